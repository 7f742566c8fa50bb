"""`zero_fx.inspect`: what the compiler would do with a model on hardware that is not here."""

from __future__ import annotations

import dataclasses
import time

import torch
from torch import nn

from .batch import samples_of, with_samples
from .blocks import Stack, largest_stack, shorten
from .breaks import breaks_since, explain
from .calibrate import calibrated
from .config import Config
from .dry_run import dry_run, hollow_copy
from .hardware import CALIBRATED, HARDWARE, Hardware
from .params import held_bytes, resident_bytes, rows_of_model
from .passes.pipeline import HALVES, SCHEDULE, run_passes
from .passes.prefetch import start_order
from .predict import StepGraphs
from .repeat import repeat
from .report import Report
from .torch_compat import graph_break_reasons

FEW = 3  # identical blocks of the shorter of two captures: enough that one has a block like it on each side


def inspect(
    model: nn.Module,
    *args,
    stage: int | None = None,
    world_size: int = 64,
    hardware: str | Hardware | None = None,
    ranks_per_node: int | None = None,
    memory_budget: int | float | str | None = None,
    rank: int = 0,
    config: Config | None = None,
    **kwargs,
) -> Report:
    """What `rank` of `world_size` ranks would run in a step of `model(*args, **kwargs)` and its backward pass, and what
    that would take: memory, elements sent, time. Nothing is lowered or run, and no peer and no device is needed.

    model, args: plain; both may be on the meta device, and then cost no memory. They are not changed.
    stage: 3 if left out. hardware: the name of a published profile ("a100", "h100", the default, "h200", "b200", "cpu") or a
        Hardware; or "calibrated" for what `zero-fx bench --calibrate` measured here. ranks_per_node: in place of the profile's. memory_budget: as for zero_fx.compile; a fraction is of
        the profile's memory.
    config: a zero_fx.Config for all other options; stage, hardware and memory_budget come before what it says.

    A model with many identical blocks is captured with a few of them where its graphs repeat themselves, see repeat.py.
    Raises ValueError or TypeError for what cannot be used; CaptureError, a RuntimeError, for a model whose forward fails;
    RuntimeError inside a process group.
    """
    begun = time.perf_counter()
    config = config or Config()
    profile = profile_of(hardware or config.hardware or "h100", ranks_per_node)
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size={world_size!r}: expected a number of ranks, 1 or more")
    stage = config.stage if stage is None else stage
    memory_budget = config.memory_budget if memory_budget is None else memory_budget
    config = dataclasses.replace(config, stage=stage, hardware=profile, memory_budget=memory_budget)
    if isinstance(config.memory_budget, float):
        config = dataclasses.replace(config, memory_budget=round(config.memory_budget * profile.memory_bytes))
    rows = rows_of_model(hollow_copy(model), config, world_size, rank)  # which refuses what is no module
    broken = len(graph_break_reasons)
    try:
        graphs, blocks = capture(model, args, kwargs, config, world_size, rank)
    except Exception as error:
        better = explain(error, type(model).__name__)
        raise better from (None if better is error else error)

    def again(samples: int | None = None, **changes) -> Report:
        options = {"stage": stage, "world_size": world_size, "hardware": profile, "memory_budget": memory_budget,
                   "rank": rank, "config": config} | changes  # fmt: skip
        others = (args, kwargs) if samples is None else with_samples(args, kwargs, samples)
        return inspect(model, *others[0], **options, **others[1])

    return Report(
        model=type(model).__name__, config=config, world=world_size, rank=rank, step=graphs.step(), rows=rows, graphs=graphs,
        blocks=blocks, breaks=breaks_since(broken), seconds=time.perf_counter() - begun, samples=samples_of(args, kwargs),
        again=again,
    )  # fmt: skip


def profile_of(hardware: str | Hardware, ranks_per_node: int | None) -> Hardware:
    if hardware == CALIBRATED:
        hardware = calibrated(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    elif not isinstance(hardware, Hardware):
        if hardware not in HARDWARE:
            known = ", ".join(map(repr, (*HARDWARE, CALIBRATED)))
            raise ValueError(f"hardware={hardware!r}: expected one of {known}, or a Hardware")
        hardware = HARDWARE[hardware]
    if ranks_per_node is None:
        return hardware
    if isinstance(ranks_per_node, bool) or not isinstance(ranks_per_node, int) or ranks_per_node < 1:
        raise ValueError(f"ranks_per_node={ranks_per_node!r}: expected a number of ranks, 1 or more")
    return dataclasses.replace(hardware, ranks_per_node=ranks_per_node)


def capture(model, args, kwargs, config: Config, world: int, rank: int) -> tuple[StepGraphs, str]:
    """(the graphs of the whole model, how much of it was captured for them: "" for all)."""
    stack = largest_stack(model)
    # Under a memory budget all activations together decide what is saved, so the whole model is captured.
    if stack is not None and stack.count > 2 * FEW and config.memory_budget is None:
        found = capture_repeated(model, args, kwargs, config, world, rank, stack)
        if found is not None:
            return found, f"{FEW} and {FEW + 1} of the {stack.count} identical blocks of {stack.path or 'the model'}"
    return dry_run(model, args, kwargs, world=world, rank=rank, config=config), ""


def capture_repeated(model, args, kwargs, config, world, rank, stack: Stack) -> StepGraphs | None:
    """The model captured with a few of its identical blocks and repeated; None if its graphs are not periodic."""
    captured = []
    for count in (FEW, FEW + 1):
        shorter = hollow_copy(model)
        shorten(shorter, stack, count)
        captured.append(dry_run(shorter, args, kwargs, world=world, rank=rank, config=config, rewrites=False))
    short, long = captured
    if [label for label, _ in short.halves] != [label for label, _ in long.halves]:
        return None
    halves, runs = [], list(long.runs)
    for (label, one), (_, other) in zip(short.halves, long.halves):
        gm = repeat(one, other, stack, 1, stack.count - FEW - 1)
        if gm is None:
            return None
        runs += run_passes(gm, HALVES, long.passes, label)
        order = start_order(gm, long.passes)
        runs += run_passes(gm, SCHEDULE, dataclasses.replace(long.passes, order=order), label)
        halves.append((label, gm))
    rows = rows_of_model(model, config, world, rank)
    return dataclasses.replace(
        long, halves=tuple(halves), runs=tuple(runs), resident_bytes=resident_bytes(rows), held_bytes=held_bytes(rows, world)
    )
