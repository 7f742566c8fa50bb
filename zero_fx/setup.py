"""What `compile` does to the world around a model: process group, mesh, equal weights, the optimizer."""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .runtime.param import ParamState


def device_of(model: nn.Module) -> torch.device:
    """The one device of a model's parameters and buffers; CPU for a model without any."""
    where = {tensor.device: name for name, tensor in model.named_buffers()}
    where |= {tensor.device: name for name, tensor in model.named_parameters()}
    if len(where) > 1:
        found = ", ".join(f"{name!r} on {device}" for device, name in where.items())
        raise ValueError(f"the model is on several devices ({found}); move it to one before zero_fx.compile")
    return next(iter(where), torch.device("cpu"))


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
    if mesh.size() == 1:
        return
    group = mesh.get_group()
    source = dist.get_global_rank(group, 0)
    for tensor in [*model.parameters(), *model.buffers()]:
        values = tensor.detach().contiguous()
        if values.numel():
            # As bytes: gloo has no broadcast of bool, complex or 8-bit floating-point tensors.
            dist.broadcast(values.reshape(-1).view(torch.uint8), source, group=group)
            tensor.data.copy_(values)


def repoint_optimizer(optimizer: torch.optim.Optimizer, replaced: dict[nn.Parameter, ParamState]) -> None:
    """Let `optimizer` hold the sharded parameters in place of the old ones; options and order of groups stay, and
    states of the parameter's shape (momenta, after warm-up steps) are cut as the parameter is."""
    for group in optimizer.param_groups:
        group["params"] = [replaced[p].param if p in replaced else p for p in group["params"]]
    for old, new in replaced.items():
        if old in optimizer.state:
            values = optimizer.state.pop(old)
            optimizer.state[new.param] = {key: cut(value, new) for key, value in values.items()}


def cut(value, state: ParamState):
    """This rank's part of an optimizer's state tensor of the parameter's shape; anything else as it is."""
    if not isinstance(value, torch.Tensor) or not value.dim() or tuple(value.shape) != state.shape:
        return value
    return state.as_dtensor(state.rows_of(value).clone())
