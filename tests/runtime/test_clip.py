"""Clipping: the norm of the unsharded gradients, on every rank, by one small all-reduce, and fast."""

import statistics
import time

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn

import zero_fx

INF = float("inf")


class Tied(nn.Module):
    """A tied weight, an odd one, a whole one (0-dim), and one that gets no gradient."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 5, dtype=dtype), nn.Linear(5, 7, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones((), dtype=dtype))
        self.unused = nn.Linear(5, 5, dtype=dtype)

    def forward(self, x):
        return (self.head(self.embed(x)) * self.scale).square().sum()


def clip(rank, world, stage):
    torch.manual_seed(0)
    plain = Tied()
    model = Tied()
    model.load_state_dict(plain.state_dict())
    zero_fx.compile(model, stage=stage, lowering="eager", keep_whole_below=0)
    for norm_type in (2.0, 1.0, INF, 3.5):
        for max_norm in (0.5, 1e6):
            compare(plain, model, torch.arange(rank, rank + 4), max_norm, norm_type)


def compare(plain, model, x, max_norm, norm_type):
    plain.zero_grad()
    model.zero_grad()
    plain(x).backward()
    model(x).backward()
    for param in plain.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad, dist.ReduceOp.AVG)
    expected = nn.utils.clip_grad_norm_(plain.parameters(), max_norm, norm_type)
    assert expected > 0.5
    torch.testing.assert_close(model.clip_grad_norm_(max_norm, norm_type), expected)
    for (name, param), (_, ours) in zip(plain.named_parameters(), model.named_parameters()):
        assert (param.grad is None) == (ours.grad is None), name
        if param.grad is not None:
            torch.testing.assert_close(ours.grad.full_tensor(), param.grad)


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow), 3])
def test_equals_the_unsharded_norm(stage):
    ranks.run(clip, stage)


def not_finite(rank, world):
    model = zero_fx.compile(Tied(), lowering="eager", keep_whole_below=0)
    model(torch.arange(4)).backward()
    if rank == 1:  # in one rank's shard only; every rank must know
        model.embed._parameters["weight"].grad._local_tensor.fill_(float("nan"))
    try:
        model.clip_grad_norm_(1.0, error_if_nonfinite=True)
    except RuntimeError as error:
        return str(error)


@pytest.mark.slow
def test_a_norm_that_is_not_finite():
    for message in ranks.run(not_finite):
        assert "total norm of order 2.0 of the gradients is nan" in message


class Many(nn.Module):
    def __init__(self, count: int):
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.randn(24, 8)) for _ in range(count))


def many(rank, world, count):
    """Seconds of clipping `count` DTensor gradients, and of torch's own clipping of as many plain ones."""
    model, plain = Many(count), Many(count)
    zero_fx.compile(model, lowering="eager", keep_whole_below=0)
    for param in plain.parameters():
        param.grad = torch.randn(param.shape)
    for state in model._zero_fx_model.params.values():
        state.param.grad = state.as_dtensor(torch.randn(state.rows_of(torch.empty(state.shape)).shape))
    times = {"ours": [], "torch": []}
    for _ in range(7):
        for name, call in (("ours", model.clip_grad_norm_), ("torch", lambda n: nn.utils.clip_grad_norm_(plain.parameters(), n))):
            start = time.perf_counter()
            call(1.0)
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


@pytest.mark.slow
def test_a_thousand_parameters_are_fast():
    for seconds in ranks.run(many, 1000):
        assert seconds["ours"] < 2 * seconds["torch"] + 0.01, seconds
