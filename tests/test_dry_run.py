"""A dry run captures what training would run, without running it."""

import dataclasses
import resource

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.test_stages import Classifier, graphs_of
from zero_fx.dry_run import dry_run
from zero_fx.shapes import LlamaSize, llama
from zero_fx.text import text

TOKENS = torch.zeros(4, dtype=torch.long)
TINY = LlamaSize(layers=1, dim=32, hidden=64, heads=4, kv_heads=2, vocab=64)
OPTIONS = {"lowering": "eager", "keep_whole_below": 0}


@pytest.fixture(autouse=True)
def clean():
    yield
    torch._dynamo.reset()
    assert not dist.is_initialized()


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow), 3])
def test_the_same_graphs_as_in_training(stage):
    trained = graphs_of(Classifier(), TOKENS, world=4, rank=1, stage=stage)
    graphs = dry_run(Classifier(), (TOKENS,), world=4, rank=1, stage=stage, **OPTIONS)
    assert {label: text(gm) for label, gm in graphs.halves} == trained


@pytest.mark.slow
def test_a_model_on_the_meta_device_and_its_copy_on_the_cpu_have_one_prediction():
    model, args = llama(TINY, 2, 16, torch.float32)
    on_cpu = llama(TINY, 2, 16, torch.float32)[0].to_empty(device="cpu")
    values = [param.detach().clone() for param in on_cpu.parameters()]
    first = dry_run(model, args, world=16, hardware="h100", **OPTIONS)
    again = dry_run(on_cpu, args, world=16, hardware="h100", **OPTIONS)
    assert first.predict() == again.predict()
    assert all(torch.equal(a, b) or a.isnan().any() for a, b in zip(values, on_cpu.parameters())), "the model was changed"
    assert all(param.is_meta for param in model.parameters())


@pytest.mark.slow
def test_resident_bytes_are_the_shards_and_adams_states():
    model, args = llama(TINY, 1, 16, torch.bfloat16)
    whole = sum(param.nbytes for param in model.parameters())
    # Every parameter's rows are divisible by 8 here, and every rank owns as many.
    assert dry_run(model, args, world=8, **OPTIONS).resident_bytes == 3 * whole // 8
    assert dry_run(model, args, world=8, **{**OPTIONS, "stage": 0}).resident_bytes == 3 * whole


def test_both_sides_of_a_graph_break_are_captured():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            x = self.first(x)
            torch._dynamo.graph_break()
            return {"loss": self.second(x).sum()}

    graphs = dry_run(Broken(), kwargs={"x": torch.empty(2, 8, device="meta")}, world=2, **OPTIONS)
    assert sorted(label for label, _ in graphs.halves) == ["backward"] * 2 + ["forward"] * 2


def test_without_a_gradient_there_is_one_graph():
    model = nn.Linear(8, 8).requires_grad_(False)
    assert [label for label, _ in dry_run(model, (torch.ones(1, 8),), world=2, **OPTIONS).halves] == ["inference"]


@pytest.mark.slow
def test_passes_hide_communication():
    """The more compute there is beside it, the less is exposed; without the passes all of it is."""
    model, args = llama(dataclasses.replace(TINY, layers=2, dim=512, hidden=1024), 8, 256)
    with_passes = dry_run(model, args, world=64, hardware="h100", **OPTIONS).predict()
    model, args = llama(dataclasses.replace(TINY, layers=2, dim=512, hidden=1024), 8, 256)
    without = dry_run(model, args, world=64, hardware="h100", passes=(), **OPTIONS).predict()
    assert without.exposed_s == pytest.approx(without.links_s, rel=0.05)
    assert with_passes.exposed_s < 0.9 * without.exposed_s and with_passes.step_s < without.step_s


def test_refusals():
    with pytest.raises(ValueError, match=r"rank=4: expected 0 to world - 1 = 3"):
        dry_run(nn.Linear(2, 2), (torch.ones(1, 2),), world=4, rank=4)
    with pytest.raises(TypeError, match="takes a torch.nn.Module, got function"):
        dry_run(lambda x: x, (torch.ones(1, 2),), world=4)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="run it in another process"):
            dry_run(nn.Linear(2, 2), (torch.ones(1, 2),), world=4)
    finally:
        dist.destroy_process_group()


def test_costs_no_memory():
    """Neither full parameters nor shards are written to: 48 GiB of them, on two ranks."""
    with torch.device("meta"):
        model = nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(1 << 15, 1 << 16), nn.Linear(1 << 16, 1 << 15))])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    graphs = dry_run(model, (torch.ones(1, 1 << 15, device="meta"),), world=2, keep_whole_below=0)
    assert graphs.resident_bytes > 3 * 24 * 2**30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20, "KiB"
