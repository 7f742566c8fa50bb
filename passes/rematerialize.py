"""rematerialize: under a memory budget, some activations are computed again in backward, but nothing random is.

The share of activations that backward may find saved is `config.fraction`, chosen by zero_fx.budget; which ones, at the
least extra time, is cut by PyTorch's partitioner (min-cut, then a knapsack over recomputable regions). This pass says what
it may not touch: what a random operator drew is saved, so that dropout's masks are not drawn again.

    before                                          after
    %1: f32[4,3] = bernoulli(%0, ...)               %1: f32[4,3] = bernoulli(%0, ...)  # saved for backward
    %2: f32[4,3] = mul(%0, %1)                      %2: f32[4,3] = mul(%0, %1)

requires  a joint graph
ensures   with a fraction below 1: random operators are tagged to be saved, unless the user checkpoints them
numerics  bitwise
leaves    the cut to the partitioner; parameters to plan_gathers
"""

from __future__ import annotations

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ..vocabulary import PassConfig, Report


def rematerialize(gm: fx.GraphModule, config: PassConfig) -> Report:
    if config.fraction >= 1:
        return Report(False)
    saved = 0
    for node in gm.graph.nodes:
        if is_random(node) and "recompute" not in node.meta:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            node.meta["zero_fx_saved"] = True
            saved += 1
    return Report(saved > 0, {"random_saved": saved})


def is_random(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
