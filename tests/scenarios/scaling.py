"""float16 and loss scaling: what one rank finds, all ranks act on."""

from __future__ import annotations

import torch
from torch import nn

import zero_fx


class Uneven(nn.Module):
    """Parameters of which some are whole, and some have rows on the first rank only; the whole one comes first."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.first, self.few = nn.Linear(6, 5), nn.Linear(5, 1)

    def forward(self, x):
        return self.few((self.first(x) * self.scale).tanh())


def make(stage: int, fused: bool, scale: float = 1024.0):
    torch.manual_seed(0)
    model = zero_fx.compile(Uneven(), stage=stage, precision="fp16", lowering="eager", keep_whole_below=2, timeout_s=30)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused or None)
    return model, optimizer, zero_fx.GradScaler("cpu", init_scale=scale, growth_interval=2)


def check_scaler(rank: int, world: int, stage: int, fused: bool, clip: bool) -> None:
    """In step 1 one rank's rows of one gradient are infinite. That step is skipped everywhere and the scale halved; after
    two good steps it doubles."""
    model, optimizer, scaler = make(stage, fused)
    scales = []
    for step in range(4):
        before = zero_fx.full_state_dict(model)
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        scaler.scale(model(x).float().square().sum()).backward()
        grads = {name: param.grad for name, param in model.named_parameters()}
        assert all(grad.dtype == torch.float32 for grad in grads.values())
        if step == 1 and rank == world - 1:
            grads["first.weight"]._local_tensor[0, 0] = float("inf")
        if clip:
            scaler.unscale_(optimizer)
            norm = model.clip_grad_norm_(0.1)
            assert step == 1 or norm < 50, f"the norm is of scaled gradients: {norm}"
            # At stage 0 gradients are equal on all ranks, unless a test edits them, and the first rank's are counted.
            assert norm.isfinite() or step == 1 and stage > 0, norm
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after = zero_fx.full_state_dict(model)
        is_same = all(torch.equal(before[name], after[name]) for name in before)
        assert is_same == (step == 1), f"step {step}: parameters {'did not move' if is_same else 'moved'}"
        scales.append(scaler.get_scale())
    assert scales == [1024.0, 512.0, 512.0, 1024.0], scales


def check_overflow(rank: int, world: int, stage: int) -> None:
    """A scale that float16 cannot hold on one rank's data: every rank lowers it until steps are taken again."""
    model, optimizer, scaler = make(stage, False, 2.0**20)
    before, scales = zero_fx.full_state_dict(model), []
    for _ in range(20):
        scaler.scale(model(torch.full((4, 6), 3.0 * (rank + 1))).float().square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    after = zero_fx.full_state_dict(model)
    assert scales[0] == 2.0**19 and min(scales) < 2.0**16, scales
    assert all(value.isfinite().all() for value in after.values())
    assert any(not torch.equal(before[name], after[name]) for name in before)


def check_partial(rank: int, world: int) -> str:
    model, optimizer, scaler = make(1, False)
    with model.no_sync():
        scaler.scale(model(torch.ones(4, 6)).float().sum()).backward()
    try:
        scaler.step(optimizer)
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"
