"""The parity rule: a sharded model and an unsharded one whose gradients are averaged over the ranks stay equal.

Compared after every step: each gradient, the gradient norm, each parameter and buffer; after every micro-batch: the
loss. The ranks see different data, so a reduction that is left out, done twice or summed for averaged shows.
"""

from __future__ import annotations

import contextlib
import copy

import torch
import torch.distributed as dist
import zoo
from torch import nn
from torch._inductor import config as inductor_config
from zoo.common import Case, Draw, leaves

import zero_fx

RTOL, ATOL = 1e-4, 1e-6
MAX_NORM = 1.0
COMPILE_TIMEOUT_S = 30


def sgd(params):
    return torch.optim.SGD(params, lr=0.3, momentum=0.9)


class Twin:
    """`plain`, an unsharded model, and `sharded`, the same weights under zero_fx, each with its optimizer.

    model: what becomes `sharded`, if `plain` cannot be copied; else a copy.
    group: the process group of the mesh that `options` may have.
    """

    def __init__(self, plain: nn.Module, model: nn.Module | None = None, optimizer=sgd, group=None, **options):
        self.plain, self.group = plain, group
        model = copy.deepcopy(plain) if model is None else model
        if dist.get_rank(group) > 0:
            spoil(model)
        self.sharded = zero_fx.compile(model, **{"keep_whole_below": 0, "timeout_s": COMPILE_TIMEOUT_S, **options})
        self.params = dict(self.sharded.named_parameters())
        assert list(self.params) == [name for name, _ in plain.named_parameters()]
        self.worst = 0.0  # difference of a gradient, relative to its largest element
        self.optimizers = optimizer(plain.parameters()), optimizer(self.sharded.parameters())

    def pairs(self) -> list[tuple[str, nn.Parameter, nn.Parameter]]:
        """(name, plain parameter, sharded parameter)."""
        for name, param in self.sharded.named_parameters():
            assert param is self.params[name], f"{name} is another object than after compile"
        return [(name, param, self.params[name]) for name, param in self.plain.named_parameters()]

    def average_grads(self) -> None:
        """What data parallelism does: the plain model's gradients become their mean over ranks. A parameter that
        some ranks did not use counts as zeros there; one that none used keeps None."""
        params = list(self.plain.parameters())
        for param, is_used in zip(params, on_any_rank([p.grad is not None for p in params], self.group)):
            if is_used:
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad
                dist.all_reduce(param.grad, dist.ReduceOp.AVG, group=self.group)

    def compare_grads(self, rtol=RTOL, atol=ATOL) -> None:
        pairs = self.pairs()
        has = [sharded.grad is not None for _, _, sharded in pairs]
        anywhere = on_any_rank(has, self.group)
        odd = [name for (name, _, _), here, there in zip(pairs, has, anywhere) if here != there]
        some_odd = on_any_rank([bool(odd)], self.group)[0]
        assert not some_odd, f"gradients that other ranks have and this one has not: {odd}"
        wrong = []
        for name, plain, sharded in pairs:
            got = None if sharded.grad is None else sharded.grad
            if got is not None and got.placements != sharded.placements:
                wrong.append(f"{name}: gradient is {got.placements}, parameter {sharded.placements}")
                continue
            got = None if got is None else got.full_tensor()
            if plain.grad is None:
                wrong += [f"{name}: expected no gradient, got {got}"] if got is not None and got.any() else []
            elif got is None:
                wrong += [f"{name}: no gradient, expected {plain.grad}"] if plain.grad.any() else []
            else:
                wrong += difference(name, got, plain.grad, rtol, atol)
                self.worst = max(self.worst, relative_error(got, plain.grad))
        assert not wrong, "gradients differ: " + "\n".join(wrong)

    def compare_params(self, rtol=RTOL, atol=ATOL) -> None:
        wrong = []
        for name, plain, sharded in self.pairs():
            wrong += difference(name, sharded.detach().full_tensor(), plain.detach(), rtol, atol)
        buffers = dict(self.sharded.named_buffers())
        assert list(buffers) == [name for name, _ in self.plain.named_buffers()]
        for name, plain in self.plain.named_buffers():
            wrong += difference(name, buffers[name], plain, rtol, atol)
        assert not wrong, "parameters or buffers differ: " + "\n".join(wrong)

    def step(self, max_norm: float | None = MAX_NORM) -> None:
        """Average, compare, clip, step and compare again."""
        self.average_grads()
        self.compare_grads()
        if max_norm is not None:
            want = nn.utils.clip_grad_norm_(self.plain.parameters(), max_norm)
            got = self.sharded.clip_grad_norm_(max_norm)
            torch.testing.assert_close(got.to(want.dtype), want, msg=lambda text: f"gradient norm: {text}")
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.compare_params()


