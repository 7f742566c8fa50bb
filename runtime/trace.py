"""What a rank ran since the last comparison, as one number that ranks compare: at the end of each backward pass, and of
each forward that has none.

Two ranks that take different branches run collectives of different parameters. Where these happen to have one size,
nothing fails and data are mixed up. The comparison is one all-reduce of two numbers, before the optimizer steps and
before an evaluation's outputs are returned.
"""

from __future__ import annotations

import zlib

import torch
import torch.distributed as dist

from .tensors import backend_of

SHOWN = 20


class Trace:
    """A running checksum of what was noted, and the last notes for the error. `is_open` from the begin of a forward to
    the next comparison."""

    def __init__(self):
        self.value, self.is_open = 0, False
        self.notes: list[str] = []

    def note(self, what: str) -> None:
        """Add the name of a graph or of a parameter that is about to run collectives."""
        self.value = zlib.crc32(what.encode(), self.value)
        self.notes = [*self.notes[-SHOWN:], what]

    def compare(self, group, device_type: str) -> None:
        """Raise RuntimeError on every rank unless all ranks of `group` noted the same; then start anew."""
        mine, notes = self.value, self.notes
        self.value, self.notes, self.is_open = 0, [], False
        if group.size() == 1 or backend_of(group, device_type) == "fake":
            return
        largest = torch.tensor([mine, -mine], device=device_type)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        if largest[0] != -largest[1]:
            everyones: list = [None] * group.size()
            dist.all_gather_object(everyones, (mine, notes), group=group)
            rank = group.rank()
            other = next(i for i, (value, _) in enumerate(everyones) if value != mine)
            raise RuntimeError(
                "zero_fx: ranks ran different collectives since they last compared, so gathered parameters and gradients "
                "were mixed up; do not step the optimizer or use the outputs. Ranks must take the same branches.\n"
                f"  rank {rank} ran last:\n{shown(notes)}\n  rank {other}:\n{shown(everyones[other][1])}"
            )


def shown(notes: list[str]) -> str:
    return "\n".join("    " + note for note in notes or ["(nothing)"])
