"""Figures of a compiled model that really ran, to stand beside the predicted ones of a report."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

from torch import nn

from .lowering import NUMBER
from .model import CompiledModel
from .params import rows_of_state
from .predict import graphs_of
from .report import Report
from .runtime.count import count_collectives
from .runtime.memory import storage_bytes
from .runtime.state import ModelState


def measure(state: ModelState, starts: Sequence[float], run: Callable[[], object] | None) -> dict[str, float]:
    """Of this rank, by name; bytes, seconds, elements.

    "step_s": median from one forward with gradients to the next, of the last ones (`starts`); missing before the third.
    "parameters", "gradients": that live now, gathered ones included. With `run`, which runs one step on every rank:
    "elements_sent" and "collectives" of it, and "allocated_peak": the most bytes that live at once of what PyTorch
    allocates meanwhile, so without this rank's own parameters and their optimizer states, which live already.
    """
    found: dict[str, float] = {}
    if len(starts) > 2:  # the first interval has the compilation in it
        found["step_s"] = statistics.median(b - a for a, b in list(zip(starts, starts[1:]))[1:])
    params = list(state.params.values())
    found["parameters"] = storage_bytes([t for s in params for t in (s.param, s.held)])
    found["gradients"] = storage_bytes([s.param.grad for s in params])
    if run is not None:
        with count_collectives(state.world, memory=True) as count:
            run()
        found |= {"elements_sent": count.elements, "collectives": count.collectives, "allocated_peak": count.peak_bytes}
    return found


def live_report(model: nn.Module, compiled: CompiledModel, run: Callable[[], object] | None) -> Report:
    """The report of a compiled model, of the graphs that its last forward with gradients ran: `model.report(run)`."""
    begun = time.perf_counter()
    state, backend = compiled.state, compiled.backend
    if not backend.graphs.ran:
        raise RuntimeError("report() of a model that has not run: its graphs are made by the first forward with gradients")
    measured = measure(state, tuple(compiled.starts), run)
    graphs = graphs_of(backend)
    ran = tuple((label, gm) for label, gm in graphs.halves if gm.meta[NUMBER] in backend.graphs.ran)
    return Report(
        model=type(model).__name__, config=compiled.config, world=state.world, rank=state.rank,
        step=dataclasses.replace(graphs, halves=ran).step(), rows=rows_of_state(state), graphs=graphs, blocks="",
        seconds=time.perf_counter() - begun, measured=measured,
    )  # fmt: skip
