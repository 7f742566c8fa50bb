"""A report as Chrome trace events (the Trace Event Format, as chrome://tracing and Perfetto read it)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .simulate import memory_by_kind

if TYPE_CHECKING:
    from .report import Report

COMPUTE, LINKS = 0, 1  # lanes, as threads of one process


def trace_events(report: Report) -> list[dict]:
    """Complete events ("X") in microseconds, and counters ("C") in bytes. Graphs follow one another, then the optimizer."""
    found = [lane(COMPUTE, "compute"), lane(LINKS, "links")]
    offset = 0.0
    for half, timeline in zip(report.step.halves, report.timelines):
        begun = 0.0
        memory, shown = memory_by_kind(half), None
        for index, (event, end) in enumerate(zip(half.events, timeline.ends)):
            if end > begun:
                about = {"module": event.module, "line": event.line, "graph": half.label}
                name = f"wait {event.op}" if event.back else event.op
                found.append(span(COMPUTE, name, offset + begun, end - begun, about))
            now = {kind: values[index] for kind, values in memory.items()}
            if now != shown:
                found.append({"ph": "C", "pid": 0, "name": "memory", "ts": (offset + begun) * 1e6, "args": now})
            begun, shown = end, now
        for index, start, end in timeline.transfers:
            event = half.events[index]
            about = {"parameters": ", ".join(event.params), "elements sent": event.sent, "graph": half.label}
            found.append(span(LINKS, event.op, offset + start, end - start, about))
        offset += max([timeline.seconds, *(end for *_, end in timeline.transfers)])
    found.append(span(COMPUTE, "optimizer", offset, report.step.optimizer_s, {}))
    return found


def lane(number: int, name: str) -> dict:
    return {"ph": "M", "pid": 0, "tid": number, "name": "thread_name", "args": {"name": name}}


def span(number: int, name: str, start_s: float, seconds: float, about: dict) -> dict:
    return {"ph": "X", "pid": 0, "tid": number, "name": name, "ts": start_s * 1e6, "dur": seconds * 1e6, "args": about}
