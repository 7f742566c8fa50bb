"""Bytes of model states on this rank: parameters, gradients, optimizer states; each storage counted once."""

from __future__ import annotations

import torch

from .state import ModelState
from .tensors import local_of


def storage_bytes(tensors) -> int:
    """Bytes of the distinct storages behind `tensors`; DTensors count their local part, None counts nothing."""
    storages = {}
    for tensor in tensors:
        if tensor is not None:
            storage = local_of(tensor).untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def state_bytes(model: ModelState, optimizer: torch.optim.Optimizer | None = None) -> dict[str, int]:
    """{"parameters", "gradients", "optimizer"} now, in bytes. Parameters include what is gathered and held."""
    params = list(model.params.values())
    values = [v for s in optimizer.state.values() for v in s.values()] if optimizer else []
    return {
        "parameters": storage_bytes([t for s in params for t in (s.param, s.held)]),
        "gradients": storage_bytes([g for s in params for g in (s.param.grad, s.local.grad if s.has_local_grad() else None)]),
        "optimizer": storage_bytes(v for v in values if isinstance(v, torch.Tensor) and v.dim() > 0),
    }
