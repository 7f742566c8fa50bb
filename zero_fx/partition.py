"""Cut a joint graph into forward and backward: PyTorch's min-cut partitioner, with one of its faults mended.

AOTAutograd expects what forward saves in the order tensors, opaque objects, symbolic sizes. Where a random operator is
recomputed (dropout in a checkpointed region), the partitioner appends its generator state behind the opaque objects;
a DTensor input brings one, its mesh. Seen in 2.13 and 2.14; in 2.11 there are no opaque objects and nothing to do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from functorch.compile import min_cut_rematerialization_partition
from torch import fx

from .torch_compat import CustomPartitionerFn, saved_fraction
from .text import type_of


class Partitioner(CustomPartitionerFn):
    """For Inductor, which asks for an object of this class, and for the eager lowering, which calls it.

    plan(gm, cut) -> the fraction of activations to save; it may tag the joint graph. cut(gm, fraction) cuts a copy.
    """

    def __init__(self, plan: Callable | None = None):
        self.plan = plan

    def __deepcopy__(self, memo):
        return self  # Inductor copies its options, and the plan reaches the store, which cannot be copied

    def __call__(self, gm: fx.GraphModule, joint_inputs, *, num_fwd_outputs: int, **kwargs):
        def cut(joint: fx.GraphModule, fraction: float):
            with saved_fraction(fraction) if fraction < 1 else contextlib.nullcontext():
                forward, backward = min_cut_rematerialization_partition(
                    joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **kwargs
                )
            order_saved(forward, num_fwd_outputs)
            order_inputs(backward)
            return forward, backward

        return cut(gm, 1.0 if self.plan is None else self.plan(gm, cut))

    def uuid(self):
        return None


def is_opaque(node) -> bool:
    return isinstance(node, fx.Node) and type_of(node.meta.get("val")) == "object"


def order_saved(forward: fx.GraphModule, num_fwd_outputs: int) -> None:
    """Move opaque objects behind the last tensor that forward saves."""
    output = forward.graph.output_node()
    values = list(output.args[0])
    returned, saved = values[:num_fwd_outputs], values[num_fwd_outputs:]
    tensors = [node for node in saved if is_tensor(node)]
    opaque = [node for node in saved if is_opaque(node)]
    sizes = [node for node in saved if not is_tensor(node) and not is_opaque(node)]
    ordered = returned + tensors + opaque + sizes
    if ordered != values:
        output.args = (type(output.args[0])(ordered),)
        forward.recompile()


def order_inputs(backward: fx.GraphModule) -> None:
    """Move saved generator states before the first opaque input."""
    inputs = list(backward.graph.find_nodes(op="placeholder"))
    first = next((node for node in inputs if is_opaque(node)), None)
    if first is None:
        return
    moved = [node for node in inputs[inputs.index(first) :] if node.target.startswith("rng_state_output")]
    for node in moved:
        first.prepend(node)
    if moved:
        backward.recompile()


def is_tensor(node) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)
