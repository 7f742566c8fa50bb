"""What one rank measures of each variant: losses, step times interleaved with the other variants', memory, traffic.

Memory is exact: the sum of all allocations minus frees since before the model was built, by PyTorch's profiler (on CPU)
or allocator (on CUDA), at its highest during the last steps. Elements sent and collectives are counted by the profiler
at the process group, whoever called it.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import statistics
import time

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from zero_fx.hardware import Hardware
from zero_fx.predict import graphs_of
from zero_fx.runtime.count import elements_sent

from .models import Workload
from .variants import Variant, train_step

WARM_STEPS = 3  # before anything is timed; losses are compared over them
PEAK_STEPS = 2  # over which memory is looked at
BINS = 300  # points of a curve of memory over time
MARK = "benchmark: memory from here"


@dataclasses.dataclass
class Result:
    """Of one variant on one rank. step_s: one entry for each round. Bytes and elements per rank and step.
    memory: (milliseconds, bytes) over PEAK_STEPS steps. What is predicted is zero_fx's cost model on the profile that was measured in this run."""

    name: str
    losses: list[float]
    compile_s: float
    peak_bytes: int
    collectives: int
    elements_sent: float
    memory: list[tuple[float, int]]
    predicted_step_s: float | None = None
    predicted_peak_bytes: int | None = None
    step_s: list[float] = dataclasses.field(default_factory=list)

    @property
    def median_s(self) -> float:
        return statistics.median(self.step_s)


@dataclasses.dataclass
class Running:
    """A variant that has warmed up."""

    model: object
    optimizer: object
    result: Result


def batches(workload: Workload, rank: int, count: int) -> list:
    generator = torch.Generator().manual_seed(1 + rank)
    return [workload.batch(generator) for _ in range(count)]


def warm_up(workload: Workload, variant: Variant, mesh, data, hardware: Hardware) -> Running:
    """Build a variant and take its first steps, under the profiler for memory. hardware: to predict with."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as memory:
        model, optimizer = variant.make(workload, mesh)
        start = time.perf_counter()
        losses = [train_step(model, optimizer, data[0])]
        first_s = time.perf_counter() - start
        losses.append(train_step(model, optimizer, data[1]))  # optimizer states exist from here on
        gc.collect()  # what compilation left behind in cycles would count as alive for as long as chance has it
        with record_function(MARK):
            start = time.perf_counter()
            losses += [train_step(model, optimizer, batch) for batch in data[2 : 2 + PEAK_STEPS]]
            step_s = (time.perf_counter() - start) / PEAK_STEPS
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as traffic:
        train_step(model, optimizer, data[-1])
    calls, elements = count_traffic(traffic, dist.get_world_size())
    means = [mean_over_ranks(loss) for loss in losses]
    curve = memory_of(memory)
    result = Result(variant.name, means, first_s - step_s, max(size for _, size in curve), calls, elements, curve)
    if hasattr(model, "_zero_fx_compiled"):
        predicted = graphs_of(model._zero_fx_compiled.backend).predict(hardware)
        result.predicted_step_s, result.predicted_peak_bytes = predicted.step_s, predicted.peak_bytes
    return Running(model, optimizer, result)


def mean_over_ranks(loss: torch.Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def memory_of(recorded: profile) -> list[tuple[float, int]]:
    """(milliseconds since the mark, bytes): the sum of allocations since the profile began, the highest of each of BINS
    intervals from the mark on."""
    events = recorded.profiler.kineto_results.events()
    begin = min(event.start_ns() for event in events if event.name() == MARK)
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    width = max(1, changes[-1][0] - begin) / BINS
    live, highest = 0, {}
    for start, size in changes:
        live += size
        if start >= begin:
            place = int((start - begin) / width)
            highest[place] = max(highest.get(place, 0), live)
    return [(round(place * width / 1e6, 2), size) for place, size in highest.items()]


# Operators of a process group whose input shape is recorded: its place, and what a rank sends in a ring per element.
VOLUMES = {
    "c10d::_allgather_base_": (1, lambda world: world - 1),
    "c10d::_reduce_scatter_base_": (1, lambda world: (world - 1) / world),
    "c10d::alltoall_base_": (1, lambda world: (world - 1) / world),
}
FUNCTIONAL = "_c10d_functional::"
SMALL = 64  # elements: norms, flags and checksums are not counted as traffic


def count_traffic(recorded: profile, world: int) -> tuple[int, float]:
    """(collectives, elements that a rank sends) of what was recorded, small ones left out of both. Ours are counted as
    functional collectives, the peers' at the process group."""
    entries = [
        (entry.key, entry.count, [math.prod(shape) for shape in entry.input_shapes])
        for entry in recorded.key_averages(group_by_input_shape=True)
    ]
    ours = [(key.removeprefix(FUNCTIONAL), count, sizes[0]) for key, count, sizes in entries if key.startswith(FUNCTIONAL)]
    ours = [(kind, count, size) for kind, count, size in ours if kind != "wait_tensor" and size > SMALL]
    if ours:
        return sum(c for _, c, _ in ours), sum(c * elements_sent(kind, size, world) for kind, c, size in ours)
    calls, elements, scattered = 0, 0.0, 0
    for key, count, sizes in entries:
        if key in VOLUMES:
            index, factor = VOLUMES[key]
            calls += count
            elements += count * sizes[index] * factor(world)
            scattered += count * sizes[index] if "reduce_scatter" in key else 0
    # gloo runs a reduce-scatter as an all-reduce, which is recorded as well: it is counted once, as what was asked for.
    reduced = [(count, max(sizes)) for key, count, sizes in entries if key == "gloo:all_reduce" and max(sizes) > SMALL]
    left = sum(count * size for count, size in reduced) - scattered
    if left > SMALL:
        calls += sum(count for count, _ in reduced)
        elements += 2 * left * (world - 1) / world
    return calls, elements


def time_rounds(running: list[Running], data, rounds: int, tell) -> None:
    """Interleaved: each round runs one step of every variant, in turn forwards and backwards."""
    for number in range(rounds):
        for one in running if number % 2 == 0 else reversed(running):
            batch = data[number % len(data)]
            dist.barrier()
            start = time.perf_counter()
            train_step(one.model, one.optimizer, batch)
            dist.barrier()
            one.result.step_s.append(time.perf_counter() - start)
        tell()
