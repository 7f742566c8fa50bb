"""Small graphs for the tests of passes: traced from functions on fake tensors, without ranks or a process group."""

import dataclasses

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import zero_fx  # noqa: F401  registers the operators
from zero_fx.passes.pipeline import run_passes
from zero_fx.passes.shard_grads import shard_grads
from zero_fx.passes.shard_params import shard_params
from zero_fx.text import text
from zero_fx.verify import signature, verify
from zero_fx.vocabulary import PassConfig

zfx = torch.ops.zero_fx
GROUP = "0"
TO_BF16 = {"compute_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
FROM_BF16 = {"reduce_dtype": torch.float32, "shard_dtype": torch.float32}


def gather(shard, shape, world=2, lifetime="use", held=None, local=None, name="w", **dtypes):
    return zfx.gather_param(shard, held, local, shape, lifetime, world, name, GROUP, **dtypes)


def reduce(grad, rows, world=2, whole=False, name="w", **dtypes):
    return zfx.reduce_grad(grad, rows, whole, world, name, GROUP, **dtypes)


def trace(function, *shapes: tuple[int, ...]) -> fx.GraphModule:
    """The graph of `function` on f32 inputs of `shapes`."""
    mode = FakeTensorMode()
    with mode:
        inputs = [torch.empty(shape) for shape in shapes]
    gm = make_fx(function)(*inputs)
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), inputs):
        node.meta["val"] = value
    return gm


CONFIG = PassConfig(stage=3, world=2, rank=0)


def check(pass_, gm: fx.GraphModule, stage=3, world=2, rank=0, **options) -> str:
    """Run `pass_` as the pipeline does; verify before and after, that the report is honest, and that a second run
    changes nothing. Returns the text of the result, or "unchanged"."""
    config = dataclasses.replace(CONFIG, stage=stage, world=world, rank=rank, **options)
    verify(gm)
    before, types = text(gm), signature(gm)
    report = pass_(gm, config)
    verify(gm, types)
    after = text(gm)
    assert report.changed == (before != after), (report, before, after)
    again = pass_(gm, config)
    assert not again.changed and text(gm) == after, "not idempotent"
    return after if report.changed else "unchanged"


def sharded(function, *shapes: tuple[int, ...], **config) -> fx.GraphModule:
    """The graph of `function` with collectives in place of its markers."""
    gm = trace(function, *shapes)
    run_passes(gm, (shard_params, shard_grads), dataclasses.replace(CONFIG, **config), "test")
    return gm
