"""Models on the meta device: the values of an unsharded init, made a block at a time, or loaded."""

from __future__ import annotations

import pytest
import ranks
from scenarios import materialised


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_same_as_constructor(stage, world):
    ranks.run(materialised.same_as_constructor, stage, stage != 2, world=world)


@pytest.mark.parametrize("stage, precision", [(3, None), (3, "bf16"), pytest.param(1, None, marks=pytest.mark.slow)])
def test_same_as_apply(stage, precision):
    ranks.run(materialised.same_as_apply, stage, precision)


@pytest.mark.parametrize("stage", [0, 3])
def test_loaded(stage, tmp_path):
    ranks.run(materialised.loaded, stage, str(tmp_path))


def test_mistakes():
    ranks.run(materialised.mistakes)


def test_some_on_meta():
    ranks.run(materialised.some_on_meta)


@pytest.mark.parametrize("init", [None, "load"])
@pytest.mark.parametrize("stage", [1, 3])
def test_peak(stage, init):
    for peak, bound in ranks.run(materialised.peak_of_init, stage, init):
        assert peak <= bound * 1.05, f"{peak / bound:.2f} of full/N + the largest block"
        assert peak > 0.8 * bound, "nothing was measured"


@pytest.mark.full
def test_billion(tmp_path):
    """1.3 billion parameters on 2 ranks, from 4 files of bfloat16, to train in float32."""
    elements = materialised.write_billion(str(tmp_path))
    largest_block = 4 * 50257 * 2048  # the embedding
    bound = 4 * elements / 2 + largest_block
    for loading, step, loss in ranks.run(materialised.load_billion, str(tmp_path), timeout_s=500):
        print(f"{elements / 1e9:.2f} B parameters: loaded in {loading / 1e9:.2f} GB a rank, full/N + the largest block is "
              f"{bound / 1e9:.2f} GB; a step of SGD took {step / 1e9:.2f} GB more; loss {loss:.2f}")  # fmt: skip
        assert 2 * elements < loading <= bound
        assert 9 < loss < 14  # ln(50257) is 10.8
