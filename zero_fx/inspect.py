"""`zero_fx.inspect`: what the compiler would do with a model on hardware that is not here."""

from __future__ import annotations

import dataclasses
import time

from torch import nn

from .blocks import PERIODS, SHORT, Stack, grow, largest_stack, shorten
from .config import Config
from .dry_run import dry_run, hollow_copy
from .events import GATHERED, Half
from .hardware import HARDWARE, Hardware
from .params import held_bytes, resident_bytes, rows_of_model
from .predict import Step, StepGraphs
from .report import Report


def inspect(
    model: nn.Module,
    *args,
    stage: int = 3,
    world_size: int = 64,
    hardware: str | Hardware = "h100",
    ranks_per_node: int | None = None,
    memory_budget: int | float | str | None = None,
    rank: int = 0,
    config: Config | None = None,
    **kwargs,
) -> Report:
    """What `rank` of `world_size` ranks would run in a step of `model(*args, **kwargs)` and its backward pass, and what
    that would take: memory, elements sent, time. Nothing is lowered or run, and no peer and no device is needed.

    model, args: plain; both may be on the meta device, and then cost no memory. They are not changed.
    hardware: the name of a published profile ("a100", "h100", "h200", "b200", "cpu") or a Hardware; ranks_per_node: in
        place of the profile's. memory_budget: as for zero_fx.compile; a fraction is of the profile's memory.
    config: a zero_fx.Config for all other options; its stage, hardware and memory_budget are replaced by these.

    A model with many identical blocks is captured with a few of them where its schedule repeats itself, see blocks.py.
    Raises ValueError or TypeError for what cannot be used; RuntimeError inside a process group.
    """
    begun = time.perf_counter()
    profile = profile_of(hardware, ranks_per_node)
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size={world_size!r}: expected a number of ranks, 1 or more")
    config = dataclasses.replace(config or Config(), stage=stage, hardware=profile, memory_budget=memory_budget)
    if isinstance(config.memory_budget, float):
        config = dataclasses.replace(config, memory_budget=round(config.memory_budget * profile.memory_bytes))
    rows = rows_of_model(hollow_copy(model), config, world_size, rank)  # which refuses what is no module
    step, graphs, blocks = capture(model, args, kwargs, config, world_size, rank)
    step = dataclasses.replace(step, resident_bytes=resident_bytes(rows))

    def again(**changes) -> Report:
        options = {
            "stage": stage, "world_size": world_size, "hardware": profile, "memory_budget": memory_budget, "config": config,
        }  # fmt: skip
        return inspect(model, *args, **{**options, **changes}, **kwargs)

    return Report(
        model=type(model).__name__, config=config, world=world_size, rank=rank, step=step, rows=rows, graphs=graphs,
        blocks=blocks, seconds=time.perf_counter() - begun, again=again,
    )  # fmt: skip


def profile_of(hardware: str | Hardware, ranks_per_node: int | None) -> Hardware:
    if not isinstance(hardware, Hardware):
        if hardware not in HARDWARE:
            raise ValueError(f"hardware={hardware!r}: expected one of {', '.join(map(repr, HARDWARE))}, or a Hardware")
        hardware = HARDWARE[hardware]
    if ranks_per_node is None:
        return hardware
    if isinstance(ranks_per_node, bool) or not isinstance(ranks_per_node, int) or ranks_per_node < 1:
        raise ValueError(f"ranks_per_node={ranks_per_node!r}: expected a number of ranks, 1 or more")
    return dataclasses.replace(hardware, ranks_per_node=ranks_per_node)


def capture(model, args, kwargs, config: Config, world: int, rank: int) -> tuple[Step, StepGraphs, str]:
    """(events of the whole model, graphs to show, what was left out of them)."""
    stack = largest_stack(model)
    # Under a memory budget the whole model decides what is saved, so all of it is captured.
    if stack is not None and stack.count > 2 * SHORT + max(PERIODS) and config.memory_budget is None:
        found = capture_repeated(model, args, kwargs, config, world, rank, stack)
        if found is not None:
            return found
    graphs = dry_run(model, args, kwargs, world=world, rank=rank, config=config)
    return graphs.step(), graphs, ""


def capture_repeated(model, args, kwargs, config, world, rank, stack: Stack) -> tuple[Step, StepGraphs, str] | None:
    """The model captured with a few of its identical blocks, or None if its schedule does not repeat itself."""
    captured: dict[int, tuple[StepGraphs, Step]] = {}

    def with_blocks(count: int) -> tuple[StepGraphs, Step]:
        if count not in captured:
            shorter = hollow_copy(model)
            shorten(shorter, stack, count)
            graphs = dry_run(shorter, args, kwargs, world=world, rank=rank, config=config)
            captured[count] = graphs, graphs.step()
        return captured[count]

    for period in PERIODS:
        few = SHORT + (stack.count - SHORT) % period
        (_, short), (graphs, long) = with_blocks(few), with_blocks(few + period)
        if len(short.halves) != len(long.halves):
            return None
        times = (stack.count - few - period) // period
        halves = [grow(a, b, stack, period, times) for a, b in zip(short.halves, long.halves)]
        if all(half is not None for half in halves):
            held = held_bytes(rows_of_model(model, config, world, rank), world)
            note = f"{few + period} of the {stack.count} identical blocks of {stack.path or 'the model'}"
            return dataclasses.replace(long, halves=tuple(with_held(half, held) for half in halves)), graphs, note
    return None


def with_held(half: Half, held: int) -> Half:
    """Held parameters live from the start of backward; those of all blocks do."""
    start = {kind: held if kind == GATHERED else size for kind, size in half.at_start}
    return dataclasses.replace(half, at_start=tuple(start.items()))
