"""Reports: of graphs that would run, and of graphs that ran."""

import json

import pytest
import torch
from torch import nn

import ranks
import zero_fx
from scenarios.reports import OPTIONS, Mixer, check_report
from zero_fx.params import held_bytes, resident_bytes, rows_of_model


@pytest.fixture(autouse=True)
def clean():
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def report():
    return zero_fx.inspect(nn.Sequential(*[Mixer() for _ in range(2)]), torch.ones(8, 33), world_size=64, config=zero_fx.Config(**OPTIONS))




@pytest.mark.slow
@pytest.mark.parametrize("stage, precision", [(3, None), (1, "bf16"), pytest.param(2, None, marks=pytest.mark.full),
                                              pytest.param(0, None, marks=pytest.mark.full)])  # fmt: skip
def test_a_running_model_reports_what_inspect_foretold(stage, precision):
    config = zero_fx.Config(stage=stage, precision=precision, hardware="cpu", **OPTIONS)
    for rank, ran in enumerate(ranks.run(check_report, stage, precision)):
        foretold = zero_fx.inspect(Mixer(), torch.ones(8, 33), config=config, world_size=2, rank=rank)
        torch._dynamo.reset()
        assert ran["halves"] == ["forward", "backward"], "those of another length and of the evaluation did not run in the step"
        for label, text in ran["graphs"].items():
            assert text == foretold.graph(label)
        measured = ran["measured"]
        assert measured["elements_sent"] == pytest.approx(ran["sent"]) == pytest.approx(sum(foretold.sent.values()))
        assert measured["parameters"] == ran["local"] == foretold.memory["parameters"]
        assert measured["step_s"] > 0 and measured["gradients"] == 0 and measured["collectives"] >= 1
        assert "as it ran" in ran["text"] and "elements_sent" in ran["text"]
        json.dumps(ran["json"])


def test_rows_foretell_what_compile_holds():
    """Resident and held bytes, from shapes alone, are the compiled model's own."""
    for stage, precision in ((0, None), (1, "bf16"), (2, None), (3, "bf16")):
        config = zero_fx.Config(stage=stage, precision=precision, **OPTIONS)
        graphs = zero_fx.inspect(Mixer(), torch.ones(8, 33), config=config, world_size=7, rank=6).graphs
        rows = rows_of_model(Mixer(), config, 7, 6)
        assert (resident_bytes(rows), held_bytes(rows, 7)) == (graphs.resident_bytes, graphs.held_bytes)
        torch._dynamo.reset()


def test_one_screen(report):
    lines = str(report).splitlines()
    assert lines[0] == f"Sequential: {report.parameters:,} parameters, stage 3, rank 0 of 64 (8 nodes), h100"
    assert len(lines) < 50
    for what in ("optimizer states", "peak", "exposed", "model flops utilisation", "elements sent", "bucket_collectives", "prefetch"):
        assert what in str(report)
    assert sum(report.memory.values()) == report.prediction.peak_bytes
    assert "test_report.py" not in str(report) and "reports.py:" in str(report), "the peak's source line is the model's"
    assert report.parameters == sum(p.numel() for p in Mixer().parameters()) * 2


def test_tables(report):
    parameters = report.table("parameters")
    assert "0.first.weight" in parameters and "Shard(0)" in parameters and "Replicate()" in parameters
    assert "reduce_scatter" in report.table("collectives")
    assert report.table("memory") in str(report) and report.table("passes") in str(report)
    with pytest.raises(ValueError, match="table 'time': this report has 'parameters', 'memory', 'collectives', 'passes'"):
        report.table("time")


def test_graphs_and_diffs(report):
    joint = report.graph("joint")
    assert "gather_param" in joint
    assert report.graph("forward", after="prefetch") == report.graph("forward")
    changed = report.diff("shard_params", "forward")
    assert any(line.startswith("+") and "all_gather" in line for line in changed.splitlines())
    assert any(line.startswith("-") and "gather_param" in line for line in changed.splitlines())
    assert "reports.py:" in report.graph("forward", places=True)
    with pytest.raises(ValueError, match="pass 'fuse' did not run; these did: .*shard_params"):
        report.diff("fuse")
    with pytest.raises(ValueError, match="graph 'inference' number 0: there are 0 of it; there is"):
        report.graph("inference")


def test_json(report):
    found = json.loads(json.dumps(report.to_dict()))
    assert found["schema"] == "zero_fx.report/1" and found["world"] == 64 and found["ranks_per_node"] == 8
    assert found["peak_bytes"] == sum(found["memory"].values())
    assert {row["name"] for row in found["parameter_rows"]} == {f"{i}.{n}" for i in (0, 1) for n, _ in Mixer().named_parameters()}


def test_refusals():
    model, x = nn.Linear(4, 4), torch.ones(1, 4)
    with pytest.raises(ValueError, match="hardware='h900': expected one of 'a100', 'h100'"):
        zero_fx.inspect(model, x, hardware="h900")
    with pytest.raises(ValueError, match="world_size=0: expected a number of ranks, 1 or more"):
        zero_fx.inspect(model, x, world_size=0)
    with pytest.raises(ValueError, match="ranks_per_node=0: expected a number of ranks, 1 or more"):
        zero_fx.inspect(model, x, ranks_per_node=0)
    with pytest.raises(TypeError, match="takes a torch.nn.Module, got function"):
        zero_fx.inspect(lambda x: x, x)
