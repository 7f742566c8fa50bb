"""zero_fx.plan and stage="auto": what fits, fastest first, and why the rest is out."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import ranks
import torch
from torch import nn

import zero_fx
from zero_fx.accumulate import last_reductions_s, peak_bytes, step_s, without
from zero_fx.cli import main
from zero_fx.plan import micro_batches_of
from zero_fx.runtime.count import count_collectives
from zero_fx.simulate import play

OPTIONS = {"lowering": "eager", "keep_whole_below": 100}
CONFIG = zero_fx.Config(**OPTIONS)
MIB = 1 << 20


class Net(nn.Module):
    def __init__(self, layers=3, dim=64):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)) for _ in range(layers)])

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


@pytest.fixture(autouse=True)
def clean():
    yield
    torch._dynamo.reset()


def test_micro_batches():
    assert micro_batches_of(12, None) == [(12, 1), (6, 2), (3, 4), (1, 12)]
    assert micro_batches_of(12, (4, 12, 4)) == [(12, 1), (4, 3)]
    assert micro_batches_of(None, None) == [(None, 1)]
    with pytest.raises(ValueError, match="micro_batches has 5: expected numbers that divide the 12 samples"):
        micro_batches_of(12, (5,))


@pytest.mark.slow
def test_candidates_are_what_inspect_says():
    found = zero_fx.plan(Net(), torch.ones(512, 64), world_size=8, hardware="h100", config=CONFIG)
    fitting = [c for c in found if c.fits]
    assert [c.step_s for c in fitting] == sorted(c.step_s for c in fitting) and found[: len(fitting)] == fitting
    assert {c.stage for c in fitting} == {0, 1, 2, 3} and {c.accumulation for c in fitting} == {1}
    for c in fitting:
        torch._dynamo.reset()
        alone = zero_fx.inspect(Net(), torch.ones(512, 64), stage=c.stage, world_size=8, memory_budget=c.memory_budget, config=CONFIG)
        assert (c.peak_bytes, c.step_s) == (alone.prediction.peak_bytes, alone.prediction.step_s)
    stage_3 = [c for c in fitting if c.stage == 3]
    assert [c.memory_budget is None for c in stage_3] == [False, True], "memory that is left keeps parameters gathered"
    assert "not inspected: a micro-batch of 512 fits" in str(found) and "accumulation" in str(found)


@pytest.mark.slow
def test_the_less_memory_the_higher_the_stage_and_the_smaller_the_micro_batch():
    model, x = Net(layers=2, dim=256), torch.ones(4096, 256)
    plans = {memory: zero_fx.plan(model, x, world_size=8, memory=memory * MIB, config=CONFIG, micro_batches=(4096, 256))
             for memory in (400, 15)}  # fmt: skip
    for memory, found in plans.items():
        for c in found:
            assert c.fits == (c.peak_bytes is not None and c.peak_bytes <= memory * MIB), c
            assert c.fits or c.reason
    assert plans[400][0].accumulation == 1 and {c.stage for c in plans[400] if c.fits} == {0, 1, 2, 3}
    tight = plans[15]
    assert tight[0].stage >= 2 and tight[0].accumulation > 1
    assert any("alone take" in c.reason for c in tight if c.stage == 0)
    assert any("smallest feasible" in c.reason for c in tight), str(tight)
    nothing = zero_fx.plan(model, x, world_size=8, memory=MIB, config=CONFIG)
    assert not any(c.fits for c in nothing)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_seconds_of_micro_batches(stage):
    """Each collective's seconds are counted as often as it runs (zero_fx/formulas.py), nothing hidden or everything."""
    report = zero_fx.inspect(Net(), torch.ones(8, 64), stage=stage, world_size=8, config=CONFIG)
    halves, times = report.step.halves, 3
    ops = {"gathers": ("all_gather", "gather_held"), "reductions": ("reduce_scatter", "all_reduce")}
    links = {name: sum(e.link_s for half in halves for e in half.events if e.op in them) for name, them in ops.items()}
    for half in halves:
        silent = play(without(half, sum(ops.values(), ())))
        assert silent.links_s == silent.exposed_s == 0 and silent.compute_s == pytest.approx(play(half).compute_s)
    compute = times * sum(play(half).compute_s for half in halves) + report.step.optimizer_s
    found = step_s(report, times)
    runs = {0: (1, 0), 1: (1, 0), 2: (1, times), 3: (times, times)}[stage]
    most = runs[0] * links["gathers"] + runs[1] * links["reductions"]
    rest = compute + (last_reductions_s(report) if stage < 2 else 0)
    assert rest <= found * (1 + 1e-9) and found <= (rest + most) * (1 + 1e-9)
    assert (last_reductions_s(report) > 0) and step_s(report, 1) == report.prediction.step_s


