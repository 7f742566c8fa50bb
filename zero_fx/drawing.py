"""The timeline and the memory of a report as a static drawing, by matplotlib."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from .events import GATHERED, GRADIENTS, SAVED, WORKSPACE
from .lanes import LANES, Span, offsets_of, spans_of
from .simulate import memory_by_kind

if TYPE_CHECKING:
    from .report import Report

COLUMNS = 800  # spans and memory are drawn as so many columns, at most
COLORS = {
    "matmul": "#3f6fe0", "attention": "#8a5cf0", "pointwise": "#9bb0cc", "copy": "#c99a2e", "wait": "#e5484d",
    "gather": "#0f9d8f", "reduce": "#ec7a1c", "optimizer": "#6b7280",
}  # fmt: skip
MEMORY = {
    "parameters": "#414c5f", "optimizer states": "#8793a8", GATHERED: "#0f9d8f", GRADIENTS: "#ec7a1c", SAVED: "#6d97f3",
    WORKSPACE: "#b8a4f8",
}  # fmt: skip
GIB = 1 << 30


def matplotlib_for(what: str):
    """matplotlib, with its Figure; ImportError names `what` where it is not installed."""
    try:
        import matplotlib
        import matplotlib.figure
    except ImportError as error:
        raise ImportError(f"{what} draws with matplotlib, which is not installed here: pip install matplotlib") from error
    return matplotlib


def draw(report: Report, path: str | os.PathLike) -> None:
    matplotlib = matplotlib_for("save_svg")
    with matplotlib.rc_context({"svg.hashsalt": "zero_fx", "font.size": 9}):
        figure = matplotlib.figure.Figure(figsize=(11, 5.4), layout="constrained")
        lanes, memory = figure.subplots(2, 1, sharex=True, height_ratios=(1, 1.6))
        draw_lanes(lanes, report)
        draw_memory(memory, report)
        figure.suptitle(
            f"{report.model}, stage {report.config.stage}, {report.world:,} ranks, {report.step.hardware.name}: "
            f"step {report.prediction.step_s * 1e3:,.1f} ms, peak {report.prediction.peak_bytes / GIB:,.1f} GiB"
        )
        figure.savefig(path, format="svg", metadata={"Date": None})


def draw_lanes(axes, report: Report) -> None:
    spans, offsets = spans_of(report), offsets_of(report)
    end = offsets[-1] + report.step.optimizer_s
    used = dict.fromkeys(span.kind for span in spans)
    for row, lane in enumerate(LANES):
        bars = columns_of([span for span in spans if span.lane == lane], end)
        for (kind, alpha), pieces in bars.items():
            axes.broken_barh(pieces, (len(LANES) - 1 - row + 0.1, 0.8), color=COLORS[kind], alpha=alpha, linewidth=0)
    axes.set_yticks([len(LANES) - 1 - row + 0.5 for row in range(len(LANES))], LANES)
    for half, start in zip(report.step.halves, offsets):
        axes.axvline(start * 1e3, color="#888", linewidth=0.6)
        axes.annotate(half.label, (start * 1e3, len(LANES)), (4, 3), textcoords="offset points", annotation_clip=False)
    axes.set_ylim(0, len(LANES))
    handles = [axes.barh(0, 0, color=COLORS[kind], label=kind) for kind in COLORS if kind in used]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.005, 1), frameon=False, fontsize=8)


def columns_of(spans: list[Span], end: float) -> dict[tuple[str, float], list[tuple[float, float]]]:
    """{(kind, opacity): [(start, width) in ms, ...]}: in each column the kind that takes most of it, paler where little is
    covered. Neighbours of one look are one piece."""
    width = end / COLUMNS
    shares: list[dict[str, float]] = [{} for _ in range(COLUMNS)]
    for span in spans:
        first, last = int(span.start_s / width), min(int((span.start_s + span.seconds) / width), COLUMNS - 1)
        for column in range(first, last + 1):
            inside = min(span.start_s + span.seconds, (column + 1) * width) - max(span.start_s, column * width)
            shares[column][span.kind] = shares[column].get(span.kind, 0.0) + inside / width
    found: dict[tuple[str, float], list[tuple[float, float]]] = {}
    looks = [look(share) for share in shares]
    begun = 0
    for column in range(1, COLUMNS + 1):
        if column == COLUMNS or looks[column] != looks[begun]:
            if looks[begun] is not None:
                found.setdefault(looks[begun], []).append((begun * width * 1e3, (column - begun) * width * 1e3))
            begun = column
    return found


def look(share: dict[str, float]) -> tuple[str, float] | None:
    covered = sum(share.values())
    if covered < 0.01:
        return None
    return max(share, key=share.get), 1.0 if covered > 0.75 else 0.65 if covered > 0.3 else 0.35


def draw_memory(axes, report: Report) -> None:
    times, stacks = memory_columns(report)
    below = [0.0] * len(times)
    for name, color in MEMORY.items():
        top = [low + high for low, high in zip(below, stacks[name])]
        if any(stacks[name]):
            axes.fill_between(times, below, top, step="post", color=color, linewidth=0, label=name)
        below = top
    device = report.step.hardware.memory_bytes / GIB
    if device < 2.2 * max(below, default=0):
        axes.axhline(device, color="#d92d3a", linestyle="--", linewidth=0.9, label=f"device, {device:,.1f} GiB")
    axes.set_xlim(0, times[-1] if times else 1)
    axes.set_ylim(0)
    axes.set_xlabel("ms of the step")
    axes.set_ylabel("GiB of a rank")
    axes.legend(loc="upper left", bbox_to_anchor=(1.005, 1), frameon=False, fontsize=8, reverse=True)


def memory_columns(report: Report) -> tuple[list[float], dict[str, list[float]]]:
    """(ms at which columns begin, {name: GiB}): in each column what lives at its highest event."""
    always = {name: report.memory[name] / GIB for name in ("parameters", "optimizer states")}
    offsets = offsets_of(report)
    end = offsets[-1] + report.step.optimizer_s
    best: dict[int, tuple[int, dict[str, float]]] = {}
    for half, timeline, offset in zip(report.step.halves, report.timelines, offsets):
        kinds = memory_by_kind(half)
        begun = 0.0
        for index, finish in enumerate(timeline.ends):
            for column in range(int((offset + begun) / end * COLUMNS), int((offset + finish) / end * COLUMNS) + 1):
                if timeline.live[index] > best.get(column, (-1,))[0]:
                    best[column] = timeline.live[index], {kind: values[index] / GIB for kind, values in kinds.items()}
            begun = finish
    times = [column * end / COLUMNS * 1e3 for column in range(COLUMNS + 1)]
    stacks = {name: [best.get(c, (0, {}))[1].get(name, always.get(name, 0.0)) for c in range(COLUMNS + 1)] for name in MEMORY}
    return times, stacks
