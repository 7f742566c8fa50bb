"""The profile of this machine: measured, kept, and what the plans are then made with."""

import dataclasses
import math

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn

import zero_fx
from zero_fx.calibrate import cache_path, calibrate, calibrated, line, save
from zero_fx.hardware import HARDWARE

CPU = torch.device("cpu")


def test_a_line_through_points_on_it():
    assert line([(n, 2e-3 + n * 1e-9) for n in (1e4, 1e6, 1e8)]) == pytest.approx((2e-3, 1e-9))


@pytest.fixture
def ends_without_group():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_kept_and_read_again(tmp_path, monkeypatch, ends_without_group):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ValueError, match="zero-fx bench --calibrate"):
        calibrated(CPU)
    with pytest.raises(ValueError, match="zero-fx bench --calibrate"):
        zero_fx.compile(nn.Linear(2, 2), hardware="calibrated")
    save(HARDWARE["cpu"], CPU)
    assert calibrated(CPU) == HARDWARE["cpu"]
    cache_path(CPU).write_text('{"name": "of another version"}')
    with pytest.raises(ValueError, match="zero-fx bench --calibrate"):
        calibrated(CPU)


def test_an_unknown_profile_is_refused():
    with pytest.raises(ValueError, match="hardware='h800': expected None, 'calibrated', or one of 'a100'"):
        zero_fx.compile(nn.Linear(2, 2), hardware="h800")


def measured(rank: int, world: int):
    return calibrate(CPU)


@pytest.mark.slow
def test_ranks_measure_one_profile():
    first, second = ranks.run(measured, world=2)
    assert first == second and first.name == "calibrated"
    numbers = [value for value in dataclasses.astuple(first) if isinstance(value, float)]
    assert all(math.isfinite(value) and value >= 0 for value in numbers)
    # Within what any machine has: a wrong unit is off by more.
    assert 1e8 < dict(first.matmul_flops)[torch.float32] < 1e13 and 1e7 < first.link_bytes_per_s < 1e12
    assert 1e-6 < first.latency_s < 0.1 and first.busy_links <= 1


def plans_with_its_own(rank: int, world: int, folder: str):
    """Ranks whose machines were calibrated differently: the first rank's profile is used by all."""
    import os

    os.environ["XDG_CACHE_HOME"] = f"{folder}/{rank}"
    try:
        save(dataclasses.replace(HARDWARE["cpu"], latency_s=1e-3 * (rank + 1)), CPU)
        model = zero_fx.compile(nn.Linear(8, 8), hardware="calibrated")
    finally:
        del os.environ["XDG_CACHE_HOME"]
    return model._zero_fx_compiled.backend.passes


def without_a_profile(rank: int, world: int, folder: str):
    import os

    os.environ["XDG_CACHE_HOME"] = folder
    try:
        zero_fx.compile(nn.Linear(8, 8), hardware="calibrated")
    except ValueError as error:
        return str(error)
    finally:
        del os.environ["XDG_CACHE_HOME"]


@pytest.mark.slow
def test_all_ranks_say_that_there_is_no_profile(tmp_path):
    for message in ranks.run(without_a_profile, str(tmp_path), timeout_s=30):
        assert "zero-fx bench --calibrate" in message


@pytest.mark.slow
def test_ranks_plan_with_the_first_ranks_profile(tmp_path):
    first, second = ranks.run(plans_with_its_own, str(tmp_path), world=2)
    assert first.hardware == second.hardware and first.hardware.latency_s == 1e-3
    assert first.bucket_bytes == second.bucket_bytes
