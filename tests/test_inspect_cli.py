"""`zero-fx inspect`, in this process."""

import json

import pytest
import torch
from torch import nn

from zero_fx.cli import main


@pytest.fixture(autouse=True)
def clean():
    yield
    torch._dynamo.reset()


def own():
    """A model of the user's, as `--model module:function` wants it."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)), (torch.randn(4, 64),)


def bare():
    return own()[0]


OWN = ["inspect", "--model", "tests.test_inspect_cli:own", "--world", "4"]


def test_figures_are_printed_and_written(tmp_path, capsys):
    assert main([*OWN, "--json", str(tmp_path / "r.json"), "--trace", str(tmp_path / "t.json")]) == 0
    shown = capsys.readouterr()
    assert "16,576 parameters, stage 3, rank 0 of 4 (1 node), h100" in shown.out and "bucket_collectives" in shown.out
    figures = json.loads((tmp_path / "r.json").read_text())
    assert figures["parameters"] == 64 * 128 * 2 + 128 + 64 and figures["world"] == 4
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert "wrote" in shown.err


def test_a_graph_or_a_diff_in_place_of_the_report(capsys):
    assert main([*OWN, "--graph", "forward", "--after", "shard_params"]) == 0
    assert "all_gather(%0, 4, \"0.weight\")" in capsys.readouterr().out
    assert main([*OWN, "--diff", "shard_grads"]) == 0
    assert "+ " in (out := capsys.readouterr().out) and "reduce_scatter" in out


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--model", "gpt2-smal"], "did you mean 'gpt2-small'"),
        (["--model", "tests.test_inspect_cli:none"], "has no attribute 'none'"),
        (["--model", "no.such:thing"], "No module named"),
        (["--model", "tests.test_inspect_cli:bare"], "expected it to return (model, args), got Sequential"),
        ([*OWN[1:], "--seq", "8"], "--seq has no effect"),
        ([*OWN[1:], "--precision", "int3"], "precision='int3'"),
        ([*OWN[1:], "--hardware", "h900"], "hardware='h900'"),
        ([*OWN[1:], "--world", "0"], "world_size=0"),
        ([*OWN[1:], "--stage", "4"], "stage=4"),
        ([*OWN[1:], "--ranks-per-node", "0"], "ranks_per_node=0"),
        ([*OWN[1:], "--memory-budget", "lots"], "memory_budget='lots'"),
        ([*OWN[1:], "--after", "prefetch"], "without --graph"),
        ([*OWN[1:], "--graph", "forward", "--diff", "prefetch"], "give one"),
        ([*OWN[1:], "--html", "/no/such/folder/x.html"], "there is no folder"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_said_in_one_line(flags, message, capsys):
    assert main(["inspect", *flags]) == 2
    shown = capsys.readouterr().err
    assert message in shown and shown.count("\n") == 1
