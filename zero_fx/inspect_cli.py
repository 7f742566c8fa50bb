"""`zero-fx inspect`: what a step of a published or of your own model takes on hardware that is not here."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys

import torch
from torch import nn

from .config import Config
from .hardware import HARDWARE
from .inspect import inspect
from .report import Report
from .shapes import NAMES, build
from .train import option


@dataclasses.dataclass(frozen=True)
class InspectOptions:
    """The flags of `zero-fx inspect`."""

    model: str = option("llama-8b", f"{', '.join(NAMES)}; or module:function, which returns (model, args)")
    stage: int = option(3, "0, 1, 2 or 3")
    world: int = option(64, "ranks")
    hardware: str = option("h100", ", ".join(HARDWARE))
    ranks_per_node: int = option(8, "ranks of a node")
    memory_budget: str | None = option(None, "of a rank's whole step: 24GiB, or 0.8 for a part of the device's memory")
    precision: str | None = option(
        None, "bf16 or fp16: compute in it on float32 parameters; none: in their own dtype (default: bf16, for a model of "
        "your own none)"
    )  # fmt: skip
    batch: int = option(1, "samples of one rank")
    seq: int = option(0, "tokens of a sample; 0: the context that the model was published with")
    html: str | None = option(None, "write a page: timeline, memory, graphs, parameters")
    trace: str | None = option(None, "write a trace for Perfetto or chrome://tracing")
    svg: str | None = option(None, "write a drawing of the timeline and the memory")
    json: str | None = option(None, "write all figures as JSON")
    graph: str | None = option(None, "print a graph instead of the report: joint, forward, backward or inference")
    after: str | None = option(None, "the graph as it was after this pass")
    diff: str | None = option(None, "print what a pass changed instead of the report")


def run(options: InspectOptions) -> Report:
    """Inspect, write what was asked for, print. Raises ValueError or TypeError for options that cannot be used."""
    check(options)
    model, args, kwargs = model_of(options)
    report = inspect(
        model, *args, stage=options.stage, world_size=options.world, hardware=options.hardware,
        ranks_per_node=options.ranks_per_node, memory_budget=number(options.memory_budget), config=Config(precision=precision_of(options)),
        **kwargs,
    )  # fmt: skip
    report = dataclasses.replace(report, model=options.model)
    if options.graph or options.diff:
        print(report.graph(options.graph, options.after) if options.graph else report.diff(options.diff))
    else:
        print(report)
    for path, save in ((options.html, "save_html"), (options.trace, "save_trace"), (options.svg, "save_svg")):
        if path:
            getattr(report, save)(path)
            print(f"wrote {path}", file=sys.stderr)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(report.to_dict(), file, indent=1)
        print(f"wrote {options.json}", file=sys.stderr)
    return report


def check(options: InspectOptions) -> None:
    """What can be said before the seconds that a capture takes."""
    for name in ("html", "trace", "svg", "json"):
        folder = os.path.dirname(getattr(options, name) or "") or "."
        if not os.path.isdir(folder):
            raise ValueError(f"--{name} {getattr(options, name)}: there is no folder {folder}")
    if options.after and not options.graph:
        raise ValueError(f"--after {options.after} has no effect without --graph")
    if options.graph and options.diff:
        raise ValueError("--graph and --diff were both given: give one")


def number(budget: str | None) -> str | float | None:
    """A memory budget: a part of the device's memory as a float, else as it is."""
    try:
        return float(budget) if budget is not None else None
    except ValueError:
        return budget


def precision_of(options) -> str | None:
    return {"none": None, None: None if ":" in options.model else "bf16"}.get(options.precision, options.precision)


def model_of(options) -> tuple[nn.Module, tuple, dict]:
    """(model, args, kwargs), on the meta device."""
    if ":" not in options.model:
        dtype = torch.float32  # masters; precision says what is computed in
        return *build(options.model, options.batch, options.seq or None, dtype), {}
    for name, default in (("batch", 1), ("seq", 0)):
        if getattr(options, name) != default:
            raise ValueError(f"--{name} has no effect on {options.model}, which makes its own arguments")
    path, _, name = options.model.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(path), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--model {options.model}: {error}") from error
    with torch.device("meta"):
        found = function()
    if not isinstance(found, tuple) or len(found) not in (2, 3) or not isinstance(found[0], nn.Module):
        raise TypeError(f"--model {options.model}: expected it to return (model, args), got {type(found).__name__}")
    args = found[1] if isinstance(found[1], tuple) else (found[1],)
    return found[0], args, found[2] if len(found) == 3 else {}
