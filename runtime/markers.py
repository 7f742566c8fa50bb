"""The two operators that capture leaves in a graph, and that run by themselves where nothing was captured.

    gather_param(shard, held, local, shape, lifetime, world, name, group) -> (rows, ...)   the full parameter
    reduce_grad(grad, rows, whole, world, name, group) -> (rows/N, ...)                    its gradient, averaged

In mixed precision both have dtypes: the shard is gathered in `compute_dtype`, the gradient is reduced in `reduce_dtype` and
becomes `shard_dtype`. None: as it is.

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
    "str group, *, ScalarType? compute_dtype=None, ScalarType? reduce_dtype=None) -> Tensor"
)
LIBRARY.define(
    "reduce_grad(Tensor grad, int rows, bool whole, int world, str name, str group, "
    "*, ScalarType? reduce_dtype=None, ScalarType? shard_dtype=None) -> Tensor"
)


def gather_param(shard, held, local, shape, lifetime, world, name, group, *, compute_dtype=None, reduce_dtype=None):
    source = as_dtype(shard, compute_dtype)
    if lifetime == WHOLE:
        return shard.clone() if source is shard else source
    padded = pad_rows(source, chunk_rows(shape[0], world))
    full = wait(all_gather(padded, world, group, name), padded, name)
    return full.narrow(0, 0, shape[0])


def reduce_grad(grad, rows, whole, world, name, group, *, reduce_dtype=None, shard_dtype=None):
    grad = as_dtype(grad, reduce_dtype)
    if whole:
        return as_dtype(wait(all_reduce(grad, group, name), grad, name), shard_dtype)
    padded = pad_rows(grad, chunk_rows(grad.shape[0], world) * world)
    reduced = wait(reduce_scatter(padded, world, group, name), padded, name).narrow(0, 0, rows)
    return as_dtype(reduced, shard_dtype)


def as_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor if dtype is None else tensor.to(dtype)


LIBRARY.impl("gather_param", gather_param, "CompositeExplicitAutograd")
LIBRARY.impl("reduce_grad", reduce_grad, "CompositeExplicitAutograd")


@torch.library.register_fake("zero_fx::gather_param", lib=LIBRARY)
def _(shard, held, local, shape, lifetime, world, name, group, *, compute_dtype=None, reduce_dtype=None):
    return shard.new_empty(shape, dtype=compute_dtype or shard.dtype)


@torch.library.register_fake("zero_fx::reduce_grad", lib=LIBRARY)
def _(grad, rows, whole, world, name, group, *, reduce_dtype=None, shard_dtype=None):
    return grad.new_empty(grad.shape if whole else (rows, *grad.shape[1:]), dtype=shard_dtype or grad.dtype)


def remember(ctx, inputs, keyword_only_inputs, output):
    shard, _, local, _, lifetime, *ctx.where = inputs
    ctx.is_local = local is not None
    ctx.whole = lifetime == WHOLE
    ctx.rows = shard.shape[0] if shard.dim() else 0
    is_cast = keyword_only_inputs["compute_dtype"] is not None
    ctx.dtypes = {"reduce_dtype": keyword_only_inputs["reduce_dtype"], "shard_dtype": shard.dtype} if is_cast else {}


def backward(ctx, grad):
    if ctx.is_local:
        # Before autograd adds it to that of other micro-batches: they accumulate in the parameter's dtype.
        return None, None, as_dtype(grad, ctx.dtypes.get("shard_dtype")), *[None] * 5
    shard_grad = torch.ops.zero_fx.reduce_grad(grad, ctx.rows, ctx.whole, *ctx.where, **ctx.dtypes)
    return shard_grad, *[None] * 7


torch.library.register_autograd("zero_fx::gather_param", backward, setup_context=remember, lib=LIBRARY)
