"""shard_grads: reduce markers become collectives.

N = ranks, chunk = ceil(rows / N) rows, own = the rows of this rank without padding.

    sharded parameter                                       whole parameter
    %1: f32[N*chunk,3] = constant_pad_nd(%0, ...)           %1: f32[rows,3] = all_reduce(%0, "w")
    %2: f32[chunk,3] = reduce_scatter(%1, N, "w")           %2: f32[rows,3] = wait(%1, %0, "w")
    %3: f32[chunk,3] = wait(%2, %1, "w")
    %4: f32[own,3] = slice(%3, 0, 0, own)

    sharded, where the transport runs a reduce-scatter as an all-reduce (`config.exchange`: gloo)
    %1: f32[N*chunk,3] = constant_pad_nd(%0, ...)
    %2: f32[N*chunk,3] = all_to_all(%1, N, "w")
    %3: f32[N*chunk,3] = wait(%2, %1, "w")
    %4: f32[N,chunk,3] = view(%3, ...)
    %5: f32[chunk,3] = mean(%4, [0])
    %6: f32[own,3] = slice(%5, 0, 0, own)

All average over the ranks. With one rank nothing is left but the gradient. In mixed precision a gradient is cast to
`reduce_dtype` before it travels and to `shard_dtype` after; the all-to-all's pieces are added up in `shard_dtype`:

    %1: f32[N*chunk,3] = convert_element_type(%0, torch.float32)
    %2: f32[chunk,3] = reduce_scatter(%1, N, "w")

requires  a backward graph, after partitioning
ensures   no reduce markers; every reduction is awaited where it is started
numerics  bitwise the same in stages 1, 2 and 3; the all-to-all sums in the order of ranks, the others as the transport
leaves    joining reductions to bucket_collectives, awaiting them later to prefetch
"""

from __future__ import annotations

import torch
from torch import fx

from ..vocabulary import PassConfig, Reduce, Report, cast, find, insert, is_view, op, replace
from .shard_params import pad

aten = torch.ops.aten


def shard_grads(gm: fx.GraphModule, config: PassConfig) -> Report:
    markers = find(gm.graph, "reduce_grad")
    for node in markers:
        reduce = Reduce(*node.args, **node.kwargs)
        with gm.graph.inserting_before(node):
            if reduce.world == 1:
                reduced = alone(gm.graph, reduce, node)
            elif reduce.whole:
                reduced = all_reduced(gm.graph, reduce, node)
            else:
                reduced = scattered(gm.graph, reduce, node, config)
        replace(node, reduced)
    return Report(len(markers) > 0, {"reduced": len(markers)})


def alone(graph: fx.Graph, reduce: Reduce, node: fx.Node) -> fx.Node:
    """The gradient of one rank, as a collective would leave it: its own memory, contiguous, since users write to it."""
    grad = cast(graph, reduce.grad, reduce.shard_dtype, node)
    if grad.meta["val"].is_contiguous() and (grad is not reduce.grad or is_own(grad)):
        return grad
    return insert(graph, aten.clone.default, grad, like=node, memory_format=torch.contiguous_format)


def is_own(node: fx.Node) -> bool:
    """Whether nothing else has the memory of `node`: no input, and no other reader of it or of what it is a view of."""
    if node.op == "placeholder" or len(node.users) > 1:
        return False
    return is_own(node.args[0]) if is_view(node) else True


def all_reduced(graph: fx.Graph, reduce: Reduce, node: fx.Node) -> fx.Node:
    source = cast(graph, reduce.grad, reduce.reduce_dtype, node)
    started = insert(graph, op("all_reduce"), source, reduce.group, reduce.name, like=node)
    reduced = insert(graph, op("wait"), started, source, reduce.name, like=node)
    return cast(graph, reduced, reduce.shard_dtype, node)


def scattered(graph: fx.Graph, reduce: Reduce, node: fx.Node, config: PassConfig) -> fx.Node:
    """The rows of this rank of the mean over ranks."""
    rows = reduce.grad.meta["val"].shape[0]
    chunk = -(-rows // reduce.world)
    source = pad(graph, cast(graph, reduce.grad, reduce.reduce_dtype, node), chunk * reduce.world, node)
    kind = "all_to_all" if config.exchange else "reduce_scatter"
    started = insert(graph, op(kind), source, reduce.world, reduce.group, reduce.name, like=node)
    reduced = insert(graph, op("wait"), started, source, reduce.name, like=node)
    if config.exchange:
        pieces = [reduce.world, chunk, *reduced.meta["val"].shape[1:]]
        reduced = insert(graph, aten.view.default, reduced, pieces, like=node)
        wider = reduce.shard_dtype not in (None, reduced.meta["val"].dtype)
        added_in = {"dtype": reduce.shard_dtype} if wider else {}
        reduced = insert(graph, aten.mean.dim, reduced, [0], like=node, **added_in)
    if chunk != reduce.rows:
        reduced = insert(graph, aten.slice.Tensor, reduced, 0, 0, reduce.rows, like=node)
    return cast(graph, reduced, reduce.shard_dtype, node)
