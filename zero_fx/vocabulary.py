"""What passes may say about a graph: our operators, how to insert one with its type, and what a pass reports."""

from __future__ import annotations

import dataclasses
import operator
from typing import NamedTuple

import torch
from torch import fx

from .hardware import HARDWARE, Hardware
from .torch_compat import detect_fake_mode

WHOLE, STEP, USE = "whole", "step", "use"  # lifetimes of a full parameter, see runtime/markers.py


@dataclasses.dataclass(frozen=True)
class PassConfig:
    """All that a pass may depend on beside the graph. `world` = N ranks; `rank` decides padding only.

    exchange: reduce by an all-to-all and a sum of one's own, where the transport has no real reduce-scatter (gloo).
    broadcasts: this rank's number, where gathers run as broadcasts (gloo), see runtime/collectives.py.
    hardware: whose times the plans are made with. bucket_bytes, inflight_bytes: see Config.
    memory_budget: bytes of the whole step on a rank, or None. fraction, kept: the plan under it, see zero_fx/budget.py.
    without: names of passes that are left out.
    order: in which the collectives of a graph start, by their numbers in it, as the ranks agreed.
    """

    stage: int
    world: int
    rank: int
    exchange: bool = False
    broadcasts: int | None = None
    hardware: Hardware = HARDWARE["cpu"]
    bucket_bytes: int = 6 << 20
    inflight_bytes: int = 24 << 20
    memory_budget: int | None = None
    fraction: float = 1.0
    kept: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    order: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Report:
    """What a pass did: whether the graph changed, and counts worth showing."""

    changed: bool
    stats: dict[str, int] = dataclasses.field(default_factory=dict)


class Gather(NamedTuple):
    """Arguments of a `gather_param` marker."""

    shard: fx.Node
    held: fx.Node | None
    local: fx.Node | None
    shape: tuple[int, ...]
    lifetime: str
    world: int
    name: str
    group: str
    compute_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None


class Reduce(NamedTuple):
    """Arguments of a `reduce_grad` marker."""

    grad: fx.Node
    rows: int
    whole: bool
    world: int
    name: str
    group: str
    reduce_dtype: torch.dtype | None = None
    shard_dtype: torch.dtype | None = None


def op(name: str):
    """The overload of one of our operators; they are registered by the runtime, which passes do not import."""
    return getattr(torch.ops.zero_fx, name).default


REDUCTIONS = ("reduce_scatter", "all_to_all", "all_reduce")
COLLECTIVES = ("all_gather", "gather_held", *REDUCTIONS)
MARKERS = ("gather_param", "reduce_grad")


def is_op(node: fx.Node, *names: str) -> bool:
    return node.op == "call_function" and any(node.target is op(name) for name in names)


def find(graph: fx.Graph, name: str) -> list[fx.Node]:
    return list(graph.find_nodes(op="call_function", target=op(name)))


aten = torch.ops.aten
VIEWS = {
    aten.view, aten._unsafe_view, aten.t, aten.transpose, aten.permute, aten.expand, aten.unsqueeze, aten.squeeze,
    aten.slice, aten.select, aten.narrow, aten.split, aten.split_with_sizes, aten.chunk, aten.unbind, aten.detach,
    aten.alias, aten.as_strided, aten.diagonal,
}  # fmt: skip


def is_view(node: fx.Node) -> bool:
    """Whether a node gives another shape to memory that it does not own."""
    return node.target is operator.getitem or getattr(node.target, "overloadpacket", None) in VIEWS


def insert(graph: fx.Graph, target, *args, like: fx.Node, **kwargs) -> fx.Node:
    """Add a call at the graph's insertion point, with its recomputed type, and the provenance of `like`. It is marked
    "zero_fx_inserted": what surrounds a collective may differ over ranks, and plans that ranks share leave it out."""
    node = graph.call_function(target, args, kwargs)
    node.meta["zero_fx_inserted"] = True
    for key in ("nn_module_stack", "stack_trace", "partitioner_tag", "seq_nr", "custom"):
        if key in like.meta:
            node.meta[key] = like.meta[key]
    node.meta["val"] = value_of(node)
    return node


def cast(graph: fx.Graph, tensor: fx.Node, dtype: torch.dtype | None, like: fx.Node) -> fx.Node:
    """`tensor` in `dtype`; itself if it is, or for None."""
    if dtype is None or tensor.meta["val"].dtype == dtype:
        return tensor
    return insert(graph, torch.ops.prims.convert_element_type.default, tensor, dtype, like=like)


def value_of(node: fx.Node):
    """The fake value that `node` has by its target and its arguments' recorded values."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    mode = detect_fake_mode((args, kwargs))
    if mode is None:
        return node.target(*args, **kwargs)
    with mode:
        return node.target(*args, **kwargs)


def replace(node: fx.Node, new: fx.Node) -> None:
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def collective_sequence(gm: fx.GraphModule) -> tuple[str, ...]:
    """The collectives of a graph in order, one line each: what every rank must run alike."""
    lines = []
    for node in gm.graph.nodes:
        if is_op(node, *COLLECTIVES):
            name = ", ".join(node.meta.get("zero_fx_bucket", [node.args[-1]]))
            sent = node.args[1 if is_op(node, "gather_held") else 0].meta["val"]
            kind = node.target.name().split("::")[1]
            lines.append(f"{kind} {name} {str(sent.dtype)[6:]}{list(sent.shape)}")
    return tuple(lines)
