"""A report as one self-contained page: the files of `page/` with the report's data in them; nothing is fetched.

The data are JSON, compressed: columns of whole numbers and tables of strings, times in nanoseconds of the step.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
import math
import pathlib
from typing import TYPE_CHECKING

from .events import KINDS
from .lanes import LANES, Span, lives_of, name_of_event, offsets_of, spans_of, stays_of, walk
from .text import line_of, module_of, text, type_of
from .text_diff import compare

if TYPE_CHECKING:
    from .report import Report

PAGE = pathlib.Path(__file__).with_name("page")
SCRIPTS = ("data.js", "head.js", "timeline.js", "pointer.js", "graphs.js", "parameters.js")
SPAN_KINDS = ("matmul", "attention", "pointwise", "copy", "wait", "gather", "reduce", "optimizer")


class Strings:
    """Each string once; the data have its number."""

    def __init__(self):
        self.number: dict[str, int] = {}

    def __call__(self, value: str) -> int:
        return self.number.setdefault(value, len(self.number))


def page(report: Report) -> str:
    packed = gzip.compress(json.dumps(data_of(report), separators=(",", ":")).encode(), 6, mtime=0)
    parts = {
        "zero_fx report": html.escape(f"{report.model}, stage {report.config.stage}, {report.world:,} ranks"),
        "/*style*/": read("style.css"),
        "/*script*/": "\n".join(map(read, SCRIPTS)),
        "<!--data-->": base64.b64encode(packed).decode(),
    }
    found = read("index.html")
    for place, text_ in parts.items():
        found = found.replace(place, text_, 1)
    return found


def read(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")


def data_of(report: Report) -> dict:
    strings = Strings()
    texts: dict[str, int] = {}
    found = {
        "summary": summary(report),
        "lanes": LANES, "span_kinds": SPAN_KINDS, "kinds": KINDS,
        "spans": columns_of_spans(spans_of(report), strings),
        "halves": [half(report, number, offset, strings, texts) for number, offset in enumerate(offsets_of(report)[:-1])],
        "passes": [run(one, texts) for one in report.graphs.runs],
        "parameters": parameters(report),
    }  # fmt: skip
    return found | {"strings": list(strings.number), "texts": list(texts)}


def summary(report: Report) -> dict:
    figures = report.to_dict()
    hardware, (label, event, _) = report.step.hardware, report.peak
    del figures["parameter_rows"], figures["passes"]
    return figures | {
        "nodes": math.ceil(report.world / hardware.ranks_per_node), "device_bytes": hardware.memory_bytes,
        "source": hardware.source, "budget": report.config.memory_budget, "peak_half": label, "peak_at": f"{name_of_event(event)} {event.line}".strip() if event else "",
        "precision": str(report.config.precision.compute)[6:] if report.config.precision else None,
    }  # fmt: skip


def ns(seconds: float) -> int:
    return round(seconds * 1e9)


def columns_of_spans(spans: list[Span], strings: Strings) -> dict:
    return {
        "lane": [LANES.index(s.lane) for s in spans], "kind": [SPAN_KINDS.index(s.kind) for s in spans],
        "name": [strings(s.name) for s in spans], "start": [ns(s.start_s) for s in spans],
        "dur": [max(1, ns(s.seconds)) for s in spans], "half": [s.half for s in spans], "event": [s.index for s in spans],
    }  # fmt: skip


def half(report: Report, number: int, offset: float, strings: Strings, texts: dict[str, int]) -> dict:
    """One graph: when its events end, what lives when, its text with the place of each line and the line of each event."""
    played, timeline = report.step.halves[number], report.timelines[number]
    walked = walk(report, number)
    lives = lives_of(walked)
    shown = [node for node in walked.gm.graph.nodes if node.op == "output" or type_of(node.meta.get("val")) != "object"]
    line = {node: i for i, node in enumerate(shown)}
    return {
        "label": played.label, "start": ns(offset), "seconds": timeline.seconds, "peak_event": timeline.peak_index,
        "peak_bytes": timeline.peak_bytes,
        "ends": [ns(end) for end in timeline.ends], "event_name": [strings(e.op) for e in played.events],
        "event_place": [strings(f"{e.module} {e.line}".strip()) for e in played.events],
        "life": {
            "kind": [KINDS.index(one.kind) for one in lives], "bytes": [one.bytes for one in lives],
            "name": [strings(one.name) for one in lives], "first": [one.first for one in lives],
            "last": [one.last for one in lives],
        },
        "text": texts.setdefault(text(walked.gm), len(texts)),
        "places": [strings(f"{module_of(node)} {line_of(node)}".strip()) for node in shown],
        "line_of_event": [line.get(node, -1) for node in walked.nodes],
    }  # fmt: skip


def run(one, texts: dict[str, int]) -> dict:
    """A pass: the graph before and after by number, what it did, which lines stayed and which moved."""
    found = compare(one.before.splitlines(), one.after.splitlines())
    return {
        "graph": one.label, "name": one.name, "ms": round(one.time_ms, 3), "stats": one.report.stats,
        "before": texts.setdefault(one.before, len(texts)), "after": texts.setdefault(one.after, len(texts)),
        "blocks": found.blocks(), "moved": found.moved,
    }  # fmt: skip


def parameters(report: Report) -> list[list]:
    """[name, shape, dtype, computed in, placement, rows here, bytes here, [[half, start, end, members of the bucket], ...]]."""
    offsets = offsets_of(report)
    stays: dict[str, list] = {}
    for number, timeline in enumerate(report.timelines):
        begun = {index: start for index, start, _ in timeline.transfers}
        for stay in stays_of(walk(report, number)):
            start, end = offsets[number] + begun.get(stay.first, 0.0), offsets[number] + timeline.ends[stay.last]
            stays.setdefault(stay.name, []).append([number, ns(start), ns(end), stay.members])
    return [
        [row.name, list(row.shape), str(row.dtype)[6:], str(row.used_dtype)[6:], row.placement, row.rows, row.local_bytes,
         stays.get(row.name, [])]
        for row in report.rows
    ]  # fmt: skip
