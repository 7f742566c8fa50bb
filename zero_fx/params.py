"""Each parameter's place on one rank, from shapes alone: how it is sharded, how long its full values live, its bytes."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import nn

from .capture import lifetime_of
from .config import Config
from .lowering import ADAM_STATES
from .precision import cast_params, kept_modules
from .runtime.layout import owned_rows
from .runtime.state import ModelState
from .vocabulary import STEP, WHOLE


@dataclasses.dataclass(frozen=True)
class ParamRow:
    """One parameter. lifetime: "whole", "step" or "use", see runtime/markers.py. rows: of dimension 0 that this rank owns.

    used_dtype: in which it is gathered and computed in; another than `dtype` in mixed precision.
    local_bytes: of this rank's rows, in `dtype`; full_bytes: of all. trains: whether it has a gradient and optimizer states.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    used_dtype: torch.dtype
    lifetime: str
    trains: bool
    rows: int
    local_bytes: int
    full_bytes: int

    @property
    def placement(self) -> str:
        return "Replicate()" if self.lifetime == WHOLE else "Shard(0)"

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def rows_of_model(model: nn.Module, config: Config, world: int, rank: int) -> tuple[ParamRow, ...]:
    """Of a plain model, as `rank` of `world` ranks would have it."""
    precision = config.precision
    cast = set() if precision is None else cast_params(model, precision, kept_modules(model, precision))
    rows = []
    for name, param in model.named_parameters():
        used = precision.compute if param in cast else param.dtype
        rows.append(make_row(name, param, used, lifetime_of(param, config), world, rank))
    return tuple(rows)


def rows_of_state(state: ModelState) -> tuple[ParamRow, ...]:
    """Of a compiled model."""
    return tuple(
        make_row(p.name, p.param, p.compute_dtype or p.param.dtype, p.lifetime, state.world, state.rank)
        for p in state.params.values()
    )


def make_row(name: str, param: nn.Parameter, used_dtype: torch.dtype, lifetime: str, world: int, rank: int) -> ParamRow:
    shape, dtype = tuple(param.shape), param.dtype
    full = math.prod(shape) * dtype.itemsize
    if lifetime == WHOLE:
        rows, local = shape[0] if shape else 1, full
    else:
        rows = owned_rows(shape[0], world, rank)[1]
        local = full // shape[0] * rows
    return ParamRow(name, shape, dtype, used_dtype, lifetime, param.requires_grad, rows, local, full)


def resident_bytes(rows: tuple[ParamRow, ...]) -> int:
    """Of a rank's own parameters and of the states that Adam has for them."""
    return sum(row.local_bytes * (1 + ADAM_STATES * row.trains) for row in rows)


def held_bytes(rows: tuple[ParamRow, ...], world: int) -> int:
    """Of the gathered parameters that stages 1 and 2 hold through a step, padding included."""
    found = [row for row in rows if row.lifetime == STEP]
    return sum(row.elements // row.shape[0] * -(-row.shape[0] // world) * world * row.used_dtype.itemsize for row in found)
