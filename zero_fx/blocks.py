"""Blocks of a model: runs of identical ones, which need to be captured only a few times (see repeat.py), and what may be
whole at a time while it gets its values (see materialise.py)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import nn


@dataclasses.dataclass(frozen=True)
class Stack:
    """Children `first` to `first + count - 1` of the module `path`, all alike."""

    path: str
    first: int
    count: int

    @property
    def prefix(self) -> str:
        return f"{self.path}." if self.path else ""


def largest_stack(model: nn.Module) -> Stack | None:
    """The run of identical blocks with the most parameters, if there is one of two or more."""
    owners = owners_of_parameters(model)
    found: list[tuple[int, Stack]] = []
    for path, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            for first, count in runs(list(module.children()), owners):
                elements = sum(p.numel() for p in module[first].parameters()) * count
                found.append((elements, Stack(path, first, count)))
    found = [(elements, stack) for elements, stack in found if stack.count > 1 and elements]
    return max(found, key=lambda one: one[0])[1] if found else None


def owners_of_parameters(model: nn.Module) -> dict[int, int]:
    """id of a parameter or buffer: by how many modules it is owned."""
    owners: dict[int, int] = {}
    for module in model.modules():
        for value in (*module._parameters.values(), *module._buffers.values()):
            owners[id(value)] = owners.get(id(value), 0) + 1
    return owners


def runs(children: list[nn.Module], owners: dict[int, int]) -> list[tuple[int, int]]:
    """(first, count) of each longest run of children that are alike."""
    found, first = [], 0
    for i in range(1, len(children) + 1):
        if i == len(children) or not alike(children[first], children[i], i - first, owners):
            found.append((first, i - first))
            first = i
    return found


OWN_DICTS = ("_parameters", "_buffers", "_modules")


def alike(one: nn.Module, other: nn.Module, distance: int, owners: dict[int, int]) -> bool:
    """Whether two blocks run the same code on parameters of the same types. A number that counts the blocks, as
    `layer_idx` does, may differ by their distance."""
    if type(one) is not type(other) or list(one._modules) != list(other._modules) or one is other:
        return False
    for kind in ("_parameters", "_buffers"):
        mine, theirs = getattr(one, kind), getattr(other, kind)
        if list(mine) != list(theirs) or not all(same_type(mine[n], theirs[n], owners) for n in mine):
            return False
    mine, theirs = vars(one), vars(other)
    if mine.keys() != theirs.keys():
        return False
    for name in mine.keys() - set(OWN_DICTS):
        if not same_value(mine[name], theirs[name], distance):
            return False
    children = zip(one._modules.values(), other._modules.values())
    return all(a is None and b is None or (a is not None and b is not None and alike(a, b, distance, owners)) for a, b in children)


def same_type(mine, theirs, owners: dict[int, int]) -> bool:
    """Of two tensors that no other module shares."""
    if mine is None or theirs is None:
        return mine is theirs
    facts = [(t.shape, t.stride(), t.dtype, t.requires_grad, type(t), owners[id(t)]) for t in (mine, theirs)]
    return facts[0] == facts[1] and owners[id(mine)] == 1


def same_value(mine, theirs, distance: int) -> bool:
    if mine is theirs:
        return True
    if type(mine) is not type(theirs):
        return False
    if type(mine) is int:
        return mine == theirs or theirs - mine == distance
    if isinstance(mine, (bool, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)):
        return mine == theirs
    if isinstance(mine, (list, tuple)):
        return len(mine) == len(theirs) and all(same_value(a, b, distance) for a, b in zip(mine, theirs))
    if isinstance(mine, dict):  # hooks have keys that count all hooks: a block with any is like no other
        return mine.keys() == theirs.keys() and all(same_value(mine[k], theirs[k], distance) for k in mine)
    return isinstance(mine, set) and mine == theirs


def shorten(model: nn.Module, stack: Stack, count: int) -> None:
    """Leave only the first `count` blocks of the stack, in place."""
    children = model.get_submodule(stack.path)
    del children[stack.first + count : stack.first + stack.count]


def tensors_of(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def most_at_once(model: nn.Module) -> int:
    """Bytes of the largest of a block and the own tensors of any module."""
    own = [sum(tensor.nbytes for tensor in [*m.parameters(False), *m.buffers(False)]) for m in model.modules()]
    stack = largest_stack(model)
    if stack is not None:
        own.append(bytes_of(model.get_submodule(stack.path)[stack.first]))
    return max(own)


def bytes_of(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in tensors_of(module))


def units(module: nn.Module, most: int, seen: set | None = None) -> Iterator[list[nn.Module]]:
    """The modules in the order of nn.Module.apply, children first, cut into the largest trees of at most `most` bytes; a
    module above these is a unit without its children."""
    seen = set() if seen is None else seen
    if bytes_of(module) <= most:
        unit: list[nn.Module] = []
        module.apply(unit.append)
        unit = [one for one in dict.fromkeys(unit) if one not in seen]
        seen.update(unit)
        yield unit
        return
    for child in module.children():
        yield from units(child, most, seen)
    if module not in seen:
        seen.add(module)
        yield [module]
