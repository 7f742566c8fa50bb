"""Convolutions and norms with running statistics."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from .common import Case, images


def batch_norm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(),
        nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4, affine=False), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip


def group_norm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, groups=3), nn.GroupNorm(2, 6), nn.SiLU(), nn.ConvTranspose2d(6, 4, 2, stride=2),
        nn.InstanceNorm2d(4, affine=True), nn.MaxPool2d(2), nn.Conv2d(4, 2, 1),
    )  # fmt: skip


def conv1d() -> nn.Module:
    return nn.Sequential(nn.Conv1d(3, 5, 3), nn.Tanh(), nn.Conv1d(5, 2, 2))


class Residual(nn.Module):
    """Two branches, one of them in place."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.norm, self.branch = nn.BatchNorm2d(6), nn.Conv2d(6, 6, 3, padding=1)
        self.register_buffer("kernel", torch.ones(6, 1, 3, 3) / 9)

    def forward(self, x):
        x = self.stem(x)
        y = self.norm(self.branch(x))
        y += F.conv2d(x, self.kernel, padding=1, groups=6)
        return F.relu(y, inplace=True).mean((2, 3))


def eval_later(model, optimizer, step: int) -> None:
    model.train(step < 2)


CASES = [
    Case("batch_norm", batch_norm, images(3)),
    Case("batch_norm_eval", batch_norm, images(3), between=eval_later),
    Case("group_norm", group_norm, images(3)),
    Case("residual", Residual, images(3)),
    Case("conv1d", conv1d, lambda draw: draw.normal(4, 3, 9)),
]
