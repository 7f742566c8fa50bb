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
%1: object = input
%2: f32[2,3] = input
%3: f32[5,3] = view(%0, [5, 3])
%4: f32[3,5] = t(%3)
%5: f32[2,5] = mm(%2, %4)
%6: f32[] = sum(%5)
return [%6, %0, %2, %1]
backward
%0: f32[5,3] = input
%1: f32[2,3] = input
%2: object = input
%3: f32[] = input
%4: f32[2,5] = expand(%3, [2, 5])
%5: f32[5,2] = t(%4)
%6: f32[5,3] = mm(%5, %1)
%7: f32[3,5] = t(%6)
%8: f32[5,3] = view(%0, [5, 3])
%9: f32[3,5] = t(%8)
%10: f32[5,3] = t(%9)
%11: f32[2,3] = mm(%4, %10)
%12: f32[5,3] = t(%7)
%13: f32[5,3] = all_reduce(%12, "weight")
%14: f32[5,3] = wait(%13, %12, "weight")
%15: f32[5,3] = view(%14, [5, 3])
return [%15, %2, %11]""")

    def test_stage_1(self):
        self.assertExpectedInline(small(1), """\
forward
%0: f32[3,3] = input
%1: object = input
%2: f32[6,3] = input
%3: f32[2,3] = input
%4: f32[3,3] = view(%0, [3, 3])
%5: none = gather_held(%2, %4, 2, "weight")
%6: f32[6,3] = wait(%2, %4, "weight")
%7: f32[5,3] = slice(%6, 0, 0, 5)
%8: f32[3,5] = t(%7)
%9: f32[2,5] = mm(%3, %8)
%10: f32[] = sum(%9)
return [%10, %0, %2, %3, %1]
backward
%0: f32[3,3] = input
%1: f32[6,3] = input
%2: f32[2,3] = input
%3: object = input
%4: f32[] = input
%5: f32[2,5] = expand(%4, [2, 5])
%6: f32[5,2] = t(%5)
%7: f32[5,3] = mm(%6, %2)
%8: f32[3,5] = t(%7)
%9: f32[3,3] = view(%0, [3, 3])
%10: none = gather_held(%1, %9, 2, "weight")
%11: f32[6,3] = wait(%1, %9, "weight")
%12: f32[5,3] = slice(%11, 0, 0, 5)
%13: f32[3,5] = t(%12)
%14: f32[5,3] = t(%13)
%15: f32[2,3] = mm(%5, %14)
%16: f32[5,3] = t(%8)
%17: f32[6,3] = constant_pad_nd(%16, [0, 0, 0, 1])
%18: f32[3,3] = reduce_scatter(%17, 2, "weight")
%19: f32[3,3] = wait(%18, %17, "weight")
%20: f32[3,3] = view(%19, [3, 3])
return [%20, %3, None, %15]""")

    def test_stage_1_before_the_last_micro_batch(self):
        self.assertExpectedInline(small(1, accumulate=True), """\
forward
%0: f32[5,3] = input
%1: f32[3,3] = input
%2: object = input
%3: f32[6,3] = input
%4: f32[2,3] = input
%5: f32[3,3] = view(%1, [3, 3])
%6: none = gather_held(%3, %5, 2, "weight")
%7: f32[6,3] = wait(%3, %5, "weight")
%8: f32[5,3] = slice(%7, 0, 0, 5)
%9: f32[3,5] = t(%8)
%10: f32[2,5] = mm(%4, %9)
%11: f32[] = sum(%10)
return [%11, %0, %1, %3, %4]
backward
%0: f32[5,3] = input
%1: f32[3,3] = input
%2: f32[6,3] = input
%3: f32[2,3] = input
%4: f32[] = input
%5: f32[2,5] = expand(%4, [2, 5])
%6: f32[5,2] = t(%5)
%7: f32[5,3] = mm(%6, %3)
%8: f32[3,5] = t(%7)
%9: f32[3,3] = view(%1, [3, 3])
%10: none = gather_held(%2, %9, 2, "weight")
%11: f32[6,3] = wait(%2, %9, "weight")
%12: f32[5,3] = slice(%11, 0, 0, 5)
%13: f32[3,5] = t(%12)
%14: f32[5,3] = t(%13)
%15: f32[2,3] = mm(%5, %14)
%16: f32[5,3] = t(%8)
return [%16, None, None, %15]""")

    def test_stage_2(self):
        self.assertEqual(small(2), small(1))  # they differ only in what micro-batches share
        self.assertEqual(small(2, accumulate=True), small(2))

    def test_stage_3(self):
        self.assertExpectedInline(small(3), """\
forward
%0: f32[3,3] = input
%1: object = input
%2: f32[2,3] = input
%3: f32[3,3] = view(%0, [3, 3])
%4: f32[6,3] = all_gather(%3, 2, "weight")
%5: f32[6,3] = wait(%4, %3, "weight")
%6: f32[5,3] = slice(%5, 0, 0, 5)
%7: f32[3,5] = t(%6)
%8: f32[2,5] = mm(%2, %7)
%9: f32[] = sum(%8)
return [%9, %0, %2, %1]
backward
%0: f32[3,3] = input
%1: f32[2,3] = input
%2: object = input
%3: f32[] = input
%4: f32[2,5] = expand(%3, [2, 5])
%5: f32[5,2] = t(%4)
%6: f32[5,3] = mm(%5, %1)
%7: f32[3,5] = t(%6)
%8: f32[3,3] = view(%0, [3, 3])
%9: f32[6,3] = all_gather(%8, 2, "weight")
%10: f32[6,3] = wait(%9, %8, "weight")
%11: f32[5,3] = slice(%10, 0, 0, 5)
%12: f32[3,5] = t(%11)
%13: f32[5,3] = t(%12)
%14: f32[2,3] = mm(%4, %13)
%15: f32[5,3] = t(%7)
%16: f32[6,3] = constant_pad_nd(%15, [0, 0, 0, 1])
%17: f32[3,3] = reduce_scatter(%16, 2, "weight")
%18: f32[3,3] = wait(%17, %16, "weight")
%19: f32[3,3] = view(%18, [3, 3])
return [%19, %2, %14]""")


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
            self.assertIn("f32[128,16] = all_gather(", graphs["forward"])  # 101 rows in 64 chunks of 2
            self.assertIn("f32[192,16] = all_gather(", graphs["forward"])  # 130 rows in 64 chunks of 3
            self.assertIn("f32[2,16] = reduce_scatter(", graphs["backward"])
