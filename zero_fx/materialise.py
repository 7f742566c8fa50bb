"""Give a model on the meta device its values, of which each rank keeps its own rows.

Module by module: the most that is whole at any time is one block, or the largest module of a model without blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .blocks import most_at_once, tensors_of, units
from .capture import lifetime_of
from .config import Config
from .runtime.layout import own_copy, owned_rows, part_of
from .runtime.markers import WHOLE
from .setup import broadcast_values
from .torch_compat import watch_writes

LOAD = "load"
KINDS = ("_parameters", "_buffers")
ALIGNED = 64  # bytes


@dataclasses.dataclass(frozen=True)
class Materialised:
    """rows: this rank's memory for its part of each parameter that was on the meta device. unset: names of parameters and
    persistent buffers that nothing has set yet."""

    rows: dict[nn.Parameter, torch.Tensor]
    unset: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Slot:
    """Where a module has a tensor of its own: owner is its `_parameters` or `_buffers`."""

    module: nn.Module
    kind: str
    key: str
    name: str  # in the whole model

    @property
    def owner(self) -> dict[str, torch.Tensor | None]:
        return getattr(self.module, self.kind)

    @property
    def is_lost(self) -> bool:
        """Whether no checkpoint has its value."""
        return self.kind == "_buffers" and self.key in self.module._non_persistent_buffers_set


def check_init(init) -> None:
    if not (init is None or init == LOAD or callable(init)):
        raise TypeError(f"init={init!r}: expected None, {LOAD!r}, or a function that is given a module")


@torch.no_grad()
def materialise(model: nn.Module, init, config: Config, mesh: DeviceMesh, device: torch.device) -> Materialised:
    """Replace the buffers of `model` on the meta device, in place, and return what its parameters are to become.

    init: as in zero_fx.compile. Raises ValueError where it does what cannot be done module by module, or leaves a buffer
    without a value that no checkpoint has.
    """
    names = {id(module): name for name, module in model.named_modules()}
    todo = {module for module in model.modules() if any(tensor.is_meta for tensor in tensors_of(module))}
    if not todo:
        if init is not None:
            raise ValueError(f"init={init!r} has an effect on a model on the meta device only; this one has its values")
        return Materialised({})
    parts = [[module for module in unit if module in todo] for unit in units(model, most_at_once(model))]
    maker = Maker(init, config, mesh, device, 0 if init == LOAD else max(map(room, parts)))
    try:
        for unit in parts:
            maker.make(unit, names)
        maker.check_buffers()
    except BaseException:
        maker.undo()
        raise
    return Materialised(maker.rows, tuple(maker.unset))


def room(unit: list[nn.Module]) -> int:
    """Bytes that the full parameters of its modules need."""
    params = {param for module in unit for param in module._parameters.values() if param is not None and param.is_meta}
    return sum(aligned(param.nbytes) for param in params)


def aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


class Maker:
    """What is made so far. `before`: (slot, tensor on the meta device), to go back to after an error.

    One piece of memory is for the full parameters of every unit: an allocator that gets the rows of one unit between the full
    parameters of two would not be able to use the space of the first for the second.
    """

    def __init__(self, init: str | Callable | None, config: Config, mesh: DeviceMesh, device: torch.device, size: int):
        self.init, self.config, self.mesh, self.device = init, config, mesh, device
        self.memory, self.used = torch.empty(size, dtype=torch.uint8, device=device), 0
        self.rows: dict[nn.Parameter, torch.Tensor] = {}
        self.buffers: dict[torch.Tensor, torch.Tensor] = {}  # {on the meta device: its values}
        self.unset: dict[str, None] = {}
        self.lost: dict[str, nn.Module] = {}  # buffers without a value that no checkpoint has, and their owners
        self.before: list[tuple[Slot, torch.Tensor]] = []
        self.written: set[int] = set()  # addresses of storages

    def make(self, unit: list[nn.Module], names: dict[int, str]) -> None:
        slots = [
            Slot(module, kind, key, f"{names[id(module)]}.{key}".lstrip("."))
            for module in unit for kind in KINDS for key, tensor in getattr(module, kind).items()
            if tensor is not None and tensor.is_meta
        ]  # fmt: skip
        metas = [slot.owner[slot.key] for slot in slots]
        self.before += zip(slots, metas)
        if self.init == LOAD:
            return self.leave(slots, metas)
        self.used, full = 0, {}
        for slot, meta in zip(slots, metas):
            if meta not in full:
                full[meta] = self.whole(slot, meta)
            slot.owner[slot.key] = full[meta]
        for module in unit:
            self.run(module, names[id(module)])
        for slot, meta in zip(slots, metas):
            self.take(slot, meta, full[meta])

    def leave(self, slots: list[Slot], metas: list[torch.Tensor]) -> None:
        """Memory for what will be loaded."""
        for slot, meta in zip(slots, metas):
            if slot.kind == "_parameters":
                if meta not in self.rows:
                    self.rows[meta] = unset_like(self.part(meta, meta), self.device)
            else:
                slot.owner[slot.key] = self.buffers.setdefault(meta, unset_like(meta, self.device))
            self.note_unset(slot)

    def whole(self, slot: Slot, meta: torch.Tensor) -> torch.Tensor:
        """The full tensor to set, which has the values of one that was made in another unit with which it is shared."""
        if slot.kind == "_buffers":
            return self.buffers.setdefault(meta, unset_like(meta, self.device))
        own = self.memory[self.used : self.used + meta.nbytes].view(meta.dtype)
        values = own.as_strided(meta.shape, torch.empty_like(meta).stride(), own.storage_offset()).fill_(float("nan"))
        self.used += aligned(meta.nbytes)
        if meta in self.rows:
            self.gather(meta, values)
        param = nn.Parameter(values, requires_grad=meta.requires_grad)
        param.__dict__.update(vars(meta))  # which an init may look at
        return param

    def gather(self, meta: torch.Tensor, values: torch.Tensor) -> None:
        """Into `values`, from all ranks' rows."""
        if lifetime_of(meta, self.config) == WHOLE:
            values.copy_(self.rows[meta])
            return
        for rank in range(self.mesh.size()):
            part = values.narrow(0, *owned_rows(len(values), self.mesh.size(), rank))
            if rank == self.mesh.get_local_rank():
                part.copy_(self.rows[meta])
            broadcast_values(part, self.mesh, rank)

    def run(self, module: nn.Module, name: str) -> None:
        call = self.init
        if call is None:
            call = getattr(type(module), "reset_parameters", None) or getattr(type(module), "_reset_parameters", None)
        if call is None:
            return
        what = f"{'init' if self.init else call.__name__} of {name or 'the model'} ({type(module).__name__})"

        def note(tensor: torch.Tensor) -> None:
            if tensor.is_meta:
                raise ValueError(
                    f"{what} writes to a tensor of shape {tuple(tensor.shape)} of another module, whose values are cut "
                    "already: a model on the meta device is materialised module by module, children first. Give "
                    "zero_fx.compile init=, a function that sets what the module it is given has"
                )
            self.written.add(tensor.untyped_storage().data_ptr())

        with watch_writes(note):
            call(module)

    def take(self, slot: Slot, meta: torch.Tensor, made: torch.Tensor) -> None:
        """Keep what init left in a slot: in the tensor `made`, or in another that it put there."""
        value = slot.owner[slot.key]
        if value is None or value.shape != meta.shape or value.dtype != meta.dtype or value.device != made.device:
            raise ValueError(f"init left {described(value)} as {slot.name!r}: expected {described(made)}")
        if self.config.sync_module_states:
            broadcast_values(value, self.mesh)
        if is_unset(value, value is made and value.untyped_storage().data_ptr() not in self.written):
            self.note_unset(slot)
        if slot.kind == "_parameters":
            self.rows[meta] = own_copy(self.part(meta, value.detach()))
            slot.owner[slot.key] = meta  # which the sharded one will replace
        else:
            self.buffers[meta] = value

    def part(self, param: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
        is_whole = lifetime_of(param, self.config) == WHOLE
        return part_of(full, is_whole, self.mesh.size(), self.mesh.get_local_rank())

    def note_unset(self, slot: Slot) -> None:
        if slot.is_lost:
            self.lost[slot.name] = slot.module
        else:
            self.unset[slot.name] = None

    def check_buffers(self) -> None:
        if self.lost:
            name, module = next(iter(self.lost.items()))
            raise ValueError(
                f"buffer {name!r} of a {type(module).__name__} was made on the meta device, which lost its values, is in no "
                "checkpoint (persistent=False), and nothing sets it. Compute it on the CPU in the module's constructor "
                "(device='cpu'), or give zero_fx.compile init=, a function that sets it when it is given this module"
            )

    def undo(self) -> None:
        for slot, meta in self.before:
            slot.owner[slot.key] = meta


def unset_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Of its type; NaN where it can be."""
    values = torch.empty_like(tensor, device=device, requires_grad=False)
    return values.fill_(float("nan")) if values.is_floating_point() or values.is_complex() else values.zero_()


def is_unset(value: torch.Tensor, is_untouched: bool) -> bool:
    if not value.numel() or not (value.is_floating_point() or value.is_complex()):
        return is_untouched and value.numel() > 0
    # The largest element is NaN if any is; isnan would make a tensor of this size.
    return bool((torch.view_as_real(value) if value.is_complex() else value).amax().isnan())


def described(value: torch.Tensor | None) -> str:
    return "None" if value is None else f"a tensor of shape {tuple(value.shape)}, {value.dtype} on {value.device}"
