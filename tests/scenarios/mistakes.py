"""Mistakes that must be reported, and requests that must be answered right or refused."""

from __future__ import annotations

import torch
import zoo
from parity import Twin
from torch import nn
from zoo.common import Draw, loss_of

import zero_fx

from .api import raises, twin_of
from .graphs import compiled, train_steps


# --- mistakes


class Chosen(nn.Module):
    """Runs the layer that the caller names."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x, which: int):
        return self.layers[which](x)


def check_branches_differ(rank: int, world: int, stage: int) -> None:
    """Ranks that run different experts: an error on each of them, soon, that names what differs."""
    model = zero_fx.compile(Chosen(), stage, lowering="eager", keep_whole_below=0, timeout_s=10)
    with raises(RuntimeError, "zero_fx: ranks compiled different collectives"):
        loss_of(model(Draw(rank, 0, 0).normal(4, 6), rank % 2)).backward()


class EditsWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        with torch.no_grad():
            self.layer.weight.mul_(0.5)
        return self.layer(x)


class EditsData(EditsWeight):
    def forward(self, x):
        self.layer.weight.data.clamp_(-0.1, 0.1)
        return self.layer(x)


class EditsBehindBreak(EditsWeight):
    @torch._dynamo.disable
    def forward(self, x):
        self.layer.weight.data.mul_(0.5)
        return self.layer(x)


def check_weight_edit(rank: int, world: int, kind: str, stage: int) -> None:
    """An edit of a weight in forward is refused, or does what it does in the plain model; it is never lost."""
    plain = {"no_grad": EditsWeight, "data": EditsData, "eager": EditsBehindBreak}[kind]()
    twin = Twin(plain, stage=stage, lowering="eager")
    x = Draw(rank, 0, 0).normal(4, 6)
    try:
        loss_of(twin.sharded(x)).backward()
    except (ValueError, RuntimeError) as error:
        assert "zero_fx" in str(error) and "layer.weight" in str(error), error
        return
    loss_of(twin.plain(x)).backward()
    twin.step()


def check_refusals(rank: int, world: int) -> None:
    """Models that cannot be sharded are refused before anything is changed."""
    lazy, integer = nn.LazyLinear(3), nn.Linear(2, 2)
    integer.counts = nn.Parameter(torch.zeros(2, dtype=torch.uint8), requires_grad=False)
    cases = [
        (nn.Embedding(5, 3, sparse=True), ValueError, "sparse"),
        (lazy, ValueError, "lazy"),
        (integer, ValueError, "counts"),
        (nn.Linear(2, 2, dtype=torch.complex64), ValueError, "complex"),
        (torch.compile(nn.Linear(2, 2)), ValueError, "plain model"),
        ("model", TypeError, "torch.nn.Module"),
    ]
    for model, kind, text in cases:
        with raises(kind, text):
            zero_fx.compile(model, 3)
    model = compiled("mlp", 3)
    with raises(ValueError, "once"):
        zero_fx.compile(model, 3)
    with raises(ValueError, "before"):
        zero_fx.compile(nn.Sequential(model, nn.Linear(4, 4)), 3)
    with raises(RuntimeError, "before compiling"):
        model.half()
    assert model.to("cpu") is model and model.float() is model


def check_added_param(rank: int, world: int, stage: int) -> None:
    """A layer that is replaced after compile would not be sharded: refused at the next forward."""
    model = compiled("mlp", stage)
    train_steps(model, zoo.CASES["mlp"], rank, 1)
    model[2] = nn.Linear(8, 4)
    with raises(ValueError, "after zero_fx.compile"):
        model(Draw(rank, 0, 0).normal(4, 6))


def check_misuse_of_no_sync(rank: int, world: int, stage: int) -> None:
    model, case = compiled("mlp", stage), zoo.CASES["mlp"]
    with model.no_sync(), raises(RuntimeError, "already active"), model.no_sync():
        pass
    if stage < 2:
        with model.no_sync():
            case.train(model, case.batch(Draw(rank, 0, 0)))
        with raises(RuntimeError, "no_sync"):
            model.clip_grad_norm_(1.0)


def check_double_backward(rank: int, world: int, stage: int) -> None:
    """A penalty on input gradients: right, or an error; never a wrong gradient in silence."""
    twin = twin_of("mlp", stage)
    x = Draw(rank, 0, 0).normal(4, 6).requires_grad_()

    def run(model):
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        grad.square().sum().backward()

    try:
        run(twin.sharded)
    except RuntimeError as error:
        assert "double backward" in str(error) or "once_differentiable" in str(error), error
        return
    run(twin.plain)
    twin.step()


def check_weight_penalty(rank: int, world: int, stage: int) -> None:
    """A user's penalty on `model.parameters()`, which are DTensors: right, or an error."""
    twin = twin_of("mlp", stage)
    x = Draw(rank, 0, 0).normal(4, 6)
    for model in (twin.plain, twin.sharded):
        penalty = sum(param.square().sum() for param in model.parameters())
        penalty = penalty.full_tensor() if hasattr(penalty, "full_tensor") else penalty
        (loss_of(model(x)) + 0.1 * penalty).backward()
    twin.step()
