"""Loss scaling for float16: torch.amp.GradScaler whose ranks agree on which steps overflowed.

The original is not enough on sharded gradients: where an optimizer's first gradient is one that every rank has whole, it
takes each rank's own finding for everyone's, and ranks then step, and scale, apart.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from .runtime.tensors import local_of
from .torch_compat import ScalerBase, unscale_and_check


class GradScaler(ScalerBase):
    """As torch.amp.GradScaler. An infinite or NaN gradient on any rank makes all ranks skip the step and lower the scale.

    `unscale_` and `step` are collective (one all-reduce of one number a step); all ranks call them alike.
    """

    def unscale_grads(self, optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool) -> None:
        """Scale the local gradients in place; found_inf: a 0-dim tensor that becomes 1 if any rank has found one."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for param in params:
            if param.grad is None:
                continue
            if any(placement.is_partial() for placement in getattr(param.grad, "placements", ())):
                raise RuntimeError(
                    "zero_fx: GradScaler met gradients of micro-batches under no_sync that are not reduced yet; unscale and "
                    "step after a backward pass outside of no_sync"
                )
            if not allow_fp16 and param.grad.dtype == torch.float16:
                raise ValueError("Attempting to unscale FP16 gradients.")
            local = local_of(param.grad)
            if local.numel():
                by_dtype.setdefault(local.dtype, []).append(local)
        for grads in by_dtype.values():
            unscale_and_check(grads, found_inf, inv_scale)
        # By parameters and not by gradients: a rank may have none.
        meshes = dict.fromkeys(param.device_mesh for param in params if hasattr(param, "device_mesh"))
        for mesh in meshes:
            dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=mesh.get_group())
