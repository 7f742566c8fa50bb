"""Count the collectives that really ran, and what they sent: a measurement, not a reading of graphs.

The profiler sees every call of a `_c10d_functional` operator with its input shapes, whoever makes it: eager code,
autograd's backward, code that a compiler generated. Collectives called as `torch.distributed.all_reduce(...)` are
other operators and are not counted: of ours those are the one number of gradient clipping, and the flags by which
ranks agree which gradients exist.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math

from torch.profiler import ProfilerActivity, profile

PREFIX = "_c10d_functional::"
WAIT = "wait_tensor"


@dataclasses.dataclass
class CollectiveCount:
    """Filled when `count_collectives` ends. `calls` counts by operator; `elements` are sent per rank, in rings.
    `peak_bytes`: the most that lived at once of what PyTorch allocated inside, if it was asked for. `waited_s`: seconds that
    the host waited for collectives; with nccl it does not, the device does."""

    calls: dict[str, int] = dataclasses.field(default_factory=dict)
    elements: float = 0.0
    peak_bytes: int | None = None
    waited_s: float = 0.0

    @property
    def collectives(self) -> int:
        return sum(self.calls.values())


@contextlib.contextmanager
def count_collectives(world: int, memory: bool = False):
    """Count what this rank runs inside, in a group of `world` ranks; yields a CollectiveCount, filled at the end.

    Every collective must be over a group of that size. Raises ValueError for an operator whose volume is unknown
    here. Slows down what it measures: use it for one step.
    """
    count = CollectiveCount()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=memory) as recorded:
        yield count
    if memory:
        events = sorted(recorded.profiler.kineto_results.events(), key=lambda event: event.start_ns())
        changes = (event.nbytes() for event in events if event.name() == "[memory]")
        count.peak_bytes = max(itertools.accumulate(changes), default=0)
    for entry in recorded.key_averages(group_by_input_shape=True):
        kind = entry.key.removeprefix(PREFIX)
        if entry.key == PREFIX + WAIT:
            count.waited_s += entry.cpu_time_total / 1e6
        if kind == entry.key or kind == WAIT or kind.startswith("_"):  # those of its own use do not communicate
            continue
        count.calls[kind] = count.calls.get(kind, 0) + entry.count
        count.elements += entry.count * elements_sent(kind, math.prod(entry.input_shapes[0]), world)


def elements_sent(kind: str, elements: int, world: int) -> float:
    """Elements that a rank sends in a ring for one collective whose *input* has `elements`, the padding included."""
    if kind in ("all_gather_into_tensor", "all_gather_into_tensor_out"):
        return elements * (world - 1)
    if kind in ("broadcast", "broadcast_"):  # the mean over ranks, of which one is the root
        return elements * (world - 1) / world
    if kind in ("reduce_scatter_tensor", "all_to_all_single"):
        return elements * (world - 1) / world
    if kind in ("all_reduce", "all_reduce_"):
        return 2 * elements * (world - 1) / world
    raise ValueError(f"count_collectives does not know how much {PREFIX}{kind} sends")
