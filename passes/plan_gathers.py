"""plan_gathers: full parameters are never saved for backward; they are read again there.

Every gather marker, and every view, cast or copy of one, is tagged for recomputation. So what a forward graph saves
is the shard, and the backward graph has a marker of its own: under lifetime "use" (stage 3) it gathers again, under
"step" (stages 1 and 2) it finds the values that are still held, under "whole" (stage 0) it is the parameter itself.

    before                                        after
    %1: f32[4,3] = gather_param(%0, ...)          %1: f32[4,3] = gather_param(%0, ...)  # again in backward
    %2: f32[3,4] = permute(%1, [1, 0])            %2: f32[3,4] = permute(%1, [1, 0])  # again in backward

requires  a joint graph with markers, merged by merge_uses
ensures   nothing of a full parameter's size that only depends on parameters crosses into backward by a cheap operator
numerics  bitwise
leaves    the collectives to shard_params; the cut itself to PyTorch's partitioner, which obeys the tags
"""

from __future__ import annotations

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ..vocabulary import Report, is_op

aten = torch.ops.aten
CHEAP = {
    aten.view, aten._unsafe_view, aten.reshape, aten.t, aten.transpose, aten.permute, aten.expand, aten.unsqueeze,
    aten.squeeze, aten.slice, aten.select, aten.narrow, aten.split, aten.split_with_sizes, aten.chunk, aten.unbind,
    aten.detach, aten.alias, aten.clone, aten.contiguous, aten._to_copy, aten.as_strided, aten.cat, aten.stack,
    aten.flatten, aten.diagonal, torch.ops.prims.convert_element_type, torch.ops.prims.view_of,
}  # fmt: skip
# The partitioner saves a recomputed node that feeds a checkpointed region of a higher number; ours is above all.
REGION = 1 << 30


def plan_gathers(gm: fx.GraphModule, config) -> Report:
    tagged = 0
    again: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if is_op(node, "gather_param") or is_cheap(node, again):
            again.add(node)
            if not node.meta.get("zero_fx_again"):
                node.meta["zero_fx_again"] = True
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
                node.meta["ac_graph_id"] = REGION
                tagged += 1
    return Report(tagged > 0, {"read_again_in_backward": tagged})


def is_cheap(node: fx.Node, again: set[fx.Node]) -> bool:
    """A view, cast or copy that depends on nothing but parameters."""
    inputs = node.all_input_nodes
    if node.op != "call_function" or not inputs or not all(arg in again for arg in inputs):
        return False
    return getattr(node.target, "overloadpacket", None) in CHEAP or getattr(node.target, "__name__", "") == "getitem"
