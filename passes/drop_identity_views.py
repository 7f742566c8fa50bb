"""drop_identity_views: a view to the shape that a value has already is the value.

DTensor's conversions leave one at each parameter and at each gradient; how many depends on the version of PyTorch.

    before                                 after
    %1: f32[3,3] = view(%0, [3, 3])        %2: f32[5,3] = gather_param(%0, ...)
    %2: f32[5,3] = gather_param(%1, ...)

requires  a functional graph
ensures   no view of the same shape and strides, except one of an input that the graph returns: returned as it is,
          the caller would get the input itself
numerics  bitwise
leaves    views that change the shape to the lowering
"""

from __future__ import annotations

import torch
from torch import fx

from ..vocabulary import Report, replace

VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default, torch.ops.aten.reshape.default)


def drop_identity_views(gm: fx.GraphModule, config) -> Report:
    dropped = 0
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or node.target not in VIEWS or not is_identity(node):
            continue
        source = node.args[0]
        if source.op == "placeholder" and any(user.op == "output" for user in node.users):
            continue
        replace(node, source)
        dropped += 1
    return Report(dropped > 0, {"dropped": dropped})


def is_identity(node: fx.Node) -> bool:
    before, after = node.args[0].meta.get("val"), node.meta.get("val")
    return before is not None and before.shape == after.shape and before.stride() == after.stride()
