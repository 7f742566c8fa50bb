"""What one step of captured graphs takes on given hardware: seconds, exposed communication, peak bytes."""

from __future__ import annotations

import dataclasses

from torch import fx

from .events import Half, half_of
from .hardware import Hardware
from .lowering import ADAM_STATES, Backend
from .passes.pipeline import PassRun
from .simulate import Timeline, play
from .vocabulary import PassConfig

# Tensors of a parameter's size that Adam's fused step reads (parameter, gradient, two moments) and writes (all but the gradient).
ADAM_TRAFFIC = 7


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Of one micro-batch and Adam's step. exposed_s: of the links' seconds (links_s) those in which the rank waits."""

    step_s: float
    exposed_s: float
    links_s: float
    peak_bytes: int


@dataclasses.dataclass(frozen=True)
class Step:
    """The events of what one rank runs in a step, in the order of capture, on one hardware. resident_bytes: of this
    rank's parameters and their optimizer's states."""

    halves: tuple[Half, ...]
    hardware: Hardware
    resident_bytes: int

    def play(self) -> list[Timeline]:
        return [play(half) for half in self.halves]

    @property
    def optimizer_s(self) -> float:
        """Seconds of Adam's step: it is bound by memory."""
        return self.resident_bytes / (1 + ADAM_STATES) * ADAM_TRAFFIC / self.hardware.memory_bytes_per_s

    def predict(self) -> Prediction:
        timelines = [timeline for half, timeline in zip(self.halves, self.play()) if half.label != "inference"]
        return Prediction(
            step_s=sum(t.seconds for t in timelines) + self.optimizer_s,
            exposed_s=sum(t.exposed_s for t in timelines),
            links_s=sum(t.links_s for t in timelines),
            peak_bytes=self.resident_bytes + max((t.peak_bytes for t in timelines), default=0),
        )


@dataclasses.dataclass(frozen=True)
class StepGraphs:
    """What one rank runs in a step.

    halves: (label, rewritten graph) in the order of capture: "forward", "backward", "inference".
    resident_bytes: of this rank's parameters and their optimizer's states. held_bytes: of gathered parameters that live
        through a step. fused: whether the lowering fuses. runs: of the passes.
    """

    halves: tuple[tuple[str, fx.GraphModule], ...]
    passes: PassConfig
    resident_bytes: int
    held_bytes: int
    fused: bool
    runs: tuple[PassRun, ...] = ()

    def step(self, hardware: Hardware | None = None) -> Step:
        """The graphs as events; on other hardware than they were planned for, if given."""
        hardware = hardware or self.passes.hardware
        halves = [
            half_of(label, gm, hardware, self.passes.world, self.fused, self.held_bytes * (label == "backward"))
            for label, gm in self.halves
        ]
        return Step(tuple(halves), hardware, self.resident_bytes)

    def predict(self, hardware: Hardware | None = None) -> Prediction:
        return self.step(hardware).predict()


def graphs_of(backend: Backend) -> StepGraphs:
    """What a compiled model has captured so far."""
    fused = backend.config.lowering == "inductor"
    halves, runs = tuple(backend.graphs.halves), tuple(backend.graphs.runs)
    return StepGraphs(halves, backend.passes, backend.resident_bytes, backend.held_bytes, fused, runs)
