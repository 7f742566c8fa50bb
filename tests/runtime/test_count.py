"""Counted collectives against cases worked out by hand; two real ranks."""

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

import zero_fx
from zero_fx.runtime.count import count_collectives, elements_sent


def run_each_kind(rank, world):
    x = torch.ones(6, 2)  # 12 elements
    with count_collectives(world) as count:
        functional.all_gather_tensor(x, 0, dist.group.WORLD).sum().item()
        functional.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD).sum().item()
        functional.all_reduce(x, "sum", dist.group.WORLD).sum().item()
        functional.all_reduce(x[0, 0], "sum", dist.group.WORLD).item()  # 0-dim: one element
        dist.all_reduce(x)  # not of the counted kind
    return count.calls, count.elements


def test_each_kind_by_hand():
    for calls, elements in ranks.run(run_each_kind):
        assert calls == {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1, "all_reduce": 2}
        assert elements == 12 + 6 + 12 + 1


def train_step(rank, world, lowering):
    """Two 6x4 weights of 24 elements, partitioned, and a bias of 4, whole."""
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.GELU(), nn.Linear(6, 4))
    model = zero_fx.compile(model, stage=3, lowering=lowering, keep_whole_below=5)
    for _ in range(2):  # the second one compiles nothing
        with count_collectives(world) as count:
            model(torch.ones(3, 4)).square().sum().backward()
    return count.calls, count.elements, count.collectives


@pytest.mark.parametrize("lowering", ["eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_forward_and_backward_of_a_compiled_model_by_hand(lowering):
    """Forward gathers both weights; backward the second again, whose input needs a gradient; both are reduced."""
    for calls, elements, collectives in ranks.run(train_step, lowering):
        # On gloo a gather is a broadcast from each rank, and what scatters is an exchange. Small ones travel together.
        assert calls == {"broadcast_": 2 * 2, "all_to_all_single": 1, "all_reduce": 1}
        assert collectives == 6
        assert elements == 3 * 12 + 2 * 12 + 2 * 4 / 2


def test_volumes_of_a_ring_of_four():
    assert elements_sent("all_gather_into_tensor", 10, 4) == elements_sent("all_gather_into_tensor_out", 10, 4) == 30
    assert elements_sent("reduce_scatter_tensor", 40, 4) == 30
    assert elements_sent("all_reduce", 40, 4) == elements_sent("all_reduce_", 40, 4) == 60
    assert elements_sent("all_to_all_single", 40, 4) == elements_sent("broadcast_", 40, 4) == 30


def test_an_unknown_collective_is_not_counted_as_nothing():
    with pytest.raises(ValueError, match="_c10d_functional::gather"):
        elements_sent("gather", 10, 4)


def test_an_error_inside_passes_through():
    with pytest.raises(KeyError), count_collectives(2):
        raise KeyError
