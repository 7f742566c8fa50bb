"""What a node of a graph costs: bytes, operations and seconds, from recorded types alone. Nothing is run.

Compute is a roofline (Williams et al., CACM 2009): seconds = max(operations / peak, bytes / memory bandwidth) and a
launch. A collective is alpha-beta (Hockney, 1994): seconds = latency + bytes sent over the slowest link / its bandwidth.
Symbolic sizes count by their hints.
"""

from __future__ import annotations

import math

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from .hardware import Hardware
from .torch_compat import size_hint
from .vocabulary import COLLECTIVES, MARKERS, is_op, is_view

UNKNOWN_SIZE = 64  # of a size that has no hint: it depends on data


def size_of(value) -> int:
    """Elements of a fake tensor, symbolic sizes by their hints; 0 for anything else."""
    if not isinstance(value, torch.Tensor):
        return 0
    return math.prod(size_hint(size, UNKNOWN_SIZE) for size in value.shape)


def bytes_of(value) -> int:
    """Bytes of a fake tensor, or of all in a tuple."""
    if isinstance(value, (list, tuple)):
        return sum(map(bytes_of, value))
    return size_of(value) * value.element_size() if isinstance(value, torch.Tensor) else 0


def flops_of(node: fx.Node, known=None, number=int):
    """Operations of a matrix product, convolution or attention; 0 for an operator without a formula. known: what makes
    of a recorded value one whose sizes count, `hinted` by default; number: of the result."""
    known = known or hinted
    packet = getattr(node.target, "overloadpacket", None)
    count = flop_registry.get(packet) or ATTENTION_ON_CPU.get(packet)
    if count is None:
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: known(n.meta.get("val")))
    try:
        return number(count(*args, **kwargs, out_val=known(node.meta.get("val"))))
    except (TypeError, ValueError, AssertionError, AttributeError):
        return 0  # a formula that does not know this form of the operator: it then counts by its bytes


def attention_flops(query, key, value, *args, out_val=None, **kwargs) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def attention_backward_flops(grad, query, key, value, *args, out_val=None, **kwargs) -> int:
    return sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape)


ATTENTION_ON_CPU = {  # which PyTorch's registry lacks
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_flops,
}


def hinted(value):
    """A meta tensor with concrete sizes for a fake tensor with symbolic ones."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(hinted, value))
    if not isinstance(value, torch.Tensor):
        return size_hint(value, UNKNOWN_SIZE) if isinstance(value, torch.SymInt) else value
    return torch.empty([size_hint(size, UNKNOWN_SIZE) for size in value.shape], dtype=value.dtype, device="meta")


def compute_s(node: fx.Node, hardware: Hardware, bytes_of=bytes_of, flops_of=flops_of, largest=max) -> float:
    """Seconds that a node computes. Views are free, and so is what passes inserted around collectives: it is there on
    some ranks and not on others, which must decide alike. bytes_of, flops_of, largest: to count in other numbers, see symbolic.py."""
    if node.op != "call_function" or is_view(node) or node.meta.get("zero_fx_inserted"):
        return 0.0
    if is_op(node, *COLLECTIVES):
        return hardware.issue_s
    if is_op(node, "wait", *MARKERS):
        return 0.0
    flops = flops_of(node)
    moved = bytes_of(node.meta.get("val"))
    if not flops:
        # A pointwise operator is fused with its neighbours: what it writes stands for what a fused kernel moves.
        return moved / hardware.memory_bytes_per_s
    moved += sum(bytes_of(arg.meta.get("val")) for arg in node.all_input_nodes)
    dtype = next((a.meta["val"].dtype for a in node.all_input_nodes if isinstance(a.meta.get("val"), torch.Tensor)), None)
    return largest(flops / hardware.flops(dtype), moved / hardware.memory_bytes_per_s) + hardware.launch_s


def collective_s(kind: str, elements: int, element_bytes: int, world: int, hardware: Hardware, largest=max) -> float:
    """Seconds of one collective over `world` ranks whose input has `elements`, alone on its links."""
    full = elements * element_bytes * (world if kind in GATHERS else 1)
    return latency_s(world, hardware) + full * byte_s(kind, world, hardware, largest)


GATHERS = ("all_gather", "gather_held")


def latency_s(world: int, hardware: Hardware) -> float:
    """Seconds of a collective without data: its start, and the steps of a ring through all nodes."""
    nodes = nodes_of(world, hardware)
    return hardware.latency_s + (world - nodes) * hardware.hop_s + (nodes - 1) * hardware.node_hop_s


def byte_s(kind: str, world: int, hardware: Hardware, largest=max) -> float:
    """Seconds that each byte of the full tensor adds: on a rank's own link, or on those between nodes if they are slower.

    As many rings run as a node has ranks, each through another rank's network link. So a node's links between nodes
    together carry what the node lacks, once (Thakur et al., IJHPCA 2005, for the volumes). An all-to-all reduces nothing
    on the way: each rank sends every other node its own piece.
    """
    nodes = nodes_of(world, hardware)
    local = -(-world // nodes)
    inside, between = (world - 1) / world, (nodes - 1) / nodes
    if kind != "all_to_all":
        between /= local
    slowest = largest(inside / hardware.link_bytes_per_s, between / hardware.node_link_bytes_per_s)
    return slowest * (2 if kind == "all_reduce" else 1)


def nodes_of(world: int, hardware: Hardware) -> int:
    return -(-world // hardware.ranks_per_node)
