"""Golden graphs of one pass; see tests/graphs.py for what `check` checks besides."""

from expecttest import TestCase

from tests.graphs import TO_BF16, check, gather, trace
from zero_fx.passes.shard_params import shard_params


class TestShardParams(TestCase):
    def test_use(self):
        gm = trace(lambda shard, x: x @ gather(shard, [4, 3]), (2, 3), (5, 4))
        self.assertExpectedInline(check(shard_params, gm), """\
%0: f32[2,3] = input
%1: f32[5,4] = input
%2: f32[4,3] = all_gather(%0, 2, "w")
%3: f32[4,3] = wait(%2, %0, "w")
%4: f32[5,3] = mm(%1, %3)
return %4""")

    def test_rows_that_do_not_fill_the_chunks_are_padded_and_cut(self):
        gm = trace(lambda shard, x: x @ gather(shard, [5, 3], world=4), (1, 3), (2, 5))
        self.assertExpectedInline(check(shard_params, gm, world=4, rank=2), """\
%0: f32[1,3] = input
%1: f32[2,5] = input
%2: f32[2,3] = constant_pad_nd(%0, [0, 0, 0, 1])
%3: f32[8,3] = all_gather(%2, 4, "w")
%4: f32[8,3] = wait(%3, %2, "w")
%5: f32[5,3] = slice(%4, 0, 0, 5)
%6: f32[2,3] = mm(%1, %5)
return %6""")

    def test_a_rank_without_rows_sends_padding(self):
        gm = trace(lambda shard, x: x @ gather(shard, [2, 3], world=3), (0, 3), (5, 2))
        self.assertExpectedInline(check(shard_params, gm, world=3, rank=2), """\
%0: f32[0,3] = input
%1: f32[5,2] = input
%2: f32[1,3] = constant_pad_nd(%0, [0, 0, 0, 1])
%3: f32[3,3] = all_gather(%2, 3, "w")
%4: f32[3,3] = wait(%3, %2, "w")
%5: f32[2,3] = slice(%4, 0, 0, 2)
%6: f32[5,3] = mm(%1, %5)
return %6""")

    def test_step(self):
        def held(shard, held, x):
            return x @ gather(shard, [3, 3], lifetime="step", held=held)

        self.assertExpectedInline(check(shard_params, trace(held, (2, 3), (4, 3), (5, 3)), stage=1), """\
%0: f32[2,3] = input
%1: f32[4,3] = input
%2: f32[5,3] = input
%3: none = gather_held(%1, %0, 2, "w")
%4: f32[4,3] = wait(%1, %0, "w")
%5: f32[3,3] = slice(%4, 0, 0, 3)
%6: f32[5,3] = mm(%2, %5)
return %6""")

    def test_more_than_two_dimensions_travel_as_a_matrix(self):
        """So that no layout that Inductor gives a convolution's weight reaches a shard, or a parameter not yet held."""
        def kernel(shard, held, x):
            return x * gather(shard, [3, 2, 2], lifetime="step", held=held)

        self.assertExpectedInline(check(shard_params, trace(kernel, (2, 2, 2), (4, 4), (3, 2, 2)), stage=1), """\
%0: f32[2,2,2] = input
%1: f32[4,4] = input
%2: f32[3,2,2] = input
%3: f32[2,4] = as_strided(%0, [2, 4], [4, 1])
%4: none = gather_held(%1, %3, 2, "w")
%5: f32[4,4] = wait(%1, %3, "w")
%6: f32[3,4] = slice(%5, 0, 0, 3)
%7: f32[3,2,2] = view(%6, [3, 2, 2])
%8: f32[3,2,2] = mul(%2, %7)
return %8""")

    def test_whole_is_read_in_place(self):
        gm = trace(lambda param, x: x @ gather(param, [4, 3], lifetime="whole"), (4, 3), (5, 4))
        self.assertExpectedInline(check(shard_params, gm, stage=0), """\
%0: f32[4,3] = input
%1: f32[5,4] = input
%2: f32[5,3] = mm(%1, %0)
return %2""")

    def test_one_rank_reads_in_place(self):
        gm = trace(lambda shard, x: x @ gather(shard, [4, 3], world=1), (4, 3), (5, 4))
        self.assertExpectedInline(check(shard_params, gm, world=1), """\
%0: f32[4,3] = input
%1: f32[5,4] = input
%2: f32[5,3] = mm(%1, %0)
return %2""")

    def test_a_returned_parameter_is_a_copy(self):
        gm = trace(lambda param: gather(param, [4, 3], lifetime="whole"), (4, 3))
        self.assertExpectedInline(check(shard_params, gm, stage=0), """\
%0: f32[4,3] = input
%1: f32[4,3] = clone(%0)
return %1""")

    def test_a_shard_is_cast_before_it_travels(self):
        def kernel(shard, x):
            return gather(shard, [3, 2, 2], **TO_BF16).float() * x

        self.assertExpectedInline(check(shard_params, trace(kernel, (1, 2, 2), (3, 2, 2)), rank=1), """\
%0: f32[1,2,2] = input
%1: f32[3,2,2] = input
%2: f32[1,4] = as_strided(%0, [1, 4], [4, 1])
%3: bf16[1,4] = convert_element_type(%2, torch.bfloat16)
%4: bf16[2,4] = constant_pad_nd(%3, [0, 0, 0, 1])
%5: bf16[4,4] = all_gather(%4, 2, "w")
%6: bf16[4,4] = wait(%5, %4, "w")
%7: bf16[3,4] = slice(%6, 0, 0, 3)
%8: bf16[3,2,2] = view(%7, [3, 2, 2])
%9: f32[3,2,2] = _to_copy(%8, dtype=torch.float32)
%10: f32[3,2,2] = mul(%9, %1)
return %10""")

    def test_what_is_read_in_place_is_cast(self):
        def whole(param, shard, x):
            return gather(param, [4, 3], lifetime="whole", **TO_BF16), gather(shard, [4, 3], world=1, **TO_BF16) * 2

        self.assertExpectedInline(check(shard_params, trace(whole, (4, 3), (4, 3), (5, 4)), stage=0, world=1), """\
%0: f32[4,3] = input
%1: f32[4,3] = input
%2: f32[5,4] = input
%3: bf16[4,3] = convert_element_type(%0, torch.bfloat16)
%4: bf16[4,3] = convert_element_type(%1, torch.bfloat16)
%5: bf16[4,3] = mul(%4, 2)
return [%3, %5]""")

    def test_no_markers(self):
        self.assertEqual(check(shard_params, trace(lambda x: x * 2, (4, 3))), "unchanged")
