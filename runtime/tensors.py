"""Small helpers on tensors."""

from __future__ import annotations

import torch


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor, without an autograd node; or the tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def hooks_of(tensor: torch.Tensor, kind: str) -> dict:
    """A tensor's hooks: kind "gradient" (register_hook) or "accumulated" (register_post_accumulate_grad_hook)."""
    name = {"gradient": "_backward_hooks", "accumulated": "_post_accumulate_grad_hooks"}[kind]
    return getattr(tensor, name, None) or {}
