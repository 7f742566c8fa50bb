"""Play the events of a graph on two lanes, compute and links: seconds, exposed waits, and memory over time."""

from __future__ import annotations

import dataclasses
import itertools

from .events import KINDS, Half


@dataclasses.dataclass(frozen=True)
class Timeline:
    """One graph played once. seconds: of the step on the compute lane, waits included; exposed_s: of those waits alone;
    compute_s: of the rest, which includes what moving data takes of it (Hardware.busy_links).

    ends: seconds at which each event ends on the compute lane; transfers: (event's index, start, end) on the links.
    live: bytes that live while each event runs, in order, of what the graph allocated and of the inputs that count.
    peak_index: of the event at the peak, -1 for before the first; peak_kinds: (kind, bytes) of what lives there.
    """

    seconds: float
    compute_s: float
    links_s: float
    exposed_s: float
    peak_bytes: int
    peak_index: int
    peak_kinds: tuple[tuple[str, int], ...]
    ends: tuple[float, ...]
    transfers: tuple[tuple[int, float, float], ...]
    live: tuple[int, ...]


def play(half: Half) -> Timeline:
    clock = links = exposed = 0.0
    ends, transfers, done = [], [], {}
    for index, event in enumerate(half.events):
        clock += event.compute_s
        if event.link_s:
            start = max(links, clock)
            links = done[index] = start + event.link_s
            transfers.append((index, start, links))
            clock += event.busy_s
        if event.back:
            late = max(0.0, done[index - event.back] - clock)
            clock, exposed = clock + late, exposed + late
        ends.append(clock)
    live, peak, peak_index, peak_kinds = memory(half)
    busy = sum(end - start for _, start, end in transfers)
    return Timeline(clock, clock - exposed, busy, exposed, peak, peak_index, peak_kinds, tuple(ends), tuple(transfers), live)


def memory(half: Half) -> tuple[tuple[int, ...], int, int, tuple[tuple[str, int], ...]]:
    """(bytes during each event, peak, its event, what lives there by kind)."""
    now = dict.fromkeys(KINDS, 0) | dict(half.at_start)
    total = peak = sum(now.values())
    live, at_peak, peak_index = [], dict(now), -1
    for index, event in enumerate(half.events):
        for kind, size in event.allocs:
            now[kind] += size
            total += size
        if total > peak:
            peak, at_peak, peak_index = total, dict(now), index
        live.append(total)
        for kind, size in event.frees:
            now[kind] -= size
            total -= size
    return tuple(live), peak, peak_index, tuple((kind, size) for kind, size in at_peak.items() if size)


def memory_by_kind(half: Half) -> dict[str, list[int]]:
    """Bytes of each kind while each event runs: what the sum `Timeline.live` is made of."""
    starts = dict.fromkeys(KINDS, 0) | dict(half.at_start)
    found = {}
    for kind, start in starts.items():
        changes = []
        freed = 0
        for event in half.events:
            changes.append(sum(size for k, size in event.allocs if k == kind) - freed)
            freed = sum(size for k, size in event.frees if k == kind)
        found[kind] = [start + change for change in itertools.accumulate(changes)]
    return found
