"""Golden graphs of one pass, and a property over random graphs: nothing is read before its wait, bytes are bounded."""

import dataclasses

from expecttest import TestCase
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graphs import CONFIG, check, gather, reduce, sharded, trace
from zero_fx.costs import bytes_of
from zero_fx.passes.pipeline import run_passes
from zero_fx.passes.prefetch import prefetch, start_order
from zero_fx.passes.shard_grads import shard_grads
from zero_fx.passes.shard_params import shard_params
from zero_fx.text import text
from zero_fx.verify import signature, verify
from zero_fx.vocabulary import REDUCTIONS, is_op

# A second of compute for each matrix product of the tests hides whatever they gather.
SLOW = dataclasses.replace(CONFIG.hardware, launch_s=1.0)


def chain(layers: int):
    """x -> x @ w0 @ w1 ..., each w gathered; inputs are the shards, then x."""

    def function(*inputs):
        *shards, x = inputs
        for i, shard in enumerate(shards):
            x = x @ gather(shard, [4, 4], name=f"w{i}")
        return x

    return sharded(function, *[(2, 4)] * layers, (4, 4))


def order(gm) -> str:
    """Starts (capitals) and waits of collectives, and products (.), in order: "A a B . b ."."""
    shown = []
    for node in gm.graph.nodes:
        if is_op(node, "all_gather", *REDUCTIONS):
            shown.append(node.args[-1].upper())
        elif is_op(node, "wait"):
            shown.append(node.args[-1])
        elif node.op == "call_function" and "mm" in str(node.target):
            shown.append(".")
    return " ".join(shown)


class TestPrefetch(TestCase):
    def test_a_gather_starts_one_product_early_where_that_hides_it(self):
        gm = chain(3)
        check(prefetch, gm, hardware=SLOW)
        self.assertExpectedInline(order(gm), """W0 W1 w0 . W2 w1 . w2 .""")

    def test_bytes_under_way_are_bounded(self):
        gm = chain(3)
        fast = dataclasses.replace(SLOW, launch_s=1e-6)  # nothing hides a gather: all would start at once
        check(prefetch, gm, hardware=fast, inflight_bytes=2 * 64)
        self.assertExpectedInline(order(gm), """W0 W1 w0 W2 . w1 . w2 .""")

    def test_one_gather_may_always_be_under_way(self):
        gm = chain(2)
        check(prefetch, gm, hardware=SLOW, inflight_bytes=0)
        self.assertExpectedInline(order(gm), """W0 w0 W1 . w1 .""")

    def test_reductions_are_awaited_at_the_end(self):
        gm = sharded(lambda x, y: (reduce(x @ x, 2, name="a"), reduce(y @ y, 2, name="b")), (4, 4), (4, 4))
        check(prefetch, gm)
        self.assertExpectedInline(order(gm), """. A . B a b""")

    def test_bytes_of_reductions_under_way_are_bounded(self):
        gm = sharded(lambda x, y: (reduce(x @ x, 2, name="a"), reduce(y @ y, 2, name="b")), (4, 4), (4, 4))
        check(prefetch, gm, inflight_bytes=64)
        self.assertExpectedInline(order(gm), """. A . a B b""")

    def test_a_reduction_that_is_read_is_awaited_there(self):
        gm = sharded(lambda x, y: (reduce(x @ x, 2, name="a") * 3, y @ y), (4, 4), (4, 4))
        check(prefetch, gm)
        self.assertExpectedInline(order(gm), """. A a .""")

    def test_a_gather_behind_a_slow_reduction_starts_before_it(self):
        def both(w, v, x):
            grad = reduce(x @ x, 64, name="a")
            return grad, (x @ gather(w, [128, 128], name="w")) @ x

        slow_links = dataclasses.replace(CONFIG.hardware, launch_s=1e-3, link_bytes_per_s=1e8)
        gm = sharded(both, (64, 128), (4,), (128, 128))
        check(prefetch, gm, hardware=slow_links)
        self.assertExpectedInline(order(gm), """W . A w . . a""")

    def test_the_agreed_order_is_kept(self):
        def both(w, x):
            grad = reduce(x @ x, 2, name="a")
            return grad, x @ gather(w, [4, 4], name="w")

        gm = sharded(both, (2, 4), (4, 4))
        config = dataclasses.replace(CONFIG, hardware=SLOW)
        assert start_order(gm, config) == (1, 0)
        check(prefetch, gm, hardware=SLOW, order=(0, 1))
        self.assertExpectedInline(order(gm), """. A W w . a""")

    def test_an_order_that_the_graph_does_not_allow(self):
        gm = sharded(lambda w, x: reduce(x @ gather(w, [4, 4], name="w"), 2, name="a"), (2, 4), (4, 4))
        with self.assertRaisesRegex(RuntimeError, r"order \(1, 0\) and this rank's graph only allows \(0, 1\)"):
            prefetch(gm, dataclasses.replace(CONFIG, order=(1, 0)))

    def test_no_collectives(self):
        self.assertEqual(check(prefetch, trace(lambda x: x * 2, (4, 3))), "unchanged")


