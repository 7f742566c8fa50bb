"""merge_uses: a parameter is gathered once and reduced once in a graph, however often the model reads it.

Tied weights, layers applied several times and weights read at two places leave one pair of markers for each read.

    before                                              after
    %1: f32[4,3] = gather_param(%0, ..., "w")           %1: f32[4,3] = gather_param(%0, ..., "w")
    %5: f32[4,3] = gather_param(%0, ..., "w")           %5: f32[4,3] = add(%3, %4)
    %6: f32[2,3] = reduce_grad(%3, ..., "w")            %6: f32[2,3] = reduce_grad(%5, ..., "w")
    %7: f32[2,3] = reduce_grad(%4, ..., "w")
    %8: f32[2,3] = add(%6, %7)

requires  a joint graph with markers
ensures   one gather marker for each parameter; one reduce marker for each sum of gradients
numerics  the mean over ranks of a sum instead of the sum of means: reorders sums. In mixed precision the sum is taken in the
          dtype of the reduction
leaves    how long the merged value lives to plan_gathers
"""

from __future__ import annotations

import torch
from torch import fx

from ..vocabulary import Reduce, Report, cast, find, insert, is_op, op, replace

ADD = torch.ops.aten.add.Tensor
ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def merge_uses(gm: fx.GraphModule, config) -> Report:
    gathers = merge_gathers(gm.graph)
    reduces = merge_reduces(gm.graph)
    return Report(gathers + reduces > 0, {"gathers_merged": gathers, "reductions_merged": reduces})


def merge_gathers(graph: fx.Graph) -> int:
    first: dict[tuple, fx.Node] = {}
    merged = 0
    for node in find(graph, "gather_param"):
        kept = first.setdefault((source_of(node.args[0]), *node.args[1:], *sorted(node.kwargs.items())), node)
        if kept is not node:
            replace(node, kept)
            merged += 1
    return merged


def source_of(shard: fx.Node) -> fx.Node:
    """The value behind aliases: a read under no_grad has a detached shard."""
    while shard.op == "call_function" and shard.target in ALIASES:
        shard = shard.args[0]
    return shard


def merge_reduces(graph: fx.Graph) -> int:
    """Rewrite sums of reductions of one parameter to the reduction of the sum, innermost first."""
    merged = 0
    for node in list(graph.find_nodes(op="call_function", target=ADD)):
        left, right, *_ = node.args
        if node.kwargs or not all(isinstance(side, fx.Node) and is_op(side, "reduce_grad") for side in (left, right)):
            continue
        same = left.args[1:] == right.args[1:] and left.kwargs == right.kwargs
        if left is right or not same or len(left.users) + len(right.users) != 2:
            continue
        reduces = Reduce(*left.args, **left.kwargs), Reduce(*right.args, **right.kwargs)
        with graph.inserting_before(node):
            grads = [cast(graph, reduce.grad, reduce.reduce_dtype, node) for reduce in reduces]
            total = insert(graph, ADD, *grads, like=node)
            reduced = insert(graph, op("reduce_grad"), total, *left.args[1:], like=node, **left.kwargs)
        replace(node, reduced)
        graph.erase_node(left)
        graph.erase_node(right)
        merged += 1
    return merged
