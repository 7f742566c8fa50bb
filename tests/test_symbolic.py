"""Formulas of a report against what reports of other worlds and other batches count."""

import pytest
import sympy
import torch
from torch import nn

import zero_fx
from zero_fx.formulas import elements_sent
from zero_fx.symbolic import KEPT, N, PSI, widest

LENGTH = 32


class Net(nn.Module):
    """Rows that no world divides (250), that some do (1000, 64), and biases that are kept whole."""

    def __init__(self):
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(1000, 64), nn.Linear(64, 250), nn.Linear(250, 64)
        self.head = nn.Linear(64, 1000)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.down(torch.relu(self.up(x)))
        return self.head(x).square().mean()


def report(stage=3, world=64, batch=4, rank=0, **options):
    torch._dynamo.reset()
    tokens = torch.zeros(batch, LENGTH, dtype=torch.long)
    return zero_fx.inspect(Net(), tokens, stage=stage, world_size=world, rank=rank, config=zero_fx.Config(**options))


def check(formulas, counted, **sizes) -> None:
    """Bytes and elements to the last digit, seconds but for rounding."""
    at = formulas.at(N=counted.world, **sizes)
    assert at["memory: parameters"] == counted.memory["parameters"]
    assert at["memory: optimizer states"] == counted.memory["optimizer states"]
    assert at["memory: gradients"] == sum(row.local_bytes for row in counted.rows)
    assert at["memory: held parameters"] == counted.graphs.held_bytes
    assert at["memory: peak"] == counted.prediction.peak_bytes
    assert at["memory: saved activations"] == dict(counted.step.halves[1].at_start)["saved activations"]
    assert at["sent: total"] == pytest.approx(sum(counted.sent.values()), rel=1e-12)
    for kind, elements in counted.sent.items():
        assert at[f"sent: {kind}"] == pytest.approx(elements, rel=1e-12)
    assert at["time: compute"] == pytest.approx(sum(one.compute_s for one in counted.timelines), rel=1e-9)
    assert at["time: collectives"] == pytest.approx(counted.prediction.links_s, rel=1e-9)
    assert at["time: optimizer"] == pytest.approx(counted.step.optimizer_s, rel=1e-9)
    assert at["time: all hidden"] <= counted.prediction.step_s * (1 + 1e-9)


def batch_symbol(formulas) -> str:
    return next(symbol.name for symbol, name in formulas.names.items() if name.endswith(".size(0)"))


@pytest.mark.slow
@pytest.mark.parametrize("stage, precision", [(0, None), (1, "bf16"), (2, None), (3, None), (3, "bf16")])
def test_equal_to_what_is_counted(stage, precision):
    """At worlds that divide rows and that do not, on one node and on many, at other batches."""
    formulas = report(stage, dynamic=True, precision=precision).formulas
    for world, batch in ((64, 4), (64, 16), (8, 4), (40, 4), (256, 64)):
        check(formulas, report(stage, world, batch, precision=precision), **{batch_symbol(formulas): batch})


def test_another_rank_and_no_dynamic_sizes():
    last = report(world=64, rank=62)
    assert last.formulas.at()["memory: parameters"] == last.memory["parameters"] < report(world=64).memory["parameters"]
    check(last.formulas, last)
    assert set(last.formulas.values) == {N, PSI, KEPT}


def test_printed_and_made_a_function():
    found = report(dynamic=True).formulas
    text = str(found)
    assert "memory: peak = " in text and "ceiling(250/N)" in text and "N = ranks, here 64" in text
    assert f"{batch_symbol(found)} = args[0].size(0), here 4" in text
    function = sympy.lambdify(N, found.sent["total"])
    assert function(8) == pytest.approx(found.at(N=8)["sent: total"])
    ideal = found.ideal["elements sent"].subs(found.values)
    whole = found.values[KEPT]
    assert ideal == pytest.approx(elements_sent(3, found.values[PSI] - whole, whole, 64))
    with pytest.raises(ValueError, match="no symbol M: these formulas have N"):
        found.at(M=3)


def test_one_rank_has_none():
    with pytest.raises(ValueError, match="inspect it with 2 ranks or more"):
        report(world=1).formulas


def test_the_peak_keeps_what_may_be_largest():
    a, b = sympy.symbols("a b", positive=True)
    found = widest([{a: 2}, {a: 1}, {b: 1, a: 1}, {b: 1}, {sympy.S.One: 5, a: 2}])
    assert set(found) == {a + b, 2 * a + 5}