@st.composite
def programs(draw):
    """(function, shapes) of a random mixture of products with gathered parameters and reductions of results."""
    steps = draw(st.lists(st.sampled_from(["gather", "again", "reduce", "read", "compute"]), min_size=1, max_size=12))
    count = max(1, steps.count("gather"))
    sizes = draw(st.lists(st.sampled_from([4, 8]), min_size=count, max_size=count))

    def function(*inputs):
        *shards, x = inputs
        gathered, results, used = [], [], 0
        for i, step in enumerate(steps):
            if step == "gather":
                gathered.append(gather(shards[used], [sizes[used], 8], name=f"w{used}"))
                used += 1
                x = x + (x[:, : gathered[-1].shape[0]] @ gathered[-1])
            elif step == "again" and gathered:
                x = x + x[:, : gathered[0].shape[0]] @ gathered[0]
            elif step == "reduce":
                results.append(reduce(x, 4, name=f"r{i}"))
            elif step == "read":
                x = x + reduce(x, 4, name=f"r{i}").sum()
            else:
                x = x @ x
        return [x, *results]

    return function, [(size // 2, 8) for size in sizes] + [(8, 8)]


@settings(max_examples=40, deadline=None)
@given(programs(), st.sampled_from([0, 256, 1024]), st.sampled_from([1e-6, 1e-3, 1.0]))
def test_random_graphs_keep_the_bound_and_read_after_waits(program, limit, launch_s):
    function, shapes = program
    config = dataclasses.replace(
        CONFIG, inflight_bytes=limit, hardware=dataclasses.replace(CONFIG.hardware, launch_s=launch_s)
    )
    gm = trace(function, *shapes)
    run_passes(gm, (shard_params, shard_grads), config, "test")
    types, before = signature(gm), len(gm.graph.nodes)
    prefetch(gm, config)
    verify(gm, types)  # among others: every reader after its wait
    assert len(gm.graph.nodes) == before
    check_bytes(gm, limit)


def check_bytes(gm, limit: int) -> None:
    """By walking the graph: gathered values that wait for their first reader, and sources of reductions."""
    nodes = list(gm.graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    gathers, reductions = [], []
    for node in nodes:
        if is_op(node, "all_gather"):
            wait = next(user for user in node.users if is_op(user, "wait"))
            gathers.append((position[node], position[wait], bytes_of(node.meta["val"])))
        elif is_op(node, *REDUCTIONS):
            wait = next(user for user in node.users if is_op(user, "wait"))
            reductions.append((position[node], position[wait], bytes_of(node.args[0].meta["val"])))
    for spans in (gathers, reductions):
        for start, _, size in spans:
            under_way = sum(s for a, b, s in spans if a <= start < b)
            assert under_way <= max(limit, size), text(gm)
