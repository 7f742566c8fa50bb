"""Awkward sizes: of parameters, and of inputs that change or differ between ranks."""

from __future__ import annotations

import torch
from torch import nn

from .common import Case, rows, sequences, tokens


class Odd(nn.Module):
    """Prime sizes, fewer rows than ranks, one element, none, no dimension, and many dimensions."""

    def __init__(self):
        super().__init__()
        self.prime, self.few, self.one = nn.Linear(7, 13), nn.Linear(13, 2), nn.Linear(2, 1)
        self.scalar, self.single = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.ones(1))
        self.cube = nn.Parameter(torch.randn(3, 1, 5, 1, 2) * 0.3)
        self.nothing = nn.Linear(7, 0)

    def forward(self, x):
        empty = self.nothing(x)
        y = self.one(self.few(self.prime(x).tanh()))
        return y * self.scalar + self.single * self.cube.sum() + empty.sum()


class ScalarOnly(nn.Module):
    """Nothing but a number."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        return x * self.scale


class EmptyOnly(nn.Module):
    """A layer without elements, bias too, whose output is used."""

    def __init__(self):
        super().__init__()
        self.empty, self.back, self.layer = nn.Linear(8, 0, bias=False), nn.Linear(0, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.layer(x + self.back(self.empty(x)))


class Tagger(nn.Module):
    """A token model whose sequence length may change."""

    def __init__(self):
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(101, 8), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x):
        x = self.embed(x)
        return self.head(self.inner(x).tanh() + x.mean(1, keepdim=True))


class Prefix(nn.Module):
    """Learned positions, sliced to the length of the input."""

    def __init__(self):
        super().__init__()
        self.positions, self.layer = nn.Parameter(torch.randn(9, 6)), nn.Linear(6, 6)

    def forward(self, x):
        return self.layer(x + self.positions[: x.shape[1]]).tanh()


def changing(draw):
    return draw.tokens(101, 3, 4 + draw.step * 2 + draw.micro)


def per_rank(draw):
    return draw.tokens(101, 3, 4 + draw.rank * 3)


def one_rank_changes(draw):
    return draw.tokens(101, 3, 4 + (draw.step if draw.rank else 0))


CASES = [
    Case("odd_sizes", Odd, rows(7), quick=True),
    Case("odd_sizes_some_whole", Odd, rows(7), options={"keep_whole_below": 20}),
    Case("scalar_only", ScalarOnly, rows(6)),
    Case("empty_layer", EmptyOnly, rows(8)),
    Case("prime_vocabulary", Tagger, tokens(101)),
    Case("changing_lengths", Tagger, changing, micros=(1, 1, 2, 2, 1)),
    Case("changing_lengths_dynamic", Tagger, changing, options={"dynamic": True}),
    Case("changing_lengths_static", Tagger, changing, options={"dynamic": False}, micros=(1, 1, 1)),
    Case("lengths_per_rank", Tagger, per_rank),
    Case("one_rank_changes_length", Tagger, one_rank_changes, micros=(1, 1, 2, 2, 1)),
    Case("sliced_positions", Prefix, lambda draw: draw.normal(3, 4 + draw.step, 6)),
    Case("one_row_batch", Tagger, lambda draw: draw.tokens(101, 1 + draw.step % 2, 5)),
    Case("empty_batch", Tagger, lambda draw: draw.tokens(101, 0 if draw.rank == 1 and draw.step == 1 else 3, 5)),
    Case("sequences", lambda: nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3)), sequences(7)),
]
