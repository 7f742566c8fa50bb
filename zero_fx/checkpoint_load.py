"""Load a training run: `load_checkpoint`, from what save_checkpoint wrote, or FSDP2's users with torch.distributed.checkpoint."""

from __future__ import annotations

import logging
import os
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import Shard
from torch.distributed.tensor import zeros as sharded_zeros

from .checkpoint import SAVERS
from .checkpoint_optimizer import load_optimizer
from .model import check_compiled
from .runtime import checkpoint_files as files
from .runtime.checkpoint_state import RESERVED, check_optimizer, seed_everything, set_rng_state, unpickled
from .runtime.together import described, from_rank_0, raise_failures, together

LOAD = "loading a checkpoint"
SHOWN = 5  # names in an error
log = logging.getLogger(__name__)


class Source:
    """One checkpoint, open for reading: `keys` maps its entries to their metadata."""

    def __init__(self, folder: str, group: dist.ProcessGroup):
        self.folder, self.group = folder, group
        self.keys: dict = {}

    def open(self) -> None:
        self.keys = FileSystemReader(self.folder).read_metadata().state_dict_metadata

    def read(self, targets: dict) -> dict:
        """`targets` with values: tensors are filled in place, anything else is replaced. Collective."""
        try:
            dcp_load(targets, storage_reader=FileSystemReader(self.folder), process_group=self.group)
        except CheckpointException as error:  # not an Exception; it has every rank's
            raise_failures(LOAD, {rank: described(cause) for rank, (cause, _) in error.failures.items()}, error)
        return targets

    def tensor(self, key: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Memory on the CPU for an entry."""
        found = self.keys[key]
        return torch.empty(found.size, dtype=dtype or found.properties.dtype)

    def target(self, key: str):
        return self.tensor(key) if isinstance(self.keys[key], TensorStorageMetadata) else None

    def below(self, prefix: str) -> dict[str, str]:
        """{rest of the key: key} of the keys that begin with `prefix`."""
        return {key[len(prefix) :]: key for key in self.keys if key.startswith(prefix)}


def load_checkpoint(
    path: str | os.PathLike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    verify: bool = True,
    **stateful,
) -> dict:
    """Read the newest complete checkpoint of `path`, or the one that `path` is. Collective: every rank calls it alike.

    model, optimizer: filled in place, the optimizer by parameter names. World size, stage and precision may be others than
        at the save: every value is the saved one. Random states are restored too; a rank that the saved run did not have
        seeds its own from rank 0's and its number.
    verify: compare each file's checksum before anything is read; False compares sizes only.
    stateful: objects that were saved as extras under these names, restored by their load_state_dict.

    Returns {"step": optimizer steps done, None if unknown, and the extras that were plain values or were not asked for}.
    Raises on all ranks: FileNotFoundError where nothing complete is there, ValueError for a damaged file (by its name), for
    parameters, shapes or param groups that differ, and for extras that are not in the checkpoint.
    """
    check_compiled(model)
    saver, group = SAVERS.get(model), model._zero_fx_model.mesh.get_group()
    if saver is not None:
        saver.wait()
    for name, value in stateful.items():
        if name in RESERVED or not callable(getattr(value, "load_state_dict", None)):
            raise TypeError(f"{name}={value!r}: expected an object with load_state_dict, saved under this name")
    folder, passed = from_rank_0(group, LOAD, lambda: files.choose(os.fspath(path)))
    if passed and dist.get_rank(group) == 0:
        warnings.warn(f"zero_fx: not complete, so passed over: {', '.join(passed)}; loading {folder}", stacklevel=2)
    source = Source(folder, group)
    mark = together(group, LOAD, lambda: check(source, group, verify))
    names = together(group, LOAD, lambda: targets_of_model(source, model))
    if optimizer is not None:
        together(group, LOAD, lambda: check_optimizer(model, optimizer))
    extras = together(group, LOAD, lambda: extras_at_hand(source, stateful, mark, group))
    load_model(source, model, names)
    if optimizer is not None:
        load_optimizer(source, model, optimizer)
    restored = load_extras(source, model, extras, stateful)
    load_rng(source, model, group)
    return {"step": mark["step"] if mark else None, **restored}


def check(source: Source, group: dist.ProcessGroup, verify: bool) -> dict | None:
    """The mark; this rank's share of the files is looked at."""
    mark = files.read_mark(source.folder)
    if mark is not None:
        names = sorted(mark["files"])[dist.get_rank(group) :: dist.get_world_size(group)]
        wrong = files.check_files(source.folder, mark, names, read=verify)
        if wrong:
            raise ValueError(f"{source.folder} is damaged: {'; '.join(wrong)}. Load an earlier checkpoint by its own folder")
    source.open()
    return mark


# --- the model


def prefix_of_model(source: Source, model: nn.Module) -> str:
    """What stands before the model's names in the keys: "model." as we and most users of FSDP2 write them."""
    names = list(model.state_dict())
    counts: dict[str, int] = {"model.": 0}
    for name in names:
        for key in source.keys:
            if key == name or key.endswith("." + name):
                prefix = key[: len(key) - len(name)]
                counts[prefix] = counts.get(prefix, 0) + 1
    return max(counts, key=counts.get)  # at a tie the usual one


def targets_of_model(source: Source, model: nn.Module) -> dict[str, str]:
    """{name in the model: key to read}; raises ValueError where the checkpoint is of another model."""
    prefix = prefix_of_model(source, model)
    values = model.state_dict(keep_vars=True)
    by_tensor: dict[int, list[str]] = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            by_tensor.setdefault(id(value), []).append(name)
    chosen, missing, shapes = {}, [], []
    for name, value in values.items():
        aliases = by_tensor.get(id(value), [name])
        found = next((alias for alias in (name, *aliases) if prefix + alias in source.keys), None)
        if found is not None and isinstance(value, torch.Tensor):
            if name != aliases[0]:
                continue  # a tied one, which is read once
            size = source.keys[prefix + found].size
            if size != value.shape:
                shapes.append(f"{name} is {tuple(size)} there and {tuple(value.shape)} here")
            chosen[name] = prefix + found
        elif isinstance(value, torch.Tensor):
            missing.append(name)
        elif any(rest == name or rest.startswith(name + ".") for rest in source.below(prefix)):
            chosen[name] = prefix + name
        else:
            missing.append(name)
    known = tuple(values)
    extra = [rest for rest in source.below(prefix) if rest not in values and not rest.startswith(nested(known))] if prefix else []
    check_match(source.folder, missing, extra, shapes)
    return chosen


def check_match(where: str, missing: list[str], extra: list[str], shapes: list[str], hint: str = "") -> None:
    """Raise ValueError if there is any: a name that is only here, only there, or of another shape there."""
    found = {"missing there": missing, "unknown here": extra, "other shapes": shapes}
    problems = [f"{what}: {short(names)}" for what, names in found.items() if names]
    if problems:
        raise ValueError(f"{where} is of another model. Parameters and buffers {'; '.join(problems)}{hint}")


def nested(names: tuple[str, ...]) -> tuple[str, ...]:
    """What the keys of a module's extra state may begin with, where that is a dict."""
    return tuple(name + "." for name in names if name.endswith("_extra_state"))


def short(names: list[str]) -> str:
    shown = ", ".join(map(str, names[:SHOWN]))
    return shown + f" and {len(names) - SHOWN} more" * (len(names) > SHOWN)


def load_model(source: Source, model: nn.Module, chosen: dict[str, str]) -> None:
    values = model.state_dict()
    tensors = {key: values[name] for name, key in chosen.items() if isinstance(values[name], torch.Tensor)}
    for key, tensor in tensors.items():
        saved = source.keys[key].properties.dtype
        if saved != tensor.dtype:
            log.warning("%s was saved in %s and is loaded into %s", key, saved, tensor.dtype)
    with torch.no_grad():
        source.read(tensors)
    for name, key in chosen.items():
        if key not in tensors:  # a module's extra state, perhaps in several entries, which the present one has the form of
            read = source.read({key: values[name]})
            module = model.get_submodule(name.rpartition(".")[0])
            module.set_extra_state(read[key])


# --- extras and random states


def extras_at_hand(source: Source, stateful: dict, mark: dict | None, group: dist.ProcessGroup) -> dict[str, str]:
    """{name of an extra: key of this rank's value}"""
    own = source.below(f"ranks.{dist.get_rank(group)}.extra.")
    common = source.below("extra.")
    differ = {key.split(".extra.", 1)[1] for key in source.keys if key.startswith("ranks.") and ".extra." in key}
    absent = [name for name in stateful if name not in common]
    if absent:
        there = f"it has {', '.join(common)}" if common else "it has none"
        raise ValueError(f"{source.folder} has no extra {absent[0]!r}; {there}")
    if mark is None or mark["world"] == dist.get_world_size(group):
        return {**common, **own}
    for name in differ:
        text = f"extra {name!r} was another on each of {mark['world']} ranks, and there are {dist.get_world_size(group)} now"
        if name in stateful:
            raise ValueError(f"{text}: it cannot be restored; leave {name}= out and set it up anew")
        warnings.warn(f"zero_fx: {text}, so it is left out of what load_checkpoint returns", stacklevel=4)
    return {name: key for name, key in common.items() if name not in differ}


def load_extras(source: Source, model: nn.Module, extras: dict[str, str], stateful: dict) -> dict:
    """Restore `stateful`; {name: value} of the others."""
    blobs = source.read({key: source.target(key) for key in dict.fromkeys(extras.values())})
    restored = {}
    for name, key in extras.items():
        mesh, sharded = model._zero_fx_model.mesh, {}
        for number, entry in source.below(f"extra_tensors.{name}.").items():
            found = source.keys[entry]
            sharded[entry] = sharded_zeros(
                *found.size, dtype=found.properties.dtype, device_mesh=mesh, placements=[Shard(0)] if found.size else None
            )
        source.read(sharded)
        value = unpickled(blobs[key], {int(entry.rpartition(".")[2]): tensor for entry, tensor in sharded.items()})
        if name in stateful:
            stateful[name].load_state_dict(value)
        else:
            restored[name] = value
    return restored


def load_rng(source: Source, model: nn.Module, group: dist.ProcessGroup) -> None:
    """Random states, and buffers in which this rank differed from rank 0."""
    rank = dist.get_rank(group)
    buffers = source.below(f"ranks.{rank}.buffers.")
    values = model.state_dict()
    source.read({key: values[name] for name, key in buffers.items()})
    keys = {key: source.target(key) for key in (f"ranks.{rank}.rng", "ranks.0.rng") if key in source.keys}
    read = source.read(keys)
    if f"ranks.{rank}.rng" in read:
        set_rng_state(model, unpickled(read[f"ranks.{rank}.rng"], {}))
    elif read:
        seed = int.from_bytes(bytes(unpickled(read["ranks.0.rng"], {})["torch"][:8].tolist()), "little")
        seed_everything((seed + rank) % 2**32)
