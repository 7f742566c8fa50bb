"""Optimizers given to zero_fx.compile, whose steps run on local shards, beside those of an unsharded model."""

from __future__ import annotations

import copy
import os
import time

import parity
import torch
import zoo
from torch import nn
from torch.distributed.tensor import DTensor
from zoo.common import Draw

import zero_fx
from zero_fx.local_step import NAMES
from zero_fx.setup import NUMBERS

from .api import raises

NAME = "odd_sizes"  # parameters of which some ranks have no rows
OPTIONS = {
    "SGD": {"momentum": 0.9, "nesterov": True}, "Adam": {"amsgrad": True}, "Adagrad": {"initial_accumulator_value": 0.1},
    "RMSprop": {"momentum": 0.9, "centered": True}, "ASGD": {"t0": 1, "lambd": 0.1},
}  # fmt: skip
KINDS = [(name, how) for name in NAMES for how in ("plain", "foreach", "fused") if how != "fused" or name in ("SGD", "Adam", "AdamW", "Adagrad")]


def build(name: str, how: str, params) -> torch.optim.Optimizer:
    """Two groups, the second with its own learning rate."""
    params = list(params)
    flags = {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}[how]
    groups = [{"params": params[::2]}, {"params": params[1::2], "lr": 0.01}]
    return getattr(torch.optim, name)(groups, lr=0.03, **OPTIONS.get(name, {}), **flags)


class Pair:
    """An unsharded model, the sharded one, and an optimizer for each, built before zero_fx.compile."""

    def __init__(self, stage: int, make, **options):
        self.case = zoo.CASES[NAME]
        self.plain = parity.build(self.case)
        model = copy.deepcopy(self.plain)
        self.optimizers = make(self.plain.parameters()), make(model.parameters())
        options = {"lowering": "eager", "keep_whole_below": 8, "timeout_s": 30, **options}
        self.sharded = zero_fx.compile(model, stage, optimizer=self.optimizers[1], **options)

    def backward(self, rank: int, step: int) -> None:
        for model in (self.plain, self.sharded):
            self.case.train(model, self.case.batch(Draw(rank, step, 0)))
        for param in self.plain.parameters():
            torch.distributed.all_reduce(param.grad, torch.distributed.ReduceOp.AVG)

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def compare(self) -> None:
        values = zero_fx.full_state_dict(self.sharded)
        for name, expected in self.plain.state_dict().items():
            torch.testing.assert_close(values[name], expected, rtol=parity.RTOL, atol=parity.ATOL)


def check_kind(rank: int, world: int, name: str, how: str, stage: int) -> None:
    """Parameters, and states as the user finds them: in `state` and in `state_dict`."""
    pair = Pair(stage, lambda params: build(name, how, params))
    kept = list(pair.optimizers[1].state.values())[:0]
    for step in range(4):
        pair.backward(rank, step)
        pair.step()
        pair.compare()
        if step % 2:
            kept = compare_states(pair)
    assert kept or name == "SGD"
    assert isinstance(pair.optimizers[1], getattr(torch.optim, name)) and type(pair.optimizers[1]).__name__ == name


def compare_states(pair: Pair) -> list:
    plain, sharded = pair.optimizers
    seen = []
    for one, other in zip(flat(plain), flat(sharded), strict=True):
        assert list(plain.state[one]) == list(sharded.state[other])
        for key, expected in plain.state[one].items():
            value = sharded.state[other][key]
            is_number = key in NUMBERS and not one.dim()
            assert isinstance(value, DTensor) == (isinstance(expected, torch.Tensor) and expected.shape == one.shape and not is_number)
            value = value.full_tensor() if isinstance(value, DTensor) else value
            torch.testing.assert_close(value, expected, rtol=1e-3, atol=1e-6)
            seen.append(key)
    return seen


def flat(optimizer) -> list:
    return [param for group in optimizer.param_groups for param in group["params"]]


def check_around(rank: int, world: int, stage: int) -> None:
    """A scheduler, hooks, a closure, options changed by hand, a parameter frozen and one added later, states loaded."""
    pair = Pair(stage, lambda params: torch.optim.AdamW(list(params)[:-1], lr=0.03))
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7) for optimizer in pair.optimizers]
    calls = []
    pair.optimizers[1].register_step_pre_hook(lambda optimizer, args, kwargs: calls.append(optimizer))
    for step in range(6):
        pair.backward(rank, step)
        if step == 1:
            for optimizer in pair.optimizers:
                optimizer.param_groups[0]["weight_decay"] = 0.5
        if step == 2:
            for model, optimizer in zip((pair.plain, pair.sharded), pair.optimizers):
                optimizer.add_param_group({"params": [list(model.parameters())[-1]], "lr": 0.1})
        if step == 3:
            for model in (pair.plain, pair.sharded):
                next(model.parameters()).grad = None  # as of a layer that this step did not use
        if step == 4:
            for optimizer in pair.optimizers:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                for values in optimizer.state.values():
                    values["exp_avg"].mul_(0.5)
                first = flat(optimizer)[1]
                optimizer.state[first]["exp_avg_sq"] = optimizer.state[first]["exp_avg_sq"] * 2
        pair.step()
        pair.compare()
        for scheduler in schedulers:
            scheduler.step()
    compare_states(pair)
    assert calls == [pair.optimizers[1]] * 6, "a hook ran more or less than once a step, or for another optimizer"

    def closure():
        loss = pair.case.train(pair.sharded, pair.case.batch(Draw(rank, 9, 0)))
        assert torch.is_grad_enabled()
        return loss

    assert torch.isfinite(pair.optimizers[1].step(closure))


