"""Meet `memory_budget`: how much of the activations to save, and which gathered parameters to keep for backward.

One graph, cut at several fractions of saved activations, is played in memory (zero_fx.simulate) with its collectives in
place. The largest fraction whose peak fits is taken; what is then left of the budget buys gathers, as a 0/1 knapsack
(Kellerer, Pferschy, Pisinger 2004): worth the seconds that gathering again would take, weighing the full bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from torch import fx

from .costs import bytes_of, collective_s, size_of
from .events import half_of
from .passes.pipeline import BUDGET, HALVES, SCHEDULE, run_passes
from .simulate import play
from .vocabulary import USE, Gather, PassConfig, find

# Of the activations that would be saved without a budget. Not 0: forward would be computed again as a whole before
# backward begins, with the same peak.
FRACTIONS = tuple(i / 10 for i in range(10, 0, -1))
UNITS = 2048  # into which the knapsack cuts what is left


@dataclasses.dataclass(frozen=True)
class Plan:
    """fraction: of the activations to save. kept: names of gathered parameters that stay for backward.
    peak_bytes: of the step, as simulated."""

    fraction: float
    kept: tuple[str, ...]
    peak_bytes: int


@dataclasses.dataclass(frozen=True)
class Problem:
    """A joint graph to be cut. cut(joint, fraction) -> (forward, backward). resident: bytes of shards and optimizer
    states, and of held parameters, that live throughout. fused: whether the lowering fuses."""

    joint: fx.GraphModule
    cut: Callable
    config: PassConfig
    resident: int
    held: int
    fused: bool

    def peak(self, fraction: float, kept: tuple[str, ...]) -> int:
        """Simulated peak bytes of forward and backward."""
        config = dataclasses.replace(self.config, kept=kept, fraction=fraction)
        joint = copy_of(self.joint)
        run_passes(joint, BUDGET, config, "budget")
        forward, backward = self.cut(joint, fraction)
        peaks = []
        for label, half in (("forward", forward), ("backward", backward)):
            run_passes(half, HALVES + SCHEDULE, config, label)
            held = self.held if label == "backward" else 0
            peaks.append(play(half_of(label, half, config.hardware, config.world, self.fused, held)).peak_bytes)
        return self.resident + max(peaks)


def copy_of(gm: fx.GraphModule) -> fx.GraphModule:
    """The same graph with nodes of its own; values and attributes are shared."""
    graph = fx.Graph()
    result = graph.graph_copy(gm.graph, {})
    graph.output(result).meta.update(gm.graph.output_node().meta)
    copied = fx.GraphModule(gm, graph)
    copied.meta.update(gm.meta)
    return copied


def choose(problem: Problem) -> Plan:
    """The plan for one graph; raises ValueError if even saving nothing does not fit."""
    budget = problem.config.memory_budget
    fraction, peak = largest_fraction(problem, budget)
    kept = knapsack(candidates(problem), budget - peak)
    return Plan(fraction, kept, problem.peak(fraction, kept) if kept else peak)


def largest_fraction(problem: Problem, budget: int) -> tuple[float, int]:
    """(fraction, peak) of the most activations that fit, by bisection: less saved is less memory, as a rule. Where the
    least is too much, every other is tried."""
    peaks: dict[float, int] = {}

    def fits(fraction: float) -> bool:
        peaks[fraction] = problem.peak(fraction, ())
        return peaks[fraction] <= budget

    if fits(FRACTIONS[0]):
        return FRACTIONS[0], peaks[FRACTIONS[0]]
    if not fits(FRACTIONS[-1]):
        for fraction in reversed(FRACTIONS[1:-1]):
            if fits(fraction):
                return fraction, peaks[fraction]
        smallest = min(peaks.values())
        raise ValueError(
            f"memory_budget={budget:,} bytes cannot be met: the smallest feasible is {smallest:,} bytes "
            f"({problem.resident:,} of them parameters and optimizer states)"
        )
    low, high = 0, len(FRACTIONS) - 1  # FRACTIONS[low] does not fit, FRACTIONS[high] does
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(FRACTIONS[middle]) else (middle, high)
    return FRACTIONS[high], peaks[FRACTIONS[high]]


def candidates(problem: Problem) -> list[tuple[str, int, float]]:
    """(name, bytes, seconds) of each parameter that backward would gather again."""
    config, found = problem.config, []
    for node in find(problem.joint.graph, "gather_param"):
        gather = Gather(*node.args)
        shard, full = gather.shard.meta["val"], node.meta["val"]
        if gather.lifetime == USE and config.world > 1 and backward_reads(node):
            seconds = collective_s("all_gather", size_of(shard), full.element_size(), config.world, config.hardware)
            found.append((gather.name, bytes_of(full), seconds))
    return found


def backward_reads(node: fx.Node) -> bool:
    """Whether a node of backward reads the parameter or a view of it."""
    for user in node.users:
        if user.meta.get("partitioner_tag") == "is_backward" or "tangents" in user.name:
            return True
        if user.meta.get("zero_fx_again") and backward_reads(user):
            return True
    return False


def knapsack(items: list[tuple[str, int, float]], capacity: int) -> tuple[str, ...]:
    """Names of the items of most worth that weigh at most `capacity` together. Weights are rounded up to units."""
    unit = max(1, capacity // UNITS)
    room = capacity // unit if capacity > 0 else 0
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())] * (room + 1)
    for index, (_, size, worth) in enumerate(items):
        weight = -(-size // unit)
        for space in range(room, weight - 1, -1):
            worth_with = best[space - weight][0] + worth
            if worth_with > best[space][0]:
                best[space] = (worth_with, (*best[space - weight][1], index))
    return tuple(items[index][0] for index in best[room][1]) if room else ()
