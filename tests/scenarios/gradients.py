"""Gradients and what consumes them: optimizers, clipping, hooks, zero_grad."""

from __future__ import annotations

import contextlib

import parity
import torch
import zoo
from torch import nn
from zoo.common import Draw, loss_of

import zero_fx

from .api import train_twin, twin_of
from .graphs import compiled


OPTIMIZERS = {
    "adamw_foreach": lambda params: torch.optim.AdamW(params, lr=0.03, foreach=True),
    "adamw_fused": lambda params: torch.optim.AdamW(params, lr=0.03, fused=True),
    "adam_single": lambda params: torch.optim.Adam(params, lr=0.03, foreach=False, amsgrad=True),
    "sgd_nesterov": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.03),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.9),
    "nadam_decay": lambda params: torch.optim.NAdam(params, lr=0.01, weight_decay=0.1),
    "normalised": lambda params: Normalised(params),
}


class Normalised(torch.optim.Optimizer):
    """A user's optimizer that needs whole tensors: steps of unit length."""

    def __init__(self, params, lr: float = 0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and param.numel():
                    assert param.shape == param.grad.shape
                    param.sub_(param.grad / (param.grad.norm() + 1e-3) * group["lr"])


def check_optimizer(rank: int, world: int, kind: str, stage: int) -> None:
    twin = twin_of("odd_sizes", stage, optimizer=OPTIMIZERS[kind])
    train_twin(twin, "odd_sizes", rank, 4)


def check_param_groups(rank: int, world: int, stage: int) -> None:
    """Groups with their own learning rate and decay, and a scheduler."""

    def build(params):
        params = list(params)
        groups = [{"params": params[::2], "weight_decay": 0.1}, {"params": params[1::2], "lr": 0.05}]
        return torch.optim.AdamW(groups, lr=0.02, weight_decay=0.0)

    twin = twin_of("mlp", stage, optimizer=build)
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in twin.optimizers]
    for _ in range(3):
        train_twin(twin, "mlp", rank, 1)
        for scheduler in schedulers:
            scheduler.step()


def check_hooks(rank: int, world: int, stage: int, micros: int) -> None:
    """register_post_accumulate_grad_hook: once in each backward pass that reduces, with the reduced gradient."""
    twin, case = twin_of("mlp", stage), zoo.CASES["mlp"]
    seen: dict[str, list[torch.Tensor]] = {}
    for name, param in twin.params.items():
        param.register_post_accumulate_grad_hook(
            lambda p, name=name: seen.setdefault(name, []).append(p.grad.full_tensor().clone())
        )
    for micro in range(micros):
        for model in (twin.plain, twin.sharded):
            is_inner = model is twin.sharded and micro < micros - 1
            with model.no_sync() if is_inner else contextlib.nullcontext():
                case.train(model, case.batch(Draw(rank, 0, micro)))
    twin.average_grads()
    for name, plain in twin.plain.named_parameters():
        torch.testing.assert_close(seen[name][-1], plain.grad, rtol=parity.RTOL, atol=parity.ATOL)
        assert len(seen[name]) <= micros and (micros > 1 or len(seen[name]) == 1), f"{name}: {len(seen[name])} calls"


def check_grad_hooks(rank: int, world: int, stage: int) -> None:
    """register_hook on a parameter may replace the gradient."""
    twin = twin_of("mlp", stage)
    for model in (twin.plain, twin.sharded):
        next(model.parameters()).register_hook(lambda grad: grad * 0.5)
    train_twin(twin, "mlp", rank, 2)


def check_optimizer_in_backward(rank: int, world: int, stage: int) -> None:
    """A step for each parameter as soon as its gradient is there."""
    twin, case = twin_of("mlp", stage), zoo.CASES["mlp"]
    optimizers = {param: torch.optim.SGD([param], lr=0.3) for param in twin.params.values()}

    def step_one(param):
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in twin.params.values():
        param.register_post_accumulate_grad_hook(step_one)
    plain_optimizer = torch.optim.SGD(twin.plain.parameters(), lr=0.3)
    for step in range(3):
        for model in (twin.plain, twin.sharded):
            case.train(model, case.batch(Draw(rank, step, 0)))
        twin.average_grads()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        twin.compare_params()


def check_clipping(rank: int, world: int, stage: int, norm_type: float) -> None:
    """Both ways to clip, for sharded and whole parameters together."""
    twin = twin_of("odd_sizes", stage, keep_whole_below=20)
    case = zoo.CASES["odd_sizes"]
    for model in (twin.plain, twin.sharded):
        case.train(model, case.batch(Draw(rank, 0, 0)))
    twin.average_grads()
    counted = [param for param in twin.plain.parameters() if param.numel()]  # PyTorch's maximum of nothing is an error
    want = nn.utils.clip_grad_norm_(counted, 0.01, norm_type)
    got = twin.sharded.clip_grad_norm_(0.01, norm_type)
    torch.testing.assert_close(got, want)
    twin.compare_grads()
    for model in (twin.plain, twin.sharded):
        nn.utils.clip_grad_value_(model.parameters(), 1e-4)
    twin.compare_grads()


def check_torch_clipping(rank: int, world: int, stage: int) -> None:
    """PyTorch's own function on DTensors."""
    twin, case = twin_of("mlp", stage), zoo.CASES["mlp"]
    for model in (twin.plain, twin.sharded):
        case.train(model, case.batch(Draw(rank, 0, 0)))
    twin.average_grads()
    want, got = (nn.utils.clip_grad_norm_(model.parameters(), 0.1) for model in (twin.plain, twin.sharded))
    torch.testing.assert_close(got.full_tensor() if hasattr(got, "full_tensor") else got, want)
    twin.compare_grads()


def check_zero_grad(rank: int, world: int, stage: int, to_none: bool) -> None:
    """Gradients are gone after zero_grad, inside an accumulation too."""
    twin, case = twin_of("mlp", stage), zoo.CASES["mlp"]
    for step in range(3):
        for model in (twin.plain, twin.sharded):
            with model.no_sync() if model is twin.sharded else contextlib.nullcontext():
                case.train(model, case.batch(Draw(rank, step, 0)))
            model.zero_grad(set_to_none=to_none)  # thrown away
            case.train(model, case.batch(Draw(rank, step, 1)))
        twin.average_grads()
        twin.compare_grads()
        for model in (twin.plain, twin.sharded):
            model.zero_grad(set_to_none=to_none)


def check_scaler(rank: int, world: int, stage: int) -> None:
    """An overflow on one rank: every rank skips the step and lowers its scale."""
    model = compiled("odd_sizes", stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = zero_fx.full_state_dict(model)
    for overflow in (True, False):
        scale = float("inf") if overflow and rank == 0 else 1.0
        scaler.scale(loss_of(model(Draw(rank, 0, 0).normal(4, 7))) * scale).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after = zero_fx.full_state_dict(model)
        same = all(torch.equal(before[name], after[name]) for name in before)
        assert same == overflow, f"overflow={overflow}, parameters {'did not move' if same else 'moved'}"
        assert scaler.get_scale() == 2.0
