"""The two operators that capture leaves in a graph, and that run by themselves where nothing was captured.

    gather_param(shard, held, local, shape, lifetime, world, name, group) -> (rows, ...)   the full parameter
    reduce_grad(grad, rows, whole, world, name, group) -> (rows/N, ...)                    its gradient, averaged

The backward of `gather_param` is `reduce_grad`, or, where `local` is given, nothing but handing the full gradient to
`local`: a leaf of the full shape in which a rank accumulates over micro-batches. N = world = ranks of `group`.

Both are functional: outputs are fresh, nothing is mutated, so AOTAutograd may reorder, merge or drop them. Their
kernels perform the collectives and wait; passes replace them by collectives that are started and awaited apart.
"""

from __future__ import annotations

import torch

from .collectives import LIBRARY, all_gather, all_reduce, reduce_scatter, wait
from .layout import chunk_rows, pad_rows

# How long a full parameter lives.
WHOLE = "whole"  # always: every rank has it, and only gradients travel
STEP = "step"  # from the first forward to the last backward of an optimizer step
USE = "use"  # around each use, gathered again in backward

LIBRARY.define(
    "gather_param(Tensor shard, Tensor? held, Tensor? local, int[] shape, str lifetime, int world, str name, "
    "str group) -> Tensor"
)
LIBRARY.define("reduce_grad(Tensor grad, int rows, bool whole, int world, str name, str group) -> Tensor")


def gather_param(shard, held, local, shape, lifetime, world, name, group):
    if lifetime == WHOLE:
        return shard.clone()
    padded = pad_rows(shard, chunk_rows(shape[0], world))
    full = wait(all_gather(padded, world, group, name), padded, name)
    return full.narrow(0, 0, shape[0])


def reduce_grad(grad, rows, whole, world, name, group):
    if whole:
        return wait(all_reduce(grad, group, name), grad, name)
    padded = pad_rows(grad, chunk_rows(grad.shape[0], world) * world)
    return wait(reduce_scatter(padded, world, group, name), padded, name).narrow(0, 0, rows)


LIBRARY.impl("gather_param", gather_param, "CompositeExplicitAutograd")
LIBRARY.impl("reduce_grad", reduce_grad, "CompositeExplicitAutograd")


@torch.library.register_fake("zero_fx::gather_param", lib=LIBRARY)
def _(shard, held, local, shape, lifetime, world, name, group):
    return shard.new_empty(shape)


@torch.library.register_fake("zero_fx::reduce_grad", lib=LIBRARY)
def _(grad, rows, whole, world, name, group):
    return grad.new_empty(grad.shape if whole else (rows, *grad.shape[1:]))


def remember(ctx, inputs, output):
    shard, _, local, _, lifetime, *ctx.where = inputs
    ctx.is_local = local is not None
    ctx.whole = lifetime == WHOLE
    ctx.rows = shard.shape[0] if shard.dim() else 0


def backward(ctx, grad):
    if ctx.is_local:
        return None, None, grad, *[None] * 5
    shard_grad = torch.ops.zero_fx.reduce_grad(grad, ctx.rows, ctx.whole, *ctx.where)
    return shard_grad, *[None] * 7


torch.library.register_autograd("zero_fx::gather_param", backward, setup_context=remember, lib=LIBRARY)
