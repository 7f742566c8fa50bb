"""Gradients over 1, 2, 3 and 8 micro-batches of a step are the unsharded model's, in every stage and precision."""

from __future__ import annotations

import pytest
import ranks
import worst
from scenarios import accumulation

slow, full = pytest.mark.slow, pytest.mark.full
STAGES = (0, 1, 2, 3)


def note(kind: str, name: str, stage: int, *more, world: int = 2) -> None:
    worst.note(f"accumulation, {kind}", f"{name}, stage {stage}", ranks.run(accumulation.check, name, stage, *more, world=world))


@pytest.mark.parametrize("is_no_sync", [True, False])
@pytest.mark.parametrize("stage", [0, 1, pytest.param(2, marks=slow), 3])
def test_fp32(stage, is_no_sync):
    note("fp32", "mlp_some_whole", stage, None, is_no_sync)


@pytest.mark.parametrize("precision", ["bfloat16", pytest.param("float16", marks=full)])
@pytest.mark.parametrize("is_no_sync", [True, pytest.param(False, marks=full)])
@pytest.mark.parametrize("stage", [pytest.param(stage, marks=slow) for stage in STAGES])
def test_mixed_precision(stage, is_no_sync, precision):
    note(precision, "mlp_some_whole", stage, precision, is_no_sync)


@pytest.mark.parametrize("name", ["unused_some_micros", "unused_last_micro", pytest.param("tied_head", marks=full)])
@pytest.mark.parametrize("is_no_sync", [True, pytest.param(False, marks=full)])
@pytest.mark.parametrize("stage", [pytest.param(0, marks=full), pytest.param(1, marks=slow), pytest.param(2, marks=full), pytest.param(3, marks=slow)])
def test_layers_that_some_micro_batches_use(stage, is_no_sync, name):
    note("fp32", name, stage, None, is_no_sync)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=full)])
@pytest.mark.parametrize("is_no_sync", [True, pytest.param(False, marks=full)])
@pytest.mark.parametrize("stage", [pytest.param(stage, marks=slow) for stage in STAGES])
def test_uneven_last_micro_batch(stage, is_no_sync, world):
    note("fp32", "mlp_some_whole", stage, None, is_no_sync, True, world=world)


@pytest.mark.parametrize("stage", [pytest.param(stage, marks=slow) for stage in STAGES])
def test_no_sync_for_some(stage):
    ranks.run(accumulation.mixed_within_a_step, stage)
