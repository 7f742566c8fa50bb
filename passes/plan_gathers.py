"""plan_gathers: full parameters are read again in backward, but for those that the memory budget keeps.

Every gather marker, and every view, cast or copy of one, is tagged for recomputation. So what a forward graph saves
is the shard, and the backward graph has a marker of its own: under lifetime "use" (stage 3) it gathers again, under
"step" (stages 1 and 2) it finds the values that are still held, under "whole" (stage 0) it is the parameter itself.

    before                                        after
    %1: f32[4,3] = gather_param(%0, ...)          %1: f32[4,3] = gather_param(%0, ...)  # again in backward
    %2: f32[3,4] = permute(%1, [1, 0])            %2: f32[3,4] = permute(%1, [1, 0])  # again in backward

A parameter in `config.kept` (chosen by zero_fx.budget: seconds saved for bytes held) is saved instead: forward gathers it
and backward finds it.

requires  a joint graph with markers, merged by merge_uses
ensures   nothing of a full parameter's size that only depends on parameters crosses into backward by a cheap operator,
          except kept parameters themselves
numerics  bitwise
leaves    the collectives to shard_params; the cut itself to PyTorch's partitioner, which obeys the tags
"""

from __future__ import annotations

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ..vocabulary import Gather, PassConfig, Report, is_op

aten = torch.ops.aten
CHEAP = {
    aten.view, aten._unsafe_view, aten.reshape, aten.t, aten.transpose, aten.permute, aten.expand, aten.unsqueeze,
    aten.squeeze, aten.slice, aten.select, aten.narrow, aten.split, aten.split_with_sizes, aten.chunk, aten.unbind,
    aten.detach, aten.alias, aten.clone, aten.contiguous, aten._to_copy, aten.as_strided, aten.cat, aten.stack,
    aten.flatten, aten.diagonal, torch.ops.prims.convert_element_type, torch.ops.prims.view_of,
}  # fmt: skip
# The partitioner saves a recomputed node that feeds a checkpointed region of a higher number; ours is above all.
REGION = 1 << 30


def plan_gathers(gm: fx.GraphModule, config: PassConfig) -> Report:
    tagged = kept = 0
    again: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if is_op(node, "gather_param") and Gather(*node.args).name in config.kept:
            kept += keep(node)
            again.add(node)  # its views and casts are still made again: they cost nothing beside it
            continue
        if is_op(node, "gather_param") or is_cheap(node, again):
            again.add(node)
            if not node.meta.get("zero_fx_again"):
                node.meta["zero_fx_again"] = True
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
                node.meta["ac_graph_id"] = REGION
                tagged += 1
    return Report(tagged + kept > 0, {"read_again_in_backward": tagged, "kept": kept})


def keep(node: fx.Node) -> int:
    """Tag a gather to be saved; 1 if it was not."""
    if node.meta.get("zero_fx_saved"):
        return 0
    node.meta.pop("zero_fx_again", None)
    node.meta.pop("ac_graph_id", None)
    node.meta["zero_fx_saved"] = True
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return 1


def is_cheap(node: fx.Node, again: set[fx.Node]) -> bool:
    """A view, cast or copy that depends on nothing but parameters."""
    inputs = node.all_input_nodes
    if node.op != "call_function" or not inputs or not all(arg in again for arg in inputs):
        return False
    return getattr(node.target, "overloadpacket", None) in CHEAP or getattr(node.target, "__name__", "") == "getitem"
