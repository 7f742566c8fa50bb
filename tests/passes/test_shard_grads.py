"""Golden graphs of one pass; see tests/graphs.py for what `check` checks besides."""

import torch
from expecttest import TestCase

from tests.graphs import FROM_BF16, check, reduce, trace
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

    def test_each_is_awaited_where_it_starts(self):
        gm = trace(lambda x, y: (reduce(x * 2, 2, name="a"), reduce(y * 3, 2, name="b")), (4, 3), (4, 3))
        self.assertExpectedInline(check(shard_grads, gm), """\
%0: f32[4,3] = input
%1: f32[4,3] = input
%2: f32[4,3] = mul(%0, 2)
%3: f32[2,3] = reduce_scatter(%2, 2, "a")
%4: f32[2,3] = wait(%3, %2, "a")
%5: f32[4,3] = mul(%1, 3)
%6: f32[2,3] = reduce_scatter(%5, 2, "b")
%7: f32[2,3] = wait(%6, %5, "b")
return [%4, %7]""")

    def test_by_exchange(self):
        gm = trace(lambda x: reduce(x * 2, 1, world=3), (5, 3))
        self.assertExpectedInline(check(shard_grads, gm, world=3, rank=2, exchange=True), """\
%0: f32[5,3] = input
%1: f32[5,3] = mul(%0, 2)
%2: f32[6,3] = constant_pad_nd(%1, [0, 0, 0, 1])
%3: f32[6,3] = all_to_all(%2, 3, "w")
%4: f32[6,3] = wait(%3, %2, "w")
%5: f32[3,2,3] = view(%4, [3, 2, 3])
%6: f32[2,3] = mean(%5, [0])
%7: f32[1,3] = slice(%6, 0, 0, 1)
return %7""")

    def test_a_reduction_that_is_read_is_awaited_there(self):
        gm = trace(lambda x: reduce(x, 2) * 3, (4, 3))
        self.assertExpectedInline(check(shard_grads, gm), """\
%0: f32[4,3] = input
%1: f32[2,3] = reduce_scatter(%0, 2, "w")
%2: f32[2,3] = wait(%1, %0, "w")
%3: f32[2,3] = mul(%2, 3)
return %3""")

    def test_one_rank(self):
        def function(x):
            return reduce(x * 2, 4, world=1), reduce(x, 4, world=1), reduce(x.sum(0).expand(4, 3), 4, world=1)

        self.assertExpectedInline(check(shard_grads, trace(function, (4, 3)), world=1), """\
%0: f32[4,3] = input
%1: f32[4,3] = mul(%0, 2)
%2: f32[4,3] = clone(%0, memory_format=torch.contiguous_format)
%3: f32[3] = sum(%0, [0])
%4: f32[4,3] = expand(%3, [4, 3])
%5: f32[4,3] = clone(%4, memory_format=torch.contiguous_format)
return [%1, %2, %5]""")

    def test_two_gradients_of_one_rank_do_not_share_memory(self):
        def function(x):
            y = x * 2
            return reduce(y, 4, world=1, name="a"), reduce(y.view(12), 12, world=1, name="b")

        lines = check(shard_grads, trace(function, (4, 3)), world=1).splitlines()
        self.assertEqual(sum("clone" in line for line in lines), 2)

    def test_a_gradient_is_cast_before_it_travels(self):
        gm = trace(lambda x: reduce(x.bfloat16(), 1, world=3, **FROM_BF16), (5, 3))
        self.assertExpectedInline(check(shard_grads, gm, world=3, rank=2), """\
%0: f32[5,3] = input
%1: bf16[5,3] = _to_copy(%0, dtype=torch.bfloat16)
%2: f32[5,3] = convert_element_type(%1, torch.float32)
%3: f32[6,3] = constant_pad_nd(%2, [0, 0, 0, 1])
%4: f32[2,3] = reduce_scatter(%3, 3, "w")
%5: f32[2,3] = wait(%4, %3, "w")
%6: f32[1,3] = slice(%5, 0, 0, 1)
return %6""")

    def test_what_travels_in_bf16_is_added_up_in_f32(self):
        dtypes = {"reduce_dtype": torch.bfloat16, "shard_dtype": torch.float32}
        gm = trace(lambda x: reduce(x.bfloat16(), 2, **dtypes), (4, 3))
        self.assertExpectedInline(check(shard_grads, gm, exchange=True), """\
%0: f32[4,3] = input
%1: bf16[4,3] = _to_copy(%0, dtype=torch.bfloat16)
%2: bf16[4,3] = all_to_all(%1, 2, "w")
%3: bf16[4,3] = wait(%2, %1, "w")
%4: bf16[2,2,3] = view(%3, [2, 2, 3])
%5: f32[2,3] = mean(%4, [0], dtype=torch.float32)
return %5""")

    def test_whole_and_alone_are_cast_back(self):
        def both(x, y):
            dtypes = {"reduce_dtype": torch.bfloat16, "shard_dtype": torch.float32}
            return reduce(x.bfloat16(), 4, whole=True, **dtypes), reduce(y.bfloat16(), 4, world=1, **dtypes)

        self.assertExpectedInline(check(shard_grads, trace(both, (4, 3), (4, 3)), stage=0), """\
%0: f32[4,3] = input
%1: f32[4,3] = input
%2: bf16[4,3] = _to_copy(%0, dtype=torch.bfloat16)
%3: bf16[4,3] = all_reduce(%2, "w")
%4: bf16[4,3] = wait(%3, %2, "w")
%5: f32[4,3] = convert_element_type(%4, torch.float32)
%6: bf16[4,3] = _to_copy(%1, dtype=torch.bfloat16)
%7: f32[4,3] = convert_element_type(%6, torch.float32)
return [%5, %7]""")

    def test_no_markers(self):
        self.assertEqual(check(shard_grads, trace(lambda x: x * 2, (4, 3))), "unchanged")
