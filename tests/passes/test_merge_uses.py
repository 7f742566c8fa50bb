"""Golden graphs of one pass; see tests/graphs.py for what `check` checks besides."""

from expecttest import TestCase

from tests.graphs import FROM_BF16, TO_BF16, check, gather, reduce, trace
from zero_fx.passes.merge_uses import merge_uses


class TestMergeUses(TestCase):
    def test_two_reads_of_one_parameter_become_one_gather(self):
        def tied(shard, x):
            return gather(shard, [4, 3]) @ x, gather(shard, [4, 3]).sum()

        self.assertExpectedInline(check(merge_uses, trace(tied, (2, 3), (3, 5))), """\
%0: f32[2,3] = input
%1: f32[3,5] = input
%2: f32[4,3] = gather_param(%0, None, None, [4, 3], "use", 2, "w")
%3: f32[4,5] = mm(%2, %1)
%4: f32[] = sum(%2)
return [%3, %4]""")

    def test_reductions_of_three_uses_become_one_of_their_sum(self):
        def grads(a, b, c):
            return reduce(a, 2) + reduce(b, 2) + reduce(c, 2)

        self.assertExpectedInline(check(merge_uses, trace(grads, (4, 3), (4, 3), (4, 3))), """\
%0: f32[4,3] = input
%1: f32[4,3] = input
%2: f32[4,3] = input
%3: f32[4,3] = add(%0, %1)
%4: f32[4,3] = add(%3, %2)
%5: f32[2,3] = reduce_grad(%4, 2, False, 2, "w")
return %5""")

    def test_a_read_without_gradient_is_the_same_read(self):
        def both(shard):
            return gather(shard, [4, 3]).sum(), gather(shard.detach(), [4, 3]).sum()

        self.assertEqual(check(merge_uses, trace(both, (2, 3))).count("gather_param"), 1)

    def test_uses_in_bf16_are_added_up_in_the_dtype_of_the_reduction(self):
        def grads(shard, a, b, c):
            both = gather(shard, [4, 3], **TO_BF16) + gather(shard, [4, 3], **TO_BF16)
            return both, reduce(a.bfloat16(), 2, **FROM_BF16) + reduce(b.bfloat16(), 2, **FROM_BF16)

        self.assertExpectedInline(check(merge_uses, trace(grads, (2, 3), (4, 3), (4, 3), (4, 3))), """\
%0: f32[2,3] = input
%1: f32[4,3] = input
%2: f32[4,3] = input
%3: f32[4,3] = input
%4: bf16[4,3] = gather_param(%0, None, None, [4, 3], "use", 2, "w", compute_dtype=torch.bfloat16, reduce_dtype=torch.float32)
%5: bf16[4,3] = add(%4, %4)
%6: bf16[4,3] = _to_copy(%1, dtype=torch.bfloat16)
%7: bf16[4,3] = _to_copy(%2, dtype=torch.bfloat16)
%8: f32[4,3] = convert_element_type(%6, torch.float32)
%9: f32[4,3] = convert_element_type(%7, torch.float32)
%10: f32[4,3] = add(%8, %9)
%11: f32[2,3] = reduce_grad(%10, 2, False, 2, "w", reduce_dtype=torch.float32, shard_dtype=torch.float32)
return [%5, %11]""")

    def test_a_read_in_another_dtype_is_another_read(self):
        def two(shard):
            return gather(shard, [4, 3], **TO_BF16).float() + gather(shard, [4, 3])

        self.assertEqual(check(merge_uses, trace(two, (2, 3))), "unchanged")

    def test_two_parameters_stay_two(self):
        def two(a, b):
            return gather(a, [4, 3], name="a") + gather(b, [4, 3], name="b")

        self.assertEqual(check(merge_uses, trace(two, (2, 3), (2, 3))), "unchanged")

    def test_gradients_of_two_parameters_are_not_merged(self):
        def two(a, b):
            return reduce(a, 2, name="a") + reduce(b, 2, name="b")

        self.assertEqual(check(merge_uses, trace(two, (4, 3), (4, 3))), "unchanged")

    def test_a_reduction_that_something_else_reads_stays(self):
        def shared(a, b):
            first = reduce(a, 2)
            return first + reduce(b, 2), first * 2

        self.assertEqual(check(merge_uses, trace(shared, (4, 3), (4, 3))), "unchanged")
