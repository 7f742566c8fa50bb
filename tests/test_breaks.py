"""Models that zero_fx.inspect cannot capture whole, or at all: what it says, and where."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zero_fx
from zero_fx.breaks import CaptureError

OPTIONS = {"world_size": 4, "config": zero_fx.Config(keep_whole_below=0)}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


class Broken(nn.Module):
    """A graph break between two layers, and a third layer that never is in a graph."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)
        self.aside = nn.Linear(16, 16)

    @torch._dynamo.disable
    def look(self, x):
        return self.aside(x)

    def forward(self, x):
        x = torch.relu(self.first(x))
        torch._dynamo.graph_break()
        return self.last(self.look(x)).square().mean()


def test_what_was_captured_where_it_breaks_and_what_runs_eagerly():
    report = zero_fx.inspect(Broken(), torch.ones(4, 8), **OPTIONS)
    shown = str(report)
    (broken, *_) = [one for one in report.breaks if "graph_break" in one.code]
    assert broken.line.startswith("test_breaks.py:") and broken.line in shown and broken.code in shown
    assert "aside.weight" in shown
    gathered = {name for event in report.collectives for name in event.params}
    assert gathered == {f"{layer}.{name}" for layer in ("first", "last") for name in ("weight", "bias")}
    assert report.to_dict()["breaks"][0]["line"] == report.breaks[0].line


class Failing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 16)

    def forward(self, x):
        return self.layer(x) @ torch.ones(3, 3)


def test_a_forward_that_fails_is_named_by_line():
    with pytest.raises(CaptureError, match=r"Failing fails at test_breaks.py:\d+ \(return self.layer\(x\) @ torch.ones\(3, 3\)\)"):
        zero_fx.inspect(Failing(), torch.ones(4, 8), **OPTIONS)


def test_a_budget_that_cannot_be_met():
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    with pytest.raises(ValueError, match=r"memory_budget=1,000 bytes cannot be met: the smallest feasible is [\d,]+ bytes"):
        zero_fx.inspect(model, torch.ones(4, 64), memory_budget=1000, **OPTIONS)


@pytest.mark.parametrize("budget, message", [("lots", "memory_budget='lots'"), (-5, "memory_budget=-5"), (1.5, "memory_budget=1.5")])
def test_what_is_no_budget(budget, message):
    with pytest.raises(ValueError, match=message):
        zero_fx.inspect(nn.Linear(8, 8), torch.ones(2, 8), memory_budget=budget, **OPTIONS)
