"""Golden graphs of one pass; see tests/graphs.py for what `check` checks besides."""

from expecttest import TestCase

from tests.graphs import check, reduce, trace
from zero_fx.passes import shard_grads as module
from zero_fx.passes.shard_grads import shard_grads


class TestShardGrads(TestCase):
    def test_sharded(self):
        gm = trace(lambda x: reduce(x * 2, 2), (4, 3))
        self.assertExpectedInline(check(shard_grads, gm), """\
%0: f32[4,3] = input
%1: f32[4,3] = mul(%0, 2)
%2: f32[2,3] = reduce_scatter(%1, 2, "w")
%3: f32[2,3] = wait(%2, %1, "w")
return %3""")

    def test_rows_that_do_not_fill_the_chunks(self):
        gm = trace(lambda x: reduce(x * 2, 1, world=3), (5, 3))
        self.assertExpectedInline(check(shard_grads, gm, world=3, rank=2), """\
%0: f32[5,3] = input
%1: f32[5,3] = mul(%0, 2)
%2: f32[6,3] = constant_pad_nd(%1, [0, 0, 0, 1])
%3: f32[2,3] = reduce_scatter(%2, 3, "w")
%4: f32[2,3] = wait(%3, %2, "w")
%5: f32[1,3] = slice(%4, 0, 0, 1)
return %5""")

    def test_whole(self):
        gm = trace(lambda x: reduce(x * 2, 4, whole=True), (4, 3))
        self.assertExpectedInline(check(shard_grads, gm, stage=0), """\
%0: f32[4,3] = input
%1: f32[4,3] = mul(%0, 2)
%2: f32[4,3] = all_reduce(%1, "w")
%3: f32[4,3] = wait(%2, %1, "w")
return %3""")

    def test_reductions_overlap_with_what_follows(self):
        gm = trace(lambda x, y: (reduce(x * 2, 2, name="a"), reduce(y * 3, 2, name="b")), (4, 3), (4, 3))
        self.assertExpectedInline(check(shard_grads, gm), """\
%0: f32[4,3] = input
%1: f32[4,3] = input
%2: f32[4,3] = mul(%0, 2)
%3: f32[2,3] = reduce_scatter(%2, 2, "a")
%4: f32[4,3] = mul(%1, 3)
%5: f32[2,3] = reduce_scatter(%4, 2, "b")
%6: f32[2,3] = wait(%3, %2, "a")
%7: f32[2,3] = wait(%5, %4, "b")
return [%6, %7]""")

    def test_bytes_under_way_are_bounded(self):
        rows = module.IN_FLIGHT_BYTES // 4 // 2 + 2  # two such gradients exceed the bound
        gm = trace(lambda x, y: (reduce(x * 2, rows // 2, name="a"), reduce(y * 3, rows // 2, name="b")), (rows,), (rows,))
        lines = check(shard_grads, gm).splitlines()
        order = [name for line in lines for name in ("wait", "reduce_scatter", "mul") if f"= {name}(" in line]
        self.assertEqual(order, ["mul", "reduce_scatter", "mul", "wait", "reduce_scatter", "wait"])

    def test_a_reduction_that_is_read_is_awaited_there(self):
        gm = trace(lambda x: reduce(x, 2) * 3, (4, 3))
        self.assertExpectedInline(check(shard_grads, gm), """\
%0: f32[4,3] = input
%1: f32[2,3] = reduce_scatter(%0, 2, "w")
%2: f32[2,3] = wait(%1, %0, "w")
%3: f32[2,3] = mul(%2, 3)
return %3""")

    def test_no_markers(self):
        self.assertEqual(check(shard_grads, trace(lambda x: x * 2, (4, 3))), "unchanged")
