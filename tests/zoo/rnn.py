"""Recurrent networks: Dynamo does not trace them, and they keep their weights in a list of their own."""

from __future__ import annotations

import copy

import torch
from torch import nn

from .common import Case, sequences


class Recurrent(nn.Module):
    """Linear, recurrent layer, Linear."""

    def __init__(self, kind, **options):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.inner = kind(6, 5, batch_first=True, **options)
        self.head = nn.LazyLinear(3)
        self.head(self.inner(torch.zeros(1, 2, 6))[0])  # gives the lazy layer its shape

    def forward(self, x):
        return self.head(self.inner(self.first(x))[0])


class Copied(nn.Module):
    """A recurrent layer and a deep copy of it, which train apart."""

    def __init__(self):
        super().__init__()
        self.one = nn.LSTM(6, 6, batch_first=True)
        self.two = copy.deepcopy(self.one)

    def forward(self, x):
        return self.one(x)[0] + self.two(x.tanh())[0]


class Packed(nn.Module):
    """Sequences of different lengths, packed."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.GRU(6, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3, 2]), batch_first=True)
        return self.head(nn.utils.rnn.pad_packed_sequence(self.inner(packed)[0], batch_first=True)[0])


class Cells(nn.Module):
    """A cell stepped by hand."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTMCell(6, 5), nn.Linear(5, 3)

    def forward(self, x):
        state = None
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        return self.head(state[0])


CASES = [
    Case("lstm", lambda: Recurrent(nn.LSTM), sequences(6), quick=True),
    Case("gru", lambda: Recurrent(nn.GRU), sequences(6)),
    Case("rnn", lambda: Recurrent(nn.RNN), sequences(6)),
    Case("lstm_deep", lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True, proj_size=3), sequences(6)),
    Case("lstm_root", lambda: nn.LSTM(6, 5), sequences(6)),
    Case("lstm_copied", Copied, sequences(6)),
    Case("gru_packed", Packed, sequences(6)),
    Case("lstm_cell", Cells, sequences(6)),
]
