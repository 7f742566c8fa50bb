"""Ranks that do not run the same program: a message on every rank in time, never a hang, never mixed up data."""

import contextlib
import datetime
import os
import pathlib
import re
import subprocess
import sys
import time

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn

import zero_fx

pytestmark = pytest.mark.timeout(120)
OPTIONS = {"stage": 3, "lowering": "eager", "keep_whole_below": 0}


class Experts(nn.Module):
    """Two experts of one shape; the caller chooses."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, which: str):
        return (self.a if which == "a" else self.b)(x).square().sum()


class EagerExperts(Experts):
    """The same where nothing is captured."""

    forward = torch._dynamo.disable(Experts.forward)


def message_of(call) -> str:
    """The text of the RuntimeError that `call()` raises; "" if it raises none."""
    try:
        call()
    except Exception as error:
        return str(error)
    return ""


def step(model, which: str) -> None:
    model(torch.ones(2, 4), which).backward()


def different_first_graphs(rank, world):
    model = zero_fx.compile(Experts(), timeout_s=20, **OPTIONS)
    start = time.monotonic()
    return message_of(lambda: step(model, "ab"[rank])), time.monotonic() - start


def test_ranks_that_compile_different_collectives():
    for message, seconds in ranks.run(different_first_graphs):
        assert "ranks compiled different collectives" in message
        assert all(f"all_gather {x}.weight, {x}.bias float32[10]" in message for x in "ab")
        assert "rank 0" in message and "rank 1" in message
        assert seconds < 20


def different_branches_later(rank, world, make):
    model = zero_fx.compile(make(), timeout_s=20, **OPTIONS)
    for which in ("a", "b", "a", "b"):
        step(model, which)
    return message_of(lambda: step(model, "ab"[rank]))


@pytest.mark.parametrize("make", [Experts, pytest.param(EagerExperts, marks=pytest.mark.slow)])
def test_ranks_that_take_different_branches_through_graphs_they_all_have(make):
    # The two experts have one shape, so the collectives themselves succeed and mix up the experts.
    for message in ranks.run(different_branches_later, make):
        assert "ranks ran different collectives" in message and "do not step the optimizer" in message
        assert "rank 0 ran last" in message or "rank 1 ran last" in message
        assert "a.weight" in message and "b.weight" in message, "both sequences are named"


def different_branches_without_backward(rank, world, stage):
    """(message, another after it): of evaluations through branches that every rank has compiled."""
    model = zero_fx.compile(Experts(), timeout_s=20, **OPTIONS | {"stage": stage})
    x = torch.ones(2, 4)
    with torch.no_grad():
        same = [model(x, which) for which in ("a", "b", "a")]
        message = message_of(lambda: model(x, "ab"[rank]))
        assert torch.equal(model(x, "a"), same[0]), "a right evaluation after a refused one"
    return message


def different_branches_with_gradients_that_nobody_wants(rank, world):
    model = zero_fx.compile(Experts(), timeout_s=20, **OPTIONS)
    x = torch.ones(2, 4)
    for which in ("a", "b", "ab"[rank]):
        model(x, which)
    return message_of(lambda: model(x, "a"))


def test_an_evaluation_without_no_grad_is_compared_by_the_next_forward():
    for message in ranks.run(different_branches_with_gradients_that_nobody_wants):
        assert "ranks ran different collectives" in message


@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_ranks_that_evaluate_different_branches(stage):
    for message in ranks.run(different_branches_without_backward, stage):
        assert "ranks ran different collectives" in message and "use the outputs" in message
        assert "a.weight" in message and "b.weight" in message


LATE = """
import time, torch, torch.distributed as dist, zero_fx
model = zero_fx.compile(torch.nn.Linear(8, 8), lowering="eager", keep_whole_below=0, timeout_s=3)
model(torch.ones(2, 8)).sum().backward()
if dist.get_rank() == 1:
    time.sleep(9)
start = time.monotonic()
try:
    model(torch.ones(2, 8)).sum().backward()
except RuntimeError as error:
    print(f"rank {dist.get_rank()} after {time.monotonic() - start:.0f} s: {error}", flush=True)
