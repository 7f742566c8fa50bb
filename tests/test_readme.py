"""README.md is true: its code runs, its graphs are the ones that run, its option table is the options."""

import dataclasses
import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests.test_stages import small
from zero_fx.config import Config
from zero_fx.passes.pipeline import NAMES

ROOT = pathlib.Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def section_of(title: str) -> str:
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", README, re.DOTALL | re.MULTILINE)[1]


def test_all_code_is_in_sections_that_run():
    assert README.count("```python") == sum(section_of(title).count("```python") for title in ("Use", "Inspect"))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("section, has", [("Use", ("zero_fx.compile(model, stage=3)", "no_sync")), ("Inspect", ("zero_fx.plan",))])
def test_the_code_runs(tmp_path, section, has):
    code = "\n".join(re.findall(r"```python\n(.*?)```", section_of(section), re.DOTALL))
    assert all(what in code for what in has)
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    environment["PYTHONPATH"] = str(ROOT)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280, env=environment, cwd=tmp_path)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_graphs_are_those_that_run(stage):
    assert f"```\n{small(stage)}\n```" in README


def test_every_option_is_in_the_table_with_its_default():
    for field in dataclasses.fields(Config):
        row = re.search(rf"^\| `{field.name}` \| (.*?) \|", README, re.MULTILINE)
        assert row, f"{field.name} is not in the option table"
        shown = row[1].strip("`").strip('"')
        value = int(field.default) if field.name == "timeout_s" else field.default
        assert shown == str(value), f"{field.name}: {shown} in README.md, {field.default} in Config"


def test_passes_and_make_targets_are_named():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([a-z-]+)", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"
    for name in NAMES:
        assert f"`{name}`" in README


def test_files_that_it_names_exist():
    for path in re.findall(r"\]\((docs/[^)]+)\)", README):
        assert (ROOT / path).exists(), path
