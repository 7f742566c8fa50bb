"""Weights that are read, returned, edited or computed in unusual places."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from .common import Case, images, loss_of, rows, tokens


class ParentReads(nn.Module):
    """The parent reads a weight of a child whose forward never runs."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 6), nn.Linear(6, 11)

    def forward(self, x):
        hidden = self.embed(x).tanh()
        return hidden @ self.head.weight.t() + self.head.bias


class ReturnsWeight(nn.Module):
    """A weight, and a view of it, are outputs."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x):
        return {"out": self.layer(x), "weight": self.layer.weight, "row": self.layer.weight[0]}


class Regularised(nn.Module):
    """The loss has a term of the weights alone."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        penalty = sum(module.weight.square().sum() for module in (self.layer, self.head))
        return loss_of(self.head(self.layer(x).tanh())) + 0.01 * penalty


class CastWeights(nn.Module):
    """Weights cast, transposed, sliced and joined before their use."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 8) * 0.3)
        self.other = nn.Parameter(torch.randn(8, 5) * 0.3)

    def forward(self, x):
        joined = torch.cat([self.weight[:, :4], self.other.t()[:, :3].new_zeros(6, 4), self.weight[:, 4:]], dim=1)
        mixed = (x @ joined).tanh()[:, :8] @ self.other.double().float()
        return mixed + x[:, :5] @ self.weight.t()[:5, :5]


class MaskedLinear(nn.Module):
    """A pruned layer: the mask is applied to the weight in every forward, out of place."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 6))
        self.register_buffer("mask", (torch.arange(30).view(5, 6) % 3 > 0).float())

    def forward(self, x):
        return F.linear(x, self.weight * self.mask)


class Orthogonal(nn.Module):
    """A user's own parametrization beside PyTorch's."""

    class Skew(nn.Module):
        def forward(self, x):
            return x.triu(1) - x.triu(1).t()

    def __init__(self):
        super().__init__()
        self.skew, self.orthogonal = nn.Linear(6, 6), parametrizations.orthogonal(nn.Linear(6, 4))
        parametrize.register_parametrization(self.skew, "weight", Orthogonal.Skew())

    def forward(self, x):
        return self.orthogonal(self.skew(x).tanh())


class Scaled(torch.autograd.Function):
    """A user's autograd function that saves a weight."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


class CustomFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(6, 6) * 0.4), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(Scaled.apply(x, self.weight).tanh())


class Strided(nn.Module):
    """Parameters that are not contiguous when the model is compiled."""

    def __init__(self):
        super().__init__()
        self.turned = nn.Parameter(torch.randn(6, 5).t())
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.head = nn.Linear(4, 5)

    def forward(self, x):
        return self.head(self.conv(x).mean((2, 3))) @ self.turned


class Properties(nn.Module):
    """A class with a property, slots of its own, `__getattr__` and a cached weight product."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.tensor([0.5, 2.0]))

    @property
    def product(self):
        return self.inner.weight * self.scale[0]

    def __getattr__(self, name: str):
        if name == "alias":
            return self.inner
        return super().__getattr__(name)

    def forward(self, x):
        return F.linear(x, self.product, self.alias.bias) * self.scale[1]


class DefaultGetattr(nn.Module):
    """Parameters reached by getattr and setattr with names, as generated code does."""

    def __init__(self):
        super().__init__()
        for i in range(3):
            self.register_parameter(f"w{i}", nn.Parameter(torch.randn(6, 6) * 0.3))
        self.register_parameter("none", None)

    def forward(self, x):
        for i in range(3):
            x = (x @ getattr(self, f"w{i}")).relu()
        return x if self.none is None else x + self.none


class Vmapped(nn.Module):
    """An ensemble through torch.func.vmap over stacked weights."""

    def __init__(self):
        super().__init__()
        self.stack = nn.Parameter(torch.randn(3, 6, 4) * 0.4)

    def forward(self, x):
        return torch.vmap(lambda weight: (x @ weight).tanh())(self.stack)


def normed(norm):
    """A convolution under a weight norm, an activation, and a linear layer under the same."""

    def build():
        return nn.Sequential(norm(nn.Conv2d(3, 5, 3)), nn.Tanh(), nn.Flatten(), norm(nn.Linear(80, 3)))

    return build


def read_from_outside(model, batch):
    """User code reads the head's weight itself."""
    hidden = model.embed(batch).tanh()
    loss = loss_of(hidden @ model.head.weight.t()) + loss_of(model(batch))
    loss.backward()
    return loss.detach()


CASES = [
    Case("parent_reads_weight", ParentReads, tokens(11), quick=True),
    Case("user_reads_weight", ParentReads, tokens(11), read_from_outside),
    Case("returns_weight", ReturnsWeight, rows(6)),
    Case("regularised", Regularised, rows(6)),
    Case("cast_weights", CastWeights, rows(6)),
    Case("masked_linear", MaskedLinear, rows(6)),
    Case("orthogonal", Orthogonal, rows(6)),
    Case("custom_function", CustomFunction, rows(6)),
    Case("strided", Strided, images(3)),
    Case("properties", Properties, rows(6)),
    Case("getattr_names", DefaultGetattr, rows(6)),
    Case("vmapped", Vmapped, rows(6)),
    Case("weight_norm", normed(parametrizations.weight_norm), images(3)),
    Case("weight_norm_by_hook", normed(nn.utils.weight_norm), images(3), micros=(1, 1, 1)),
    Case("spectral_norm", normed(parametrizations.spectral_norm), images(3)),
    Case("spectral_norm_by_hook", normed(nn.utils.spectral_norm), images(3), micros=(1, 1, 1)),
]