def check_peak(rank: int, world: int, stage: int) -> tuple[int, int]:
    """(least measured peak of a step of 3 micro-batches, what accumulate.py allows)."""
    x = torch.randn(512, 64, generator=torch.Generator().manual_seed(rank))
    model = zero_fx.compile(Net(), stage, hardware="cpu", **OPTIONS)

    def step(micro_batches):
        model.zero_grad()
        with model.no_sync():
            for _ in range(micro_batches - 1):
                model(x).backward()
        model(x).backward()

    for micro_batches in (1, 1, 3, 3):
        step(micro_batches)
        if micro_batches == 1:
            report = model.report()
    measured = []
    for _ in range(4):  # a thread of gloo's may let go of its tensors late
        with count_collectives(world, memory=True) as count:
            step(3)
        measured.append(count.peak_bytes)
    return min(measured), peak_bytes(report, 3) - report.step.resident_bytes


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_measured_peak_of_micro_batches(stage):
    for measured, allowed in ranks.run(check_peak, stage):
        assert 0.5 * allowed < measured <= 1.02 * allowed, (measured, allowed)


AUTO = """
import sys, pytest, torch, torch.distributed as dist, zero_fx
from tests.test_plan import Net
x = torch.ones(8, 64)
model = zero_fx.compile(Net(), "auto", example=x, memory_budget=sys.argv[1], hardware="cpu", lowering="eager")
model(x).backward()
with pytest.raises(ValueError, match="plans before a process group exists"):
    zero_fx.compile(Net(), "auto", example=x)
print(f"stage {model._zero_fx_compiled.config.stage}, world {dist.get_world_size()}\\n", end="", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("memory, stages", [("1GiB", (0, 1, 2)), ("1400000 B", (3,))])
def test_auto_takes_the_first_that_fits(tmp_path, memory, stages):
    (tmp_path / "auto.py").write_text(AUTO)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(tmp_path / "auto.py"), memory]
    root = pathlib.Path(__file__).parents[1]
    env = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root / 'tests'}"}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert ran.returncode == 0, ran.stderr[-3000:]
    first, second = ran.stdout.splitlines()
    assert first == second and first in [f"stage {stage}, world 2" for stage in stages]


def test_auto_needs_an_example_and_says_what_is_missing():
    with pytest.raises(ValueError, match='stage="auto" needs example='):
        zero_fx.compile(Net(), "auto")
    with pytest.raises(ValueError, match="example= has an effect with"):
        zero_fx.compile(Net(), 3, example=torch.ones(1, 64))
    with pytest.raises(ValueError, match='stage="auto": no stage fits this device(?s:.*)alone take'):
        zero_fx.compile(Net(), "auto", example=torch.ones(8, 64), memory_budget=1000, **OPTIONS)


def test_refusals():
    model, x = Net(), torch.ones(8, 64)
    with pytest.raises(ValueError, match="stages has 4: expected some of 0, 1, 2, 3"):
        zero_fx.plan(model, x, stages=(4,))
    with pytest.raises(ValueError, match="config has memory_budget=1,000, which a plan chooses"):
        zero_fx.plan(model, x, config=zero_fx.Config(memory_budget=1000))
    with pytest.raises(ValueError, match="memory_budget='much'"):
        zero_fx.plan(model, x, memory="much")


OWN = ["plan", "--model", "tests.test_inspect_cli:own", "--world", "4"]


def test_the_command(tmp_path, capsys):
    assert main([*OWN, "--memory", "1MiB", "--stages", "1", "3", "--json", str(tmp_path / "p.json")]) == 0
    shown = capsys.readouterr()
    assert "micro-batch" in shown.out and "wrote" in shown.err
    found = json.loads((tmp_path / "p.json").read_text())
    assert {candidate["stage"] for candidate in found} == {1, 3} and found[0]["reason"] == "" and found[0]["step_s"] > 0
    assert main([*OWN, "--memory", "2KiB", "--stages", "3"]) == 0
    shown = capsys.readouterr()
    assert "nothing of tests.test_inspect_cli:own fits" in shown.err and "out because" in shown.out


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--stages", "5"], "stages has 5: expected some of 0, 1, 2, 3"),
        (["--stages", "all"], "--stages all: expected some of 0, 1, 2, 3"),
        (["--memory", "lots"], "memory_budget='lots'"),
        (["--world", "0"], "world_size=0"),
        (["--json", "/no/such/folder/x"], "there is no folder"),
        (["--batch", "3"], "--batch has no effect"),
    ],
)
def test_what_cannot_be_used_is_said_in_one_line(flags, message, capsys):
    assert main([*OWN, *flags]) == 2
    shown = capsys.readouterr().err
    assert message in shown and shown.count("\n") == 1
