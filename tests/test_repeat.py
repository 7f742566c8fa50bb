"""Identical blocks are captured once: a repeated graph is the one that a whole capture would have given."""

import collections

import pytest
import torch
from torch import nn

import zero_fx
from zero_fx.dry_run import dry_run
from zero_fx.shapes import LlamaSize, llama

SIZE = LlamaSize(layers=9, dim=48, hidden=64, heads=4, kv_heads=2, vocab=64)
OPTIONS = {"lowering": "eager", "keep_whole_below": 60, "hardware": zero_fx.hardware.HARDWARE["h100"]}


@pytest.fixture(autouse=True)
def clean():
    yield
    torch._dynamo.reset()


def both(model, args, world: int, rank: int, **options):
    """(inspected with repetition, captured as a whole)"""
    config = zero_fx.Config(**OPTIONS, **options)
    report = zero_fx.inspect(model, *args, config=config, world_size=world, rank=rank)
    return report, dry_run(model, args, world=world, rank=rank, config=config)


def kinds_of(step) -> list:
    """What each half runs for which module and parameters, without an order: views may stand elsewhere."""
    return [
        (half.label, collections.Counter((e.op, e.module, e.params, e.flops, e.link_s) for e in half.events))
        for half in step.halves
    ]


@pytest.mark.parametrize(
    "stage, precision",
    [
        pytest.param(3, "bf16", marks=pytest.mark.slow),
        pytest.param(3, None, marks=pytest.mark.full),
        *[pytest.param(s, p, marks=pytest.mark.full) for s in (0, 1, 2) for p in (None, "bf16")],
    ],
)
def test_repeated_and_whole_captures_are_the_same(stage, precision):
    """A world that divides nothing, and a rank that owns fewer rows than others."""
    report, whole = both(*llama(SIZE, 2, 16, torch.float32), world=7, rank=6, stage=stage, precision=precision)
    assert report.blocks == "3 and 4 of the 9 identical blocks of blocks"
    assert report.prediction == whole.predict()
    assert kinds_of(report.step) == kinds_of(whole.step())
    assert [t.peak_kinds for t in report.timelines] == [t.peak_kinds for t in whole.step().play()]
    assert report.graphs.resident_bytes == whole.resident_bytes and report.graphs.held_bytes == whole.held_bytes


class Residual(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x):
        return x + torch.relu(self.linear(x))


class Nested(nn.Module):
    """Every block's output is read again, by the block that is as far from the end: no graph that repeats itself."""

    def __init__(self, dim: int = 12, blocks: int = 9):
        super().__init__()
        self.blocks = nn.ModuleList(Residual(dim) for _ in range(blocks))

    def forward(self, x):
        seen = []
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i >= len(self.blocks) - len(seen):
                x = x + seen[len(self.blocks) - i - 1]
            seen.append(x)
        return x


class Summed(Nested):
    """The outputs of all blocks are added up at the end: the sum is as long as the model."""

    def forward(self, x):
        total = 0
        outputs = []
        for block in self.blocks:
            x = block(x)
            outputs.append(x)
        for output in outputs:
            total = total + output
        return total


class Twice(Nested):
    """Each block is run twice, one behind the other."""

    def forward(self, x):
        for block in self.blocks:
            x = block(block(x))
        return x


class Thin(Nested):
    """Blocks that run only when their number is even."""

    def forward(self, x):
        for i, block in enumerate(self.blocks):
            x = block(x) if i % 2 else x
        return x


@pytest.mark.parametrize("kind", [Nested, Summed, Twice, Thin])
def test_other_models_are_right_too(kind):
    """Repeated or captured whole: the figures are those of the whole."""
    report, whole = both(kind(), (torch.ones(4, 12),), world=4, rank=1, stage=3)
    assert report.prediction == whole.predict()
    assert kinds_of(report.step) == kinds_of(whole.step())
    assert bool(report.blocks) == (kind is Twice)


def test_under_a_memory_budget_the_whole_model_is_captured():
    report, whole = both(Twice(), (torch.ones(4, 12),), world=4, rank=1, stage=3, memory_budget="1MiB")
    assert report.blocks == "" and report.graphs.passes.memory_budget == 2**20 and report.prediction == whole.predict()
