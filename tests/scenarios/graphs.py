"""How many graphs are captured, what they save for backward, and what they send."""

from __future__ import annotations

import contextlib
import copy

import parity
import torch
import zoo
from parity import Twin
from torch import nn
from zoo.common import Draw, loss_of

import zero_fx
import zero_fx.lowering
from zero_fx.runtime import collectives

aten = torch.ops.aten


def graphs_of(model: nn.Module):
    return model._zero_fx_compiled.backend.graphs


def compiled(name: str, stage: int, **options) -> nn.Module:
    """The case's model, sharded, every parameter that has a dimension too."""
    options = {"keep_whole_below": 0, "lowering": "eager", "timeout_s": parity.COMPILE_TIMEOUT_S, **options}
    return zero_fx.compile(parity.build(zoo.CASES[name]), stage=stage, **options)


def train_steps(model: nn.Module, case, rank: int, steps: int, optimizer=None) -> list[torch.Tensor]:
    """Losses of `steps` steps."""
    optimizer = optimizer or parity.sgd(model.parameters())
    losses = []
    for step in range(steps):
        losses.append(case.train(model, case.batch(Draw(rank, step, 0))))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def check_one_capture(rank: int, world: int, name: str, stage: int) -> None:
    model = compiled(name, stage)
    train_steps(model, zoo.CASES[name], rank, 10)
    assert graphs_of(model).captured == 1, graphs_of(model).captured


def check_flips(rank: int, world: int, stage: int) -> None:
    """Ten changes between train, eval and no_grad: one graph for each kind, whatever their order."""
    model, case = compiled("dropout", stage), zoo.CASES["dropout"]
    optimizer = parity.sgd(model.parameters())
    for _ in range(10):
        model.train()
        train_steps(model, case, rank, 1, optimizer)
        model.eval()
        with torch.no_grad():
            model(case.batch(Draw(rank, 0, 0)))
    assert graphs_of(model).captured <= 2, graphs_of(model).captured


def check_toggles(rank: int, world: int, stage: int) -> None:
    """A parameter frozen and unfrozen by turns: two graphs."""
    model, case = compiled("mlp", stage), zoo.CASES["mlp"]
    optimizer = parity.sgd(model.parameters())
    for step in range(12):
        model[0].weight  # noqa: B018  reading it must not matter
        next(model.parameters()).requires_grad_(step % 2 == 0)
        train_steps(model, case, rank, 1, optimizer)
    assert graphs_of(model).captured <= 2, graphs_of(model).captured