def spoil(model: nn.Module) -> None:
    """Other values than on the first rank, which compile must overwrite."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.add_(1 if tensor.is_floating_point() else 0)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference, relative to the largest element; 0 where nothing is but what cancels out."""
    if not want.numel() or want.abs().max() < 1e-6:
        return 0.0
    return ((got - want).abs().max() / want.abs().max()).item()


def on_any_rank(flags: list[bool], group=None) -> list[bool]:
    """Elementwise: whether the flag is up on any rank."""
    tensor = torch.tensor(flags, dtype=torch.uint8)
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    return [bool(flag) for flag in tensor.tolist()]


def difference(name: str, got: torch.Tensor, want: torch.Tensor, rtol: float, atol: float) -> list[str]:
    try:
        torch.testing.assert_close(got, want, rtol=rtol, atol=atol)
    except AssertionError as error:
        shown = f"\n  got {got}\n  expected {want}" if want.numel() <= 12 else ""
        return [f"{name}: {str(error).strip()}{shown}"]
    return []


def build(case: Case) -> nn.Module:
    """The plain model of `case`, the same on every rank."""
    torch.manual_seed(0)
    return case.build()


def check_losses(got, want) -> None:
    for ours, theirs in zip(leaves(got), leaves(want), strict=True):
        assert theirs.isfinite().all(), f"the case is useless: the plain model's loss is {theirs}"
        torch.testing.assert_close(ours, theirs, rtol=RTOL, atol=ATOL, msg=lambda text: f"loss: {text}")


def run_micro(twin: Twin, case: Case, draw: Draw, is_last: bool) -> None:
    """The same micro-batch through both models."""
    losses = []
    for model in (twin.plain, twin.sharded):
        torch.manual_seed(draw.step * 10 + draw.micro)  # dropout draws the same masks in both
        is_plain = model is twin.plain
        with contextlib.nullcontext() if is_plain or is_last else model.no_sync():
            losses.append(case.train(model, case.batch(Draw(draw.rank, draw.step, draw.micro))))
    check_losses(losses[1], losses[0])


def check_parity(rank: int, world: int, name: str, stage: int, lowering: str) -> float:
    """Train both models of the case `name`; the worst gradient error."""
    # Inductor draws with a generator of its own unless told to draw as eager PyTorch does; the plain model is eager.
    with inductor_config.patch(fallback_random=True):
        return train_both(rank, zoo.CASES[name], stage, lowering)


def train_both(rank: int, case: Case, stage: int, lowering: str) -> float:
    twin = Twin(build(case), build(case), stage=stage, lowering=lowering, **case.options)
    start = [param.detach().clone() for param in twin.plain.parameters()]
    for step, micros in enumerate(case.micros):
        for model, optimizer in zip((twin.plain, twin.sharded), twin.optimizers):
            if case.between is not None:
                case.between(model, optimizer, step)
        try:
            for micro in range(micros):
                run_micro(twin, case, Draw(rank, step, micro), micro == micros - 1)
            twin.step()
        except AssertionError as error:
            raise AssertionError(f"step {step} with {micros} micro-batches: {error}") from error
    moved = any(not torch.equal(a, b) for a, b in zip(start, twin.plain.parameters()))
    assert moved, "the case is useless: no parameter moved"
    return twin.worst
    return twin.sharded._zero_fx_compiled.backend.graphs.captured
