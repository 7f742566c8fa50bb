"""Ordinary modules: shared, repeated, nested, frozen and unused ones."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from .common import Case, loss_of, rows, tokens


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


class TiedHead(nn.Module):
    """Embedding and output head are one parameter."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.inner = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.inner(self.embed(x)).tanh())


class Repeated(nn.Module):
    """One layer applied several times."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, x):
        for _ in range(4):
            x = self.norm(x + self.layer(x).tanh())
        return x


class TwoNames(nn.Module):
    """One submodule under two names, and two modules that share only a weight."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.again = self.first
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)
        self.right.weight = self.left.weight

    def forward(self, x):
        return self.right(self.left(self.again(self.first(x).tanh())).tanh())


class SharedBlocks(nn.Module):
    """The same Linear inside every block of a list."""

    def __init__(self):
        super().__init__()
        shared = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(nn.ModuleDict({"mix": shared, "own": nn.Linear(6, 6)}) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = x + block["own"](block["mix"](x).tanh())
        return x


class PartlyFrozen(nn.Module):
    """A frozen encoder whose outputs go through operators with several results, and a trainable head."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(6, 10).requires_grad_(False)
        self.bias_only = nn.Linear(5, 5)
        self.bias_only.weight.requires_grad_(False)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        left, right = self.encoder(x).split(5, dim=-1)
        values, _ = torch.stack([left, right]).max(dim=0)
        return self.head(self.bias_only(values))


class Unused(nn.Module):
    """A layer that is never used, and one used only when asked for."""

    def __init__(self):
        super().__init__()
        self.main, self.extra, self.never = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x, with_extra: bool):
        x = self.main(x)
        return self.extra(x).tanh() if with_extra else x.tanh()


class ParamLists(nn.Module):
    """Parameters in a ParameterList and a ParameterDict."""

    def __init__(self):
        super().__init__()
        self.mats = nn.ParameterList(torch.randn(6, 6) * 0.3 for _ in range(3))
        self.named = nn.ParameterDict({"scale": torch.ones(6), "shift": torch.zeros(6)})

    def forward(self, x):
        for mat in self.mats:
            x = (x @ mat).tanh()
        return x * self.named["scale"] + self.named["shift"]


class Router(nn.Module):
    """Top-2 of 4 experts, every expert run and masked: no branch depends on data."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(6, 4)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x):
        scores = self.gate(x).softmax(-1)
        top, index = scores.topk(2, dim=-1)
        weights = torch.zeros_like(scores).scatter(-1, index, top)
        return sum(weights[:, i : i + 1] * expert(x).relu() for i, expert in enumerate(self.experts))


class Buffers(nn.Module):
    """Buffers that forward replaces and edits, one of them not in the state dict."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(6), persistent=False)

    def forward(self, x):
        self.calls += 1
        out = self.layer(x) - self.mean
        with torch.no_grad():
            self.mean = self.mean * 0.9 + out.mean(0) * 0.1
        return out.tanh()


class Hooked(nn.Module):
    """Forward hooks and pre-hooks on submodules, and a hook on an activation's gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.first.register_forward_hook(lambda module, args, out: out * 2)
        self.second.register_forward_pre_hook(lambda module, args: (args[0].tanh(),))

    def forward(self, x):
        x = self.first(x)
        x.register_hook(lambda grad: grad * 0.5)
        return self.second(x)


class Mixture(nn.Module):
    """Less common layers, each with parameters of other shapes."""

    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(13, 6, mode="sum")
        self.bilinear = nn.Bilinear(6, 6, 5)
        self.norms = nn.Sequential(nn.RMSNorm(5), nn.PReLU(), nn.LayerNorm(5))
        self.table = nn.Embedding(13, 6, padding_idx=0)

    def forward(self, x):
        bag = self.bag(x)
        return self.norms(self.bilinear(bag, self.table(x).mean(1)))


class DataDependent(nn.Module):
    """Sizes that depend on the data."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        x = self.inner(x)
        chosen = x[x[:, 0] > -0.5]
        return self.head(x).sum() + self.head(chosen).square().sum()


class StopGradient(nn.Module):
    """Weights used under no_grad and through detach beside their ordinary use."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        with torch.no_grad():
            target = self.layer(x).tanh()
        return F.mse_loss(self.layer(x), target) + F.linear(x, self.head.weight.detach(), self.head.bias).sum() * 0.1


class MixedDtypes(nn.Module):
    """Parameters of two types in one model."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(6, 6).double(), nn.Linear(6, 6)

    def forward(self, x):
        return self.narrow(self.wide(x.double()).tanh().float())


def train_sometimes(model, batch):
    x, with_extra = batch
    loss = loss_of(model(x, with_extra))
    loss.backward()
    return loss.detach()


def flip_modes(model, optimizer, step: int) -> None:
    model.train(step % 2 == 0)


def dropout_net() -> nn.Module:
    inner = nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.2)
    return nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), *inner, nn.Linear(16, 3))


CASES = [
    Case("mlp", mlp, rows(6)),
    Case("mlp_some_whole", mlp, rows(6), options={"keep_whole_below": 33}, quick=True),
    Case("mlp_all_whole", mlp, rows(6), options={"keep_whole_below": 4096}),
    Case("one_linear", lambda: nn.Linear(6, 4), rows(6), micros=(1, 2, 1)),
    Case("tied_head", TiedHead, tokens(11), quick=True),
    Case("repeated_layer", Repeated, rows(6)),
    Case("two_names", TwoNames, rows(6)),
    Case("shared_blocks", SharedBlocks, rows(6)),
    Case("partly_frozen", PartlyFrozen, rows(6)),
    Case("unused_some_steps", Unused, lambda d: (d.normal(4, 6), d.step % 2 == 1), train_sometimes, quick=True),
    Case("unused_some_micros", Unused, lambda d: (d.normal(4, 6), d.micro == 1), train_sometimes),
    Case("unused_last_micro", Unused, lambda d: (d.normal(4, 6), d.micro == 0), train_sometimes),
    Case("param_lists", ParamLists, rows(6)),
    Case("router", Router, rows(6)),
    Case("edited_buffers", Buffers, rows(6)),
    Case("hooked", Hooked, rows(6)),
    Case("mixture", Mixture, tokens(13)),
    Case("data_dependent", DataDependent, rows(6)),
    Case("stop_gradient", StopGradient, rows(6)),
    Case("mixed_dtypes", MixedDtypes, rows(6)),
    Case("dropout", dropout_net, rows(6)),
    Case("dropout_flips", dropout_net, rows(6), between=flip_modes),
]
