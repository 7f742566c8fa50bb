"""Mixed precision against an unsharded model with fp32 masters (tests/mixed.py), and what it sends, holds and refuses."""

from __future__ import annotations

import dataclasses

import mixed
import parity
import torch
import torch.distributed as dist
import zoo
from torch import nn
from torch._inductor import config as inductor_config
from zoo.common import Draw

import zero_fx
from zero_fx import Precision
from zero_fx.formulas import model_state_bytes
from zero_fx.runtime.memory import state_bytes

from .graphs import compiled, counting, graphs_of, train_steps

BF16 = Precision()
# Both models run the same bf16 operators, from equal parameters; only fp32 sums over ranks and uses are ordered otherwise.
RTOL, ATOL = 1e-5, 1e-7


def check_parity(rank: int, world: int, name: str, stage: int, lowering: str, precision=BF16, rtol=RTOL, atol=ATOL) -> float:
    """Train the case under `precision` beside the reference; the largest difference of a gradient, relative to the
    largest element of that gradient."""
    case = zoo.CASES[name]
    kept = precision.keep_fp32
    plain = mixed.reference(parity.build(case), precision.compute, kept)
    options = {"stage": stage, "lowering": lowering, "precision": precision, **case.options}
    with inductor_config.patch(fallback_random=True):
        twin = parity.Twin(plain, parity.build(case), **options)
        worst, start = 0.0, [param.detach().clone() for param in plain.parameters()]
        for step, micros in enumerate(case.micros[:3]):
            for model, optimizer in zip((twin.plain, twin.sharded), twin.optimizers):
                if case.between is not None:
                    case.between(model, optimizer, step)
            for micro in range(micros):
                run_micro(twin, case, Draw(rank, step, micro), micro == micros - 1, max(rtol, 1e-2 if rtol > RTOL else 0))
            worst = max(worst, step_both(twin, rtol, atol))
    assert all(p.dtype == torch.float32 == p.grad_dtype for p in map(described, twin.sharded.parameters()))
    assert any(not torch.equal(a, b) for a, b in zip(start, plain.parameters())), "no parameter moved"
    return worst


@dataclasses.dataclass
class Dtypes:
    dtype: torch.dtype
    grad_dtype: torch.dtype


def described(param) -> Dtypes:
    return Dtypes(param.dtype, param.dtype if param.grad is None else param.grad.dtype)


def run_micro(twin, case, draw, is_last: bool, rtol: float) -> None:
    losses = []
    for model in (twin.plain, twin.sharded):
        torch.manual_seed(draw.step * 10 + draw.micro)
        is_plain = model is twin.plain
        with torch.enable_grad() if is_plain or is_last else model.no_sync():
            losses.append(case.train(model, case.batch(Draw(draw.rank, draw.step, draw.micro))))
    torch.testing.assert_close(losses[1], losses[0], rtol=max(rtol, 1e-6), atol=1e-6)


def step_both(twin, rtol: float, atol: float) -> float:
    """Average, compare, step, compare, and let both go on from the same values: a difference in the last digit of an fp32
    parameter may be one of a whole bf16 digit in the next forward."""
    twin.average_grads()
    worst = 0.0
    for _, plain, sharded in twin.pairs():
        if plain.grad is not None and sharded.grad is not None and plain.grad.numel():
            assert sharded.grad.dtype == torch.float32
            worst = max(worst, parity.relative_error(sharded.grad.full_tensor(), plain.grad))
    twin.compare_grads(rtol, atol)
    for optimizer in twin.optimizers:
        optimizer.step()
        optimizer.zero_grad()
    twin.compare_params(max(rtol, 1e-5), max(atol, 1e-6))
    with torch.no_grad():
        for _, plain, sharded in twin.pairs():
            plain.copy_(sharded.full_tensor())
        for theirs, ours in zip(twin.plain.buffers(), twin.sharded.buffers()):
            theirs.copy_(ours)
    return worst


def check_bitwise(rank: int, world: int, name: str) -> None:
    """Stages 1, 2 and 3 give the same losses and parameters, to the last bit, after five steps."""
    case, results = zoo.CASES[name], {}
    for stage in (1, 2, 3):
        torch._dynamo.reset()
        model = compiled(name, stage, precision="bf16")
        losses = train_steps(model, case, rank, 5, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9))
        results[stage] = [*losses, *zero_fx.full_state_dict(model).values()]
    for stage in (2, 3):
        for got, want in zip(results[stage], results[1], strict=True):
            assert want.isfinite().all() and torch.equal(got, want), f"stage {stage} differs from stage 1"


class Bytes:
    """Stands in for the transport: dtypes of what the collectives send."""

    def __init__(self, real):
        self.real, self.dtypes = real, set()

    def __getattr__(self, kind: str):
        def call(tensor, *args, **kwargs):
            if kind != "wait_tensor":
                self.dtypes.add((kind.split("_")[0], tensor.dtype))
            return getattr(self.real, kind)(tensor, *args, **kwargs)

        return call


def check_sent(rank: int, world: int, stage: int, reduce: torch.dtype, name: str) -> dict:
    """{"gathered", "reduced"}: dtypes that travelled in a step; `name`: a model that is captured, or one that is not."""
    from zero_fx.runtime import collectives

    model = compiled(name, stage, precision=Precision(reduce=reduce))
    seen = Bytes(collectives.transport)
    collectives.transport = seen
    try:
        train_steps(model, zoo.CASES[name], rank, 1)
    finally:
        collectives.transport = seen.real
    gathered = {dtype for kind, dtype in seen.dtypes if kind == "broadcast"}
    return {"gathered": gathered, "reduced": {dtype for kind, dtype in seen.dtypes if kind == "all"}}


