"""`zero_fx.plan`: which stage, budget, micro-batch and accumulation fit a device's memory, fastest first."""

from __future__ import annotations

import dataclasses
import os

from tabulate import tabulate
from torch import nn
from tqdm import tqdm

from .accumulate import peak_bytes, step_s, waiting_bytes
from .batch import samples_of, with_samples
from .config import STAGES, Config, parse_bytes
from .dry_run import hollow_copy
from .hardware import Hardware, hardware_of
from .inspect import inspect, profile_of
from .params import held_bytes, resident_bytes, rows_of_model

GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to make an optimizer step of a rank's samples, on one rank.

    memory_budget: bytes, of zero_fx.Config, or None. micro_batch: samples of one forward, None where unknown; accumulation:
    forwards of a step. peak_bytes (of several micro-batches an upper bound) and step_s as simulated, None where nothing was
    captured. reason: why it is out; "" for what fits.
    """

    stage: int
    memory_budget: int | None
    micro_batch: int | None
    accumulation: int
    peak_bytes: int | None = None
    step_s: float | None = None
    reason: str = ""

    @property
    def fits(self) -> bool:
        return not self.reason


class Candidates(list):
    """A list of Candidate: those that fit, fastest first, then the others. `str()` is a table."""

    def __str__(self) -> str:
        rows = [
            [c.stage, "" if c.memory_budget is None else gib(c.memory_budget), c.micro_batch, c.accumulation,
             None if c.peak_bytes is None else gib(c.peak_bytes), None if c.step_s is None else f"{c.step_s * 1e3:,.1f}", c.reason]
            for c in self
        ]  # fmt: skip
        headers = ["stage", "budget, GiB", "micro-batch", "accumulation", "peak, GiB", "step, ms", "out because"]
        return tabulate(rows, headers, colalign=("right",) * 6 + ("left",), disable_numparse=True)


def plan(
    model: nn.Module,
    *args,
    world_size: int = 64,
    hardware: str | Hardware | None = None,
    memory: int | float | str | None = None,
    ranks_per_node: int | None = None,
    stages: tuple[int, ...] = STAGES,
    micro_batches: tuple[int, ...] | None = None,
    config: Config | None = None,
    **kwargs,
) -> Candidates:
    """All ways to train `model(*args, **kwargs)` in `memory` bytes a rank: stage x budget x micro-batch x accumulation.

    args: with the samples that one rank has in one optimizer step, in dimension 0 of its tensors (see zero_fx/batch.py).
    memory: bytes, "80GiB" or a fraction of the device's; all of it if left out. hardware, ranks_per_node, config: as for
        zero_fx.inspect. stages: to look at. micro_batches: samples of one forward to look at; by default all of a rank's
        samples, half of them, and so on while they divide.
    A budget is tried where a stage does not fit without one, so that activations are computed again, and at stage 3, where
    memory that is left keeps parameters gathered. Of one stage, micro-batches smaller than the largest that fits without
    a budget are not inspected: they only communicate and start kernels more often.

    Each candidate is captured as by zero_fx.inspect, with a progress bar. Raises ValueError or TypeError for what cannot be used.
    """
    config = config or Config()
    if config.memory_budget is not None:
        raise ValueError(f"config has memory_budget={config.memory_budget:,}, which a plan chooses: give it as memory=")
    profile = profile_of(hardware or config.hardware or "h100", ranks_per_node)
    limit = parse_bytes(1.0 if memory is None else memory)
    limit = round(limit * profile.memory_bytes) if isinstance(limit, float) else limit
    check_stages(stages)
    sizes = micro_batches_of(samples_of(args, kwargs), micro_batches)
    search = Search(model, args, kwargs, config, profile, world_size, limit)
    found = []
    with tqdm(total=len(stages) * len(sizes), desc="plan", unit="candidate", disable=None, leave=False) as bar:
        for stage in stages:
            found += search.of_stage(stage, sizes, bar)
    return Candidates(sorted(found, key=lambda c: (not c.fits, c.step_s or float("inf"), c.stage, c.accumulation)))


def check_stages(stages) -> None:
    if not stages:
        raise ValueError("stages is empty: expected some of 0, 1, 2, 3")
    for stage in stages:
        if isinstance(stage, bool) or stage not in STAGES:
            raise ValueError(f"stages has {stage!r}: expected some of 0, 1, 2, 3")


def micro_batches_of(samples: int | None, given: tuple[int, ...] | None) -> list[tuple[int | None, int]]:
    """(micro-batch, accumulation), largest micro-batch first."""
    if samples is None:
        if given is not None:
            raise ValueError(f"micro_batches={given!r}: no argument of forward is a tensor with a batch dimension")
        return [(None, 1)]
    if given is None:
        given, size = [samples], samples
        while size % 2 == 0:
            given.append(size := size // 2)
        if size > 1:
            given.append(1)
    for size in given:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1 or samples % size:
            raise ValueError(f"micro_batches has {size!r}: expected numbers that divide the {samples} samples of a rank")
    return [(size, samples // size) for size in sorted(set(given), reverse=True)]


@dataclasses.dataclass(frozen=True)
class Search:
    """What is the same for all candidates. limit: bytes of a rank."""

    model: nn.Module
    args: tuple
    kwargs: dict
    config: Config
    profile: Hardware
    world: int
    limit: int

    def of_stage(self, stage: int, sizes, bar) -> list[Candidate]:
        bar.set_postfix_str(f"stage {stage}")
        rows = rows_of_model(hollow_copy(self.model), dataclasses.replace(self.config, stage=stage), self.world, 0)
        gradients = sum(row.local_bytes for row in rows if row.trains)
        states = resident_bytes(rows) + held_bytes(rows, self.world) + gradients
        if states > self.limit:
            bar.update(len(sizes))
            reason = f"parameters, gradients and optimizer states alone take {gib(states)} GiB"
            return [Candidate(stage, None, size, times, reason=reason) for size, times in sizes]
        found, fitting = [], None
        for size, times in sizes:
            if fitting is None:
                alone = self.candidate(stage, None, size, times)
                found.append(alone)
                budget = self.limit - waiting_bytes(rows, stage, times)
                if budget > states and (not alone.fits or stage == 3):
                    found.append(self.candidate(stage, budget, size, times))
                fitting = size if alone.fits else None
            else:
                found.append(Candidate(stage, None, size, times, reason=f"not inspected: a micro-batch of {fitting} fits"))
            bar.update()
        return found

    def candidate(self, stage: int, budget: int | None, size: int | None, times: int) -> Candidate:
        args, kwargs = (self.args, self.kwargs) if size is None else with_samples(self.args, self.kwargs, size)
        try:
            report = inspect(
                self.model, *args, stage=stage, world_size=self.world, hardware=self.profile, memory_budget=budget,
                config=self.config, **kwargs,
            )  # fmt: skip
        except ValueError as error:
            if budget is None or "smallest feasible" not in str(error):
                raise
            return Candidate(stage, budget, size, times, reason=str(error).splitlines()[0])
        peak = peak_bytes(report, times)
        reason = f"takes {gib(peak - self.limit)} GiB more than the {gib(self.limit)} there are" if peak > self.limit else ""
        return Candidate(stage, budget, size, times, peak, step_s(report, times), reason)


def choose_stage(model: nn.Module, example, config: Config, device) -> Config:
    """`config` with the stage and the memory budget of the fastest candidate for `stage="auto"`; every rank finds the same.

    example: the arguments of one forward. Raises ValueError if nothing fits, with the table.
    """
    args, kwargs = split_example(example)
    memory, config = config.memory_budget, dataclasses.replace(config, memory_budget=None)
    found = plan(
        model, *args, world_size=int(os.environ.get("WORLD_SIZE", "1")), hardware=config.hardware or hardware_of(device),
        memory=memory, micro_batches=None if (samples := samples_of(args, kwargs)) is None else (samples,), config=config, **kwargs,
    )  # fmt: skip
    if not found[0].fits:
        raise ValueError(f'stage="auto": no stage fits this device with the example as one micro-batch\n{found}')
    return dataclasses.replace(config, stage=found[0].stage, memory_budget=found[0].memory_budget)


def split_example(example) -> tuple[tuple, dict]:
    """(args, kwargs) of what a user gave: positional arguments, keyword arguments, or one tensor."""
    if isinstance(example, dict):
        return (), example
    return (example if isinstance(example, tuple) else (example,)), {}


def gib(size: float) -> str:
    return f"{size / GIB:,.2f}" if size >= GIB else f"{size / GIB:.3g}"
