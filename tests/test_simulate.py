"""The two lanes and the memory of a played graph, worked out by hand."""

import dataclasses

import pytest
import torch

from tests.graphs import CONFIG, gather, reduce, sharded, trace
from zero_fx.costs import bytes_of, bytes_sent, collective_s, compute_s, flops_of
from zero_fx.hardware import HARDWARE
from zero_fx.passes.prefetch import prefetch
from zero_fx.simulate import play

# A product of 4x4 matrices takes 1 s, a collective 3 s; nothing else takes time.
TOY = dataclasses.replace(
    HARDWARE["cpu"], launch_s=1.0, matmul_flops=((torch.float32, 1e30),), memory_bytes_per_s=1e30, latency_s=3.0,
    link_bytes_per_s=1e30, issue_s=0.0,
)  # fmt: skip


def products(a, b, x):
    x = x @ x @ x @ x  # three products
    return x @ gather(a, [4, 4], name="a") @ gather(b, [4, 4], name="b")


def test_an_unscheduled_gather_is_exposed_whole():
    timeline = play(sharded(products, (2, 4), (2, 4), (4, 4)), TOY, 2, fused=False)
    assert timeline.compute_s == pytest.approx(5) and timeline.links_s == pytest.approx(6)
    assert timeline.exposed_s == pytest.approx(6) and timeline.seconds == pytest.approx(11)


def test_a_scheduled_gather_is_hidden_behind_what_comes_before():
    gm = sharded(products, (2, 4), (2, 4), (4, 4))
    prefetch(gm, dataclasses.replace(CONFIG, hardware=TOY))
    timeline = play(gm, TOY, 2, fused=False)
    # The first starts at once and is done at 3; the second at 6, which is needed at 4.
    assert timeline.exposed_s == pytest.approx(2) and timeline.seconds == pytest.approx(7)


def test_the_peak_counts_what_lives():
    def function(x):
        y = x @ x  # 64 bytes
        return (y @ y).sum()  # both live: 128 bytes

    timeline = play(trace(function, (4, 4)), TOY, 2, fused=False)
    assert timeline.peak_bytes == 128 and "mm" in timeline.peak_node
    assert timeline.live[-1] == 4  # the sum is returned


def test_views_and_waits_own_no_memory():
    gm = sharded(lambda a, x: x @ gather(a, [4, 4]).t(), (2, 4), (4, 4))
    assert play(gm, TOY, 2, fused=False).peak_bytes == 128  # the gathered parameter and the product


def test_fused_pointwise_results_take_no_memory():
    def function(x):
        return ((x * 2).relu() + 1).sum()

    gm = trace(function, (100,))
    assert play(gm, TOY, 2, fused=False).peak_bytes == 800
    assert play(gm, TOY, 2, fused=True).peak_bytes == 4


def test_what_forward_saved_is_counted_in_backward_and_freed():
    gm = trace(lambda primals_1, saved: (saved * 2 @ primals_1), (4, 4), (4, 4))
    nodes = list(gm.graph.find_nodes(op="placeholder"))
    nodes[0].target, nodes[1].target = "primals_1", "mul_1"
    timeline = play(gm, TOY, 2, fused=False, is_backward=True)
    assert timeline.peak_bytes == 128 and timeline.live[-1] == 64


def test_held_parameters_live_throughout_backward():
    gm = sharded(lambda a, held, x: x @ gather(a, [4, 4], lifetime="step", held=held), (2, 4), (4, 4), (4, 4))
    assert play(gm, TOY, 2, fused=False).peak_bytes == 128  # gathered here
    assert play(gm, TOY, 2, fused=False, held=64, is_backward=True).peak_bytes == 128 + 2 * 64  # x and held were not primals


def test_costs_by_hand():
    gm = trace(lambda x, y: (x @ y).relu(), (8, 16), (16, 4))
    product, relu = [node for node in gm.graph.nodes if node.op == "call_function"]
    assert flops_of(product) == 2 * 8 * 16 * 4 and flops_of(relu) == 0
    assert bytes_of(product.meta["val"]) == 8 * 4 * 4
    hardware = HARDWARE["h100"]
    moved = 4 * (8 * 16 + 16 * 4 + 8 * 4)
    assert compute_s(product, hardware) == pytest.approx(moved / hardware.memory_bytes_per_s + hardware.launch_s)
    assert bytes_sent("all_gather", 10, 4) == 30 and bytes_sent("all_reduce", 40, 4) == 60
    assert bytes_sent("reduce_scatter", 40, 4) == bytes_sent("all_to_all", 40, 4) == 30
    across = collective_s("all_gather", 1000, 4, 16, hardware)  # two nodes: the network is the slowest link
    assert across == pytest.approx(hardware.latency_s + 4000 * 15 / hardware.node_link_bytes_per_s)


def test_a_reduction_is_a_transfer_too():
    gm = sharded(lambda x: reduce(x @ x, 2), (4, 4))
    timeline = play(gm, TOY, 2, fused=False)
    assert timeline.links_s == pytest.approx(3) and timeline.exposed_s == pytest.approx(3)
