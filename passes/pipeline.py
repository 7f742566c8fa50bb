"""Which passes run, in what order, and why there; and the one place that runs them.

Two graphs pass through here: the joint graph of forward and backward before it is cut, and each half after.
`config.without` names the optional ones that are left out.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time

from torch import fx

from ..config import Debug
from ..text import text
from ..text_diff import diff
from ..verify import signature, verify
from ..vocabulary import PassConfig, Report
from .bucket_collectives import bucket_collectives
from .drop_identity_views import drop_identity_views
from .merge_uses import merge_uses
from .plan_gathers import plan_gathers
from .prefetch import prefetch
from .rematerialize import rematerialize
from .shard_grads import shard_grads
from .shard_params import shard_params

JOINT = (
    drop_identity_views,  # first: reads of one parameter then start from one value
    merge_uses,  # before the plan, which counts one gather and one reduction for each parameter
    plan_gathers,  # last before the cut: its tags tell the partitioner what may not be saved
)
BUDGET = (  # again, with the plan that the memory budget asks for
    plan_gathers,
    rematerialize,  # beside plan_gathers: together they say what is saved
)
HALVES = (
    shard_params,  # collectives exist only after the cut: before it, tracing forbids started-but-not-awaited values
    shard_grads,  # after shard_params: a backward graph gathers before it reduces, and reads like that
    bucket_collectives,  # before the schedule, which moves what travels together as one
)
SCHEDULE = (
    prefetch,  # last, on final collectives, and apart: ranks agree on the order that it proposes
)
NAMES = tuple(dict.fromkeys(p.__name__ for p in JOINT + BUDGET + HALVES + SCHEDULE))


@dataclasses.dataclass(frozen=True)
class PassRun:
    """One pass on one graph. label: "joint", "forward", "backward" or "inference". before, after: the graph's text."""

    label: str
    name: str
    report: Report
    time_ms: float
    before: str
    after: str


def run_passes(gm: fx.GraphModule, passes: tuple, config: PassConfig, label: str) -> list[PassRun]:
    """Run `passes` on `gm` in place; verify after each. `label` names dumps."""
    debug = Debug.from_environment(NAMES)
    dump(debug, gm, f"{label}_capture")
    runs, checked = [], {}
    before = text(gm)
    for pass_ in passes:
        name = pass_.__name__
        if name in debug.skip or name in config.without:
            continue
        types = signature(gm)
        start = time.perf_counter()
        report = pass_(gm, config)
        time_ms = (time.perf_counter() - start) * 1e3
        if report.changed:
            verify(gm, types, checked)
            gm.recompile()
        run = PassRun(label, name, report, time_ms, before, text(gm) if report.changed else before)
        tell(debug, run)
        dump(debug, gm, f"{label}_{name}")
        runs.append(run)
        before = run.after
    return runs


def tell(debug: Debug, run: PassRun) -> None:
    if debug.level >= 1:
        print(f"zero_fx: {run.label}: {run.name} {run.report.stats} {run.time_ms:.1f} ms", file=sys.stderr)
    if debug.level == 2:
        print(diff(run.before, run.after), file=sys.stderr)
    if debug.level >= 3:
        print(run.after, file=sys.stderr)


def dump(debug: Debug, gm: fx.GraphModule, name: str) -> None:
    """Write the graph to the next numbered file of ZERO_FX_DUMP; one folder a rank."""
    if debug.dump is None:
        return
    folder = os.path.join(debug.dump, f"rank{os.environ.get('RANK', '0')}")
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, f"{len(os.listdir(folder)):02d}_{name}.txt")
    with open(path, "w", encoding="utf-8") as file:
        file.write(text(gm) + "\n")
