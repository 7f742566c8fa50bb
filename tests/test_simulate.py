"""The two lanes and the memory of a played graph, worked out by hand."""

import dataclasses

import pytest
import torch

from tests.graphs import CONFIG, gather, reduce, sharded, trace
from zero_fx.costs import byte_s, bytes_of, collective_s, compute_s, flops_of, latency_s
from zero_fx.events import half_of
from zero_fx.hardware import HARDWARE
from zero_fx.passes.prefetch import prefetch
from zero_fx.simulate import memory_by_kind, play

# A product of 4x4 matrices takes 1 s, a collective 3 s; nothing else takes time.
TOY = dataclasses.replace(
    HARDWARE["cpu"], launch_s=1.0, matmul_flops=((torch.float32, 1e30),), memory_bytes_per_s=1e30, latency_s=3.0,
    link_bytes_per_s=1e30, issue_s=0.0,
)  # fmt: skip


def products(a, b, x):
    x = x @ x @ x @ x  # three products
    return x @ gather(a, [4, 4], name="a") @ gather(b, [4, 4], name="b")


def test_an_unscheduled_gather_is_exposed_whole():
    timeline = play(half_of("forward", sharded(products, (2, 4), (2, 4), (4, 4)), TOY, 2, False))
    assert timeline.compute_s == pytest.approx(5) and timeline.links_s == pytest.approx(6)
    assert timeline.exposed_s == pytest.approx(6) and timeline.seconds == pytest.approx(11)


def test_a_scheduled_gather_is_hidden_behind_what_comes_before():
    gm = sharded(products, (2, 4), (2, 4), (4, 4))
    prefetch(gm, dataclasses.replace(CONFIG, hardware=TOY))
    timeline = play(half_of("forward", gm, TOY, 2, False))
    # The first starts at once and is done at 3; the second at 6, which is needed at 4.
    assert timeline.exposed_s == pytest.approx(2) and timeline.seconds == pytest.approx(7)


def test_the_peak_counts_what_lives():
    def function(x):
        y = x @ x  # 64 bytes
        return (y @ y).sum()  # both live: 128 bytes

    half = half_of("forward", trace(function, (4, 4)), TOY, 2, False)
    timeline = play(half)
    assert timeline.peak_bytes == 128 and half.events[timeline.peak_index].op == "mm"
    assert timeline.live[-1] == 4  # the sum is returned


def test_views_and_waits_own_no_memory():
    gm = sharded(lambda a, x: x @ gather(a, [4, 4]).t(), (2, 4), (4, 4))
    assert play(half_of("forward", gm, TOY, 2, False)).peak_bytes == 128  # the gathered parameter and the product


def test_fused_pointwise_results_take_no_memory():
    def function(x):
        return ((x * 2).relu() + 1).sum()

    gm = trace(function, (100,))
    assert play(half_of("forward", gm, TOY, 2, False)).peak_bytes == 800
    assert play(half_of("forward", gm, TOY, 2, True)).peak_bytes == 4


def test_what_forward_saved_is_counted_in_backward_and_freed():
    gm = trace(lambda primals_1, saved: (saved * 2 @ primals_1), (4, 4), (4, 4))
    nodes = list(gm.graph.find_nodes(op="placeholder"))
    nodes[0].target, nodes[1].target = "primals_1", "mul_1"
    timeline = play(half_of("backward", gm, TOY, 2, False))
    assert timeline.peak_bytes == 128 and timeline.live[-1] == 64


def test_held_parameters_live_throughout_backward():
    gm = sharded(lambda a, held, x: x @ gather(a, [4, 4], lifetime="step", held=held), (2, 4), (4, 4), (4, 4))
    assert play(half_of("forward", gm, TOY, 2, False)).peak_bytes == 128  # gathered here
    assert play(half_of("backward", gm, TOY, 2, False, 64)).peak_bytes == 128 + 2 * 64  # x and held were not primals


def test_costs_by_hand():
    gm = trace(lambda x, y: (x @ y).relu(), (8, 16), (16, 4))
    product, relu = [node for node in gm.graph.nodes if node.op == "call_function"]
    assert flops_of(product) == 2 * 8 * 16 * 4 and flops_of(relu) == 0
    assert bytes_of(product.meta["val"]) == 8 * 4 * 4
    hardware = HARDWARE["h100"]
    moved = 4 * (8 * 16 + 16 * 4 + 8 * 4)
    assert compute_s(product, hardware) == pytest.approx(moved / hardware.memory_bytes_per_s + hardware.launch_s)


def test_collectives_by_hand():
    hardware = HARDWARE["h100"]  # 8 ranks a node
    inside, between = hardware.link_bytes_per_s, hardware.node_link_bytes_per_s
    assert byte_s("all_gather", 4, hardware) == pytest.approx(3 / 4 / inside)
    # Two nodes: half of the tensor has to come from the other one, over the 8 links of a node together.
    assert byte_s("all_gather", 16, hardware) == pytest.approx(max(15 / 16 / inside, 1 / 2 / (8 * between)))
    assert byte_s("reduce_scatter", 64, hardware) == pytest.approx(max(63 / 64 / inside, 7 / 8 / (8 * between)))
    assert byte_s("all_reduce", 64, hardware) == pytest.approx(2 * byte_s("reduce_scatter", 64, hardware))
    assert byte_s("all_to_all", 64, hardware) == pytest.approx(7 / 8 / between)  # over each rank's own link
    slow = dataclasses.replace(hardware, node_link_bytes_per_s=1e9)
    assert byte_s("all_gather", 16, slow) == pytest.approx(1 / 2 / 8e9)
    hops = 14 * hardware.hop_s + hardware.node_hop_s
    assert latency_s(16, hardware) == pytest.approx(hardware.latency_s + hops)
    gather, reduction = collective_s("all_gather", 1000, 4, 16, slow), collective_s("reduce_scatter", 16000, 4, 16, slow)
    assert gather == reduction == pytest.approx(latency_s(16, slow) + 64000 / 2 / 8e9)


def test_attention_on_the_cpu_counts_as_on_a_gpu():
    def function(q, k, v):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0]

    gm = trace(function, (2, 3, 8, 16), (2, 3, 8, 16), (2, 3, 8, 16))
    assert sum(map(flops_of, gm.graph.nodes)) == 2 * (2 * 2 * 3 * 8 * 8 * 16)  # two products


def test_moving_data_takes_the_ranks_own_time():
    gm = sharded(products, (2, 4), (2, 4), (4, 4))
    free, busy = (play(half_of("forward", gm, dataclasses.replace(TOY, busy_links=part), 2, False)) for part in (0.0, 0.5))
    assert busy.compute_s == pytest.approx(free.compute_s + 0.5 * free.links_s)


def test_a_reduction_is_a_transfer_too():
    gm = sharded(lambda x: reduce(x @ x, 2), (4, 4))
    timeline = play(half_of("forward", gm, TOY, 2, False))
    assert timeline.links_s == pytest.approx(3) and timeline.exposed_s == pytest.approx(3)


def test_memory_has_kinds_that_add_up():
    half = half_of("forward", sharded(lambda a, x: x @ gather(a, [4, 4]).t(), (2, 4), (4, 4)), TOY, 2, False)
    timeline, by_kind = play(half), memory_by_kind(half)
    assert dict(timeline.peak_kinds) == {"gathered parameters": 64, "saved activations": 64}  # what forward returns is saved
    assert [sum(values) for values in zip(*by_kind.values())] == list(timeline.live)
