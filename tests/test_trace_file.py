"""report.save_trace against the Trace Event Format: what a viewer needs, and what a person reads in it."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import zero_fx
from zero_fx.lanes import LANES


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


@pytest.fixture(scope="module")
def traces(tmp_path_factory) -> dict[int, tuple]:
    """{stage: (report, what the file holds)}"""
    found = {}
    for stage in (1, 3):
        torch._dynamo.reset()
        model = nn.Sequential(*[Block() for _ in range(3)])
        config = zero_fx.Config(precision="bf16", keep_whole_below=0)
        report = zero_fx.inspect(model, torch.ones(8, 64), stage=stage, world_size=16, config=config)
        path = tmp_path_factory.mktemp("trace") / "trace.json"
        report.save_trace(path)
        found[stage] = report, json.loads(path.read_text())
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_every_event_is_of_the_format(traces, stage):
    """Fields by phase, as Google's document of the format has them; times in microseconds and not negative."""
    events = traces[stage][1]["traceEvents"]
    fields = {"X": {"name", "ph", "ts", "dur", "pid", "tid"}, "C": {"name", "ph", "ts", "pid", "args"}, "M": {"name", "ph", "pid", "tid", "args"}}
    for event in events:
        assert event["ph"] in fields and fields[event["ph"]] <= event.keys(), event
        assert event.get("ts", 0) >= 0 and event.get("dur", 0) >= 0
        assert all(isinstance(value, (int, float)) for value in (event.get("args", {}) if event["ph"] == "C" else {}).values())
    assert {event["ph"] for event in events} == set(fields)


@pytest.mark.parametrize("stage", [1, 3])
def test_lanes(traces, stage):
    """Each event is in a lane that has a name, and what is in one lane does not overlap."""
    events = traces[stage][1]["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M" and event["name"] == "thread_name"}
    assert tuple(names.values()) == LANES
    for lane in names:
        spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and e["tid"] == lane)
        assert all(end <= start + 1e-6 for (_, end), (start, _) in zip(spans, spans[1:])), names[lane]
    assert {e["tid"] for e in events if e["ph"] == "X"} == set(names)


def test_names_that_a_person_recognises(traces):
    """A collective says which parameters it serves, a wait what it waits for, and each its module and line."""
    report, trace = traces[3]
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert all(span["name"] and "zero_fx" not in span["name"] and "default" not in span["name"] for span in spans)
    assert any(span["name"].startswith("wait for all_gather") for span in spans)
    sent = [span for span in spans if span["cat"] in ("gather", "reduce")]
    assert len(sent) == len(report.collectives)
    served = set(", ".join(span["args"]["parameters"] for span in sent).split(", "))
    assert served == {row.name for row in report.rows}
    products = [span for span in spans if span["cat"] == "matmul"]
    assert {span["args"]["module"] for span in products} >= {f"{i}.{name}" for i in range(3) for name in ("up", "down")}
    assert all(span["args"]["line"].startswith("test_trace_file.py:") for span in products)


@pytest.mark.parametrize("stage", [1, 3])
def test_it_adds_up(traces, stage):
    """The last event ends with the step; memory's highest counter is the predicted peak."""
    report, trace = traces[stage]
    events = trace["traceEvents"]
    end = max(event["ts"] + event["dur"] for event in events if event["ph"] == "X")
    assert end == pytest.approx(1e6 * report.prediction.step_s, rel=1e-6)
    highest = max(sum(event["args"].values()) for event in events if event["ph"] == "C")
    assert highest + report.step.resident_bytes == report.prediction.peak_bytes
