"""load_full_state_dict: weights of a plain model from files of every kind, each rank its own rows."""

from __future__ import annotations

import os
import shutil

import pytest
import ranks
from scenarios import pretrained


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("weights"))
    pretrained.write_files(path)
    return path


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stage", [0, 3])
def test_same_values(folder, stage, world):
    ranks.run(pretrained.load_each, folder, stage, world=world)


def test_only_own_rows(folder):
    ranks.run(pretrained.reads_its_rows, folder)


def test_mistakes(folder, tmp_path):
    for name in ("one.safetensors", "one.pt"):
        cut = tmp_path / name.replace("one", "cut")
        shutil.copy(os.path.join(folder, name), cut)
        os.truncate(cut, cut.stat().st_size // 2)
    shutil.copytree(os.path.join(folder, "several_safetensors"), tmp_path / "incomplete")
    os.unlink(tmp_path / "incomplete" / "model-00002-of-00002.safetensors")
    ranks.run(pretrained.mistakes, str(tmp_path))
