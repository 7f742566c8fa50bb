"""Optimizers given to zero_fx.compile step on local shards, and nobody sees it but by the time that it takes."""

from __future__ import annotations

import pytest
import ranks
from scenarios import local_steps

slow, full = pytest.mark.slow, pytest.mark.full
QUICK = ("AdamW", "fused"), ("SGD", "foreach")
SLOW = ("Adam", "plain"), ("NAdam", "plain"), ("Rprop", "foreach"), ("ASGD", "foreach"), ("Adagrad", "fused")


@pytest.mark.parametrize("stage", [pytest.param(0, marks=full), pytest.param(1, marks=full), pytest.param(2, marks=full), 3])
@pytest.mark.parametrize(
    "name, how", [pytest.param(*kind, marks=() if kind in QUICK else slow if kind in SLOW else full) for kind in local_steps.KINDS]
)
def test_equals_unsharded(name, how, stage):
    ranks.run(local_steps.check_kind, name, how, stage)


@slow
def test_in_3_ranks():
    ranks.run(local_steps.check_kind, "AdamW", "foreach", 3, world=3)


@pytest.mark.parametrize("stage", [1, 3])
def test_what_people_do_around_a_step(stage):
    ranks.run(local_steps.check_around, stage)


def test_gradients_are_freed():
    ranks.run(local_steps.check_gradients_go)


def test_checkpoint(tmp_path):
    ranks.run(local_steps.check_checkpoint, str(tmp_path))


@pytest.mark.parametrize("fused", [False, True])
def test_scaler(fused):
    ranks.run(local_steps.check_scaler, fused)


@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_that_are_not_reduced_are_refused(stage):
    ranks.run(local_steps.check_refusal, stage)


def test_others_are_left_alone():
    ranks.run(local_steps.check_left_alone)


@slow
def test_time_at_1000_parameters():
    for times in ranks.run(local_steps.time_steps, 1000, 64):
        print(", ".join(f"{how} {time:.2f} ms" for how, time in times.items()))
        assert times["local"] < 1.3 * times["plain"] and times["local"] < 0.6 * times["dtensor"], times
