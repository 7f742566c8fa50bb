"""A played step as spans on lanes, and what lives in memory when: what the page, the drawing and the trace show."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from torch import fx

from .events import GATHERED, REDUCTIONS, Event, Storages
from .text import line_of, module_of, name_of, type_of
from .vocabulary import COLLECTIVES, is_op

if TYPE_CHECKING:
    from .report import Report

COMPUTE, LINKS, COPY = "compute", "communication", "copy"
LANES = (COMPUTE, LINKS, COPY)
COPYING = {"_to_copy", "convert_element_type", "clone", "copy", "copy_", "cat", "stack", "constant_pad_nd", "slice_scatter"}
PLAIN = {"gather_held": "all_gather", "convert_element_type": "cast", "_to_copy": "cast", "constant_pad_nd": "pad", "clone": "copy"}


@dataclasses.dataclass(frozen=True)
class Span:
    """lane: of LANES. kind: "matmul", "attention", "pointwise", "copy", "wait", "gather", "reduce", "optimizer".
    start_s: from the begin of the step. half, index: of its event; -1 for the optimizer."""

    lane: str
    kind: str
    name: str
    start_s: float
    seconds: float
    half: int = -1
    index: int = -1


def offsets_of(report: Report) -> list[float]:
    """Seconds at which each graph begins, and after them the optimizer."""
    found = [0.0]
    for timeline in report.timelines:
        found.append(found[-1] + max([timeline.seconds, *(end for *_, end in timeline.transfers)]))
    return found


def spans_of(report: Report) -> list[Span]:
    """By lane in the order of time; graphs follow one another, then the optimizer. Operators that only copy have a lane
    of their own to be seen; they take the compute lane's time."""
    found, offsets = [], offsets_of(report)
    for number, (half, timeline) in enumerate(zip(report.step.halves, report.timelines)):
        begun = 0.0
        for index, (event, end) in enumerate(zip(half.events, timeline.ends)):
            if end > begun:
                name = f"wait for {name_of_event(half.events[index - event.back])}" if event.back else name_of_event(event)
                kind = kind_of(event)
                found.append(Span(COPY if kind == "copy" else COMPUTE, kind, name, offsets[number] + begun, end - begun, number, index))
            begun = end
        for index, start, end in timeline.transfers:
            event = half.events[index]
            kind = "reduce" if event.op in REDUCTIONS else "gather"
            found.append(Span(LINKS, kind, name_of_event(event), offsets[number] + start, end - start, number, index))
    return [*found, Span(COMPUTE, "optimizer", "optimizer step (Adam)", offsets[-1], report.step.optimizer_s)]


def kind_of(event: Event) -> str:
    if event.back:
        return "wait"
    if event.link_s:
        return "reduce" if event.op in REDUCTIONS else "gather"
    if event.flops:
        return "attention" if "attention" in event.op else "matmul"
    return "copy" if event.op in COPYING else "pointwise"


def name_of_event(event: Event) -> str:
    """ "mm blocks.3.gate", "all_gather blocks.3.gate.weight and 4 more"."""
    of = some(event.params) if event.params else event.module
    return f"{plain(event.op)} {of}".strip()


def some(params: tuple[str, ...]) -> str:
    return f"{params[0]} and {len(params) - 1} more" if len(params) > 1 else params[0]


def plain(op: str) -> str:
    """An operator's name as people say it."""
    if "scaled_dot_product" in op or "efficient_attention" in op:
        return "attention backward" if "backward" in op else "attention"
    return PLAIN.get(op, op.strip("_"))


@dataclasses.dataclass(frozen=True)
class Life:
    """One storage: it lives from event `first` (-1: from before the graph) to `last`, both included."""

    kind: str
    bytes: int
    name: str
    first: int
    last: int


@dataclasses.dataclass(frozen=True)
class Walk:
    """Graph `number` of a report beside its events. nodes: of each event; deaths: of storages, the event after which nobody
    reads them; those that are not in it stay."""

    gm: fx.GraphModule
    storages: Storages
    nodes: list[fx.Node]
    deaths: dict[fx.Node, int]

    def last(self, storage: fx.Node) -> int:
        return self.deaths.get(storage, len(self.nodes) - 1)


def walk(report: Report, number: int) -> Walk:
    graphs = report.graphs
    label, gm = graphs.halves[number]
    storages = Storages(gm, graphs.fused, graphs.held_bytes * (label == "backward"), label == "backward")
    nodes: list[fx.Node] = []
    deaths: dict[fx.Node, int] = {}
    for node in gm.graph.nodes:
        _, frees = storages.step(node)
        deaths.update(dict.fromkeys(storages.frees.get(node, ()), len(nodes)))
        nodes += [node] if node.op in ("call_function", "output") or frees else []
    return Walk(gm, storages, nodes, deaths)


def lives_of(walked: Walk) -> tuple[Life, ...]:
    """What a graph allocates and what lives when it begins; at each event their sum is Timeline.live."""
    storages = walked.storages
    births = {node: (-1, size) for node, size in storages.saved.items() if size}
    births |= {node: (i, storages.sizes[node]) for i, node in enumerate(walked.nodes) if storages.sizes.get(node)}
    found = [
        Life(storages.kinds[node], size, name_of_storage(node), first, walked.last(node))
        for node, (first, size) in births.items()
    ]
    if storages.held:
        found.append(Life(GATHERED, storages.held, "parameters that forward gathered", -1, len(walked.nodes) - 1))
    return tuple(found)


def name_of_storage(node: fx.Node) -> str:
    """What made it, where, its type and its source line."""
    of, value = module_of(node), node.meta.get("val")
    if is_op(node, *COLLECTIVES):
        of = some(tuple(node.meta.get("zero_fx_bucket", [node.args[-1]])))
        value = node.args[0].meta["val"] if is_op(node, "gather_held") else value
    what = "saved by forward:" if node.op == "placeholder" else plain(name_of(node))
    return " ".join(filter(None, (what, of, type_of(value), line_of(node))))


@dataclasses.dataclass(frozen=True)
class Stay:
    """One gather of one parameter: its full values live from event `first` to event `last` of their graph.
    members: of the bucket that it travels in, itself included."""

    name: str
    first: int
    last: int
    members: int


def stays_of(walked: Walk) -> list[Stay]:
    """Of all parameters that a graph gathers, in the order of the gathers."""
    found = []
    for index, start in enumerate(walked.nodes):
        if not is_op(start, "all_gather", "gather_held"):
            continue
        names = start.meta.get("zero_fx_bucket") or [start.args[-1]]
        for name, pieces in zip(names, pieces_of(start, len(names))):
            own = {walked.storages.owner[piece] for piece in pieces} - {start}
            found.append(Stay(name, index, max(map(walked.last, own or {start})), len(names)))
    return found


def pieces_of(start: fx.Node, count: int) -> list[list[fx.Node]]:
    """For each parameter of a bucket, the nodes that hold it after the gather."""
    if count == 1:
        return [[]]
    wait = next(user for user in start.users if is_op(user, "wait"))
    rows = next(iter(wait.users))  # (ranks, elements of all shards)
    slices = sorted(rows.users, key=lambda node: node.args[2])
    return [[piece, *piece.users] for piece in slices]
