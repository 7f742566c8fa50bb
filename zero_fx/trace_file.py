"""A report as Chrome trace events (the Trace Event Format, as chrome://tracing and Perfetto read it)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .lanes import LANES, Span, offsets_of, spans_of
from .simulate import memory_by_kind

if TYPE_CHECKING:
    from .report import Report


def trace_events(report: Report) -> list[dict]:
    """Complete events ("X") in microseconds, one thread a lane, and counters ("C") in bytes."""
    lanes = [
        {"ph": "M", "pid": 0, "tid": number, "name": "thread_name", "args": {"name": name}} for number, name in enumerate(LANES)
    ]
    return [*lanes, *(complete(report, span) for span in spans_of(report)), *counters(report)]


def complete(report: Report, span: Span) -> dict:
    about = {"kind": span.kind}
    if span.half >= 0:
        half = report.step.halves[span.half]
        event = half.events[span.index]
        about |= {"graph": half.label, "module": event.module, "line": event.line}
        if event.params:
            about |= {"parameters": ", ".join(event.params), "elements sent": event.sent}
    return {
        "ph": "X", "pid": 0, "tid": LANES.index(span.lane), "name": span.name, "cat": span.kind, "ts": span.start_s * 1e6,
        "dur": span.seconds * 1e6, "args": about,
    }  # fmt: skip


def counters(report: Report) -> list[dict]:
    """Memory by kind, where it changes."""
    found = []
    for half, timeline, offset in zip(report.step.halves, report.timelines, offsets_of(report)):
        memory, shown, begun = memory_by_kind(half), None, 0.0
        for *now, end in zip(*memory.values(), timeline.ends):
            if now != shown:
                args = dict(zip(memory, now))
                found.append({"ph": "C", "pid": 0, "name": "memory", "ts": (offset + begun) * 1e6, "args": args})
            shown, begun = now, end
    return found
