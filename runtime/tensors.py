"""Small helpers on tensors."""

from __future__ import annotations

import torch


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor, without an autograd node; or the tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)
