"""bucket_collectives: small collectives of one kind travel together, large ones alone and uncopied.

N = ranks, total = elements that one rank has of all members.

    before                                      after
    %2: f32[N*4] = all_gather(%0, N, "a")       %2: f32[total] = cat([view(%0, [-1]), view(%1, [-1])])
    %3: f32[N*4] = wait(%2, %0, "a")            %3: f32[N*total] = all_gather(%2, N, "a, b")
    ...                                         %4: f32[N*total] = wait(%3, %2, "a, b")
    %5: f32[N*6] = all_gather(%1, N, "b")       %5: f32[N,total] = view(%4, [N, total])
    %6: f32[N*6] = wait(%5, %1, "b")            %6: f32[N,4] = slice(%5, 1, 0, 4)
                                                %7: f32[N*4] = reshape(%6, [N*4])       # in place of %3
                                                ...                                     # and so for "b"

Reductions likewise: their sources, cut into N pieces each, are laid side by side, and what a reduction leaves is cut
into the members'. Gathers start where the first member did, reductions where the last member did.

A member saves a collective's latency. It costs a copy into the bucket and out of it, and overlap: the others may have to
wait until it has travelled. So tensors join while both together take less than the latency. Whether they do depends on
parameters' sizes alone, hence is the same on all ranks.

requires  collectives that are awaited, from shard_params and shard_grads
ensures   buckets of at most `config.bucket_bytes`, of one dtype, kind and group
numerics  bitwise, but for all-reduces over three or more ranks, whose order of sums depends on the place in a buffer
leaves    when they start and are awaited to prefetch; gathers into held parameters (stages 1 and 2) as they are
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import fx

from ..costs import byte_s, bytes_of, latency_s
from ..vocabulary import REDUCTIONS, PassConfig, Report, insert, is_op, is_view, op

aten = torch.ops.aten
COPIES = 3  # of a full tensor that a member of a bucket costs: read and written once, and its piece packed
SHOWN = 3  # members that a bucket's name lists


@dataclasses.dataclass
class Member:
    """A started collective, its wait, and what it sends."""

    start: fx.Node
    wait: fx.Node

    @property
    def source(self) -> fx.Node:
        return self.start.args[0]

    @property
    def name(self) -> str:
        return self.start.args[-1]


def bucket_collectives(gm: fx.GraphModule, config: PassConfig) -> Report:
    if config.world == 1:
        return Report(False)  # nothing travels
    stats = {}
    place = {node: i for i, node in enumerate(gm.graph.nodes)}
    for kind in ("all_gather", *REDUCTIONS):
        buckets = [bucket for bucket in collect(gm.graph, kind, config, place) if len(bucket) > 1]
        for bucket in buckets:
            join(gm.graph, kind, bucket, config)
        if buckets:
            stats[f"{kind}_members"] = sum(map(len, buckets))
            stats[f"{kind}_buckets"] = len(buckets)
    return Report(bool(stats), stats)


def collect(graph: fx.Graph, kind: str, config: PassConfig, place: dict[fx.Node, int]) -> list[list[Member]]:
    """Members of each bucket, in the order of the graph."""
    hardware = config.hardware
    travel = byte_s(kind, config.world, hardware)
    largest = latency_s(config.world, hardware) / (COPIES / hardware.memory_bytes_per_s + travel)
    open_buckets: dict[tuple, list[Member]] = {}
    closed = []
    for start in list(graph.find_nodes(op="call_function", target=op(kind))):
        wait = next(user for user in start.users if is_op(user, "wait") and user.args[0] is start)
        member = Member(start, wait)
        size = full_bytes(member, kind, config)
        if size > min(largest, config.bucket_bytes) or size == 0 or start.meta.get("zero_fx_bucket"):
            continue
        if kind == "all_gather" and not depends_on_inputs(member.source):
            continue
        key = (start.meta["val"].dtype, start.args[-2])
        bucket = open_buckets.setdefault(key, [])
        full = sum(full_bytes(m, kind, config) for m in bucket) + size > config.bucket_bytes
        if bucket and (full or is_read_before(bucket, member, kind, place)):
            closed.append(bucket)
            bucket = open_buckets[key] = []
        bucket.append(member)
    return closed + list(open_buckets.values())


def full_bytes(member: Member, kind: str, config: PassConfig) -> int:
    return bytes_of(member.source.meta["val"]) * (config.world if kind == "all_gather" else 1)


def depends_on_inputs(node: fx.Node) -> bool:
    """Whether a gather's source is an input, or made of inputs by what passes inserted, so that it can move up."""
    if node.op == "placeholder":
        return True
    movable = node.meta.get("zero_fx_inserted") or is_view(node)
    return bool(movable) and all(map(depends_on_inputs, node.all_input_nodes))


