"""What of a model is not captured: where graphs break, and what then runs operator by operator."""

from __future__ import annotations

import dataclasses
import linecache
import os
import traceback

from .params import ParamRow
from .predict import Step
from .text import is_users
from .torch_compat import graph_break_reasons
from .vocabulary import WHOLE


class CaptureError(RuntimeError):
    """A model's own forward failed while it was captured."""


@dataclasses.dataclass(frozen=True)
class Break:
    """A place at which one graph ends and another begins. line: "file:number" of the user's code; code: what stands there."""

    line: str
    code: str
    reason: str


def breaks_since(count: int) -> tuple[Break, ...]:
    """The graph breaks after the first `count` of this process, each place once."""
    found: dict[str, Break] = {}
    for one in graph_break_reasons[count:]:
        frame = users_frame(one.user_stack)
        if frame is not None:
            place = f"{os.path.basename(frame.filename)}:{frame.lineno}"
            reason = one.reason.partition("\n")[0].partition(" TensorVariable")[0]
            found.setdefault(place, Break(place, linecache.getline(frame.filename, frame.lineno).strip(), reason))
    return tuple(found.values())


def users_frame(stack) -> traceback.FrameSummary | None:
    """The innermost frame of the user's code."""
    return next((frame for frame in reversed(stack or []) if is_users(frame.filename)), None)


def explain(error: Exception, model: str) -> Exception:
    """The error to raise in place of one from a capture: what the compiler wrapped; or where the model's forward failed."""
    inner = getattr(error, "inner_exception", None)  # of what a backend raised: an infeasible budget
    if isinstance(inner, (ValueError, TypeError)):
        return inner
    traced = getattr(error, "real_stack", None)  # of what failed on shapes alone, which says itself what the operator got
    frame = users_frame(traced or traceback.extract_tb(error.__traceback__))
    if frame is None:
        return error
    said = (traced and str(error).partition(": got ")[2]) or str(error)
    code = linecache.getline(frame.filename, frame.lineno).strip()
    return CaptureError(
        f"{model} fails at {os.path.basename(frame.filename)}:{frame.lineno} ({code}) while it is captured: "
        f"{said.strip().splitlines()[0] if said.strip() else type(error).__name__}. Parameters and arguments have no values "
        "in a capture, only shapes; run the plain model once to see whether it works"
    )


def eager_parameters(step: Step, rows: tuple[ParamRow, ...]) -> tuple[str, ...]:
    """Names of the parameters that no captured graph gathers or reduces. Of one that is kept whole and not trained no graph
    would show it."""
    seen = {name for half in step.halves for event in half.events for name in event.params}
    trains = any(half.label == "backward" for half in step.halves)
    return tuple(
        row.name for row in rows if row.name not in seen and not (row.lifetime == WHOLE and not (row.trains and trains))
    )
