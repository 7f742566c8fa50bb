"""What passes may say about a graph: our operators, how to insert one with its type, and what a pass reports."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import fx

from .torch_compat import detect_fake_mode

WHOLE, STEP, USE = "whole", "step", "use"  # lifetimes of a full parameter, see runtime/markers.py


@dataclasses.dataclass(frozen=True)
class PassConfig:
    """All that a pass may depend on beside the graph. `world` = N ranks; `rank` decides padding only."""

    stage: int
    world: int
    rank: int


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


class Reduce(NamedTuple):
    """Arguments of a `reduce_grad` marker."""

    grad: fx.Node
    rows: int
    whole: bool
    world: int
    name: str
    group: str


def op(name: str):
    """The overload of one of our operators; they are registered by the runtime, which passes do not import."""
    return getattr(torch.ops.zero_fx, name).default


COLLECTIVES = ("all_gather", "gather_held", "reduce_scatter", "all_reduce")
MARKERS = ("gather_param", "reduce_grad")


def is_op(node: fx.Node, *names: str) -> bool:
    return node.op == "call_function" and any(node.target is op(name) for name in names)


def find(graph: fx.Graph, name: str) -> list[fx.Node]:
    return list(graph.find_nodes(op="call_function", target=op(name)))


def insert(graph: fx.Graph, target, *args, like: fx.Node) -> fx.Node:
    """Add a call at the graph's insertion point, with its recomputed type, and the provenance of `like`."""
    node = graph.call_function(target, args)
    for key in ("nn_module_stack", "stack_trace", "partitioner_tag", "seq_nr", "custom"):
        if key in like.meta:
            node.meta[key] = like.meta[key]
    node.meta["val"] = value_of(node)
    return node


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
            name, sent = node.args[-1], node.args[1 if is_op(node, "gather_held") else 0].meta["val"]
            kind = node.target.name().split("::")[1]
            lines.append(f"{kind} {name} {str(sent.dtype)[6:]}{list(sent.shape)}")
    return tuple(lines)