def is_read_before(bucket: list[Member], new: Member, kind: str, place: dict[fx.Node, int]) -> bool:
    """Whether a reduction in the bucket is read by a computation before `new` is ready, and cannot wait for it."""
    if kind == "all_gather":
        return False
    return any(place[reader] < place[new.start] for member in bucket for reader in readers(member.wait))


def readers(node: fx.Node) -> list[fx.Node]:
    """What computes with a result, past what passes inserted behind it."""
    found = []
    for user in node.users:
        if user.meta.get("zero_fx_inserted"):
            found += readers(user)
        elif user.op != "output":
            found.append(user)
    return found


def join(graph: fx.Graph, kind: str, bucket: list[Member], config: PassConfig) -> None:
    world, group = config.world, bucket[0].start.args[-2]
    is_gather = kind == "all_gather"
    where = bucket[0].start if is_gather else bucket[-1].start
    if is_gather:
        for member in bucket[1:]:
            raise_above(where, member.source)
    names = [member.name for member in bucket]
    name = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
    with graph.inserting_before(where):
        packed = pack(graph, kind, bucket, world)
        args = (packed, group, name) if kind == "all_reduce" else (packed, world, group, name)
        start = insert(graph, op(kind), *args, like=where, **({"rank": config.broadcasts} if is_gather else {}))
        start.meta["zero_fx_bucket"] = names
        result = insert(graph, op("wait"), start, packed, name, like=where)
        outs = unpack(graph, kind, bucket, result, world)
    for member, out in zip(bucket, outs):
        if not is_gather:
            sink_below(out, member.wait)
        member.wait.replace_all_uses_with(out)
        graph.erase_node(member.wait)
        graph.erase_node(member.start)


def pack(graph: fx.Graph, kind: str, bucket: list[Member], world: int) -> fx.Node:
    """The bucket's source: (total,) of a gather or an all-reduce; (N, total) of a reduction that scatters."""
    scatters = kind in ("reduce_scatter", "all_to_all")
    shape = [world, -1] if scatters else [-1]
    flat = [insert(graph, aten.reshape.default, member.source, shape, like=member.start) for member in bucket]
    return insert(graph, aten.cat.default, flat, 1 if scatters else 0, like=bucket[0].start)


def unpack(graph: fx.Graph, kind: str, bucket: list[Member], result: fx.Node, world: int) -> list[fx.Node]:
    """In place of each member's wait, its part of the bucket's result."""
    if kind == "all_gather":
        result = insert(graph, aten.view.default, result, [world, -1], like=bucket[0].start)
    outs, offset = [], 0
    for member in bucket:
        size = math.prod(member.source.meta["val"].shape) // (world if kind in ("reduce_scatter", "all_to_all") else 1)
        axis = 0 if kind == "all_reduce" else 1
        part = insert(graph, aten.slice.Tensor, result, axis, offset, offset + size, like=member.start)
        shape = list(member.wait.meta["val"].shape)
        out = insert(graph, aten.reshape.default, part, shape, like=member.start)
        if not out.meta["val"].is_contiguous():
            # One row a rank is a view with gaps; a product of it may be rounded in another way than one without.
            out = insert(graph, aten.clone.default, out, like=member.start, memory_format=torch.contiguous_format)
        outs.append(out)
        offset += size
    return outs


def raise_above(where: fx.Node, node: fx.Node) -> None:
    """Move a gather's source, which is made of inputs, before `where`."""
    if node.op == "placeholder" or node < where:
        return
    for source in node.all_input_nodes:
        raise_above(where, source)
    where.prepend(node)


def sink_below(where: fx.Node, node: fx.Node) -> None:
    """Move what passes inserted behind a reduction after `where`, in order."""
    for user in list(node.users):
        if user.meta.get("zero_fx_inserted") and user < where:
            where.append(user)
            sink_below(user, user)