def check_volume(rank: int, world: int, stage: int) -> None:
    """Elements in one step are those of fp32."""
    sent = []
    for precision in (None, "bf16"):
        model = compiled("mlp", stage, precision=precision)
        with counting(world) as counter:
            train_steps(model, zoo.CASES["mlp"], rank, 1)
        sent.append(counter.sent)
    assert sent[0] == sent[1], sent


def check_memory(rank: int, world: int, stage: int, micros: int) -> tuple[float, float]:
    """(measured, formula): bytes of model states at their peak."""
    size = 64 * world
    model = nn.Sequential(*[nn.Linear(size, size, bias=False) for _ in range(3)])
    model = zero_fx.compile(model, stage=stage, precision="bf16", lowering="eager", keep_whole_below=0, timeout_s=30)
    optimizer, seen = torch.optim.AdamW(model.parameters()), []
    model._zero_fx_model.before_release = lambda state: seen.append(sum(state_bytes(state, optimizer).values()))
    for _ in range(2):
        for micro in range(micros):
            with model.no_sync() if micro < micros - 1 else torch.enable_grad():
                model(Draw(rank, 0, micro).normal(4, size)).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    sharded = 0 if stage == 0 else 3 * size * size
    return max(seen), model_state_bytes(stage, sharded, 3 * size * size - sharded, world, micros, gathered_bytes=2)


class Inside(nn.Module):
    """Notes the dtypes that forward sees."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.head = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3)
        self.seen = []

    @torch._dynamo.disable
    def note(self, *tensors):
        self.seen.append(tuple(tensor.dtype for tensor in tensors))

    def forward(self, x, extra):
        self.note(x, extra["y"], extra["index"], self.layer.weight)
        normed = self.norm(self.layer(x) + extra["y"])
        self.note(normed, self.norm.weight)
        return self.head(normed), {"hidden": normed}

    def encode(self, x):
        return self.layer(x)


def check_dtypes(rank: int, world: int, stage: int, precision: Precision) -> None:
    """Which dtype inputs, weights and outputs have in forward, and weights outside of it."""
    torch.manual_seed(0)
    model = zero_fx.compile(Inside(), stage, precision=precision, lowering="eager", keep_whole_below=0, timeout_s=30)
    low = precision.compute
    norm = torch.float32 if precision.keep_fp32 else low
    extra = {"y": torch.randn(4, 6), "index": torch.arange(4)}
    out, more = model(torch.randn(4, 6), extra)
    assert model.seen == [(low, low, torch.int64, low), (low, norm)], model.seen
    assert extra["y"].dtype == torch.float32, "the caller's dict was changed"
    assert out.dtype == more["hidden"].dtype == (precision.output or low)
    weight = model.layer.weight  # between forward and backward
    assert weight.dtype == torch.float32 and torch.equal(weight, zero_fx.full_state_dict(model)["layer.weight"])
    out.float().sum().backward()
    assert model.encode(torch.randn(4, 6)).dtype == torch.float32
    model.encode(torch.randn(4, 6)).sum().backward()
    assert all(p.dtype == torch.float32 and (p.grad is None or p.grad.dtype == torch.float32) for p in model.parameters())
    text = "".join(gm.code for _, gm in graphs_of(model).halves)
    assert "convert_element_type" in text


def check_checkpointed_method(rank: int, world: int, stage: int) -> None:
    """A method beside forward, checkpointed: backward runs it again in the dtype that it ran in."""
    from torch.utils.checkpoint import checkpoint

    model = zero_fx.compile(Inside(), stage, precision="bf16", lowering="eager", keep_whole_below=0, timeout_s=30)
    extra = {"y": torch.randn(4, 6), "index": torch.arange(4)}
    for use_reentrant in (False, True):
        model(torch.randn(4, 6), extra)[0].float().sum().backward()
        x = torch.randn(4, 6, requires_grad=True)
        checkpoint(model.encode, x, use_reentrant=use_reentrant).sum().backward()
        assert x.grad.dtype == torch.float32
        assert dist.get_world_size() == world


class Recomputed(nn.Module):
    """Two checkpointed parts that run eagerly: backward reads their weights again."""

    def __init__(self, use_reentrant: bool):
        super().__init__()
        self.first, self.second, self.use_reentrant = nn.Linear(6, 6), nn.Linear(6, 6), use_reentrant

    @torch._dynamo.disable
    def forward(self, x):
        from torch.utils.checkpoint import checkpoint

        for layer in (self.first, self.second, self.first):
            x = checkpoint(lambda y, layer=layer: layer(y).tanh(), x, use_reentrant=self.use_reentrant)
        return x


def check_recomputed(rank: int, world: int, stage: int, use_reentrant: bool) -> None:
    torch.manual_seed(0)
    plain = mixed.reference(Recomputed(use_reentrant), torch.bfloat16)
    torch.manual_seed(0)
    twin = parity.Twin(plain, Recomputed(use_reentrant), stage=stage, lowering="eager", precision="bf16")
    for step in range(2):
        for model in (twin.plain, twin.sharded):
            out = model(Draw(rank, step, 0).normal(4, 6).requires_grad_())
            model.first.weight.sum()  # an inspection between forward and backward
            out.float().square().sum().backward()
        step_both(twin, RTOL, ATOL)
