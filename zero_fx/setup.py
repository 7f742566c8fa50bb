"""What `compile` does to the world around a model: process group, mesh, equal weights, the optimizer."""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .runtime.param import ParamState
from .runtime.tensors import backend_of


def device_of(model: nn.Module, mesh: DeviceMesh | None = None) -> torch.device:
    """The one device of a model's parameters and buffers, those on the meta device aside. For a model that is all on it:
    that of the mesh, or else an accelerator if there is one that the process group can use. CPU for a model without any."""
    where = {tensor.device: name for name, tensor in model.named_buffers()}
    where |= {tensor.device: name for name, tensor in model.named_parameters()}
    if where.pop(torch.device("meta"), None) is not None and not where:
        return target_device(mesh)
    if len(where) > 1:
        found = ", ".join(f"{name!r} on {device}" for device, name in where.items())
        raise ValueError(f"the model is on several devices ({found}); move it to one before zero_fx.compile")
    return next(iter(where), torch.device("cpu"))


def target_device(mesh: DeviceMesh | None) -> torch.device:
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if isinstance(mesh, DeviceMesh):
        kind = torch.device(mesh.device_type)
    elif kind is not None and dist.is_initialized() and backend_of(dist.group.WORLD, kind.type) in ("undefined", "gloo"):
        kind = None  # a group that was made for the CPU
    if kind is None or kind.type == "cpu":
        return torch.device("cpu")
    return torch.device(kind.type, torch.accelerator.current_device_index())


def default_mesh(device: torch.device, timeout_s: float) -> DeviceMesh:
    """All ranks. Initialises the process group from torchrun's environment, or as a world of one rank without it; its
    collectives then give up after `timeout_s`."""
    if not dist.is_initialized():
        backend = dist.get_default_backend_for_device(device)
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_s))
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh(device.type, (dist.get_world_size(),))


@torch.no_grad()
def sync_from_rank_0(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give every rank the parameters and buffers of the group's first rank."""
    for tensor in [*model.parameters(), *model.buffers()]:
        if not tensor.is_meta:
            broadcast_values(tensor, mesh)


def broadcast_values(tensor: torch.Tensor, mesh: DeviceMesh, source: int = 0) -> None:
    """Give `tensor` the values of the rank `source` of the group."""
    if mesh.size() == 1 or not tensor.numel():
        return
    group = mesh.get_group()
    values = tensor.detach().contiguous()
    # As bytes: gloo has no broadcast of bool, complex or 8-bit floating-point tensors.
    dist.broadcast(values.reshape(-1).view(torch.uint8), dist.get_global_rank(group, source), group=group)
    tensor.data.copy_(values)


NUMBERS = ("step", "mu_product", "eta", "mu")  # states that are one number for a parameter; others are 0-dim only as it is


def is_like(key: str, value, shape: tuple[int, ...]) -> bool:
    """Whether an optimizer's state has an element for each of a parameter of this shape."""
    return isinstance(value, torch.Tensor) and tuple(value.shape) == shape and (value.dim() > 0 or key not in NUMBERS)


def repoint_optimizer(optimizer: torch.optim.Optimizer, replaced: dict[nn.Parameter, ParamState]) -> None:
    """Let `optimizer` hold the sharded parameters in place of the old ones; options and order of groups stay, and
    states of the parameter's shape (momenta, after warm-up steps) are cut as the parameter is."""
    for group in optimizer.param_groups:
        group["params"] = [replaced[p].param if p in replaced else p for p in group["params"]]
    for old, new in replaced.items():
        if old in optimizer.state:
            values = optimizer.state.pop(old)
            optimizer.state[new.param] = {key: cut(key, value, new) for key, value in values.items()}


def cut(key: str, value, state: ParamState):
    """This rank's part of an optimizer's state tensor of the parameter's shape; anything else as it is."""
    if not is_like(key, value, state.shape):
        return value
    return state.as_dtensor(state.rows_of(value).clone())
