"""More than one model, dropout and other random numbers, and text generation."""

from __future__ import annotations

import copy

import parity
import torch
import torch.distributed as dist
import zoo
from parity import Twin
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint
from zoo.common import Draw, loss_of

import zero_fx

from .api import train_twin


def two_layers(*sizes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(*sizes[:2]), nn.Tanh(), nn.Linear(*sizes[1:]))


def check_adversaries(rank: int, world: int, stages: tuple[int, int]) -> None:
    """Two models trained against each other; the second one's step runs backward through the first."""
    torch.manual_seed(0)
    made = Twin(two_layers(3, 6, 4), stage=stages[0], lowering="eager")
    judge = Twin(two_layers(4, 5, 1), stage=stages[1], lowering="eager")
    for step in range(3):
        draw = Draw(rank, step, 0)
        noise, real = draw.normal(4, 3), draw.normal(4, 4)
        losses = []
        for generator, critic in ((made.plain, judge.plain), (made.sharded, judge.sharded)):
            loss = loss_of(critic(generator(noise).detach())) - loss_of(critic(real))
            loss.backward()
            losses.append(loss.detach())
        assert all(param.grad is None for param in made.sharded.parameters())
        judge.step()
        for generator, critic in ((made.plain, judge.plain), (made.sharded, judge.sharded)):
            loss = -critic(generator(noise)).mean()
            loss.backward()
            losses.append(loss.detach())
        made.step()
        judge.average_grads()
        judge.compare_grads()
        for optimizer in judge.optimizers:
            optimizer.zero_grad()
        parity.check_losses([losses[1], losses[3]], [losses[0], losses[2]])


def check_strangers(rank: int, world: int) -> None:
    """Two models in one process that share nothing: stage, group and precision differ. Steps interleave."""
    mesh = DeviceMesh.from_group(dist.new_group(list(range(world))), "cpu")
    torch.manual_seed(0)
    wide = Twin(zoo.plain.mlp().double(), stage=3, lowering="eager", mesh=mesh, group=mesh.get_group())
    low = Twin(zoo.plain.mlp().bfloat16(), stage=1, lowering="eager")
    for step in range(3):
        draw = Draw(rank, step, 0)
        x = draw.normal(4, 6)
        for twin, dtype in ((wide, torch.float64), (low, torch.bfloat16)):
            losses = [loss_of(model(x.to(dtype))) for model in (twin.plain, twin.sharded)]
            torch.testing.assert_close(losses[1], losses[0], rtol=2e-2, atol=2e-2)
            for loss in losses:
                loss.backward()
            twin.average_grads()
        wide.compare_grads(rtol=1e-10, atol=1e-12)
        low.compare_grads(rtol=5e-2, atol=2e-2)
        for twin in (low, wide):
            for optimizer in twin.optimizers:
                optimizer.step()
                optimizer.zero_grad()
        wide.compare_params(rtol=1e-10, atol=1e-12)
        low.compare_params(rtol=5e-2, atol=5e-2)


def check_part(rank: int, world: int, stage: int) -> None:
    """Only a submodule is compiled; the user's outer model has parameters of its own."""
    torch.manual_seed(0)
    inner, plain_head, x = zoo.plain.mlp(), nn.Linear(4, 2), Draw(rank, 0, 0).normal(4, 6)
    twin = Twin(inner, stage=stage, lowering="eager")
    outer = nn.Sequential(twin.sharded, copy.deepcopy(plain_head))
    for model in (nn.Sequential(twin.plain, plain_head), outer):
        loss_of(model(x).tanh()).backward()
    twin.step()
    torch.testing.assert_close(outer[1].weight.grad, plain_head.weight.grad, rtol=parity.RTOL, atol=parity.ATOL)


# --- random numbers


class Masked(nn.Module):
    """Dropout of its input times ones: the mask shows in the output, in the input's and in the weight's gradient."""

    def __init__(self, checkpointed: bool):
        super().__init__()
        self.weight, self.checkpointed = nn.Parameter(torch.ones(8, 16)), checkpointed

    def inner(self, x):
        return nn.functional.dropout(x * self.weight, 0.5, self.training)

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x)


def check_masks(rank: int, world: int, stage: int, lowering: str, checkpointed: bool) -> None:
    model = zero_fx.compile(Masked(checkpointed), stage, lowering=lowering, keep_whole_below=0, timeout_s=60)
    torch.manual_seed(rank)
    previous = None
    for _ in range(3):
        x = torch.ones(8, 16, requires_grad=True)
        out = model(x)
        out.sum().backward()
        assert set(out.unique().tolist()) == {0.0, 2.0}
        assert torch.equal(out, x.grad), "backward drew another mask than forward"
        mean = out.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        torch.testing.assert_close(model.get_parameter("weight").grad.full_tensor(), mean)
        assert previous is None or not torch.equal(out, previous), "the same mask twice"
        previous = out.detach().clone()
        model.zero_grad()


class Noisy(nn.Module):
    """Samples inside forward, as variational models do."""

    def __init__(self):
        super().__init__()
        self.mean, self.spread, self.out = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(4, 6)

    def forward(self, x):
        z = self.mean(x) + self.spread(x).exp() * torch.randn_like(self.mean(x))
        keep = torch.rand(z.shape) > 0.3
        return self.out(nn.functional.dropout(z * keep, 0.2, self.training))


def check_seed(rank: int, world: int, stage: int, lowering: str) -> None:
    """The same seed gives the same gradients, another seed others; ranks may have different seeds."""
    torch.manual_seed(0)
    model = zero_fx.compile(Noisy(), stage, lowering=lowering, keep_whole_below=0, timeout_s=60)
    x, grads = Draw(rank, 0, 0).normal(4, 6), []
    model(x).sum().backward()  # compiles
    for seed in (1, 1, 2):
        model.zero_grad()
        torch.manual_seed(seed * 100 + rank)
        loss_of(model(x)).backward()
        grads.append(torch.cat([param.grad.full_tensor().flatten() for param in model.parameters()]))
    assert grads[0].isfinite().all() and torch.equal(grads[0], grads[1]) and not torch.equal(grads[0], grads[2])


def check_generate(rank: int, world: int, name: str, stage: int) -> None:
    """Greedy generation equals the plain model's, before training and after a step."""
    torch.manual_seed(0)
    case = zoo.CASES[name]
    twin = Twin(case.build().eval(), stage=stage, lowering="eager")
    prompt = Draw(0, 0, 0).tokens(36, 2, 4) + 1
    for _ in range(2):
        with torch.no_grad():
            models = twin.plain, twin.sharded
            want, got = (model.generate(prompt, max_new_tokens=3, do_sample=False) for model in models)
        assert torch.equal(got, want), f"{got}, expected {want}"
        train_twin(twin, name, rank, 1)
