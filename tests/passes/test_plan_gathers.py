"""Golden graphs of one pass; see tests/graphs.py for what `check` checks besides."""

from expecttest import TestCase

from tests.graphs import check, gather, trace
from zero_fx.passes.plan_gathers import plan_gathers


class TestPlanGathers(TestCase):
    def test_views_casts_and_copies_of_a_parameter_are_read_again(self):
        def chain(shard, x):
            weight = gather(shard, [4, 3])
            return x @ weight.t().double().contiguous().float(), x.t()

        self.assertExpectedInline(check(plan_gathers, trace(chain, (2, 3), (5, 3))), """\
%0: f32[2,3] = input
%1: f32[5,3] = input
%2: f32[4,3] = gather_param(%0, None, None, [4, 3], "use", 2, "w")  # again in backward
%3: f32[3,4] = t(%2)  # again in backward
%4: f64[3,4] = _to_copy(%3, dtype=torch.float64)  # again in backward
%5: f64[3,4] = clone(%4, memory_format=torch.contiguous_format)  # again in backward
%6: f32[3,4] = _to_copy(%5, dtype=torch.float32)  # again in backward
%7: f32[5,4] = mm(%1, %6)
%8: f32[3,5] = t(%1)
return [%7, %8]""")

    def test_what_depends_on_data_is_left_alone(self):
        def mixed(shard, x):
            weight = gather(shard, [4, 3])
            return (weight * 2, (weight + x).t())

        self.assertExpectedInline(check(plan_gathers, trace(mixed, (2, 3), (4, 3))), """\
%0: f32[2,3] = input
%1: f32[4,3] = input
%2: f32[4,3] = gather_param(%0, None, None, [4, 3], "use", 2, "w")  # again in backward
%3: f32[4,3] = mul(%2, 2)
%4: f32[4,3] = add(%2, %1)
%5: f32[3,4] = t(%4)
return [%3, %5]""")

    def test_a_kept_parameter_is_saved_and_its_views_are_made_again(self):
        gm = trace(lambda a, b: (gather(a, [4, 3], name="a").t(), gather(b, [4, 3], name="b").t()), (2, 3), (2, 3))
        self.assertExpectedInline(check(plan_gathers, gm, kept=("b",)), """\
%0: f32[2,3] = input
%1: f32[2,3] = input
%2: f32[4,3] = gather_param(%0, None, None, [4, 3], "use", 2, "a")  # again in backward
%3: f32[3,4] = t(%2)  # again in backward
%4: f32[4,3] = gather_param(%1, None, None, [4, 3], "use", 2, "b")  # saved for backward
%5: f32[3,4] = t(%4)  # again in backward
return [%3, %5]""")

    def test_a_graph_without_parameters_is_left_alone(self):
        self.assertEqual(check(plan_gathers, trace(lambda x: x.t().contiguous(), (2, 3))), "unchanged")
