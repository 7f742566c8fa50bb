"""Each rule of the verifier, on a graph broken by hand; the message shows where."""

import pytest
import torch

from tests.graphs import gather, reduce, trace
from zero_fx.passes.shard_grads import shard_grads
from zero_fx.passes.shard_params import shard_params
from zero_fx.verify import InvalidGraph, signature, verify
from zero_fx.vocabulary import PassConfig, find

CONFIG = PassConfig(stage=3, world=2, rank=0)


def gathered():
    gm = trace(lambda shard, x: x @ gather(shard, [4, 3]), (2, 3), (5, 4))
    shard_params(gm, CONFIG)
    return gm


def test_a_good_graph_passes():
    gm = gathered()
    verify(gm, signature(gm))


def test_wrong_world_size_of_a_gather():
    gm = gathered()
    (node,) = find(gm.graph, "all_gather")
    node.args = (node.args[0], 4, *node.args[2:])
    gm.graph.lint()  # which is why there is a verifier
    with pytest.raises(InvalidGraph, match=r"%2 recorded f32\[4,3\], recomputed f32\[8,3\]"):
        verify(gm)


def test_a_reader_before_the_wait():
    gm = gathered()
    (started,), (wait,) = find(gm.graph, "all_gather"), find(gm.graph, "wait")
    wait.replace_all_uses_with(started)
    wait.args = (started, *wait.args[1:])
    with pytest.raises(InvalidGraph, match="reads a collective's result that no wait has made ready"):
        verify(gm)


def test_a_collective_without_a_wait():
    gm = trace(lambda x: reduce(x * 2, 2), (4, 3))
    shard_grads(gm, CONFIG)
    (started,), (wait,) = find(gm.graph, "reduce_scatter"), find(gm.graph, "wait")
    wait.replace_all_uses_with(started)
    gm.graph.erase_node(wait)
    with pytest.raises(InvalidGraph, match="has 0 waits, expected 1"):
        verify(gm)


def test_a_wait_that_lets_the_source_go():
    gm = gathered()
    (started,), (wait,) = find(gm.graph, "all_gather"), find(gm.graph, "wait")
    other = next(n for n in gm.graph.nodes if n.op == "placeholder" and n is not started.args[0])
    wait.args = (started, other, wait.args[2])
    with pytest.raises(InvalidGraph, match="does not keep the collective's source alive"):
        verify(gm)


def test_a_wait_for_nothing():
    gm = gathered()
    (wait,) = find(gm.graph, "wait")
    source = next(iter(gm.graph.find_nodes(op="placeholder")))
    with gm.graph.inserting_before(gm.graph.output_node()):
        node = gm.graph.call_function(wait.target, (source, source, "w"))
        node.meta["val"] = source.meta["val"]
    with pytest.raises(InvalidGraph, match="waits for what no collective started"):
        verify(gm)


def test_a_held_wait_before_its_gather():
    gm = trace(lambda s, h, x: x @ gather(s, [4, 3], lifetime="step", held=h), (2, 3), (4, 3), (5, 4))
    shard_params(gm, CONFIG)
    (start,), (wait,) = find(gm.graph, "gather_held"), find(gm.graph, "wait")
    wait.append(start)
    with pytest.raises(InvalidGraph, match="waits before the collective is started"):
        verify(gm)


def test_a_changed_signature():
    gm = gathered()
    types = signature(gm)
    (node,) = (n for n in gm.graph.nodes if "mm" in str(n.target))
    gm.graph.output_node().args = (find(gm.graph, "wait")[0],)
    gm.graph.erase_node(node)
    with pytest.raises(InvalidGraph, match="the signature changed"):
        verify(gm, types)


def test_an_undefined_value():
    gm = gathered()
    nodes = list(gm.graph.nodes)
    nodes[0].prepend(nodes[-2])
    with pytest.raises(InvalidGraph, match="not a valid graph"):
        verify(gm)


def test_the_message_is_bounded_and_points_at_the_line():
    def long(shard, x):
        for _ in range(60):
            x = torch.relu(x)
        return x @ gather(shard, [4, 3])

    gm = trace(long, (2, 3), (5, 4))
    shard_params(gm, CONFIG)
    (node,) = find(gm.graph, "all_gather")
    node.args = (node.args[0], 4, *node.args[2:])
    with pytest.raises(InvalidGraph) as error:
        verify(gm)
    assert len(str(error.value).splitlines()) < 30
    assert "> %62: f32[4,3] = all_gather" in str(error.value)
