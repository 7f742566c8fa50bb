"""Ranks compare what they are about to run, through the store, before they run it.

Each new sequence of collectives gets a number; ranks publish their n-th sequence and read each other's. A rank that
compiles a sequence it has already agreed on (a new shape, the same collectives) does not take part: others may not
compile at all then.
"""

from __future__ import annotations

import datetime
import itertools
import json

import torch.distributed as dist

SHOWN = 12  # collectives of a sequence that an error shows, from the first difference on


class Agreement:
    """`store` may be None (one rank, or a fake group): nothing to agree on then."""

    def __init__(self, store: dist.Store | None, world: int, rank: int, timeout_s: float):
        self.store, self.world, self.rank, self.timeout_s = store, world, rank, timeout_s
        self.label = ""  # given at the first check
        self.agreed: dict[tuple[str, ...], tuple[int, ...]] = {}  # sequence: the order in which it is started

    def check(self, graph: str, sequence: tuple[str, ...], order: tuple[int, ...]) -> tuple[int, ...]:
        """Raise RuntimeError on every rank unless all ranks come with the same `sequence` of collectives. Each
        proposes an `order` in which to start them (numbers in the sequence); returns the first rank's."""
        if self.store is None:
            return order
        if sequence in self.agreed:
            return self.agreed[sequence]
        self.label = self.label or self.next_label()
        turn = len(self.agreed)
        self.store.set(self.key(turn, self.rank), json.dumps([graph, sequence, order]))
        decided = order
        for rank in range(self.world):
            *theirs, proposed = self.read(turn, rank, graph)
            if theirs != [graph, list(sequence)]:
                raise RuntimeError(self.difference(rank, [graph, list(sequence)], theirs))
            decided = tuple(proposed) if rank == 0 else decided
        self.agreed[sequence] = decided
        return decided

    def next_label(self) -> str:
        """A name for this model that ranks agree on: the how-manieth of the group that compiled a graph."""
        number = itertools.count()
        return next(f"model{n}" for n in number if self.store.add(f"model{n}/rank{self.rank}", 1) == 1)

    def key(self, turn: int, rank: int) -> str:
        return f"{self.label}/{turn}/{rank}"

    def read(self, turn: int, rank: int, graph: str) -> list:
        key = self.key(turn, rank)
        try:
            self.store.wait([key], datetime.timedelta(seconds=self.timeout_s))
            return json.loads(self.store.get(key))
        except RuntimeError as error:
            raise RuntimeError(
                f"zero_fx: rank {self.rank} compiled a new {graph} graph and rank {rank} did not within "
                f"{self.timeout_s:g} s: ranks run different branches, or rank {rank} is gone. ({error})"
            ) from error

    def difference(self, rank: int, ours: list, theirs: list) -> str:
        at = next((i for i, (a, b) in enumerate(zip(ours[1], theirs[1])) if a != b), min(len(ours[1]), len(theirs[1])))

        def show(graph: str, sequence: list[str]) -> str:
            window = sequence[at : at + SHOWN] or ["(no more collectives)"]
            return "\n".join(f"    {at + i}: {item}" for i, item in enumerate(window)) + f"\n    ({graph} graph)"

        return (
            "zero_fx: ranks compiled different collectives, so they would hang or mix up their data. This happens "
            "when ranks take different branches (another expert, a missing input) in one step, or were given other options.\n"
            f"  rank {self.rank}, from the first difference:\n{show(*ours)}\n"
            f"  rank {rank}:\n{show(*theirs)}"
        )
