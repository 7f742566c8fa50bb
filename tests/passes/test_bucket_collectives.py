"""Golden graphs of one pass; see tests/graphs.py for what `check` checks besides."""


import torch
from expecttest import TestCase

from tests.graphs import FROM_BF16, TO_BF16, check, gather, reduce, sharded, trace
from zero_fx.passes.bucket_collectives import bucket_collectives


def two_gathers(a, b, x):
    return (x @ gather(a, [4, 3], name="a")) * gather(b, [3], world=2, name="b")


def two_reductions(x, y):
    return reduce(x * 2, 2, name="a"), reduce(y * 3, 2, name="b")


class TestBucketCollectives(TestCase):
    def test_gathers(self):
        gm = sharded(two_gathers, (2, 3), (2,), (5, 4))
        self.assertExpectedInline(check(bucket_collectives, gm), """\
%0: f32[2,3] = input
%1: f32[2] = input
%2: f32[5,4] = input
%3: f32[6] = reshape(%0, [-1])
%4: f32[2] = reshape(%1, [-1])
%5: f32[8] = cat([%3, %4], 0)
%6: f32[16] = all_gather(%5, 2, "a, b")
%7: f32[16] = wait(%6, %5, "a, b")
%8: f32[2,8] = view(%7, [2, -1])
%9: f32[2,6] = slice(%8, 1, 0, 6)
%10: f32[4,3] = reshape(%9, [4, 3])
%11: f32[2,2] = slice(%8, 1, 6, 8)
%12: f32[4] = reshape(%11, [4])
%13: f32[5,3] = mm(%2, %10)
%14: f32[3] = slice(%12, 0, 0, 3)
%15: f32[5,3] = mul(%13, %14)
return %15""")

    def test_reductions(self):
        self.assertExpectedInline(check(bucket_collectives, sharded(two_reductions, (4, 3), (4,))), """\
%0: f32[4,3] = input
%1: f32[4] = input
%2: f32[4,3] = mul(%0, 2)
%3: f32[4] = mul(%1, 3)
%4: f32[2,6] = reshape(%2, [2, -1])
%5: f32[2,2] = reshape(%3, [2, -1])
%6: f32[2,8] = cat([%4, %5], 1)
%7: f32[1,8] = reduce_scatter(%6, 2, "a, b")
%8: f32[1,8] = wait(%7, %6, "a, b")
%9: f32[1,6] = slice(%8, 1, 0, 6)
%10: f32[2,3] = reshape(%9, [2, 3])
%11: f32[1,2] = slice(%8, 1, 6, 8)
%12: f32[2] = reshape(%11, [2])
return [%10, %12]""")

    def test_a_bucket_of_casts_and_none_of_two_dtypes(self):
        def three(a, b, c):
            low = gather(a, [4, 3], name="a", **TO_BF16), gather(b, [4], name="b", **TO_BF16)
            return *low, gather(c, [4], name="c")

        self.assertExpectedInline(check(bucket_collectives, sharded(three, (2, 3), (2,), (2,))), """\
%0: f32[2,3] = input
%1: f32[2] = input
%2: f32[2] = input
%3: bf16[2,3] = convert_element_type(%0, torch.bfloat16)
%4: bf16[2] = convert_element_type(%1, torch.bfloat16)
%5: bf16[6] = reshape(%3, [-1])
%6: bf16[2] = reshape(%4, [-1])
%7: bf16[8] = cat([%5, %6], 0)
%8: bf16[16] = all_gather(%7, 2, "a, b")
%9: bf16[16] = wait(%8, %7, "a, b")
%10: bf16[2,8] = view(%9, [2, -1])
%11: bf16[2,6] = slice(%10, 1, 0, 6)
%12: bf16[4,3] = reshape(%11, [4, 3])
%13: bf16[2,2] = slice(%10, 1, 6, 8)
%14: bf16[4] = reshape(%13, [4])
%15: f32[4] = all_gather(%2, 2, "c")
%16: f32[4] = wait(%15, %2, "c")
return [%12, %14, %16]""")

    def test_reductions_of_casts(self):
        def two(x, y):
            return reduce(x.bfloat16(), 2, name="a", **FROM_BF16), reduce(y.bfloat16(), 2, name="b", **FROM_BF16)

        self.assertExpectedInline(check(bucket_collectives, sharded(two, (4, 3), (4,))), """\
%0: f32[4,3] = input
%1: f32[4] = input
%2: bf16[4,3] = _to_copy(%0, dtype=torch.bfloat16)
%3: f32[4,3] = convert_element_type(%2, torch.float32)
%4: bf16[4] = _to_copy(%1, dtype=torch.bfloat16)
%5: f32[4] = convert_element_type(%4, torch.float32)
%6: f32[2,6] = reshape(%3, [2, -1])
%7: f32[2,2] = reshape(%5, [2, -1])
%8: f32[2,8] = cat([%6, %7], 1)
%9: f32[1,8] = reduce_scatter(%8, 2, "a, b")
%10: f32[1,8] = wait(%9, %8, "a, b")
%11: f32[1,6] = slice(%10, 1, 0, 6)
%12: f32[2,3] = reshape(%11, [2, 3])
%13: f32[1,2] = slice(%10, 1, 6, 8)
%14: f32[2] = reshape(%13, [2])
return [%12, %14]""")

    def test_reductions_by_exchange(self):
        gm = sharded(two_reductions, (4, 3), (4,), exchange=True)
        self.assertExpectedInline(check(bucket_collectives, gm, exchange=True), """\
%0: f32[4,3] = input
%1: f32[4] = input
%2: f32[4,3] = mul(%0, 2)
%3: f32[4] = mul(%1, 3)
%4: f32[2,6] = reshape(%2, [2, -1])
%5: f32[2,2] = reshape(%3, [2, -1])
%6: f32[2,8] = cat([%4, %5], 1)
%7: f32[2,8] = all_to_all(%6, 2, "a, b")
%8: f32[2,8] = wait(%7, %6, "a, b")
%9: f32[2,6] = slice(%8, 1, 0, 6)
%10: f32[4,3] = reshape(%9, [4, 3])
%11: f32[2,2,3] = view(%10, [2, 2, 3])
%12: f32[2,3] = mean(%11, [0])
%13: f32[2,2] = slice(%8, 1, 6, 8)
%14: f32[4] = reshape(%13, [4])
%15: f32[2,2] = view(%14, [2, 2])
%16: f32[2] = mean(%15, [0])
return [%12, %16]""")

    def test_whole(self):
        def whole(x, y):
            return reduce(x, 4, whole=True, name="a"), reduce(y, 3, whole=True, name="b")

        self.assertExpectedInline(check(bucket_collectives, sharded(whole, (4, 3), (3,)), stage=0), """\
%0: f32[4,3] = input
%1: f32[3] = input
%2: f32[12] = reshape(%0, [-1])
%3: f32[3] = reshape(%1, [-1])
%4: f32[15] = cat([%2, %3], 0)
%5: f32[15] = all_reduce(%4, "a, b")
%6: f32[15] = wait(%5, %4, "a, b")
%7: f32[12] = slice(%6, 0, 0, 12)
%8: f32[4,3] = reshape(%7, [4, 3])
%9: f32[3] = slice(%6, 0, 12, 15)
%10: f32[3] = reshape(%9, [3])
return [%8, %10]""")

    def unchanged(self, gm, **config):
        self.assertEqual(check(bucket_collectives, gm, **config), "unchanged")

    def test_a_large_one_travels_alone(self):
        rows = 2 << 20  # 8 MB: longer to copy than a latency
        self.unchanged(sharded(lambda x, y: (reduce(x, rows // 2), reduce(y, rows // 2)), (rows,), (rows,)))

    def test_a_bucket_is_bounded(self):
        self.unchanged(sharded(two_gathers, (2, 3), (2,), (5, 4)), bucket_bytes=60)

    def test_one_rank(self):
        gm = sharded(lambda a, b: (reduce(a, 4, world=1), reduce(b, 4, world=1)), (4,), (4,), world=1)
        self.unchanged(gm, world=1)

    def test_dtypes_do_not_mix(self):
        self.unchanged(sharded(lambda x, y: (reduce(x, 2, name="a"), reduce(y.to(torch.bfloat16), 2, name="b")), (4,), (4,)))

    def test_a_reduction_that_is_read_does_not_wait_for_a_later_one(self):
        def read(x, y):
            early = reduce(x, 2, name="a") * 3
            return early, reduce(y * early.sum(), 2, name="b")

        self.unchanged(sharded(read, (4,), (4,)))

    def test_a_gather_of_what_is_computed_stays(self):
        def computed(a, b):
            first = gather(a, [4], name="a") * 2
            return first, gather(b * first.sum(), [4], name="b")

        self.unchanged(sharded(computed, (2,), (2,)))

    def test_no_collectives(self):
        self.unchanged(trace(lambda x: x * 2, (4, 3)))
