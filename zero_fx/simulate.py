"""Play a graph on two lanes, compute and links, and on a memory of named storages: seconds, exposed waits, peak bytes.

Storages are followed through views, waits and held parameters, each freed after its last reader. With `fused=True` a
pointwise result that only pointwise operators or one reduction read takes no memory, as when Inductor fuses them.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from .costs import bytes_of, collective_s, compute_s, size_of
from .hardware import Hardware
from .vocabulary import COLLECTIVES, is_op, is_view


@dataclasses.dataclass(frozen=True)
class Timeline:
    """One graph played once. seconds: of the step on the compute lane, waits included; exposed_s: of those waits alone;
    compute_s: of the rest, which includes what moving data takes of it (Hardware.busy_links).

    live: bytes after each node, in order, of what the graph allocated and of the inputs that were counted.
    peak_node: name and user's module of the node at the peak.
    """

    seconds: float
    compute_s: float
    links_s: float
    exposed_s: float
    peak_bytes: int
    peak_node: str
    live: tuple[int, ...]


def play(
    gm: fx.GraphModule, hardware: Hardware, world: int, fused: bool, held: int = 0, is_backward: bool = False
) -> Timeline:
    """Simulate `gm` once. held: bytes of held parameters that live from the start (stages 1 and 2). In backward the
    inputs that forward saved are counted, and freed after their last reader."""
    clock = links = computing = busy = exposed = 0.0
    done: dict[fx.Node, float] = {}
    memory = Memory(gm, fused, held, is_backward)
    for node in gm.graph.nodes:
        if node.op == "call_function":
            spent = compute_s(node, hardware)
            clock, computing = clock + spent, computing + spent
        if is_op(node, *COLLECTIVES):
            is_held = is_op(node, "gather_held")
            sent = node.args[1 if is_held else 0].meta["val"]
            kind = node.target.name().split("::")[1]
            seconds = collective_s(kind, size_of(sent), sent.element_size(), world, hardware)
            links, busy = max(links, clock) + seconds, busy + seconds
            done[node.args[0] if is_held else node] = links
            taken = seconds * hardware.busy_links  # moving data takes the rank's own time, whether anyone waits or not
            clock, computing = clock + taken, computing + taken
        if is_op(node, "wait"):
            late = max(0.0, done.get(node.args[0], 0.0) - clock)
            clock, exposed = clock + late, exposed + late
        memory.step(node)
    return Timeline(clock, computing, busy, exposed, memory.peak, memory.peak_node, tuple(memory.live))


class Memory:
    """Bytes of the storages that live while a graph runs."""

    def __init__(self, gm: fx.GraphModule, fused: bool, held: int, is_backward: bool):
        self.owner = owners(gm)
        self.sizes = sizes(gm, self.owner, fused, held)
        self.frees = frees(gm, self.owner)
        self.now = held
        for node in gm.graph.find_nodes(op="placeholder") if is_backward else ():
            if not node.target.startswith(("primals", "tangents")):
                self.sizes[node] = bytes_of(node.meta.get("val"))
                self.now += self.sizes[node]
        self.saved = {node for node in self.sizes if node.op == "placeholder"}
        self.peak = self.now
        self.peak_node, self.live = "", []

    def step(self, node: fx.Node) -> None:
        self.now += 0 if node in self.saved else self.sizes.get(node, 0)
        if self.now > self.peak:
            self.peak, self.peak_node = self.now, describe(node)
        self.live.append(self.now)
        for storage in self.frees.get(node, ()):
            self.now -= self.sizes.get(storage, 0)


def owners(gm: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    """Node: the node that allocated the storage it shows."""
    owner: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        shows = is_view(node) or is_op(node, "wait")
        owner[node] = owner[node.args[0]] if shows and isinstance(node.args[0], fx.Node) else node
    return owner


def sizes(gm: fx.GraphModule, owner: dict[fx.Node, fx.Node], fused: bool, held: int) -> dict[fx.Node, int]:
    """Bytes that each node allocates. Inputs allocate nothing; a gather into a held parameter allocates that, unless
    it lives already."""
    found = {}
    for node in gm.graph.nodes:
        if node.op != "call_function" or owner[node] is not node:
            continue
        if is_op(node, "gather_held"):
            found[node] = 0 if held else bytes_of(node.args[0].meta["val"])
        elif not (fused and is_fused_away(node, owner)):
            found[node] = bytes_of(node.meta.get("val"))
    return found


def is_fused_away(node: fx.Node, owner: dict[fx.Node, fx.Node]) -> bool:
    """Whether a fusing lowering computes a node inside its readers' kernels."""
    if not is_pointwise(node):
        return False
    readers = [user for user in through_views(node)]
    return bool(readers) and all(is_pointwise(user) or is_reduction(user) for user in readers)


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
COPIES = {aten._to_copy, aten.clone, torch.ops.prims.convert_element_type, aten.constant_pad_nd, aten.full}
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


def describe(node: fx.Node) -> str:
    """A node's operator and the module that it came from."""
    stack = node.meta.get("nn_module_stack") or {}
    where = next(reversed(list(stack.values())), ("",))[0] if stack else ""
    return f"{node.name} in {where}" if where else node.name
