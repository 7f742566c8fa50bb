"""Load a plain model's weights into a compiled model: `load_full_state_dict`, each rank reading only its own rows."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from .checkpoint_load import check_match, short
from .model import check_compiled
from .runtime.layout import owned_rows
from .runtime.markers import WHOLE
from .runtime.together import together

LOAD = "loading weights"
# Of Hugging Face's folders and PyTorch's; the index of several files before one file.
IN_FOLDER = ("model.safetensors.index.json", "model.safetensors", "pytorch_model.bin.index.json", "pytorch_model.bin")
NESTED = ("model", "state_dict", "model_state_dict", "module")  # under which a training script's file has the weights


class IncompatibleKeys(NamedTuple):
    """As load_state_dict of a module returns it."""

    missing_keys: list[str]
    unexpected_keys: list[str]


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor in a file. rows(first, count): that part of it in dimension 0, read when it is asked for; rows(): all of it."""

    shape: tuple[int, ...]
    rows: Callable[..., torch.Tensor]


def load_full_state_dict(
    model: nn.Module, source: str | os.PathLike | Mapping[str, torch.Tensor], *, strict: bool = True
) -> IncompatibleKeys:
    """Fill a compiled model with a plain model's weights. Collective: every rank calls it alike.

    source: a .safetensors file; a file that torch.save wrote of a state dict; an index (*.index.json) of several such files;
        a folder that has one of these under Hugging Face's names; or the state dict, full plain tensors by name. A file is
        mapped, and of each sharded parameter only this rank's rows are read. Dtypes are converted to the model's.
    strict: refuse names that only the model or only the source has. Of tied names one is enough.

    Returns the names that were missing in the source, and those of no use here. Raises on all ranks, before anything has
    changed: FileNotFoundError; ValueError for names, shapes, and files that are damaged or of another kind.
    """
    check_compiled(model)
    state = model._zero_fx_model
    group = state.mesh.get_group()
    entries = together(group, LOAD, lambda: open_source(source))
    keys, chosen = together(group, LOAD, lambda: match(model, entries, source, strict))
    together(group, LOAD, lambda: fill(model, entries, chosen))
    return keys


def match(model: nn.Module, entries: dict[str, Entry], source, strict: bool) -> tuple[IncompatibleKeys, dict[str, str]]:
    """(names that do not match, {name in the model, the first one of tied names: name in the source})"""
    values = model.state_dict(keep_vars=True)
    aliases: dict[int, list[str]] = {}
    for name, value in values.items():
        aliases.setdefault(id(value), []).append(name)
    chosen, missing, shapes = {}, [], []
    for names in aliases.values():
        there = next((name for name in names if name in entries), None)
        if there is None:
            missing += names
            continue
        chosen[names[0]] = there
        if entries[there].shape != tuple(values[names[0]].shape):
            shapes.append(f"{there} is {entries[there].shape} there and {tuple(values[names[0]].shape)} here")
    unexpected = [name for name in entries if name not in values]
    where = "the state dict" if isinstance(source, Mapping) else os.fspath(source)
    if strict:
        check_match(where, missing, unexpected, shapes, "" if shapes else "; strict=False loads what matches")
    check_match(where, [], [], shapes)
    return IncompatibleKeys(missing, unexpected), chosen


@torch.no_grad()
def fill(model: nn.Module, entries: dict[str, Entry], chosen: dict[str, str]) -> None:
    states = {id(state.param): state for state in model._zero_fx_model.params.values()}
    values = model.state_dict(keep_vars=True)
    for name, there in chosen.items():
        state = states.get(id(values[name]))
        if state is None or state.lifetime == WHOLE:
            target = values[name] if state is None else state.param._local_tensor
            target.copy_(entries[there].rows())
            continue
        owned = owned_rows(state.shape[0], state.world, state.model.rank)
        if owned[1]:
            state.param._local_tensor.copy_(entries[there].rows(*owned))


# --- files


def open_source(source) -> dict[str, Entry]:
    """Raises FileNotFoundError, TypeError or ValueError."""
    if isinstance(source, Mapping):
        return entries_of(source, "the state dict")
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(f"source={source!r}: expected a path, or a state dict")
    path = os.fspath(source)
    if os.path.isdir(path):
        found = [name for name in IN_FOLDER if os.path.isfile(os.path.join(path, name))]
        if not found:
            raise FileNotFoundError(f"{path} has none of {', '.join(IN_FOLDER)}; name a file")
        path = os.path.join(path, found[0])
    if not os.path.isfile(path):
        raise FileNotFoundError(f"there is no file {path} to load weights from")
    if path.endswith(".json"):
        return open_index(path)
    return open_safetensors(path) if path.endswith(".safetensors") else open_pickle(path)


def open_index(path: str) -> dict[str, Entry]:
    with open(path, encoding="utf-8") as file:
        try:
            where = json.load(file)["weight_map"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path} is no index of weights: expected a JSON object with 'weight_map'") from None
    folder = os.path.dirname(path)
    for name in dict.fromkeys(where.values()):
        if not os.path.isfile(os.path.join(folder, name)):
            raise FileNotFoundError(f"{os.path.join(folder, name)}, which {os.path.basename(path)} names, is not there")
    files = {name: open_source(os.path.join(folder, name)) for name in dict.fromkeys(where.values())}
    absent = [f"{name} in {file}" for name, file in where.items() if name not in files[file]]
    if absent:
        raise ValueError(f"{path} names what is not there: {short(absent)}")
    return {name: files[file][name] for name, file in where.items()}


def open_safetensors(path: str) -> dict[str, Entry]:
    try:
        file = safe_open(path, framework="pt")
        return {name: sliced(file, name) for name in file.keys()}  # noqa: SIM118  it is no dict
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged, or no safetensors file: {error}") from error


def sliced(file, name: str) -> Entry:
    shape = tuple(file.get_slice(name).get_shape())

    def rows(first: int = 0, count: int | None = None) -> torch.Tensor:
        if not shape or count is None:
            return file.get_tensor(name)
        return file.get_slice(name)[first : first + count]

    return Entry(shape, rows)


def open_pickle(path: str) -> dict[str, Entry]:
    """Of torch.save; its own unpickler, which makes nothing but tensors and plain values."""
    try:
        try:
            values = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except RuntimeError:  # the format before zip files, which cannot be mapped
            values = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle's, zip's and PyTorch's own kinds
        raise ValueError(f"{path} is damaged, or has more than torch.save writes of a state dict: {error}") from error
    return entries_of(values, path)


def entries_of(values, where: str) -> dict[str, Entry]:
    if isinstance(values, Mapping):
        inner = [values[name] for name in NESTED if isinstance(values.get(name), Mapping)]
        values = inner[0] if inner else values
    wrong = [] if isinstance(values, Mapping) else [type(values).__name__]
    wrong = wrong or [f"{name} ({type(value).__name__})" for name, value in values.items() if type(value) not in PLAIN]
    if wrong:
        raise ValueError(f"{where}: expected plain tensors by name, found {short(wrong)}")
    return {name: Entry(tuple(value.shape), narrowed(value)) for name, value in values.items()}


PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)


def narrowed(value: torch.Tensor) -> Callable[..., torch.Tensor]:
    def rows(first: int = 0, count: int | None = None) -> torch.Tensor:
        return value.detach() if count is None else value.detach().narrow(0, first, count)

    return rows
