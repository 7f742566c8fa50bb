"""The same parameter at stages 0, 1, 2 and 3: the graphs that training runs, as README.md shows them. And a capture
for 64 ranks in one process."""

import torch
import torch.distributed as dist
from expecttest import TestCase
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import zero_fx
from zero_fx.text import text


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, 3))

    def forward(self, x):
        return (x @ self.weight.t()).sum()


def graphs_of(model, x, world: int, rank: int = 0, accumulate: bool = False, **options) -> dict[str, str]:
    """{"forward": text, "backward": text} of what one rank of `world` runs, on a fake process group."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        zero_fx.compile(model, lowering="eager", keep_whole_below=0, **options)
        if accumulate:
            with model.no_sync():
                model(x).backward()
        else:
            model(x).backward()
        return {label: text(gm) for label, gm in model._zero_fx_compiled.backend.graphs.halves}
    finally:
        dist.destroy_process_group()
        torch._dynamo.reset()


def small(stage: int, accumulate: bool = False) -> str:
    graphs = graphs_of(Small(), torch.ones(2, 3, requires_grad=True), world=2, stage=stage, accumulate=accumulate)
    return "forward\n" + graphs["forward"] + "\nbackward\n" + graphs["backward"]


class TestStages(TestCase):
    def test_stage_0(self):
        self.assertExpectedInline(small(0), """\
forward
%0: f32[5,3] = input
%1: f32[2,3] = input
%2: f32[3,5] = t(%0)
%3: f32[2,5] = mm(%1, %2)
%4: f32[] = sum(%3)
return [%4, %0, %1]
backward
%0: f32[5,3] = input
%1: f32[2,3] = input
%2: f32[] = input
%3: f32[2,5] = expand(%2, [2, 5])
%4: f32[5,2] = t(%3)
%5: f32[5,3] = mm(%4, %1)
%6: f32[3,5] = t(%5)
%7: f32[3,5] = t(%0)
%8: f32[5,3] = t(%7)
%9: f32[2,3] = mm(%3, %8)
%10: f32[5,3] = t(%6)
%11: f32[5,3] = all_reduce(%10, "weight")
%12: f32[5,3] = wait(%11, %10, "weight")
return [%12, %9]""")

    def test_stage_1(self):
        self.assertExpectedInline(small(1), """\
forward
%0: f32[3,3] = input
%1: f32[6,3] = input
%2: f32[2,3] = input
%3: none = gather_held(%1, %0, 2, "weight")
%4: f32[6,3] = wait(%1, %0, "weight")
%5: f32[5,3] = slice(%4, 0, 0, 5)
%6: f32[3,5] = t(%5)
%7: f32[2,5] = mm(%2, %6)
%8: f32[] = sum(%7)
return [%8, %0, %1, %2]
backward
%0: f32[3,3] = input
%1: f32[6,3] = input
%2: f32[2,3] = input
%3: f32[] = input
%4: none = gather_held(%1, %0, 2, "weight")
%5: f32[2,5] = expand(%3, [2, 5])
%6: f32[5,2] = t(%5)
%7: f32[5,3] = mm(%6, %2)
%8: f32[3,5] = t(%7)
%9: f32[6,3] = wait(%1, %0, "weight")
%10: f32[5,3] = slice(%9, 0, 0, 5)
%11: f32[3,5] = t(%10)
%12: f32[5,3] = t(%11)
%13: f32[2,3] = mm(%5, %12)
%14: f32[5,3] = t(%8)
%15: f32[6,3] = constant_pad_nd(%14, [0, 0, 0, 1])
%16: f32[3,3] = reduce_scatter(%15, 2, "weight")
%17: f32[3,3] = wait(%16, %15, "weight")
return [%17, None, %13]""")

    def test_stages_0_and_1_reduce_nothing_before_the_last_micro_batch(self):
        for stage in (0, 1):
            self.assertIn("reduce", small(stage))
            self.assertNotIn("reduce", small(stage, accumulate=True))

    def test_stage_2(self):
        self.assertEqual(small(2), small(1))  # they differ only in what micro-batches share
        self.assertEqual(small(2, accumulate=True), small(2))

    def test_stage_3(self):
        self.assertExpectedInline(small(3), """\
forward
%0: f32[3,3] = input
%1: f32[2,3] = input
%2: f32[6,3] = all_gather(%0, 2, "weight")
%3: f32[6,3] = wait(%2, %0, "weight")
%4: f32[5,3] = slice(%3, 0, 0, 5)
%5: f32[3,5] = t(%4)
%6: f32[2,5] = mm(%1, %5)
%7: f32[] = sum(%6)
return [%7, %0, %1]
backward
%0: f32[3,3] = input
%1: f32[2,3] = input
%2: f32[] = input
%3: f32[6,3] = all_gather(%0, 2, "weight")
%4: f32[2,5] = expand(%2, [2, 5])
%5: f32[5,2] = t(%4)
%6: f32[5,3] = mm(%5, %1)
%7: f32[3,5] = t(%6)
%8: f32[6,3] = wait(%3, %0, "weight")
%9: f32[5,3] = slice(%8, 0, 0, 5)
%10: f32[3,5] = t(%9)
%11: f32[5,3] = t(%10)
%12: f32[2,3] = mm(%4, %11)
%13: f32[5,3] = t(%7)
%14: f32[6,3] = constant_pad_nd(%13, [0, 0, 0, 1])
%15: f32[3,3] = reduce_scatter(%14, 2, "weight")
%16: f32[3,3] = wait(%15, %14, "weight")
return [%16, %12]""")


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(101, 16), nn.Linear(16, 130), nn.ReLU(), nn.Linear(130, 7))

    def forward(self, x):
        return self.layers(x).sum()


class TestManyRanks(TestCase):
    def test_64_ranks_in_one_process(self):
        for rank in (0, 50, 63):
            graphs = graphs_of(Classifier(), torch.zeros(4, dtype=torch.long), world=64, rank=rank, stage=3)
            self.assertIn("f32[128,16] = reshape(", graphs["forward"])  # 101 rows in 64 chunks of 2
            self.assertIn("f32[192,16] = reshape(", graphs["forward"])  # 130 rows in 64 chunks of 3
            self.assertIn("f32[2,16] = reshape(", graphs["backward"])
