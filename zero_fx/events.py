"""A graph as a list of events: what each node costs, starts, waits for, allocates and frees. Figures only, no graph.

zero_fx.simulate plays them on two lanes, zero_fx.blocks repeats those of identical blocks. Storages are followed through
views, waits and held parameters, each freed after its last reader. With `fused=True` a pointwise result that only
pointwise operators or reductions read, before the next matrix product, takes no memory, as when Inductor fuses them.
"""

from __future__ import annotations

import dataclasses
import operator

import torch
from torch import fx

from .costs import bytes_of, collective_s, compute_s, flops_of, size_of
from .hardware import Hardware
from .text import line_of, module_of, name_of
from .vocabulary import COLLECTIVES, REDUCTIONS, is_op, is_view

# What memory is filled with, beside a rank's own parameters and optimizer states.
GATHERED, GRADIENTS, SAVED, WORKSPACE = "gathered parameters", "gradients", "saved activations", "workspace"
KINDS = (GATHERED, GRADIENTS, SAVED, WORKSPACE)


@dataclasses.dataclass(frozen=True)
class Event:
    """One node.

    op: the operator, or "output"; module: path of the user's module that it came from; line: "file:number" of the user's code.
    params: names of the parameters that a collective serves.
    compute_s: seconds on the compute lane; flops: of matrix products.
    link_s: seconds on the links, of a collective that starts here; busy_s: of those, what moving the data takes of the
        rank's own time (Hardware.busy_links). sent: elements that a rank sends for it, in rings.
    back: of a wait, how many events ago its collective was started; else 0.
    allocs, frees: ((kind, bytes), ...) before and after the node runs.
    """

    op: str
    module: str
    line: str
    params: tuple[str, ...] = ()
    compute_s: float = 0.0
    flops: int = 0
    link_s: float = 0.0
    busy_s: float = 0.0
    sent: float = 0.0
    back: int = 0
    allocs: tuple[tuple[str, int], ...] = ()
    frees: tuple[tuple[str, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class Half:
    """The events of one graph, forward or backward. at_start: ((kind, bytes), ...) that live when it begins."""

    label: str
    at_start: tuple[tuple[str, int], ...]
    events: tuple[Event, ...]


def half_of(label: str, gm: fx.GraphModule, hardware: Hardware, world: int, fused: bool, held: int = 0) -> Half:
    """`gm` as events. held: bytes of held parameters that live from the start (backward at stages 1 and 2). In backward
    the inputs that forward saved are counted, and freed after their last reader."""
    storages = Storages(gm, fused, held, label == "backward")
    started: dict[fx.Node, int] = {}
    events = []
    for node in gm.graph.nodes:
        is_found = bool(held) and is_op(node, "gather_held")  # backward finds what forward gathered
        figures = {} if is_found else link_figures(node, hardware, world)
        if "link_s" in figures:
            started[node.args[0] if is_op(node, "gather_held") else node] = len(events)
        if is_op(node, "wait"):
            figures["back"] = len(events) - started.get(node.args[0], len(events))
        if node.op == "call_function":
            figures |= {"compute_s": compute_s(node, hardware), "flops": flops_of(node)}
        allocs, frees = storages.step(node)
        if node.op in ("call_function", "output") or frees:
            name = name_of(node) if node.op == "call_function" else node.op
            events.append(Event(name, module_of(node), line_of(node), allocs=allocs, frees=frees, **figures))
    return Half(label, storages.at_start(), tuple(events))


def link_figures(node: fx.Node, hardware: Hardware, world: int) -> dict:
    """What a collective does on the links."""
    if not is_op(node, *COLLECTIVES):
        return {}
    source = node.args[1 if is_op(node, "gather_held") else 0].meta["val"]
    kind, elements = node.target.name().split("::")[1], size_of(source)
    seconds = collective_s(kind, elements, source.element_size(), world, hardware)
    return {
        "link_s": seconds,
        "busy_s": seconds * hardware.busy_links,
        "sent": sent(kind, elements, world),
        "params": tuple(node.meta.get("zero_fx_bucket", [node.args[-1]])),
    }


def sent(kind: str, elements: int, world: int) -> float:
    """Elements that a rank sends in a ring for a collective whose input has `elements`, padding included."""
    if kind in REDUCTIONS:
        return elements * (world - 1) / world * (2 if kind == "all_reduce" else 1)
    return elements * (world - 1)


class Storages:
    """The storages of a graph: who allocates them, of what kind and size, and after which node they are free."""

    def __init__(self, gm: fx.GraphModule, fused: bool, held: int, is_backward: bool):
        self.held, self.is_backward = held, is_backward
        self.owner = owners(gm)
        self.values = allocated(gm, self.owner, fused, held)
        self.sizes = {node: bytes_of(source.meta.get("val")) for node, source in self.values.items()}
        self.kinds = kinds(gm, self.owner, is_backward)
        self.saved = {}
        for node in gm.graph.find_nodes(op="placeholder") if is_backward else ():
            if not node.target.startswith(("primals", "tangents")):
                self.saved[node] = bytes_of(node.meta.get("val"))
        self.frees = frees(gm, self.owner)

    def at_start(self) -> tuple[tuple[str, int], ...]:
        found = [(SAVED, sum(self.saved.values())), (GATHERED, self.held)]
        return tuple((kind, size) for kind, size in found if size)

    def step(self, node: fx.Node) -> tuple[tuple, tuple]:
        """What the node allocates before it runs, and frees after."""
        size = self.sizes.get(node, 0)
        freed = [(self.kinds[s], self.sizes.get(s, self.saved.get(s, 0))) for s in self.frees.get(node, ())]
        allocs = ((self.kinds[node], size),) if size else ()
        return allocs, tuple((kind, size) for kind, size in freed if size)


def owners(gm: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    """Node: the node that allocated the storage it shows."""
    owner: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        shows = is_view(node) or is_op(node, "wait")
        owner[node] = owner[node.args[0]] if shows and isinstance(node.args[0], fx.Node) else node
    return owner


def allocated(gm: fx.GraphModule, owner: dict[fx.Node, fx.Node], fused: bool, held: int) -> dict[fx.Node, fx.Node]:
    """What each node allocates, as the node whose type that has. Inputs allocate nothing; a gather into a held parameter
    allocates that, unless it lives already."""
    found, place = {}, places(gm)
    for node in gm.graph.nodes:
        if node.op != "call_function" or owner[node] is not node:
            continue
        if is_op(node, "gather_held"):
            if not held:
                found[node] = node.args[0]
        elif not (fused and is_fused_away(node, place)):
            found[node] = mask_source(node) if fused else node
    return found


def places(gm: fx.GraphModule) -> dict[fx.Node, int]:
    """Node: how many operators that are fused with nothing, such as matrix products, come before it."""
    found, count = {}, 0
    for node in gm.graph.nodes:
        found[node] = count
        if node.op == "call_function" and not (is_view(node) or is_pointwise(node) or is_reduction(node)):
            count += node.target is not operator.getitem
    return found


def mask_source(node: fx.Node) -> fx.Node:
    """What is stored for `node`: of a dropout mask Inductor stores the random numbers, and compares again."""
    source = node.args[0] if node.args else None
    return source if isinstance(source, fx.Node) and source.target is torch.ops.prims.inductor_random.default else node


def kinds(gm: fx.GraphModule, owner: dict[fx.Node, fx.Node], is_backward: bool) -> dict[fx.Node, str]:
    """Storage: what it is there for."""
    found = {}
    for node in gm.graph.nodes:
        if is_op(node, "all_gather", "gather_held"):
            source = owner[node.args[1 if is_op(node, "gather_held") else 0]]
            found[node] = GATHERED
            if source.op != "placeholder":  # a padded or joined copy of shards
                found[source] = GATHERED
        elif is_op(node, *REDUCTIONS):
            found[node] = found[owner[node.args[0]]] = GRADIENTS
        elif owner[node] is node:
            sources = [found.get(owner[arg], WORKSPACE) for arg in node.all_input_nodes]
            is_copy = node.meta.get("zero_fx_inserted") and len(set(sources)) == 1
            found[node] = sources[0] if is_copy else SAVED if node.op == "placeholder" else WORKSPACE
    for node in gm.graph.output_node().all_input_nodes:
        if found[owner[node]] == WORKSPACE:
            found[owner[node]] = GRADIENTS if is_backward else SAVED
    return found


def is_fused_away(node: fx.Node, place: dict[fx.Node, int]) -> bool:
    """Whether a fusing lowering computes a node inside its readers' kernels, which run where it does."""
    if not is_pointwise(node):
        return False
    readers = through_views(node)
    return bool(readers) and all((is_pointwise(r) or is_reduction(r)) and place[r] == place[node] for r in readers)


def through_views(node: fx.Node) -> list[fx.Node]:
    """The readers of a node, and of its views."""
    found = []
    for user in node.users:
        found += through_views(user) if is_view(user) else [user]
    return found


def is_pointwise(node: fx.Node) -> bool:
    return has_tag(node, torch.Tag.pointwise) or getattr(node.target, "overloadpacket", None) in COPIES


def is_reduction(node: fx.Node) -> bool:
    return has_tag(node, torch.Tag.reduction) or getattr(node.target, "overloadpacket", None) in REDUCES


def has_tag(node: fx.Node, tag: torch.Tag) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and tag in node.target.tags


aten = torch.ops.aten
prims = torch.ops.prims
COPIES = {aten._to_copy, aten.clone, prims.convert_element_type, aten.constant_pad_nd, aten.full, prims.inductor_random}
REDUCES = {aten.sum, aten.mean, aten.amax, aten.var_mean, aten.native_layer_norm, aten.any, aten.max, aten.min}


def frees(gm: fx.GraphModule, owner: dict[fx.Node, fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Node: the storages that nobody reads after it. What the graph returns, and held parameters, stay."""
    last: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        last[owner[node]] = node
        for source in node.all_input_nodes:
            last[owner[source]] = node
    found: dict[fx.Node, list[fx.Node]] = {}
    for storage, node in last.items():
        if node.op != "output" and not is_op(storage, "gather_held"):
            found.setdefault(node, []).append(storage)
    return found
