"""`report.scale([8, 64, 512])`: one model on ever more ranks, each world inspected anew, as a table and a plot.

Weak scaling: a rank's samples stay the same, so that all ranks together do more. Strong scaling: the samples of all ranks
together stay the same, so that each has fewer (Hager and Wellein, Introduction to High Performance Computing, section 5.3).
"""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

from tabulate import tabulate
from tqdm import tqdm

if TYPE_CHECKING:
    from .report import Report

KINDS = ("weak", "strong")
GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Point:
    """One world. samples: of one rank, None where unknown; efficiency: of the first world's speed per rank, what is left."""

    world: int
    samples: int | None
    peak_bytes: int
    fits: bool
    step_s: float
    exposed_s: float
    sent: float
    efficiency: float


@dataclasses.dataclass(frozen=True)
class Scaling:
    """What `report.scale` found. `str()` is the table, `plot(path)` draws it."""

    model: str
    kind: str
    hardware: str
    points: tuple[Point, ...]

    def __str__(self) -> str:
        rows = [
            [p.world, p.samples, p.peak_bytes / GIB, "" if p.fits else "no", p.step_s * 1e3, p.exposed_s * 1e3, p.sent, f"{p.efficiency:.1%}"]
            for p in self.points
        ]
        headers = ["ranks", "samples a rank", "peak, GiB", "fits", "step, ms", "exposed, ms", "elements sent", "efficiency"]
        if all(p.fits for p in self.points):
            rows, headers = [[*row[:3], *row[4:]] for row in rows], headers[:3] + headers[4:]
        title = f"{self.model} on {self.hardware}, {self.kind} scaling"
        return title + "\n" + tabulate(rows, headers, floatfmt=",.2f", intfmt=",")

    def plot(self, path: str | os.PathLike) -> None:
        """Peak memory, step time and what of it is exposed communication, over the ranks. Needs matplotlib."""
        from .drawing import matplotlib_for

        figure = matplotlib_for("plot").figure.Figure(figsize=(9, 3.2), layout="constrained")
        memory, time = figure.subplots(1, 2)
        worlds = [p.world for p in self.points]
        memory.plot(worlds, [p.peak_bytes / GIB for p in self.points], marker="o")
        memory.set_ylabel("peak, GiB a rank")
        time.plot(worlds, [p.step_s * 1e3 for p in self.points], marker="o", label="step")
        time.plot(worlds, [p.exposed_s * 1e3 for p in self.points], marker="o", label="exposed communication")
        time.set_ylabel("ms")
        time.legend(frameon=False)
        for axes in (memory, time):
            axes.set_xscale("log", base=2)
            axes.set_xticks(worlds, [f"{world:,}" for world in worlds])
            axes.minorticks_off()
            axes.set_xlabel("ranks")
            axes.set_ylim(bottom=0)
        figure.suptitle(f"{self.model} on {self.hardware}, {self.kind} scaling")
        figure.savefig(path)


def scale(report: Report, worlds, kind: str) -> Scaling:
    """`report` for each number of ranks of `worlds`. Raises ValueError for what cannot be."""
    if report.again is None:
        raise ValueError("scale: this report is of a real run, which has the ranks that it has; scale one of zero_fx.inspect")
    worlds = list(worlds)
    check(report, worlds, kind)
    found = []
    for world in tqdm(worlds, desc="scale", unit="world", disable=None, leave=False):
        samples = report.samples * report.world // world if kind == "strong" else report.samples
        found.append(point(report, world, samples, kind, found[0] if found else None))
    return Scaling(report.model, kind, report.step.hardware.name, tuple(found))


def check(report: Report, worlds: list, kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r}: expected 'weak' (a rank's samples stay) or 'strong' (those of all ranks stay)")
    if not worlds:
        raise ValueError("worlds is empty: expected numbers of ranks, such as [8, 64, 512]")
    for world in worlds:
        if isinstance(world, bool) or not isinstance(world, int) or world < 1:
            raise ValueError(f"worlds has {world!r}: expected numbers of ranks, 1 or more")
    if kind == "strong":
        if report.samples is None:
            raise ValueError("kind='strong' divides the samples, and no argument of forward is a tensor with a batch dimension")
        total = report.samples * report.world
        for world in worlds:
            if total % world:
                raise ValueError(
                    f"kind='strong': {total:,} samples ({report.samples:,} on each of {report.world:,} ranks) cannot be divided "
                    f"over {world:,} ranks; inspect with a batch that can"
                )


def point(report: Report, world: int, samples: int | None, kind: str, first: Point | None) -> Point:
    changes = {} if samples == report.samples else {"samples": samples}
    here = report if world == report.world and not changes else report.again(world_size=world, rank=0, **changes)
    step, peak = here.prediction.step_s, here.prediction.peak_bytes
    efficiency = 1.0
    if first is not None:
        efficiency = first.step_s / step * (first.world / world if kind == "strong" else 1.0)
    return Point(
        world, samples, peak, peak <= here.step.hardware.memory_bytes, step, here.prediction.exposed_s, sum(here.sent.values()),
        efficiency,
    )  # fmt: skip