def check_gradients_go(rank: int, world: int) -> None:
    """zero_grad, of the model as well, frees the gradients."""
    import weakref

    pair = Pair(3, lambda params: torch.optim.AdamW(params, fused=True))
    pair.backward(rank, 0)
    grads = [weakref.ref(param.grad._local_tensor) for param in pair.sharded.parameters()]
    pair.optimizers[1].step()
    pair.sharded.zero_grad()
    assert not any(grad() is not None for grad in grads)


def check_checkpoint(rank: int, world: int, folder: str) -> None:
    """Saved, and loaded at another stage, in which the run goes on as the one that was saved."""

    def make(params):
        return torch.optim.AdamW(params, lr=0.03, fused=True)

    pair = Pair(3, make)
    for step in range(2):
        pair.backward(rank, step)
        pair.step()
    path = os.path.join(folder, "saved")
    zero_fx.save_checkpoint(path, pair.sharded, pair.optimizers[1])
    other = Pair(1, make)
    zero_fx.load_checkpoint(path, other.sharded, other.optimizers[1])
    other.plain, other.optimizers = pair.plain, (pair.optimizers[0], other.optimizers[1])
    for step in (2, 3):
        other.backward(rank, step)
        other.step()
        other.compare()
    compare_states(other)


def check_scaler(rank: int, world: int, fused: bool) -> None:
    """A step that overflows on one rank is skipped on all; one that does not is as without a scale."""
    pair = Pair(3, lambda params: torch.optim.AdamW(params, lr=0.03, fused=fused))
    scaler = zero_fx.GradScaler("cpu", init_scale=4.0)
    for step in range(3):
        pair.backward(rank, step)
        scaler.scale(torch.zeros(()))  # which makes its tensors
        for param in pair.sharded.parameters():
            if param.grad is not None:
                param.grad._local_tensor.mul_(scaler.get_scale())
        before = {name: value.clone() for name, value in pair.plain.state_dict().items()}
        if step == 1:
            if rank == 1:
                next(p for p in pair.sharded.parameters() if p.grad._local_tensor.numel()).grad._local_tensor.fill_(float("inf"))
            pair.optimizers[0].zero_grad()
        scaler.step(pair.optimizers[1])
        scaler.update()
        pair.optimizers[0].step()
        for optimizer in pair.optimizers:
            optimizer.zero_grad()
        assert step != 1 or all(torch.equal(before[name], value) for name, value in pair.plain.state_dict().items())
        pair.compare()


def check_refusal(rank: int, world: int, stage: int) -> None:
    pair = Pair(stage, lambda params: torch.optim.SGD(params, lr=0.1))
    with pair.sharded.no_sync():
        pair.case.train(pair.sharded, pair.case.batch(Draw(rank, 0, 0)))
    with raises(RuntimeError, "not reduced yet"):
        pair.optimizers[1].step()


class Sized(torch.optim.AdamW):
    """A user's optimizer: what its step asks of a parameter is not known."""


def check_left_alone(rank: int, world: int) -> None:
    for make in (Sized, lambda params: torch.optim.AdamW(params, differentiable=True), torch.optim.LBFGS):
        model = nn.Sequential(nn.Linear(4, 4))
        optimizer = make(model.parameters())
        kind = type(optimizer)
        zero_fx.compile(model, optimizer=optimizer, lowering="eager", keep_whole_below=0)
        assert type(optimizer) is kind


def time_steps(rank: int, world: int, count: int, size: int) -> dict[str, float]:
    """Milliseconds, quartiles of interleaved steps of fused AdamW: on plain tensors of a shard's size, on DTensors, locally."""
    plain = [nn.Parameter(torch.randn(size // world, size)) for _ in range(count)]
    found = {"plain": torch.optim.AdamW(plain, fused=True)}
    for how in ("dtensor", "local"):
        model = nn.ParameterList([nn.Parameter(torch.randn(size, size)) for _ in range(count)])
        optimizer = torch.optim.AdamW(model.parameters(), fused=True) if how == "local" else None
        zero_fx.compile(model, lowering="eager", keep_whole_below=0, optimizer=optimizer)
        found[how] = optimizer or torch.optim.AdamW(model.parameters(), fused=True)
    for optimizer in found.values():
        for param in flat(optimizer):
            param.grad = torch.zeros_like(param)
    times: dict[str, list[float]] = {how: [] for how in found}
    for _ in range(40):
        for how, optimizer in found.items():
            start = time.perf_counter()
            optimizer.step()
            times[how].append(time.perf_counter() - start)
    return {how: 1e3 * sorted(seconds)[len(seconds) // 4] for how, seconds in times.items()}
