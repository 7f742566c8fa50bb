"""What became of a graph in Inductor's code: of the nodes that our passes inserted, and of the order."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

import torch
from torch import fx

from zero_fx.text import name_of
from zero_fx.vocabulary import COLLECTIVES, is_op, is_view

if TYPE_CHECKING:
    from torch._inductor.graph import GraphLowering

aten, prims = torch.ops.aten, torch.ops.prims
CASTS = (prims.convert_element_type, aten._to_copy)
RESHAPES = (aten.reshape, aten.view, aten._unsafe_view)
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")
CALL = re.compile(rf"torch\.ops\.zero_fx\.(\w+)\.default\((.*)\)|extern_kernels\.({'|'.join(PRODUCTS)})\(")


@dataclasses.dataclass(frozen=True)
class Launch:
    """One start of a kernel: the nodes that Inductor says it came from, and the buffers that it reads."""

    kernel: str
    nodes: set[str]
    reads: set[str]


@dataclasses.dataclass(frozen=True)
class Inserted:
    """A pad, unpad, pack, unpack or copy that a pass inserted, or a cast of what is gathered or reduced.

    name: of the collective: its parameter, or its bucket. how: "kernel" where `kernels` do its work, "in place" where
    its source was computed into place and they fill in the rest, "view" where readers read other memory in its place,
    "extern" where a call of its own does it.
    """

    node: str
    kind: str
    name: str
    how: str
    kernels: tuple[str, ...]


def packet(node: fx.Node):
    return getattr(node.target, "overloadpacket", None)


def is_ours(node: fx.Node) -> bool:
    return node.meta.get("zero_fx_inserted", False)


def passes_on(node: fx.Node) -> bool:
    """Whether a node hands on its input's values, in another shape or dtype."""
    carried = is_ours(node) or is_view(node) or packet(node) in CASTS + RESHAPES
    return carried and not is_op(node, *COLLECTIVES, "wait")


def is_model(node: fx.Node) -> bool:
    """Whether a node computes something that the model asked for."""
    return node.op == "call_function" and not passes_on(node) and not is_op(node, *COLLECTIVES, "wait")


def collective_before(node: fx.Node) -> fx.Node | None:
    """The wait whose result a node hands on."""
    for source in node.all_input_nodes:
        found = source if is_op(source, "wait") else collective_before(source) if passes_on(source) else None
        if found is not None:
            return found
    return None


def collective_after(node: fx.Node) -> fx.Node | None:
    """The collective that a node's result is handed on to."""
    for user in node.users:
        found = user if is_op(user, *COLLECTIVES) else collective_after(user) if passes_on(user) else None
        if found is not None:
            return found
    return None


def kind_of(node: fx.Node) -> str | None:
    """None for what is not listed: reshapes, which cost nothing by themselves, and the model's own nodes."""
    if packet(node) in CASTS:
        return "cast"
    kinds = {aten.constant_pad_nd: "pad", aten.slice: "unpad", aten.cat: "pack", aten.clone: "copy"}
    kind = kinds.get(packet(node)) if is_ours(node) else None
    if kind == "unpad" and is_bucket(node.args[0]):
        return "unpack"
    return kind


def is_bucket(node: fx.Node) -> bool:
    """Whether a node is what a bucket's collective leaves."""
    wait = node.args[0] if packet(node) in RESHAPES else node
    return is_op(wait, "wait") and "zero_fx_bucket" in wait.args[0].meta


def inserted_nodes(gm: fx.GraphModule, lowering: GraphLowering, launches: list[Launch]) -> list[Inserted]:
    """What became of each of them, in the order of the graph."""
    buffers: dict[fx.Node, set[str]] = {node: {node.target} for node in gm.graph.find_nodes(op="placeholder")}
    for item in [*lowering.buffers, *lowering.operations]:
        if (origin := item.get_origin_node()) is not None:
            buffers.setdefault(origin, set()).add(item.get_name())
    found = []
    for node in gm.graph.nodes:
        kind = kind_of(node)
        collective = kind and (collective_before(node) or collective_after(node))
        if not collective:
            continue
        mine = [launch for launch in launches if node.name in launch.nodes]
        filling = [launch for launch in mine if not launch.reads]
        mine = filling or [launch for launch in mine if reads(launch, node, buffers)]
        how = "in place" if filling else "kernel" if mine else "extern" if node in buffers else "view"
        kernels = tuple(sorted({launch.kernel for launch in mine}))
        found.append(Inserted(node.name, kind, collective.args[-1], how, kernels))
    return found


def reads(launch: Launch, node: fx.Node, buffers: dict[fx.Node, set[str]]) -> bool:
    """Whether a launch reads what `node` is made of. Inductor gives all pieces of a concatenation all their origins."""
    return any(launch.reads & made_of(source, buffers) for source in node.all_input_nodes)


def made_of(node: fx.Node, buffers: dict[fx.Node, set[str]]) -> set[str]:
    """The buffers in memory that a node's value is computed from."""
    if node in buffers:
        return buffers[node]
    return set().union(*[made_of(source, buffers) for source in node.all_input_nodes])


def copies(gm: fx.GraphModule, launches: list[Launch]) -> list[str]:
    """Collectives whose source is copied before they can send it."""
    found = []
    for node in gm.graph.nodes:
        if not is_op(node, *COLLECTIVES):
            continue
        source = node.args[1 if is_op(node, "gather_held") else 0]
        copied = any(node.name in launch.nodes for launch in launches)
        if copied or not source.meta["val"].is_contiguous():
            found.append(f"{name_of(node)} {node.args[-1]}")
    return found


def order_in_graph(gm: fx.GraphModule) -> list[str]:
    found = []
    for node in gm.graph.nodes:
        if is_op(node, *COLLECTIVES, "wait"):
            found.append(f"{name_of(node)} {node.args[-1]}")
        elif node.op == "call_function" and name_of(node) in PRODUCTS:
            found.append(name_of(node))
    return found


def order_in_code(code: str) -> list[str]:
    return [product or f"{kind} {last_text(args)}" for kind, args, product in CALL.findall(code)]


def last_text(args: str) -> str:
    """Of the arguments in a line of code, the last that is text: a collective's name."""
    return args.split("'")[-2]


def starts(order: list[str]) -> list[str]:
    """The collectives of an order, without waits and products."""
    return [line for line in order if " " in line and not line.startswith("wait ")]


def delayed(in_graph: list[str], in_code: list[str]) -> list[str]:
    """Collectives that start behind more matrix products in the code than in the graph."""
    found = []
    for line in starts(in_graph):
        planned, emitted = products_before(line, in_graph), products_before(line, in_code)
        if emitted > planned:
            found.append(f"{line} (by {emitted - planned})")
    return found


def products_before(line: str, order: list[str]) -> int:
    return sum(1 for other in order[: order.index(line)] if other in PRODUCTS)
