"""shard_grads: reduce markers become collectives.

N = ranks, chunk = ceil(rows / N) rows, own = the rows of this rank without padding.

    sharded parameter                                       whole parameter
    %1: f32[N*chunk,3] = constant_pad_nd(%0, ...)           %1: f32[rows,3] = all_reduce(%0, "w")
    %2: f32[chunk,3] = reduce_scatter(%1, N, "w")           %2: f32[rows,3] = wait(%1, %0, "w")
    %3: f32[chunk,3] = wait(%2, %1, "w")
    %4: f32[own,3] = slice(%3, 0, 0, own)

Both average over the ranks. A reduction starts where its gradient is ready, and is awaited when more than
IN_FLIGHT_BYTES of gradients are under way, or at the end: a source must live until its wait, so waiting for all of
them at the end would keep every full gradient alive.

requires  a backward graph, after partitioning
ensures   no reduce markers; every reduction is awaited before the graph returns
numerics  bitwise the same in stages 1, 2 and 3
leaves    joining reductions to bucket_collectives
"""

from __future__ import annotations

from collections import deque

import torch
from torch import fx

from ..vocabulary import Reduce, Report, find, insert, op, replace
from .shard_params import pad

aten = torch.ops.aten
IN_FLIGHT_BYTES = 8 << 20


def shard_grads(gm: fx.GraphModule, config) -> Report:
    graph = gm.graph
    under_way: deque[tuple[fx.Node, fx.Node, fx.Node]] = deque()  # (marker, started, source), oldest first
    markers = find(graph, "reduce_grad")
    for node in markers:
        reduce = Reduce(*node.args)
        with graph.inserting_before(node):
            source = padded(graph, reduce, node)
            where = (reduce.group, reduce.name)
            while under_way and num_bytes(source) + sum(num_bytes(s) for _, _, s in under_way) > IN_FLIGHT_BYTES:
                finish(graph, *under_way.popleft())
            if reduce.whole:
                started = insert(graph, op("all_reduce"), source, *where, like=node)
            else:
                started = insert(graph, op("reduce_scatter"), source, reduce.world, *where, like=node)
        under_way.append((node, started, source))
        readers = [user for user in node.users if user.op != "output"]
        if readers:  # something computes with the reduced gradient: it cannot wait for the end
            with graph.inserting_before(min(readers)):
                finish(graph, *under_way.pop())
    with graph.inserting_before(graph.output_node()):
        while under_way:
            finish(graph, *under_way.popleft())
    return Report(len(markers) > 0, {"reduced": len(markers)})


def padded(graph: fx.Graph, reduce: Reduce, node: fx.Node) -> fx.Node:
    if reduce.whole:
        return reduce.grad
    rows = reduce.grad.meta["val"].shape[0]
    return pad(graph, reduce.grad, -(-rows // reduce.world) * reduce.world, node)


def finish(graph: fx.Graph, node: fx.Node, started: fx.Node, source: fx.Node) -> None:
    """Await a reduction at the graph's insertion point and give its readers the rows of this rank."""
    reduce = Reduce(*node.args)
    reduced = insert(graph, op("wait"), started, source, reduce.name, like=node)
    if not reduce.whole and reduced.meta["val"].shape[0] != reduce.rows:
        reduced = insert(graph, aten.slice.Tensor, reduced, 0, 0, reduce.rows, like=node)
    replace(node, reduced)


def num_bytes(node: fx.Node) -> int:
    value = node.meta["val"]
    return value.numel() * value.element_size()
