"""Collectives that are started and awaited apart, each with the name of the parameter that it serves.

    all_gather(shard, world, group, name) -> full        starts;  (rows/N, ...) -> (rows, ...)
    gather_held(held!, shard, world, group, name) -> ()  starts, unless `held` already has storage
    reduce_scatter(grad, world, group, name) -> shard    starts;  (rows, ...) -> (rows/N, ...), mean over ranks
    all_reduce(grad, group, name) -> grad                starts;  same shape, mean over ranks
    wait(output, source, name) -> output                 blocks until `output` may be read

N = world = ranks in `group`. `rows` is divisible by N here: padding is the graph's business. The transport is
torch's functional collectives, whose registry of pending work holds the state, so nothing of ours does. `wait`
takes the *source* too: a compiler may reuse a buffer after its last reader, and the transport still reads the
source until the wait. The names exist so that a dead or late rank is reported by parameter and not by buffer.
"""

from __future__ import annotations

import torch

LIBRARY = torch.library.Library("zero_fx", "FRAGMENT")
LIBRARY.define("all_gather(Tensor shard, int world, str group, str name) -> Tensor")
LIBRARY.define("gather_held(Tensor(a!) held, Tensor shard, int world, str group, str name) -> ()")
LIBRARY.define("reduce_scatter(Tensor grad, int world, str group, str name) -> Tensor")
LIBRARY.define("all_reduce(Tensor grad, str group, str name) -> Tensor")
LIBRARY.define("wait(Tensor(a) output, Tensor source, str name) -> Tensor(a)")

transport = torch.ops._c10d_functional


def started(kind: str, name: str, call, *args, **kwargs) -> torch.Tensor:
    """Run `call`, and name the collective if the transport refuses it (a peer is gone, sizes differ)."""
    try:
        return call(*args, **kwargs)
    except RuntimeError as error:
        raise RuntimeError(f"zero_fx: {kind} of {name!r} could not start: {error}") from error


def all_gather(shard: torch.Tensor, world: int, group: str, name: str) -> torch.Tensor:
    return started("all-gather", name, transport.all_gather_into_tensor, shard.contiguous(), world, group)


def gather_held(held: torch.Tensor, shard: torch.Tensor, world: int, group: str, name: str) -> None:
    if is_held(held):
        return
    # A new storage each time, never a resized one: whoever still reads the old values keeps the old storage. And by
    # way of another tensor: writing to `held` itself would tell autograd that what backward saved has changed.
    full = torch.empty(held.shape, dtype=held.dtype, device=held.device)
    started("all-gather", name, transport.all_gather_into_tensor_out, shard.contiguous(), world, group, out=full)
    held.data = full


def reduce_scatter(grad: torch.Tensor, world: int, group: str, name: str) -> torch.Tensor:
    return started("reduce-scatter", name, transport.reduce_scatter_tensor, grad.contiguous(), "avg", world, group)


def all_reduce(grad: torch.Tensor, group: str, name: str) -> torch.Tensor:
    return started("all-reduce", name, transport.all_reduce, grad.contiguous(), "avg", group)


def wait(output: torch.Tensor, source: torch.Tensor, name: str) -> torch.Tensor:
    try:
        transport.wait_tensor(output)
    except RuntimeError as error:
        raise RuntimeError(
            f"zero_fx: gave up waiting for the collective of {name!r}: a rank died, is late, or runs another "
            f"program. The transport said: {error}"
        ) from error
    return output


def is_held(held: torch.Tensor) -> bool:
    """Whether `held` has its gathered values; released, it has the right shape and no storage."""
    return held.untyped_storage().size() > 0 or held.numel() == 0


def release(held: torch.Tensor) -> None:
    """Drop the gathered values; the tensor keeps its shape, strides and identity."""
    held.data = without_storage(held.shape, held.dtype, held.device)


def without_storage(shape, dtype: torch.dtype, device) -> torch.Tensor:
    """A contiguous tensor of `shape` with a storage of 0 bytes."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    tensor.untyped_storage().resize_(0)
    return tensor


for name, kernel in (
    ("all_gather", all_gather),
    ("gather_held", gather_held),
    ("reduce_scatter", reduce_scatter),
    ("all_reduce", all_reduce),
    ("wait", wait),
):
    LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")


@torch.library.register_fake("zero_fx::all_gather", lib=LIBRARY)
def _(shard, world, group, name):
    return shard.new_empty((shard.shape[0] * world, *shard.shape[1:]))


@torch.library.register_fake("zero_fx::gather_held", lib=LIBRARY)
def _(held, shard, world, group, name):
    return None


@torch.library.register_fake("zero_fx::reduce_scatter", lib=LIBRARY)
def _(grad, world, group, name):
    return grad.new_empty((grad.shape[0] // world, *grad.shape[1:]))


@torch.library.register_fake("zero_fx::all_reduce", lib=LIBRARY)
def _(grad, group, name):
    return grad.new_empty(grad.shape)


@torch.library.register_fake("zero_fx::wait", lib=LIBRARY)
def _(output, source, name):
    return output
