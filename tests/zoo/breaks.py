"""Code that Dynamo does not capture whole: graph breaks, disabled submodules, methods other than forward."""

from __future__ import annotations

import torch
from torch import nn

from .common import Case, loss_of, rows


class Broken(nn.Module):
    """A graph break between two uses of a weight."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        x = self.layer(x).tanh()
        torch._dynamo.graph_break()
        return self.head(self.layer(x))


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    @torch._dynamo.disable
    def forward(self, x):
        return self.layer(x).tanh()


class Disabled(nn.Module):
    """A submodule that is never captured, whose weight the captured part uses as well."""

    def __init__(self):
        super().__init__()
        self.first, self.inner, self.head = nn.Linear(6, 6), Inner(), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.inner(self.first(x))) + x @ self.inner.layer.weight[:3].t()


class AllDisabled(nn.Module):
    """Nothing is captured."""

    def __init__(self):
        super().__init__()
        self.inner = Inner()

    @torch._dynamo.disable
    def forward(self, x):
        return self.inner(x)


class Prints(nn.Module):
    """A branch on a value, and a call that Dynamo cannot trace."""

    def __init__(self):
        super().__init__()
        self.layer, self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        x = self.layer(x)
        if x.isnan().any().item():
            return self.left(x)
        repr(x.tolist())
        return self.right(x.tanh())


class Encoder(nn.Module):
    """Methods beside forward."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 3)

    def encode(self, x):
        return self.body(x)

    def forward(self, x):
        return self.head(self.encode(x))


class TwiceBroken(nn.Module):
    """An encoder applied twice, with a graph break between."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4))

    def forward(self, a, b):
        left = self.encoder(a)
        torch._dynamo.graph_break()
        return left * 2 + self.encoder(b)


class Raises(nn.Module):
    """Forward catches an exception of its own."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        try:
            return self.head(self.check(self.layer(x)))
        except KeyError:
            return self.head(self.layer(x).tanh())

    def check(self, x):
        raise KeyError("always")


def train_encode(model, batch):
    loss = loss_of(model.encode(batch))
    loss.backward()
    return loss.detach()


def train_both(model, batch):
    """A whole forward and another method in one backward pass."""
    loss = loss_of(model(batch)) + loss_of(model.encode(batch * 2))
    loss.backward()
    return loss.detach()


def train_submodules(model, batch):
    """User code calls the submodules itself."""
    loss = loss_of(model.head(model.body[1](model.body[0](batch))))
    loss.backward()
    return loss.detach()


def train_turns(model, batch):
    """A backward pass each for a whole forward and a method, in one micro-batch."""
    first = loss_of(model.encode(batch))
    first.backward()
    second = loss_of(model(batch))
    second.backward()
    return first.detach(), second.detach()


CASES = [
    Case("graph_break", Broken, rows(6), quick=True),
    Case("disabled_submodule", Disabled, rows(6)),
    Case("all_disabled", AllDisabled, rows(6)),
    Case("prints", Prints, rows(6)),
    Case("method", Encoder, rows(6), train_encode),
    Case("method_and_forward", Encoder, rows(6), train_both),
    Case("submodules", Encoder, rows(6), train_submodules),
    Case("method_then_forward", Encoder, rows(6), train_turns, micros=(1, 1, 1)),
    Case("encoder_twice_broken", TwiceBroken, lambda draw: (draw.normal(4, 6), draw.normal(4, 6))),
    Case("raises_inside", Raises, rows(6)),
]
