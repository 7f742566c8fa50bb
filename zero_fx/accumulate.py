"""A step of several micro-batches, from the report of one: what its optimizer step takes and what lives at its peak.

What runs again in every micro-batch depends on the stage (zero_fx/formulas.py, elements_sent): stage 3 gathers and reduces in
each; stage 2 gathers in the first and reduces in each; stages 0 and 1 gather in the first (0 has nothing to gather) and
reduce after the last one's backward, parameter by parameter, with nothing left to hide it behind (inside no_sync()).
"""

from __future__ import annotations

import dataclasses
import math

from .costs import collective_s
from .events import Half
from .params import ParamRow
from .report import Report
from .simulate import play
from .vocabulary import REDUCTIONS, WHOLE

GATHERS = ("all_gather", "gather_held")


def step_s(report: Report, micro_batches: int) -> float:
    """Seconds of one optimizer step of `micro_batches` such forward and backward passes."""
    if micro_batches == 1:
        return report.prediction.step_s
    stage = report.config.stage
    halves = [half for half in report.step.halves if half.label != "inference"]
    first = sum(play(without(half, REDUCTIONS if stage < 2 else ())).seconds for half in halves)
    silent = {0: (*GATHERS, *REDUCTIONS), 1: (*GATHERS, *REDUCTIONS), 2: GATHERS, 3: ()}[stage]
    later = sum(play(without(half, silent)).seconds for half in halves)
    return first + (micro_batches - 1) * later + report.step.optimizer_s + (last_reductions_s(report) if stage < 2 else 0.0)


def peak_bytes(report: Report, micro_batches: int) -> int:
    """Bytes at the peak of such a step, an upper bound."""
    return report.prediction.peak_bytes + waiting_bytes(report.rows, report.config.stage, micro_batches)


def waiting_bytes(rows: tuple[ParamRow, ...], stage: int, micro_batches: int) -> int:
    """What several micro-batches add to one's peak at most: gradients of earlier ones live through a later one's whole backward
    pass. They are a rank's rows at stages 2 and 3, and full at stages 0 and 1, whose graphs then end with full ones."""
    if micro_batches == 1:
        return 0
    local, full = (sum(getattr(row, name) for row in rows if row.trains) for name in ("local_bytes", "full_bytes"))
    return local if stage >= 2 else full + full - local


def without(half: Half, ops: tuple[str, ...]) -> Half:
    """`half` where the collectives `ops` find their work done, and nobody waits for them."""
    gone = {index for index, event in enumerate(half.events) if event.op in ops and event.link_s}
    events = [
        dataclasses.replace(
            event, link_s=0.0 if index in gone else event.link_s, busy_s=0.0 if index in gone else event.busy_s,
            back=0 if index - event.back in gone else event.back,
        )
        for index, event in enumerate(half.events)
    ]  # fmt: skip
    return dataclasses.replace(half, events=tuple(events))


def last_reductions_s(report: Report) -> float:
    """Seconds of one reduction for each parameter, one after the other."""
    hardware, world, total = report.step.hardware, report.world, 0.0
    scatter = "all_to_all" if hardware.transport == "gloo" else "reduce_scatter"
    for row in report.rows if world > 1 else ():
        if not row.trains:
            continue
        elements = row.elements if row.lifetime == WHOLE else row.elements // row.shape[0] * world * math.ceil(row.shape[0] / world)
        kind = "all_reduce" if row.lifetime == WHOLE else scatter
        total += hardware.issue_s + collective_s(kind, elements, row.dtype.itemsize, world, hardware)
    return total
