"""Small helpers on tensors."""

from __future__ import annotations

import torch
import torch.distributed as dist


def backend_of(group: dist.ProcessGroup, device_type: str) -> str:
    """The transport that `group` uses for tensors of a device: "gloo", "nccl", "fake". A group may have several."""
    pairs = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    return pairs.get(device_type, "undefined")


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor, without an autograd node; or the tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def hooks_of(tensor: torch.Tensor, kind: str) -> dict:
    """A tensor's hooks: kind "gradient" (register_hook) or "accumulated" (register_post_accumulate_grad_hook)."""
    name = {"gradient": "_backward_hooks", "accumulated": "_post_accumulate_grad_hooks"}[kind]
    return getattr(tensor, name, None) or {}
