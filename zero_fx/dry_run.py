"""The graphs that a rank of any world would run, captured in one process that has neither the devices nor the peers.

The model's parameters become tensors of their size that nobody writes to, which costs addresses and no memory; the
process group is PyTorch's fake one. torch.compile captures and the passes rewrite as in training, and then nothing is
lowered or run: a compiled graph answers with empty tensors of the right shapes, so that what follows a graph break is
captured too.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import mmap
import sys

import torch
import torch.distributed as dist
from torch import nn

from .compile import compile_with
from .config import Config, make_config
from .predict import StepGraphs, graphs_of
from .torch_compat import fake_store, tree_leaves, tree_map

LARGE = 1 << 30  # bytes
NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux's value, which Python's module has since 3.13

def dry_run(
    model: nn.Module,
    args: tuple = (),
    kwargs: dict | None = None,
    *,
    world: int,
    rank: int = 0,
    config: Config | None = None,
    rewrites: bool = True,
    **options,
) -> StepGraphs:
    """Capture the forward of `model` on `args` and `kwargs`, and its backward, as `rank` of `world` ranks would.

    model: plain; it is not changed. It and the arguments may be on the meta device. config, options: as for
    zero_fx.compile; `hardware` names what the plans are made for. rewrites=False leaves forward and backward as they
    were cut, with markers. Raises ValueError for a model or an option that cannot
    be used, RuntimeError inside a process group: this needs a fake one of its own.
    """
    config = dataclasses.replace(make_config(config, options), sync_module_states=False)
    if not 0 <= rank < world:
        raise ValueError(f"rank={rank}: expected 0 to world - 1 = {world - 1}")
    if dist.is_initialized():
        raise RuntimeError("a process group is initialised here, and a dry run needs a fake one: run it in another process")
    model = hollow_copy(model)
    args, kwargs = hollow((args, kwargs or {}))
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=world)
    try:
        compile_with(model, config, own=untouched_rows)
        backend = model._zero_fx_compiled.backend
        backend.executes, backend.rewrites = False, rewrites
        step(model, args, kwargs)
        return graphs_of(backend)
    finally:
        dist.destroy_process_group()


def hollow_copy(model: nn.Module) -> nn.Module:
    """A copy whose parameters are on the CPU and have no values; buffers keep theirs, if they have any."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"a dry run takes a torch.nn.Module, got {type(model).__name__}")
    memo = {}
    for param in model.parameters():
        memo[id(param)] = nn.Parameter(untouched(param), requires_grad=param.requires_grad)
    copied = copy.deepcopy(model, memo)
    for module in copied.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = untouched(buffer) if buffer.is_meta else buffer.cpu()
    return copied


def hollow(values):
    """`values` with the tensors that are on the meta device or another than the CPU replaced."""

    def one(value):
        if not isinstance(value, torch.Tensor):
            return value
        return untouched(value).requires_grad_(value.requires_grad) if value.is_meta else value.cpu()

    return tree_map(one, values)


def untouched_rows(rows: torch.Tensor) -> torch.Tensor:
    return untouched(torch.empty_like(rows, device="meta", memory_format=torch.contiguous_format))


def untouched(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor of the same type. Its pages do not exist until someone writes to them."""
    if tensor.numel() * tensor.element_size() < LARGE or sys.platform != "linux":
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    # An allocator asks for memory that is accounted for, and Linux refuses more than the machine has.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
    pages = torch.frombuffer(mmap.mmap(-1, tensor.untyped_storage().nbytes(), flags=flags), dtype=torch.uint8)
    return torch.empty(0, dtype=tensor.dtype, device="cpu").set_(pages.untyped_storage(), 0, tensor.shape, tensor.stride())


def step(model: nn.Module, args: tuple, kwargs: dict) -> None:
    """Forward, and backward from every output that has one."""
    outputs = model(*args, **kwargs)
    with contextlib.suppress(TypeError):  # outputs that are not of a kind that PyTorch can take apart
        outputs = vars(outputs) if hasattr(outputs, "__dataclass_fields__") else outputs
    roots = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if roots:
        torch.autograd.backward(roots, [torch.empty_like(root) for root in roots])

