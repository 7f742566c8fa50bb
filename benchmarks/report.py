"""The suite's output: a table, the targets beside what was measured, JSON, plots."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import platform
import statistics

import torch
from tabulate import tabulate

from .measure import Result

BASE = "ddp compiled"


def ratio(results: dict[str, Result], one: str, other: str) -> float | None:
    """Median over rounds of the ratio of step times within a round; None if either was not run."""
    if one not in results or other not in results:
        return None
    return statistics.median(a / b for a, b in zip(results[one].step_s, results[other].step_s))


def table(results: dict[str, Result], tokens: int) -> str:
    rows = []
    for name, result in results.items():
        exposed = result.median_s - results["alone"].median_s if "alone" in results else None
        rows.append([
            name, result.median_s * 1e3, ratio(results, name, BASE), tokens / result.median_s, result.peak_bytes / 1e6,
            result.elements_sent / 1e6, result.collectives, None if exposed is None else exposed * 1e3, result.compile_s,
            None if result.predicted_step_s is None else result.predicted_step_s * 1e3,
            None if result.predicted_peak_bytes is None else result.predicted_peak_bytes / 1e6,
        ])  # fmt: skip
    headers = ["", "step ms", f"/ {BASE}", "tokens/s", "peak MB", "M elements", "collectives", "exposed ms", "compile s"]
    headers += ["predicted ms", "predicted MB"]
    formats = ("", ".0f", ".2f", ".0f", ".0f", ".2f", "d", ".0f", ".0f", ".0f", ".0f")
    return tabulate(rows, headers, floatfmt=formats, missingval="-")


@dataclasses.dataclass(frozen=True)
class Target:
    """A figure to reach: at most `limit`."""

    what: str
    limit: float
    measured: float | None

    @property
    def verdict(self) -> str:
        if self.measured is None:
            return "not measured"
        return "reached" if self.measured <= self.limit else "not reached"


def targets(results: dict[str, Result], formula_elements: dict[str, float]) -> list[Target]:
    fsdp = [name for name in results if name.startswith("fsdp2")]
    found = []
    if fsdp and "zero 3" in results:
        fastest = max(filter(None, (ratio(results, "zero 3", name) for name in fsdp)))
        found.append(Target("step time, stage 3 / fastest FSDP2", 0.88, fastest))
        smallest = min(results[name].peak_bytes for name in fsdp)
        found.append(Target("peak memory, stage 3 / smallest FSDP2", 0.88, results["zero 3"].peak_bytes / smallest))
    for stage in (1, 2):
        found.append(Target(f"step time, stage {stage} / DDP compiled", 1.0, ratio(results, f"zero {stage}", BASE)))
    found.append(Target("step time, stage 3 / no communication", 1.15, ratio(results, "zero 3", "alone")))
    for stage in (1, 2, 3):
        found.append(Target(f"step time, stage {stage} / DeepSpeed's", 0.78, ratio(results, f"zero {stage}", f"deepspeed {stage}")))
    for name, elements in formula_elements.items():
        if name in results and name.endswith("3"):  # an upper bound: what backward does not read is not gathered again
            found.append(Target(f"elements sent, {name} / at most by the formula", 1.01, results[name].elements_sent / elements))
        elif name in results:
            error = abs(results[name].elements_sent / elements - 1)
            found.append(Target(f"elements sent, {name}: error against the formula", 0.01, error))
    found += predictions(results)
    return [target for target in found if target.measured is not None]


def predictions(results: dict[str, Result]) -> list[Target]:
    found = []
    for name, result in results.items():
        if result.predicted_step_s is not None and name in ("zero 1", "zero 2", "zero 3"):
            step, peak = result.predicted_step_s / result.median_s, result.predicted_peak_bytes / result.peak_bytes
            found.append(Target(f"predicted peak memory, {name}: error", 0.05, abs(peak - 1)))
            found.append(Target(f"predicted step time, {name}: error", 0.25, abs(step - 1)))
    return found


def show_targets(found: list[Target]) -> str:
    rows = [[target.what, target.limit, target.measured, target.verdict] for target in found]
    return tabulate(rows, ["figure", "to reach", "measured", ""], floatfmt=("", ".2f", ".3f", ""))


def add_targets(path: pathlib.Path, found: list[Target]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([dataclasses.asdict(target) for target in [*read_targets(path), *found]], indent=1) + "\n")


def read_targets(path: pathlib.Path) -> list[Target]:
    return [Target(**target) for target in json.loads(path.read_text())] if path.exists() else []


def machine() -> dict:
    return {
        "torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count(),
        "processor": processor(), "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }  # fmt: skip


def processor() -> str:
    info = pathlib.Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()


def write_json(path: pathlib.Path, setting: dict, results: dict[str, Result], found: list[Target]) -> None:
    data = {
        "machine": machine(), "setting": setting, "results": [dataclasses.asdict(r) for r in results.values()],
        "targets": [dataclasses.asdict(target) | {"verdict": target.verdict} for target in found],
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n")


def draw_memory(path: pathlib.Path, results: dict[str, Result], title: str) -> None:
    """Bytes over two steps, as parts of each variant's own duration, since they take unlike long."""
    pyplot = plotting()
    figure, axis = pyplot.subplots(figsize=(8, 4), layout="constrained")
    for name, result in results.items():
        if "no " not in name and "only " not in name:
            end = result.memory[-1][0] / 2
            axis.plot([t / end for t, _ in result.memory], [size / 1e6 for _, size in result.memory], label=name, linewidth=1)
    axis.set_xlabel("steps")
    axis.set_ylabel("MB on a rank")
    axis.set_ylim(0)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=7, ncols=3)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, metadata={"Date": None})


def plotting():
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "zero_fx"
    from matplotlib import pyplot

    return pyplot


def draw_steps(path: pathlib.Path, results: dict[str, Result], title: str) -> None:
    """Bars of the median step time and of the peak memory, one for each variant."""
    pyplot = plotting()
    names = list(results)
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 0.3 * len(names) + 1.2), layout="constrained", sharey=True)
    panels = ([results[n].median_s * 1e3 for n in names], "step, ms"), ([results[n].peak_bytes / 1e6 for n in names], "peak, MB")
    for axis, (values, label) in zip(axes, panels):
        colors = ["#c8783c" if name.startswith("zero") else "#4878a8" for name in names]
        axis.barh(names, values, color=colors)
        axis.set_xlabel(label)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
