"""Several micro-batches in a step, against an unsharded model: with no_sync, and without it, as plain PyTorch has it."""

from __future__ import annotations

import dataclasses

import mixed
import parity
import torch
import zoo
from zoo.common import Draw, loss_of

import zero_fx

from . import precision as mixed_precision

MICROS = (1, 2, 3, 8)


def uneven(model, batch) -> torch.Tensor:
    """The last micro-batch has one row of the three that others have; each row counts the same."""
    x, rows = batch
    loss = loss_of(model(x)) * len(x) / rows
    loss.backward()
    return loss.detach()


def uneven_batch(draw: Draw) -> tuple[torch.Tensor, int]:
    return draw.normal(1 if draw.micro == 2 else 3, 6), 7


def check(rank: int, world: int, name: str, stage: int, precision, is_no_sync: bool, is_uneven: bool = False) -> float:
    """Steps of 1, 2, 3 and 8 micro-batches of the case; the worst gradient error."""
    case = dataclasses.replace(zoo.CASES[name], micros=MICROS)
    if is_uneven:
        case = dataclasses.replace(case, batch=uneven_batch, train=uneven)
    plain = parity.build(case)
    if precision is not None:
        plain = mixed.reference(plain, getattr(torch, precision))
    name_of = {"bfloat16": "bf16", "float16": "fp16", None: None}[precision]
    twin = parity.Twin(plain, parity.build(case), stage=stage, lowering="eager", precision=name_of, **case.options)
    worst, run_micro = 0.0, parity.run_micro if precision is None else run_mixed
    for step, micros in enumerate(MICROS):
        for micro in range(micros):
            run_micro(twin, case, Draw(rank, step, micro), not is_no_sync or micro == micros - 1)
        if precision is None:
            twin.step()
            worst = twin.worst
        else:
            # Of several micro-batches the unsharded model sums rounded gradients in another order than ranks do.
            worst = max(worst, mixed_precision.step_both(twin, 1e-5, 1e-6))
    return worst


def run_mixed(twin, case, draw: Draw, is_last: bool) -> None:
    mixed_precision.run_micro(twin, case, draw, is_last, mixed_precision.RTOL)


def mixed_within_a_step(rank: int, world: int, stage: int) -> None:
    """no_sync for some of a step's micro-batches, in any order; the last one always without."""
    case = zoo.CASES["mlp"]
    twin = parity.Twin(parity.build(case), stage=stage, lowering="eager")
    for step, is_last in enumerate([(True, False, True), (False, True, True), (False, True, False, True)]):
        for micro, syncs in enumerate(is_last):
            parity.run_micro(twin, case, Draw(rank, step, micro), syncs)
        twin.step()
    assert zero_fx.full_state_dict(twin.sharded)
