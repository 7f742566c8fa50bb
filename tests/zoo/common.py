"""What a model of the zoo is, and the random data and losses that they share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn


class Draw:
    """Random data of one micro-batch on one rank; the same wherever it is drawn again."""

    def __init__(self, rank: int, step: int, micro: int):
        self.rank, self.step, self.micro = rank, step, micro
        self.generator = torch.Generator().manual_seed(1 + micro + 10 * step + 1000 * rank)

    def normal(self, *shape: int, dtype=torch.float32) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=dtype)

    def tokens(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=self.generator)


def loss_of(output) -> Tensor:
    """A scalar that depends smoothly on every floating-point tensor in nested outputs, and unevenly on elements."""
    total = torch.zeros(())
    for leaf in leaves(output):
        if leaf.is_floating_point():
            weights = torch.arange(leaf.numel(), dtype=torch.float64).mul(0.7).cos().view(leaf.shape).to(leaf.dtype)
            value = leaf * weights + leaf.square() / 2
            total = total + (value.mean() if leaf.numel() else value.sum())
    return total


def leaves(output) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, dict):
        return [leaf for value in output.values() for leaf in leaves(value)]
    if dataclasses.is_dataclass(output):
        return [leaf for field in dataclasses.fields(output) for leaf in leaves(getattr(output, field.name))]
    if isinstance(output, (list, tuple)):
        return [leaf for value in output for leaf in leaves(value)]
    return []


def train(model: nn.Module, batch) -> Tensor:
    """One micro-batch: forward and backward. `batch` is a tensor, a tuple of arguments or a dict of keywords."""
    if isinstance(batch, dict):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, tuple) else model(batch)
    loss = loss_of(output)
    loss.backward()
    return loss.detach()


@dataclasses.dataclass(frozen=True)
class Case:
    """One model of the zoo and how it is trained.

    build: makes the plain model; called under a fixed seed.
    batch: data of one micro-batch, from a Draw.
    train: runs forward and backward of one micro-batch; returns what the plain and the sharded model must agree on.
    between: called before each step with (model, optimizer, step): unfreezes, switches to eval.
    micros: micro-batches of each step.
    options: of zero_fx.compile.
    quick: part of the run that developers repeat.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[Draw], object]
    train: Callable[[nn.Module, object], object] = train
    between: Callable[[nn.Module, torch.optim.Optimizer, int], None] | None = None
    micros: tuple[int, ...] = (1, 2, 2, 1)
    options: dict = dataclasses.field(default_factory=dict)
    quick: bool = False


def rows(width: int, count: int = 4) -> Callable[[Draw], Tensor]:
    """Batches of `count` vectors."""
    return lambda draw: draw.normal(count, width)


def tokens(high: int, length: int = 5, count: int = 3) -> Callable[[Draw], Tensor]:
    return lambda draw: draw.tokens(high, count, length)


def sequences(width: int, length: int = 5, count: int = 3) -> Callable[[Draw], Tensor]:
    return lambda draw: draw.normal(count, length, width)


def images(channels: int, size: int = 6, count: int = 4) -> Callable[[Draw], Tensor]:
    return lambda draw: draw.normal(count, channels, size, size)
