"""What a step takes on one rank, made for people: one screen of text, tables, graphs, JSON, a Chrome trace."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Iterable

import torch
from tabulate import tabulate

from .breaks import Break, eager_parameters
from .config import Config
from .events import KINDS, Event
from .params import ParamRow
from .passes.pipeline import PassRun
from .predict import Prediction, Step, StepGraphs
from .scale import Scaling, scale
from .simulate import Timeline
from .symbolic import Formulas, formulas_of
from .text import text
from .text_diff import diff

SCHEMA = "zero_fx.report/1"
GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Report:
    """Of one rank. `str()` is one screen; see the methods for more.

    step: what is played. graphs: as they would run; blocks: how much of the model was captured for them, "" for all; breaks:
    where they break. rows: of all parameters. seconds: that the inspection took. measured: of a real run, by name, else None. samples: of the
    rank's batch, see batch.py, None where unknown. again: inspects anew with other options; None of a real run.
    """

    model: str
    config: Config
    world: int
    rank: int
    step: Step
    rows: tuple[ParamRow, ...]
    graphs: StepGraphs
    blocks: str
    seconds: float
    breaks: tuple[Break, ...] = ()
    samples: int | None = None
    again: Callable[..., Report] | None = None
    measured: dict[str, float] | None = None

    # --- figures

    @functools.cached_property
    def timelines(self) -> list[Timeline]:
        return self.step.play()

    @functools.cached_property
    def prediction(self) -> Prediction:
        return self.step.predict()

    @property
    def parameters(self) -> int:
        """Ψ: elements of all parameters, tied ones once."""
        return sum(row.elements for row in self.rows)

    @functools.cached_property
    def peak(self) -> tuple[str, Event | None, Timeline | None]:
        """(graph, event, timeline) at which most memory is used."""
        played = list(zip(self.step.halves, self.timelines))
        if not played:
            return "", None, None
        half, timeline = max(played, key=lambda one: one[1].peak_bytes)
        return half.label, half.events[timeline.peak_index] if timeline.peak_index >= 0 else None, timeline

    @functools.cached_property
    def memory(self) -> dict[str, int]:
        """Bytes of this rank at the peak of the step, by what they are for; their sum is prediction.peak_bytes."""
        parameters = sum(row.local_bytes for row in self.rows)
        found = {"parameters": parameters, "optimizer states": self.step.resident_bytes - parameters}
        timeline = self.peak[2]
        return found | dict.fromkeys(KINDS, 0) | (dict(timeline.peak_kinds) if timeline else {})

    @functools.cached_property
    def sent(self) -> dict[str, float]:
        """Elements that this rank sends in a step of one micro-batch, by collective, padding included."""
        found: dict[str, float] = {}
        for event in self.collectives:
            kind = "all_gather" if event.op == "gather_held" else event.op
            found[kind] = found.get(kind, 0.0) + event.sent
        return found

    @functools.cached_property
    def collectives(self) -> list[Event]:
        """Those that communicate."""
        return [event for half in self.step.halves for event in half.events if event.link_s]

    @property
    def utilisation(self) -> float:
        """Model flops utilisation (arXiv 2204.02311, appendix B): three times the flops of forward's matrix products,
        over what the device could have computed in the step."""
        forward = [event for half in self.step.halves if half.label == "forward" for event in half.events]
        elements: dict[torch.dtype, int] = {}
        for row in self.rows:
            elements[row.used_dtype] = elements.get(row.used_dtype, 0) + row.elements
        dtype = max(elements, key=elements.get, default=None)  # what most parameters are computed in
        return 3 * sum(event.flops for event in forward) / self.prediction.step_s / self.step.hardware.flops(dtype)

    @functools.cached_property
    def formulas(self) -> Formulas:
        """Memory, elements sent and time as sympy expressions; see zero_fx/symbolic.py."""
        return formulas_of(self.graphs, self.rows, self.rank)

    def scale(self, worlds: Iterable[int], kind: str = "weak") -> Scaling:
        """The same model on each number of ranks: memory, step time and exposed communication, as a table and a plot.

        kind: "weak" keeps a rank's samples, "strong" those of all ranks together. Each world is inspected anew.
        """
        return scale(self, worlds, kind)

    @functools.cached_property
    def notices(self) -> list[str]:
        """What a person has to know before the figures: what does not fit, what is not captured."""
        found = []
        over = self.prediction.peak_bytes - self.step.hardware.memory_bytes
        if over > 0:
            found.append(f"does not fit: {gib(over)} GiB more than the device has")
        eager = eager_parameters(self.step, self.rows) if self.breaks or not self.step.halves else ()
        if self.breaks:
            places = [f"{one.line} ({one.code}): {one.reason}" for one in self.breaks]
            found.append("not captured whole; tensors have no values here, and a branch on one may go another way in training.\n"
                         "Graphs break at\n  " + "\n  ".join(places))
        if eager:
            names = ", ".join(eager[:8]) + (f" and {len(eager) - 8:,} more" if len(eager) > 8 else "")
            found.append(f"eager, one collective for each use, not in these figures: {names}")
        return found

    # --- text

    def __str__(self) -> str:
        hardware, prediction = self.step.hardware, self.prediction
        nodes = -(-self.world // hardware.ranks_per_node)
        label, event, _ = self.peak
        where = f"{event.op} of {event.module or 'the model'}" + (f" ({event.line})" if event.line else "") if event else ""
        lines = [
            f"{self.model}: {self.parameters:,} parameters, stage {self.config.stage}, rank {self.rank} of {self.world:,} "
            f"({nodes:,} node{'s' * (nodes > 1)}), {hardware.name}",
            f"captured in {self.seconds:.1f} s" + (f" from {self.blocks}" if self.blocks else "")
            if self.measured is None
            else "as it ran",
            *self.notices,
            "",
            self.table("memory"),
            f"peak {gib(prediction.peak_bytes)} GiB of {gib(hardware.memory_bytes)}"
            + (f": in {label}, at {where}" if where else ""),
            "",
            f"step {ms(prediction.step_s)} ms: "
            + ", ".join(f"{half.label} {ms(t.seconds)}" for half, t in zip(self.step.halves, self.timelines))
            + f", optimizer {ms(self.step.optimizer_s)}",
            f"communication {ms(prediction.links_s)} ms, exposed {ms(prediction.exposed_s)} ms; "
            f"model flops utilisation {self.utilisation:.1%}",
            f"elements sent {sum(self.sent.values()):,.0f}: "
            + ", ".join(f"{kind} {value:,.0f}" for kind, value in self.sent.items()),
            "",
            self.table("passes"),
        ]
        if self.measured is not None:
            lines += ["", self.table("measured")]
        return "\n".join(lines)

    def table(self, name: str) -> str:
        """ "parameters", "memory", "collectives", "passes", or, of a real run, "measured"."""
        tables = {
            "parameters": self.parameter_table, "memory": self.memory_table, "collectives": self.collective_table,
            "passes": self.pass_table,
        }  # fmt: skip
        if self.measured is not None:
            tables["measured"] = self.measured_table
        if name not in tables:
            raise ValueError(f"table {name!r}: this report has {', '.join(map(repr, tables))}")
        rows, headers = tables[name]()
        return tabulate(rows, headers, floatfmt=",.3f", intfmt=",")

    def memory_table(self):
        return [[name, size / GIB] for name, size in self.memory.items() if size], ["a rank's memory at the peak", "GiB"]

    def pass_table(self):
        rows = []
        for run in self.graphs.runs:
            did = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in run.report.stats.items() if count)
            rows.append([run.label, run.name, did if run.report.changed and did else "-", run.time_ms])
        return rows, ["graph", "pass", "what it did", "ms"]

    def parameter_table(self):
        where: dict[str, list[str]] = {}
        for half, timeline in zip(self.step.halves, self.timelines):
            begun = {index: start for index, start, _ in timeline.transfers}
            for index, event in enumerate(half.events):
                for name in event.params if index in begun and "gather" in event.op else ():
                    others = f" with {len(event.params) - 1} others" if len(event.params) > 1 else ""
                    where.setdefault(name, []).append(f"{half.label} {ms(begun[index])} ms{others}")
        rows = [
            [r.name, "x".join(map(str, r.shape)), str(r.dtype)[6:], str(r.used_dtype)[6:], r.placement, r.rows, r.local_bytes / 2**20,
             "; ".join(where.get(r.name, []))]
            for r in self.rows
        ]  # fmt: skip
        return rows, ["parameter", "shape", "dtype", "computed in", "placement", "rows here", "MiB here", "gathered"]

    def collective_table(self):
        rows = []
        for half, timeline in zip(self.step.halves, self.timelines):
            for index, start, end in timeline.transfers:
                event = half.events[index]
                rows.append([half.label, event.op, start * 1e3, (end - start) * 1e3, event.sent, ", ".join(event.params)])
        return rows, ["graph", "collective", "starts, ms", "takes, ms", "elements sent", "parameters"]

    def measured_table(self):
        predicted = {
            "step_s": self.prediction.step_s, "parameters": self.memory["parameters"], "elements_sent": sum(self.sent.values()),
            "allocated_peak": self.prediction.peak_bytes - self.step.resident_bytes,
        }  # fmt: skip
        rows = [[name, value, predicted.get(name)] for name, value in (self.measured or {}).items()]
        return rows, ["figure", "measured", "predicted"]

    # --- graphs

    def graph(self, label: str = "forward", after: str | None = None, index: int = 0, places: bool = False) -> str:
        """The text form of a graph: "joint", "forward", "backward" or "inference"; as it is in the end, or after a pass.

        index: among the graphs of that label, where the model has several. places: with each line's module and source
        line; only for the final halves, whose nodes still exist.
        """
        if after is None and label != "joint":
            found = [gm for name, gm in self.graphs.halves if name == label]
            return text(self.pick(found, label, index), places)
        if places:
            raise ValueError("places=True: only the final graphs of halves still have them; leave out `after`")
        runs = [run for run in self.graphs.runs if run.label == label and (after is None or run.name == after)]
        if after is None:  # the last pass on each joint graph
            runs = [run for run, after_it in zip(runs, [*runs[1:], None]) if after_it is None or after_it.before != run.after]
        return self.pick(runs, f"{label} after {after}" if after else label, index).after

    def diff(self, name: str, label: str | None = None, index: int = 0, context: int = 1) -> str:
        """What the pass `name` changed, as lines with - and +: on each graph, or on that `label` alone."""
        runs = [run for run in self.graphs.runs if run.name == name and label in (None, run.label)]
        if not runs:
            known = ", ".join(dict.fromkeys(run.name for run in self.graphs.runs))
            raise ValueError(f"pass {name!r} did not run{f' on {label}' if label else ''}; these did: {known}")
        if label is not None:
            return diff_of(self.pick(runs, label, index), context)
        return "\n".join(f"{run.label}:\n{diff_of(run, context)}" for run in runs)

    def pick(self, found: list, what: str, index: int):
        if not 0 <= index < len(found):
            known = ", ".join(dict.fromkeys(f"{run.label} after {run.name}" for run in self.graphs.runs))
            raise ValueError(f"graph {what!r} number {index}: there are {len(found)} of it; there is {known}")
        return found[index]

    # --- files

    def to_dict(self) -> dict:
        """Plain values for JSON; "schema" names their form. Bytes, seconds and elements."""
        return {
            "schema": SCHEMA, "model": self.model, "stage": self.config.stage, "world": self.world, "rank": self.rank,
            "hardware": self.step.hardware.name, "ranks_per_node": self.step.hardware.ranks_per_node,
            "parameters": self.parameters, "memory": self.memory, "peak_bytes": self.prediction.peak_bytes,
            "step_s": self.prediction.step_s, "exposed_s": self.prediction.exposed_s, "links_s": self.prediction.links_s,
            "optimizer_s": self.step.optimizer_s, "utilisation": self.utilisation, "elements_sent": self.sent,
            "graphs": [
                {"label": half.label, "seconds": t.seconds, "compute_s": t.compute_s, "exposed_s": t.exposed_s,
                 "peak_bytes": t.peak_bytes, "events": len(half.events)}
                for half, t in zip(self.step.halves, self.timelines)
            ],
            "passes": [
                {"graph": run.label, "pass": run.name, "changed": run.report.changed, "time_ms": run.time_ms, **run.report.stats}
                for run in self.graphs.runs
            ],
            "parameter_rows": [
                {**dataclasses.asdict(row), "dtype": str(row.dtype)[6:], "used_dtype": str(row.used_dtype)[6:],
                 "placement": row.placement}
                for row in self.rows
            ],
            "notices": self.notices, "breaks": [dataclasses.asdict(one) for one in self.breaks],
            "captured": self.blocks or "all", "inspect_s": self.seconds, "measured": self.measured,
        }  # fmt: skip

    def save_trace(self, path: str | os.PathLike) -> None:
        """A trace for chrome://tracing or Perfetto: a lane of computing and one of the links, and memory beside them."""
        from .trace_file import trace_events

        with open(path, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": trace_events(self), "displayTimeUnit": "ms"}, file)

    def save_html(self, path: str | os.PathLike) -> None:
        """One page that fetches nothing: timeline, memory over time, the graphs before and after each pass, parameters."""
        from .html_page import page

        with open(path, "w", encoding="utf-8") as file:
            file.write(page(self))

    def save_svg(self, path: str | os.PathLike) -> None:
        """A drawing of the timeline and the memory. Needs matplotlib; raises ImportError without it."""
        from .drawing import draw

        draw(self, path)


def diff_of(run: PassRun, context: int) -> str:
    return diff(run.before, run.after, context)


def gib(size: float) -> str:
    return f"{size / GIB:,.2f}"


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"
