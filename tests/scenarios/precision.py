"""Mixed precision against an unsharded model with fp32 masters (tests/mixed.py), and what it sends, holds and refuses."""

from __future__ import annotations

import dataclasses

import mixed
import parity
import torch
import torch.distributed as dist
import zoo
from torch import nn
from torch._inductor import config as inductor_config
from zoo.common import Draw

import zero_fx
from zero_fx import Precision
from zero_fx.formulas import model_state_bytes
from zero_fx.runtime.memory import state_bytes

from .graphs import compiled, counting, graphs_of, train_steps

BF16 = Precision()
# Both models run the same bf16 operators, from equal parameters; only fp32 sums over ranks and uses are ordered otherwise.
RTOL, ATOL = 1e-5, 1e-7


def check_parity(rank: int, world: int, name: str, stage: int, lowering: str, precision=BF16, rtol=RTOL, atol=ATOL) -> float:
    """Train the case under `precision` beside the reference; the largest difference of a gradient, relative to the
    largest element of that gradient."""
    case = zoo.CASES[name]
    kept = precision.keep_fp32
    plain = mixed.reference(parity.build(case), precision.compute, kept)
    options = {"stage": stage, "lowering": lowering, "precision": precision, **case.options}
    with inductor_config.patch(fallback_random=True):
        twin = parity.Twin(plain, parity.build(case), **options)
        worst, start = 0.0, [param.detach().clone() for param in plain.parameters()]
        for step, micros in enumerate(case.micros[:3]):
            for model, optimizer in zip((twin.plain, twin.sharded), twin.optimizers):
                if case.between is not None:
                    case.between(model, optimizer, step)
            for micro in range(micros):
                run_micro(twin, case, Draw(rank, step, micro), micro == micros - 1, max(rtol, 1e-2 if rtol > RTOL else 0))
            worst = max(worst, step_both(twin, rtol, atol))
    assert all(p.dtype == torch.float32 == p.grad_dtype for p in map(described, twin.sharded.parameters()))
    assert any(not torch.equal(a, b) for a, b in zip(start, plain.parameters())), "no parameter moved"
    return worst


@dataclasses.dataclass
class Dtypes:
    dtype: torch.dtype
    grad_dtype: torch.dtype


def described(param) -> Dtypes:
    return Dtypes(param.dtype, param.dtype if param.grad is None else param.grad.dtype)


def run_micro(twin, case, draw, is_last: bool, rtol: float) -> None:
    losses = []
    for model in (twin.plain, twin.sharded):
        torch.manual_seed(draw.step * 10 + draw.micro)
        is_plain = model is twin.plain
        with torch.enable_grad() if is_plain or is_last else model.no_sync():
            losses.append(case.train(model, case.batch(Draw(draw.rank, draw.step, draw.micro))))
    torch.testing.assert_close(losses[1], losses[0], rtol=max(rtol, 1e-6), atol=1e-6)


def step_both(twin, rtol: float, atol: float) -> float:
    """Average, compare, step, compare, and let both go on from the same values: a difference in the last digit of an fp32
    parameter may be one of a whole bf16 digit in the next forward."""
    twin.average_grads()
    worst = 0.0
    for _, plain, sharded in twin.pairs():
        if plain.grad is not None and sharded.grad is not None and plain.grad.numel():
            assert sharded.grad.dtype == torch.float32
            gap = (sharded.grad.full_tensor() - plain.grad).abs().max() / plain.grad.abs().max().clamp(min=1e-12)
            worst = max(worst, gap.item())
    twin.compare_grads(rtol, atol)
    for optimizer in twin.optimizers:
        optimizer.step()
        optimizer.zero_grad()
    twin.compare_params(max(rtol, 1e-5), max(atol, 1e-6))
    with torch.no_grad():
        for _, plain, sharded in twin.pairs():
            plain.copy_(sharded.full_tensor())
        for theirs, ours in zip(twin.plain.buffers(), twin.sharded.buffers()):
            theirs.copy_(ours)
    return worst
