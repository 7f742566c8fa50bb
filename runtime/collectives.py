"""Collectives that are started and awaited apart, each with the name of the parameter that it serves.

    all_gather(shard, world, group, name) -> full        starts;  (rows/N, ...) -> (rows, ...)
    gather_held(held!, shard, world, group, name) -> ()  starts, unless `held` already has storage
    reduce_scatter(grad, world, group, name) -> shard    starts;  (rows, ...) -> (rows/N, ...), mean over ranks
    all_to_all(grad, world, group, name) -> pieces       starts;  (rows, ...) -> (rows, ...): each rank's piece for us
    all_reduce(grad, group, name) -> grad                starts;  same shape, mean over ranks
    wait(output, source, name) -> output                 blocks until `output` may be read

N = world = ranks in `group`. `rows` is divisible by N here: padding is the graph's business. With `rank=` (this
rank's number in the group) a gather runs as a broadcast from each rank, straight into its place: gloo's own all-
gather copies everything twice more, and takes 1.6 times as long (8 MB over loopback). The volume is the same. The
transport is torch's functional collectives, whose registry of pending work holds the state, so nothing of ours does.
`wait` takes the *source* too: a compiler may reuse a buffer after its last reader, and the transport still reads the
source until the wait. The names exist so that a dead or late rank is reported by parameter and not by buffer.
"""

from __future__ import annotations

import torch

LIBRARY = torch.library.Library("zero_fx", "FRAGMENT")
LIBRARY.define("all_gather(Tensor shard, int world, str group, str name, *, int? rank=None) -> Tensor")
LIBRARY.define(
    "gather_held(Tensor(a!) held, Tensor shard, int world, str group, str name, *, int? rank=None) -> ()"
)
LIBRARY.define("reduce_scatter(Tensor grad, int world, str group, str name) -> Tensor")
LIBRARY.define("all_to_all(Tensor grad, int world, str group, str name) -> Tensor")
LIBRARY.define("all_reduce(Tensor grad, str group, str name) -> Tensor")
LIBRARY.define("wait(Tensor(a) output, Tensor source, str name) -> Tensor(a)")

transport = torch.ops._c10d_functional


def started(kind: str, name: str, call, *args, **kwargs) -> torch.Tensor:
    """Run `call`, and name the collective if the transport refuses it (a peer is gone, sizes differ)."""
    try:
        return call(*args, **kwargs)
    except RuntimeError as error:
        raise RuntimeError(f"zero_fx: {kind} of {name!r} could not start: {error}") from error


def all_gather(shard: torch.Tensor, world: int, group: str, name: str, *, rank: int | None = None) -> torch.Tensor:
    if rank is not None:
        full = shard.new_empty((shard.shape[0] * world, *shard.shape[1:]))
        started("all-gather", name, broadcast_each, full, shard, world, group, rank)
        return full
    return started("all-gather", name, transport.all_gather_into_tensor, shard.contiguous(), world, group)


def broadcast_each(full: torch.Tensor, shard: torch.Tensor, world: int, group: str, rank: int) -> None:
    """Each rank's rows, from that rank into its place in `full`."""
    pieces = full.view(world, -1)
    pieces[rank].copy_(shard.reshape(-1))
    for root in range(world):
        transport.broadcast_(pieces[root], root, group)


def gather_held(held: torch.Tensor, shard: torch.Tensor, world: int, group: str, name: str, *, rank=None) -> None:
    if is_held(held):
        return
    # A new storage each time, never a resized one: whoever still reads the old values keeps the old storage. And by
    # way of another tensor: writing to `held` itself would tell autograd that what backward saved has changed.
    full = torch.empty(held.shape, dtype=held.dtype, device=held.device)
    if rank is not None:
        started("all-gather", name, broadcast_each, full, shard, world, group, rank)
    else:
        started("all-gather", name, transport.all_gather_into_tensor_out, shard.contiguous(), world, group, out=full)
    held.data = full


def reduce_scatter(grad: torch.Tensor, world: int, group: str, name: str) -> torch.Tensor:
    return started("reduce-scatter", name, transport.reduce_scatter_tensor, grad.contiguous(), "avg", world, group)


def all_to_all(grad: torch.Tensor, world: int, group: str, name: str) -> torch.Tensor:
    sizes = [grad.shape[0] // world] * world
    return started("all-to-all", name, transport.all_to_all_single, grad.contiguous(), sizes, sizes, group)


def sum_of_pieces(pieces: torch.Tensor, world: int, dtype: torch.dtype) -> torch.Tensor:
    """What is left of a reduction after `all_to_all`: (rows, ...) -> (rows/N, ...), the mean, in the order of ranks; added
    up in `dtype`, whatever was sent."""
    return pieces.view(world, pieces.shape[0] // world, *pieces.shape[1:]).mean(0, dtype=dtype)


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
    ("all_to_all", all_to_all),
    ("all_reduce", all_reduce),
    ("wait", wait),
):
    LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")


@torch.library.register_fake("zero_fx::all_gather", lib=LIBRARY)
def _(shard, world, group, name, *, rank=None):
    return shard.new_empty((shard.shape[0] * world, *shard.shape[1:]))


@torch.library.register_fake("zero_fx::gather_held", lib=LIBRARY)
def _(held, shard, world, group, name, *, rank=None):
    return None


@torch.library.register_fake("zero_fx::reduce_scatter", lib=LIBRARY)
def _(grad, world, group, name):
    return grad.new_empty((grad.shape[0] // world, *grad.shape[1:]))


@torch.library.register_fake("zero_fx::all_to_all", lib=LIBRARY)
def _(grad, world, group, name):
    return grad.new_empty(grad.shape)


@torch.library.register_fake("zero_fx::all_reduce", lib=LIBRARY)
def _(grad, group, name):
    return grad.new_empty(grad.shape)


@torch.library.register_fake("zero_fx::wait", lib=LIBRARY)
def _(output, source, name):
    return output