"""


@pytest.mark.slow
def test_timeout_s_bounds_collectives_of_the_group_that_compile_initialises(tmp_path):
    script = tmp_path / "late.py"
    script.write_text(LATE)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    path = str(pathlib.Path(__file__).resolve().parent.parent)
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, env={**os.environ, "PYTHONPATH": path})
    found = re.search(r"rank 0 after (\d+) s: zero_fx: gave up waiting for the collective of 'weight", run.stdout)
    assert found and int(found[1]) < 8, run.stdout + run.stderr[-2000:]


def one_rank_compiles_alone(rank, world):
    model = zero_fx.compile(Experts(), timeout_s=3, **OPTIONS)
    step(model, "a")
    if rank == 1:
        return message_of(lambda: step(model, "b"))
    time.sleep(5)
    return ""


@pytest.mark.slow
def test_a_rank_that_compiles_what_no_other_does():
    message = ranks.run(one_rank_compiles_alone)[1]
    assert "rank 1 compiled a new forward graph and rank 0 did not within 3 s" in message


def late_rank(rank, world, make, stage):
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
    model = zero_fx.compile(make(), mesh=mesh, **OPTIONS | {"stage": stage})
    step(model, "a")
    start = time.monotonic()
    if rank == 1:
        time.sleep(4)
    message = message_of(lambda: step(model, "a"))
    return message, time.monotonic() - start


@pytest.mark.slow
@pytest.mark.parametrize("make, stage", [(EagerExperts, 0), (Experts, 3)])
def test_a_late_rank(make, stage):
    message, seconds = ranks.run(late_rank, make, stage)[0]
    assert "zero_fx" in message and "a." in message and seconds < 12, message


def dying_rank(rank, world, lowering, stage):
    model = zero_fx.compile(Experts(), **OPTIONS | {"lowering": lowering, "stage": stage})
    step(model, "a")
    if rank == 1:
        os._exit(3)
    step(model, "a")


@pytest.mark.slow
@pytest.mark.parametrize("lowering, stage", [("eager", 0), pytest.param("inductor", 3, marks=pytest.mark.full)])
def test_a_rank_that_dies(lowering, stage):
    with pytest.raises(ranks.RanksFailed) as failure:
        ranks.run(dying_rank, lowering, stage)
    text = str(failure.value)
    assert "rank 1: the process ended with code 3" in text
    assert "zero_fx: gave up waiting for the collective of 'a." in text or "'a.weight' could not start" in text, text


def seeded_differently(rank, world, is_synced):
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))
    model[1].running_mean.fill_(float(rank))
    mine = [tensor.clone() for tensor in model.state_dict().values()]
    zero_fx.compile(model, sync_module_states=is_synced, **OPTIONS)
    return mine, list(zero_fx.full_state_dict(model).values())


def test_weights_and_buffers_come_from_rank_0():
    (first, got_0), (_, got_1) = ranks.run(seeded_differently, True)
    for expected, a, b in zip(first, got_0, got_1):
        assert torch.equal(expected, a) and torch.equal(expected, b)


@pytest.mark.slow
def test_weights_are_each_ranks_own_rows_without_it():
    (first, got, *_), (second, _) = ranks.run(seeded_differently, False)
    assert torch.equal(got[0][:2], first[0][:2]) and torch.equal(got[0][2:], second[0][2:])


def different_parameters_per_micro_batch(rank, world, stage):
    """Each rank uses the expert of its own in the micro-batches whose gradients stay local."""
    torch.manual_seed(0)
    model, plain = Experts(), Experts()
    plain.load_state_dict(model.state_dict())
    zero_fx.compile(model, **OPTIONS | {"stage": stage})
    choices = [("a", "b")[rank], "a"]
    for i, which in enumerate(choices):
        with model.no_sync() if i == 0 else contextlib.nullcontext():
            try:
                step(model, which)
            except RuntimeError as error:
                return str(error)
        step(plain, which)
    for name, param in plain.named_parameters():
        grad = torch.zeros_like(param) if param.grad is None else param.grad
        dist.all_reduce(grad, dist.ReduceOp.AVG)
        torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), grad)
    return ""


@pytest.mark.slow
def test_local_gradients_of_different_parameters_are_reduced_with_zeros():
    assert ranks.run(different_parameters_per_micro_batch, 0) == ["", ""]


@pytest.mark.slow
def test_but_gathers_of_different_parameters_are_refused():
    for message in ranks.run(different_parameters_per_micro_batch, 1):
        assert "ranks compiled different collectives" in message
