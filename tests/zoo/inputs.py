"""Inputs and outputs that are not plain tensors."""

from __future__ import annotations

import collections
import dataclasses

import torch
from torch import Tensor, nn

from .common import Case


@dataclasses.dataclass
class Result:
    """What a model may return: tensors, a number, nothing, and nested parts."""

    out: Tensor
    extra: dict
    count: int
    nothing: None = None


Pair = collections.namedtuple("Pair", "left right")


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 4)


class KeywordOnly(Base):
    def forward(self, *, x, bias=None, scale: float = 1.0):
        out = self.second(self.first(x).tanh()) * scale
        return out if bias is None else out + bias


class Nested(Base):
    """Dicts in lists in, dataclass out."""

    def forward(self, batch: dict):
        hidden = self.first(batch["x"]) + sum(part["x"] for part in batch["parts"])
        out = self.second(hidden)
        return Result(out, {"hidden": hidden, "pair": Pair(out[:2], [out[2:], 7])}, batch["count"])


class DataclassIn(Base):
    def forward(self, batch: Result):
        return self.second(self.first(batch.out) + batch.extra["y"])


class VarArgs(Base):
    def forward(self, *xs, **more):
        hidden = sum(self.first(x) for x in xs)
        return self.second(hidden + more.get("offset", 0)), None, "text"


class LossInside(Base):
    """The loss is computed in forward, as many models do."""

    def forward(self, x, target=None):
        out = self.second(self.first(x).relu())
        return {"loss": None if target is None else nn.functional.cross_entropy(out, target), "out": out}


class IntInput(Base):
    """A number that changes from call to call."""

    def forward(self, x, step: int):
        return self.second(self.first(x) * (1 + step))


def keyword_batch(draw):
    batch = {"x": draw.normal(4, 6)}
    if draw.step % 2:
        batch |= {"bias": draw.normal(4), "scale": 0.5}
    return batch


def nested_batch(draw):
    return ({"x": draw.normal(4, 6), "parts": [{"x": draw.normal(4, 6)} for _ in range(2)], "count": 3},)


def dataclass_batch(draw):
    return (Result(draw.normal(4, 6), {"y": draw.normal(4, 6)}, 1),)


def target_batch(draw):
    x = draw.normal(4, 6)
    return {"x": x, "target": draw.tokens(4, 4)} if draw.step % 2 == 0 else {"x": x}


CASES = [
    Case("keyword_only", KeywordOnly, keyword_batch),
    Case("nested_dicts", Nested, nested_batch),
    Case("dataclass_input", DataclassIn, dataclass_batch),
    Case("variadic", VarArgs, lambda d: tuple(d.normal(4, 6) for _ in range(1 + d.step % 2))),
    Case("loss_inside", LossInside, target_batch),
    Case("changing_number", IntInput, lambda d: (d.normal(4, 6), d.step)),
    Case("input_needs_grad", KeywordOnly, lambda d: {"x": d.normal(4, 6).requires_grad_()}),
    Case("half_batch", KeywordOnly, lambda d: {"x": d.normal(4, 6), "bias": torch.zeros(()) + d.micro}),
]
