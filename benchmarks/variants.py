"""The ways to train one model that the suite compares: ours by stage and passes, and the peers."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable

import torch
from torch import nn

from . import deepspeed_peer
from .models import Workload

LR = 1e-3


@dataclasses.dataclass(frozen=True)
class Variant:
    """make(workload, mesh) -> (model, optimizer): ready to train; the model's forward returns the loss."""

    name: str
    make: Callable[[Workload, object], tuple[nn.Module, torch.optim.Optimizer]]


def plain(workload: Workload) -> nn.Module:
    torch.manual_seed(0)
    return workload.build()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, fused=True)


def make_alone(workload, mesh):
    """The compiled model without any communication: what is left to reach. Its losses differ after the first step."""
    model = plain(workload)
    optimizer = adamw(model)
    return torch.compile(model), optimizer


def make_ddp(workload, mesh, compiled: bool):
    model = nn.parallel.DistributedDataParallel(plain(workload), gradient_as_bucket_view=True)
    optimizer = adamw(model)
    return torch.compile(model) if compiled else model, optimizer


def make_fsdp2(workload, mesh, reshard: bool, compiled: str):
    """Fully sharded per block and at the root. compiled: "" (eager), "block" or "whole"."""
    from torch.distributed.fsdp import fully_shard

    model = plain(workload)
    for module in model.modules():
        if isinstance(module, workload.blocks):
            if compiled == "block":
                module.compile()
            fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    optimizer = adamw(model)
    return torch.compile(model) if compiled == "whole" else model, optimizer


def make_zero(workload, mesh, stage: int, **options):
    import zero_fx

    model = zero_fx.compile(plain(workload), stage, mesh=mesh, **options)
    return model, adamw(model)


def make_deepspeed(workload, mesh, stage: int):
    model = plain(workload)
    return deepspeed_peer.build(model, adamw(model), stage)


def train_step(model: nn.Module, optimizer, batch) -> torch.Tensor:
    """One optimizer step; returns this rank's loss."""
    loss = model(*batch)
    if isinstance(optimizer, deepspeed_peer.Engine):
        optimizer.engine.backward(loss)
    else:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def variant(name: str, make, **options) -> Variant:
    return Variant(name, lambda workload, mesh: make(workload, mesh, **options))


def peers() -> list[Variant]:
    found = [
        Variant("alone", make_alone),
        variant("ddp", make_ddp, compiled=False),
        variant("ddp compiled", make_ddp, compiled=True),
        variant("fsdp2", make_fsdp2, reshard=True, compiled=""),
        variant("fsdp2 per block", make_fsdp2, reshard=True, compiled="block"),
        variant("fsdp2 whole", make_fsdp2, reshard=True, compiled="whole"),
    ]
    if importlib.util.find_spec("deepspeed"):
        found += [variant(f"deepspeed {stage}", make_deepspeed, stage=stage) for stage in (1, 2, 3)]
    return found


def ours(stages=(1, 2, 3)) -> list[Variant]:
    return [variant(f"zero {stage}", make_zero, stage=stage) for stage in stages]


def ablations(stage: int = 3) -> list[Variant]:
    """Each optional pass alone, each left out, and none."""
    from zero_fx.config import PASSES

    found = [variant(f"zero {stage}, no passes", make_zero, stage=stage, passes=())]
    for name in PASSES:
        rest = tuple(other for other in PASSES if other != name)
        found.append(variant(f"zero {stage}, only {name}", make_zero, stage=stage, passes=(name,)))
        if len(rest) > 1:
            found.append(variant(f"zero {stage}, no {name}", make_zero, stage=stage, passes=rest))
    return found

