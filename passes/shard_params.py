"""shard_params: gather markers become collectives.

N = ranks, chunk = ceil(rows / N) rows.

    lifetime "use"                                      lifetime "step"
    %1: f32[chunk,3] = constant_pad_nd(%0, ...)         %2: none = gather_held(%held, %1, N, "w")
    %2: f32[N*chunk,3] = all_gather(%1, N, "w")         %3: f32[N*chunk,3] = wait(%held, %1, "w")
    %3: f32[N*chunk,3] = wait(%2, %1, "w")              %4: f32[rows,3] = slice(%3, 0, 0, rows)
    %4: f32[rows,3] = slice(%3, 0, 0, rows)

Without padding where this rank's rows fill a chunk; without a slice where the chunks fill the parameter. Parameters of
more than two dimensions travel as matrices: Inductor gives what convolutions read another layout by copying it, all the
way up to a graph's inputs, and would copy `held` before there is anything in it. Under "whole", and with one rank, the
marker disappears: readers read the input.

In mixed precision (`compute_dtype`) each shard is cast first, so that what travels, and what is held, has that dtype; under
"whole", and with one rank, only the cast is left:

    %1: bf16[chunk,3] = convert_element_type(%0, torch.bfloat16)
    %2: bf16[N*chunk,3] = all_gather(%1, N, "w")

requires  a forward or backward graph, after partitioning
ensures   no gather markers; each gather is awaited before its first reader
numerics  bitwise
leaves    starting gathers early to prefetch, joining them to bucket_collectives
"""

from __future__ import annotations

import math

import torch
from torch import fx

from ..vocabulary import STEP, WHOLE, Gather, PassConfig, Report, cast, find, insert, op, replace

aten = torch.ops.aten


def shard_params(gm: fx.GraphModule, config: PassConfig) -> Report:
    markers = find(gm.graph, "gather_param")
    gathered = 0
    for node in gm.graph.nodes:
        node.meta.pop("zero_fx_again", None)  # what plan_gathers had to say was to the partitioner
        node.meta.pop("zero_fx_saved", None)
    for node in markers:
        gather = Gather(*node.args, **node.kwargs)
        with gm.graph.inserting_before(node):
            in_place = gather.lifetime == WHOLE or gather.world == 1
            if in_place:
                full = cast(gm.graph, gather.shard, gather.compute_dtype, node)
            else:
                full = insert_gather(gm.graph, gather, node, config)
                gathered += 1
            is_param = full is gather.shard if in_place else gather.lifetime == STEP
            if is_param and any(user.op == "output" for user in node.users):
                # What a graph returns is the caller's to keep and to write to; the parameter is not.
                full = insert(gm.graph, aten.clone.default, full, like=node)
        replace(node, full)
    return Report(len(markers) > 0, {"gathered": gathered, "read_in_place": len(markers) - gathered})


def insert_gather(graph: fx.Graph, gather: Gather, node: fx.Node, config: PassConfig) -> fx.Node:
    rows = gather.shape[0]
    chunk = -(-rows // gather.world)
    own = cast(graph, as_matrix(graph, gather.shard, node), gather.compute_dtype, node)
    source = pad(graph, own, chunk, node)
    where = (gather.world, gather.group, gather.name)
    if gather.lifetime == STEP:
        insert(graph, op("gather_held"), gather.held, source, *where, like=node, rank=config.broadcasts)
        started = gather.held
    else:
        started = insert(graph, op("all_gather"), source, *where, like=node, rank=config.broadcasts)
    full = insert(graph, op("wait"), started, source, gather.name, like=node)
    if chunk * gather.world != rows:
        full = insert(graph, aten.slice.Tensor, full, 0, 0, rows, like=node)
    if len(gather.shape) > 2:
        full = insert(graph, aten.view.default, full, list(gather.shape), like=node)
    return full


def as_matrix(graph: fx.Graph, shard: fx.Node, like: fx.Node) -> fx.Node:
    """(rows, ...) as (rows, the rest). By strides, of which no compiler can have another opinion."""
    shape = shard.meta["val"].shape
    if len(shape) <= 2:
        return shard
    rest = math.prod(shape[1:])
    return insert(graph, aten.as_strided.default, shard, [shape[0], rest], [rest, 1], like=like)


def pad(graph: fx.Graph, tensor: fx.Node, rows: int, like: fx.Node) -> fx.Node:
    """Zeros appended in dimension 0 up to `rows` rows."""
    value = tensor.meta["val"]
    missing = rows - value.shape[0]
    if missing == 0:
        return tensor
    return insert(graph, aten.constant_pad_nd.default, tensor, [0] * (2 * value.dim() - 1) + [missing], like=like)
