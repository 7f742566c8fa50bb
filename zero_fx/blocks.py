"""Identical blocks are analysed once: capture a model with a few of them, and repeat what one more block adds.

A stack is a run of identical children of a ModuleList or Sequential. The model is captured with `short` of them and with
`long` > short. If the longer graph is the shorter one with a segment inserted, and that segment stands beside a copy of
itself, the schedule is periodic there, and the segment is inserted as often as the full model has further blocks. Where
any of this does not hold nothing is guessed: `grow` returns None, and the model is captured whole.
"""

from __future__ import annotations

import dataclasses
import re

import torch
from torch import nn

from .events import Event, Half

# Blocks of the two captures. The first must be long enough for the schedule to come to rest in the middle; a bucket
# that joins several blocks gives a period of as many.
SHORT = 4
PERIODS = (1, 2, 4)


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


def grow(short: Half, long: Half, stack: Stack, period: int, times: int) -> Half | None:
    """`long`, with what its `period` blocks more than `short` add inserted `times` times; None if it is not periodic."""
    mine, theirs = [[key(event, stack) for event in half.events] for half in (short, long)]
    size = len(theirs) - len(mine)
    if short.label != long.label or size <= 0:
        return None
    before = common(mine, theirs)
    after = common(mine[::-1], theirs[::-1])
    at = min(before, len(mine))
    if before + after < len(mine) or at < size or theirs[at - size : at] != theirs[at : at + size]:
        return None
    segment, previous = long.events[at : at + size], long.events[at - size : at]
    step = direction(previous, segment, stack, period)
    head, tail = long.events[:at], long.events[at:]
    if step < 0:  # backward: the first blocks that it meets are the last of the model
        head = [numbered(event, stack, period * times) for event in head]
    inserted = []
    for i in range(times):
        shift = step * i if step >= 0 else step * i + period * times
        inserted += [numbered(event, stack, shift) for event in segment]
    if step > 0:
        tail = [numbered(event, stack, period * times) for event in tail]
    start = {kind: size + times * (size - dict(short.at_start).get(kind, 0)) for kind, size in long.at_start}
    return Half(long.label, tuple(start.items()), (*head, *inserted, *tail))


def key(event: Event, stack: Stack) -> Event:
    """The event without the numbers of blocks."""
    return dataclasses.replace(
        event, module=anonymous(event.module, stack), params=tuple(anonymous(name, stack) for name in event.params)
    )


def pattern(stack: Stack) -> re.Pattern:
    return re.compile(rf"^{re.escape(stack.prefix)}(\d+)(?=\.|$)")


def anonymous(path: str, stack: Stack) -> str:
    return pattern(stack).sub(f"{stack.prefix}*", path)


def numbered(event: Event, stack: Stack, shift: int) -> Event:
    """The event, as of the block that is `shift` further on."""
    if not shift:
        return event

    def moved(path: str) -> str:
        return pattern(stack).sub(lambda found: f"{stack.prefix}{int(found[1]) + shift}", path)

    return dataclasses.replace(event, module=moved(event.module), params=tuple(map(moved, event.params)))


def direction(previous, segment, stack: Stack, period: int) -> int:
    """By how many blocks the segment is further on than the copy before it: period, -period, or 0 if nothing tells."""
    for one, other in zip(previous, segment):
        for a, b in zip((one.module, *one.params), (other.module, *other.params)):
            before, after = pattern(stack).match(a), pattern(stack).match(b)
            if before and after and before[1] != after[1]:
                return period if int(after[1]) > int(before[1]) else -period
    return 0


def common(mine: list, theirs: list) -> int:
    """Length of the common beginning."""
    count = 0
    for a, b in zip(mine, theirs):
        if a != b:
            break
        count += 1
    return count
