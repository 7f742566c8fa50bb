"""Load an optimizer from a checkpoint by the names of parameters; its full state as plain tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from .model import check_compiled
from .runtime.checkpoint_state import check_optimizer, optimizer_state
from .runtime.together import together

if TYPE_CHECKING:
    from .checkpoint_load import Source

LOAD = "loading an optimizer"
# Options of how a step is run, not of what it computes: the present optimizer's stay.
HOW_IT_RUNS = ("params", "foreach", "fused", "capturable", "differentiable")


def load_optimizer(source: Source, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Fill `optimizer`, states in place where they exist. Collective. ValueError: other parameters, groups or shapes."""
    names = check_optimizer(model, optimizer)
    prefix = together(source.group, LOAD, lambda: prefix_of_optimizer(source, names))
    options = read_options(source, prefix)
    pairs = together(source.group, LOAD, lambda: matched_groups(optimizer, options, names, source.folder))
    entries = together(source.group, LOAD, lambda: state_targets(source, prefix, optimizer, names))
    read = source.read({key: target for key, target, _, _ in entries})
    for group, saved in pairs:
        for option, value in saved.items():
            if option not in HOW_IT_RUNS:
                group[option] = like(group.get(option), value)
    states: dict = {}
    for key, _, param, entry in entries:
        states.setdefault(param, {})[entry] = read[key]
    optimizer.state.clear()
    optimizer.state.update(states)


def like(present, value):
    """A saved option in place of `present`: a learning rate that is a tensor stays the tensor that a scheduler may hold."""
    if isinstance(present, torch.Tensor):
        return present.copy_(torch.as_tensor(value))
    return value.item() if isinstance(value, torch.Tensor) and isinstance(present, float) else value


def prefix_of_optimizer(source: Source, names: dict) -> str:
    """What stands before "state." and "param_groups.": "optim." as we write them."""
    found = dict.fromkeys(key[: key.index("param_groups.")] for key in source.keys if "param_groups." in key)
    if not found:
        raise ValueError(f"{source.folder} has no optimizer; load the model alone (leave optimizer out)")
    if len(found) > 1:
        known = set(names.values())
        states = {prefix: {name_of(rest, known) for rest in source.below(prefix + "state.")} - {None} for prefix in found}
        fitting = [prefix for prefix, there in states.items() if there == max(states.values(), key=len)]
        if len(fitting) > 1:
            raise ValueError(f"{source.folder} has several optimizers ({', '.join(found)}); zero_fx loads one")
        return fitting[0]
    return next(iter(found))


def name_of(rest: str, known: set[str]) -> str | None:
    """The parameter's name that "<name>.<key>" begins with: the longest, as one name may begin another."""
    parts = rest.split(".")
    tried = (".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1))
    return next((name for name in tried if name in known), None)


def read_options(source: Source, prefix: str) -> list[dict]:
    """The saved param groups, "params" with names."""
    keys = source.below(prefix + "param_groups.")
    read = source.read({key: source.target(key) for key in keys.values()})
    groups: dict[str, dict] = {}
    for rest, key in keys.items():
        group, _, option = rest.rpartition(".")
        groups.setdefault(group, {})[option] = read[key]
    if all(group.isdecimal() and "params" in options for group, options in groups.items()):
        return [groups[group] for group in sorted(groups, key=int)]
    return [{**options, "params": [name]} for name, options in groups.items()]  # flattened: options of each parameter


def matched_groups(optimizer, saved: list[dict], names: dict, folder: str) -> list[tuple[dict, dict]]:
    """(group, saved options) of each param group of `optimizer`, matched by the parameters in it."""
    by_name = {name: options for options in saved for name in options["params"]}
    pairs = []
    for number, group in enumerate(optimizer.param_groups):
        ours = {names[param] for param in group["params"]}
        absent = sorted(ours - by_name.keys())
        if absent:
            raise ValueError(f"{folder} has no optimizer options for {absent[0]!r}, which is in param group {number} here")
        theirs = [by_name[name] for name in sorted(ours)]
        if any(len(options["params"]) > 1 and set(options["params"]) != ours for options in theirs):
            raise ValueError(f"param group {number} has other parameters here than in {folder}: build the groups as at the save")
        if len({str(without_how(options)) for options in theirs}) > 1:
            raise ValueError(f"param group {number} joins parameters that have other options each in {folder}")
        pairs += [(group, theirs[0])] if theirs else []
    extra = sorted(by_name.keys() - {names[param] for group in optimizer.param_groups for param in group["params"]})
    if extra:
        raise ValueError(f"{folder} has optimizer options for {extra[0]!r}, which is in no param group of this optimizer")
    return pairs


def without_how(options: dict) -> dict:
    return {option: value for option, value in options.items() if option not in HOW_IT_RUNS}


def state_targets(source: Source, prefix: str, optimizer, names: dict) -> list[tuple[str, object, torch.Tensor, str]]:
    """(key, what to read into, parameter, entry) of each saved state."""
    params = {name: param for param, name in names.items()}
    groups = {param: group for group in optimizer.param_groups for param in group["params"]}
    found = []
    for rest, key in source.below(prefix + "state.").items():
        name = name_of(rest, params.keys())
        if name is None or params[name] not in groups:
            raise ValueError(f"{source.folder} has an optimizer state {rest!r}, and no parameter here has this name")
        param, entry = params[name], rest[len(name) + 1 :]
        target = None
        if isinstance(source.keys[key], TensorStorageMetadata):
            target = state_target(source, key, param, entry, groups[param], optimizer.state.get(param, {}).get(entry))
        found.append((key, target, param, entry))
    return found


def state_target(source: Source, key: str, param: torch.Tensor, entry: str, group: dict, present) -> torch.Tensor:
    """A tensor for one saved state: the present one, or one cut as the parameter is. The dtype is the saved one's."""
    size, dtype = source.keys[key].size, source.keys[key].properties.dtype
    if isinstance(present, torch.Tensor) and present.shape == size and present.dtype == dtype:
        return present
    if entry == "step" and not size:
        on_device = group.get("capturable") or group.get("fused")
        return torch.empty((), dtype=dtype, device=param.device if on_device else "cpu")
    if size == param.shape:
        return torch.zeros_like(param, dtype=dtype, requires_grad=False)
    if not size:
        return torch.empty((), dtype=dtype, device=param.device)
    raise ValueError(
        f"optimizer state {key} has shape {tuple(size)}, another than its parameter's {tuple(param.shape)}, and how it is "
        "sharded is up to the optimizer: run one step before loading, so that the state exists"
    )


def full_optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """{"state": {name: {key: plain, full tensor}}, "param_groups": [{..., "params": names}]} on every rank.

    As get_optimizer_state_dict of torch.distributed.checkpoint.state_dict gives it with full_state_dict=True. Collective:
    every rank must call it. Costs the memory of the full states on each rank.
    """
    check_compiled(model)
    found = optimizer_state(model, optimizer, rank=0)
    states = {name: {key: full(value) for key, value in values.items()} for name, values in found["state"].items()}
    return {"state": states, "param_groups": found["param_groups"]}


def full(value):
    if isinstance(value, DTensor):
        return value.detach().full_tensor().clone()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