def check_lengths(rank: int, world: int, stage: int) -> None:
    """Eight sequence lengths: a graph for the first, one for any length, at most one more."""
    model = compiled("changing_lengths", stage)
    optimizer = parity.sgd(model.parameters())
    for step in range(8):
        loss_of(model(Draw(rank, step, 0).tokens(101, 3, 3 + step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert graphs_of(model).captured <= 3, graphs_of(model).captured


def check_accumulation_captures(rank: int, world: int, stage: int) -> None:
    """Steps of one and of two micro-batches by turns: at most a graph for each."""
    model, case = compiled("mlp", stage), zoo.CASES["mlp"]
    for step in range(6):
        if step % 2:
            with model.no_sync():
                case.train(model, case.batch(Draw(rank, step, 0)))
        case.train(model, case.batch(Draw(rank, step, 1)))
        model.zero_grad()
    assert graphs_of(model).captured <= (2 if stage < 2 else 1), graphs_of(model).captured


# --- what stage 3 saves

THROUGH = {
    aten.view, aten._unsafe_view, aten.reshape, aten.t, aten.transpose, aten.permute, aten.expand, aten.unsqueeze,
    aten.squeeze, aten.slice, aten.select, aten.split, aten.split_with_sizes, aten.unbind, aten.detach, aten.alias,
    aten.clone, aten._to_copy, aten.as_strided, aten.constant_pad_nd, torch.ops.prims.convert_element_type,
}  # fmt: skip


def gathered_source(node: torch.fx.Node) -> torch.fx.Node | None:
    """The `wait` of an all-gather that `node` is a view, cast or copy of."""
    while node.op == "call_function":
        if node.target is torch.ops.zero_fx.wait.default:
            return node if node.args[0].target is torch.ops.zero_fx.all_gather.default else None
        is_item = getattr(node.target, "__name__", "") == "getitem"
        if not is_item and getattr(node.target, "overloadpacket", None) not in THROUGH:
            return None
        node = node.args[0]
    return None


def check_nothing_full_is_saved(rank: int, world: int, name: str) -> None:
    """No output of a forward graph is a full parameter. For models that do not return one."""
    model = compiled(name, 3)
    train_steps(model, zoo.CASES[name], rank, 1)
    gathers = 0
    for label, gm in graphs_of(model).halves:
        gathers += len(gm.graph.find_nodes(op="call_function", target=torch.ops.zero_fx.all_gather.default))
        if label == "forward":
            for out in gm.graph.output_node().all_input_nodes:
                source = gathered_source(out)
                assert source is None, f"forward saves {out} {out.meta['val'].shape}, a view of {source.args}"
    assert gathers, "the model gathers nothing, so this checks nothing"


# --- volumes


class Counting:
    """Stands in for the transport and adds up the elements that this rank sends."""

    def __init__(self, world: int):
        self.real, self.world, self.sent = collectives.transport, world, {}

    def __getattr__(self, name: str):
        def call(tensor, *args, **kwargs):
            others = self.world - 1
            count = {
                "broadcast_": tensor.numel() * others // self.world,
                "all_to_all_single": tensor.numel() * others // self.world,
                "all_gather_into_tensor": tensor.numel() * others,
                "all_gather_into_tensor_out": tensor.numel() * others,
                "reduce_scatter_tensor": tensor.numel() // self.world * others,
                "all_reduce": 2 * tensor.numel() * others // self.world,
            }.get(name, 0)
            self.sent[name] = self.sent.get(name, 0) + count
            return getattr(self.real, name)(tensor, *args, **kwargs)

        return call

    def total(self) -> int:
        return sum(self.sent.values())


@contextlib.contextmanager
def counting(world: int):
    counter = Counting(world)
    collectives.transport = counter
    try:
        yield counter
    finally:
        collectives.transport = counter.real


def check_volume(rank: int, world: int, stage: int, micros: int) -> None:
    """Elements sent in one optimizer step, against the formula. Every size is divisible by the ranks."""
    size = 6 * world
    model = nn.Sequential(*[nn.Linear(size, size, bias=False) for _ in range(3)])
    total, first = 3 * size * size, size * size
    model = zero_fx.compile(model, stage=stage, lowering="eager", keep_whole_below=0, timeout_s=30)
    for _ in range(2):  # the second step compiles nothing
        with counting(world) as counter:
            for micro in range(micros):
                with model.no_sync() if micro < micros - 1 else contextlib.nullcontext():
                    model(Draw(rank, 0, micro).normal(4, size)).square().sum().backward()
        model.zero_grad()
    share = (world - 1) / world
    expected = {
        0: 2 * total,
        1: 2 * total,
        2: (1 + micros) * total,
        3: micros * (3 * total - first),  # backward does not need the first weight: the input wants no gradient
    }[stage] * share
    assert counter.total() == expected, f"{counter.sent}, expected {expected}"


# --- the comparison itself


def check_mutant(rank: int, world: int, stage: int) -> None:
    """Without one of the reductions, parity must fail; with all of them it holds."""
    case = zoo.CASES["mlp"]
    halves = zero_fx.lowering.HALVES
    for drop in (False, True):
        torch._dynamo.reset()
        zero_fx.lowering.HALVES = (drop_reduction, *halves) if drop else halves
        try:
            parity.check_parity(rank, world, case.name, stage, "eager")
        except AssertionError as error:
            assert drop and "gradients differ" in str(error), error
        else:
            assert not drop, "parity did not notice that a reduction is missing"
        finally:
            zero_fx.lowering.HALVES = halves


def drop_reduction(gm: torch.fx.GraphModule, config) -> zero_fx.lowering.Graphs:
    """A broken pass: the first reduction of the graph gives this rank's own gradient."""
    from zero_fx.vocabulary import Reduce, Report, find, insert, replace

    for node in find(gm.graph, "reduce_grad")[:1]:
        reduce = Reduce(*node.args)
        with gm.graph.inserting_before(node):
            own = reduce.grad
            if not reduce.whole:
                own = insert(gm.graph, aten.slice.Tensor, own, 0, 0, reduce.rows, like=node)
            own = insert(gm.graph, aten.clone.default, own, like=node)
        replace(node, own)
    return Report(True)


def check_bitwise(rank: int, world: int, name: str) -> None:
    """Stages 1, 2 and 3 give the same parameters, to the last bit, after five steps."""
    case, results = zoo.CASES[name], {}
    for stage in (1, 2, 3):
        torch._dynamo.reset()
        model = compiled(name, stage)
        losses = train_steps(model, case, rank, 5, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9))
        results[stage] = [*losses, *zero_fx.full_state_dict(model).values()]
    for stage in (2, 3):
        for got, want in zip(results[stage], results[1], strict=True):
            assert want.isfinite().all(), "the case is useless: training diverged"
            assert torch.equal(got, want), f"stage {stage}: differs from stage 1 by {(got - want).abs().max()}"


def check_copy_is_apart(rank: int, world: int, stage: int) -> None:
    """A deep copy as an average of weights: lerp moves it, forward sees it, the original is not affected."""
    twin = Twin(parity.build(zoo.CASES["tied_head"]), stage=stage, lowering="eager")
    averages = [copy.deepcopy(model) for model in (twin.plain, twin.sharded)]
    assert averages[1].head.weight is not None and averages[1]._parameters is not twin.sharded._parameters
    case = zoo.CASES["tied_head"]
    for step in range(3):
        for model in (twin.plain, twin.sharded):
            case.train(model, case.batch(Draw(rank, step, 0)))
        copied = copy.deepcopy(twin.sharded)  # with gradients at hand, which a copy leaves behind
        assert all(param.grad is None for param in copied.parameters())
        twin.step()
        for model, average in zip((twin.plain, twin.sharded), averages):
            with torch.no_grad():
                for mine, theirs in zip(average.parameters(), model.parameters()):
                    mine.lerp_(theirs, 0.5)
        with torch.no_grad():
            want, got = [average(case.batch(Draw(rank, 9, 0))) for average in averages]
        torch.testing.assert_close(got, want, rtol=parity.RTOL, atol=parity.ATOL)
    losses = [case.train(average, case.batch(Draw(rank, 5, 0))) for average in averages]  # it can be trained itself
    parity.check_losses(losses[1], losses[0])
    assert all(param.grad is None for param in twin.sharded.parameters())
