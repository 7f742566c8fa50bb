"""Golden graphs of one pass; see tests/graphs.py for what `check` checks besides."""

import torch
from expecttest import TestCase

from tests.graphs import check, trace
from zero_fx.passes.rematerialize import rematerialize


def noisy(x):
    return (x * torch.bernoulli(x)).relu()


class TestRematerialize(TestCase):
    def test_what_a_random_operator_drew_is_saved(self):
        self.assertExpectedInline(check(rematerialize, trace(noisy, (4, 3)), fraction=0.5), """\
%0: f32[4,3] = input
%1: f32[4,3] = bernoulli(%0)  # saved for backward
%2: f32[4,3] = mul(%0, %1)
%3: f32[4,3] = relu(%2)
return %3""")

    def test_without_a_budget_nothing_changes(self):
        self.assertEqual(check(rematerialize, trace(noisy, (4, 3))), "unchanged")

    def test_nothing_random(self):
        self.assertEqual(check(rematerialize, trace(lambda x: x.relu(), (4, 3)), fraction=0.5), "unchanged")
