"""Checkpoints that FSDP2 has saved, loaded here, and ours loaded there."""

from __future__ import annotations

import os

import torch
from torch import nn

import zero_fx

from .checkpoints import assert_equal, everything


def stepped_fsdp2():
    """(model, optimizer) under fully_shard, after two steps on made-up gradients."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)))
    model[2].bias.requires_grad_(False)
    return model, two_steps(model)


def two_steps(model):
    groups = [{"params": list(model[0].parameters()), "lr": 0.1}, {"params": [*model[1].parameters(), model.get_parameter("2.weight")]}]
    optimizer = torch.optim.AdamW(groups, lr=0.02)
    for step in range(2):
        tokens = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        model(tokens).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def stepped_ours(stage: int, seed: int):
    torch.manual_seed(seed)
    plain = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    plain[2].bias.requires_grad_(False)
    model = zero_fx.compile(plain, stage, lowering="eager", keep_whole_below=0)
    return model, two_steps(model)


def fsdp2_state(model, optimizer, **options) -> dict:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    found = get_state_dict(model, optimizer, options=StateDictOptions(**options))
    return {"model": found[0], "optim": found[1]}


def from_fsdp2(rank: int, world: int, path: str, stage: int) -> None:
    """What FSDP2's users save, in three layouts, loads here, and is theirs bit by bit."""
    import torch.distributed.checkpoint as dcp

    theirs = stepped_fsdp2()
    expected = fsdp2_state(*theirs, full_state_dict=True)
    layouts = {
        "usual": fsdp2_state(*theirs),
        "app": {"app": fsdp2_state(*theirs)},
        "flat": {**fsdp2_state(*theirs)["model"], "optimizer": fsdp2_state(*theirs, flatten_optimizer_state_dict=True)["optim"]},
    }
    for name, layout in layouts.items():
        dcp.save(layout, checkpoint_id=os.path.join(path, name))
        model, optimizer = stepped_ours(stage, seed=3)
        assert zero_fx.load_checkpoint(os.path.join(path, name), model, optimizer) == {"step": None}
        found = everything(model, optimizer)
        if rank == 0:
            assert_equal(plain_groups(found), plain_groups(expected), name)


def plain_groups(state: dict) -> dict:
    """Without the options of how a step is run, and in the order of the parameters' names."""
    groups = [{k: v for k, v in group.items() if k not in ("foreach", "fused")} for group in state["optim"]["param_groups"]]
    groups = [{**group, "params": sorted(group["params"])} for group in groups]
    return {"model": dict(state["model"]), "state": dict(state["optim"]["state"]), "groups": groups}


def to_fsdp2(rank: int, world: int, path: str, stage: int) -> None:
    """torch.distributed.checkpoint loads ours into an FSDP2 model and its optimizer."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_state_dict

    model, optimizer = stepped_ours(stage, seed=0)
    with torch.no_grad():
        model[0]._parameters["weight"].mul_(1.5)
    folder = zero_fx.save_checkpoint(path, model, optimizer, note=1)
    theirs = stepped_fsdp2()
    target = fsdp2_state(*theirs)
    dcp.load(target, checkpoint_id=folder)
    set_state_dict(*theirs, model_state_dict=target["model"], optim_state_dict=target["optim"])
    found, expected = fsdp2_state(*theirs, full_state_dict=True), everything(model, optimizer)
    if rank == 0:
        assert_equal(plain_groups(found), plain_groups(expected))
