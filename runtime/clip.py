"""Gradient clipping by the norm over all ranks: local norms, one all-reduce of one number, one scaling."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .markers import WHOLE
from .state import ModelState


@torch.no_grad()
def clip_grad_norm(model: ModelState, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
    """Clip in place; returns the norm before, a 0-dim tensor. Tied parameters are one, whole ones count once."""
    max_norm, norm_type = float(max_norm), float(norm_type)
    sharded, whole = [], []
    for state in model.params.values():
        grad = state.param.grad
        if state.has_local_grad():
            raise RuntimeError(
                "zero_fx: clip_grad_norm_ was called while gradients of micro-batches under no_sync are not reduced "
                "yet; call it after a backward pass outside of no_sync"
            )
        if grad is None:
            continue
        (whole if state.lifetime == WHOLE else sharded).append(grad._local_tensor)
    # Every rank has the same whole gradients: one rank's are counted, so that no rounding enters by a division.
    counted = sharded + whole if model.rank == 0 else sharded
    # Not of what this rank counts: another counts more, and ranks have to send one dtype.
    dtype = torch.float64 if any(grad.dtype == torch.float64 for grad in sharded + whole) else torch.float32
    total = total_norm(counted, norm_type, dtype, model)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(f"zero_fx: the total norm of order {norm_type} of the gradients is {total.item()}")
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for _, group in by_dtype(sharded + whole).items():
        torch._foreach_mul_(group, scale.to(group[0].dtype))
    return total


def total_norm(grads: list[torch.Tensor], norm_type: float, dtype: torch.dtype, model: ModelState) -> torch.Tensor:
    """The norm over all ranks of their `grads` taken together; 0-dim, of `dtype`."""
    device = next(iter(model.params.values())).param.device if model.params else torch.device("cpu")
    grads = [grad for grad in grads if grad.numel()]
    is_max = norm_type == float("inf")
    total = torch.zeros((), dtype=dtype, device=device)
    if grads:
        norms = [norm.to(dtype) for group in by_dtype(grads).values() for norm in torch._foreach_norm(group, norm_type)]
        total = torch.stack(norms)
        total = total.max() if is_max else total.pow(norm_type).sum()
    group = model.mesh.get_group()
    dist.all_reduce(total, dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=group)
    return total if is_max else total.pow(1.0 / norm_type)


def by_dtype(tensors: list[torch.Tensor]) -> dict[torch.dtype, list[torch.Tensor]]:
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return groups
