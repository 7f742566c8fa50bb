"""Golden graphs of one pass; see tests/graphs.py for what `check` checks besides."""

from expecttest import TestCase

from tests.graphs import check, gather, trace
from zero_fx.passes.drop_identity_views import drop_identity_views


class TestDropIdentityViews(TestCase):
    def test_before_and_after_an_operator(self):
        gm = trace(lambda shard: gather(shard.view(2, 3), [4, 3]).view(4, 3) * 2, (2, 3))
        self.assertExpectedInline(check(drop_identity_views, gm), """\
%0: f32[2,3] = input
%1: f32[4,3] = gather_param(%0, None, None, [4, 3], "use", 2, "w")
%2: f32[4,3] = mul(%1, 2)
return %2""")

    def test_another_shape_stays(self):
        self.assertEqual(check(drop_identity_views, trace(lambda x: x.view(3, 2) * 2, (2, 3))), "unchanged")

    def test_a_returned_view_of_an_input_stays_a_view(self):
        self.assertEqual(check(drop_identity_views, trace(lambda x: x.view(2, 3), (2, 3))), "unchanged")
