"""What a user calls beside forward and backward: state dicts, printing, hooks, optimizers, copies, and mistakes."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import weakref

import parity
import torch
import torch.distributed as dist
import zoo
from parity import Twin
from zoo.common import Draw, loss_of

import zero_fx

from .graphs import compiled, train_steps


def twin_of(name: str, stage: int, **options) -> Twin:
    return Twin(parity.build(zoo.CASES[name]), stage=stage, lowering="eager", **options)


def train_twin(twin: Twin, name: str, rank: int, steps: int = 3, max_norm: float | None = 1.0) -> None:
    case = zoo.CASES[name]
    for step in range(steps):
        losses = []
        for model in (twin.plain, twin.sharded):
            torch.manual_seed(step)
            losses.append(case.train(model, case.batch(Draw(rank, step, 0))))
        parity.check_losses(losses[1], losses[0])
        twin.step(max_norm)


def check_optimizer_before(rank: int, world: int, stage: int) -> None:
    """An optimizer built before compile: re-pointed if given, an error if not."""
    plain = parity.build(zoo.CASES["mlp"])
    model = copy.deepcopy(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    model = zero_fx.compile(model, stage, optimizer=optimizer, lowering="eager", keep_whole_below=0)
    before = zero_fx.full_state_dict(model)
    train_steps(model, zoo.CASES["mlp"], rank, 1, optimizer)
    assert not torch.equal(before["0.weight"], zero_fx.full_state_dict(model)["0.weight"])
    stale = torch.optim.SGD(plain.parameters(), lr=0.3)
    zero_fx.compile(plain, stage, lowering="eager", keep_whole_below=0)
    with raises(RuntimeError, "from before zero_fx.compile"):
        train_steps(plain, zoo.CASES["mlp"], rank, 1, stale)


@contextlib.contextmanager
def raises(kind, text: str):
    try:
        yield
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"expected {kind.__name__} with {text!r}")


def check_state_dict(rank: int, world: int, name: str, stage: int) -> None:
    """Names as in the plain model; a plain state dict loads; the gathered one loads in a plain model."""
    twin = twin_of(name, stage)
    train_twin(twin, name, rank, 2)
    assert list(twin.sharded.state_dict()) == list(twin.plain.state_dict())
    full = zero_fx.full_state_dict(twin.sharded)
    fresh = parity.build(zoo.CASES[name])
    fresh.load_state_dict(full, strict=True)
    other = compiled(name, stage)
    other.load_state_dict(twin.plain.state_dict(), strict=True)
    batch = zoo.CASES[name].batch(Draw(rank, 7, 0))
    want = twin.plain.eval()(batch)
    for model in (twin.sharded, other, fresh):
        torch.testing.assert_close(model.eval()(batch), want, rtol=parity.RTOL, atol=parity.ATOL)
    file = io.BytesIO()
    torch.save(full, file)
    elements = sum(tensor.numel() for tensor in {id(tensor): tensor for tensor in full.values()}.values())
    assert len(file.getvalue()) < elements * 4 + 1000 * (len(full) + 2), "the file holds more than the values"


def check_tie_lasts(rank: int, world: int, stage: int) -> None:
    model = compiled("tied_head", stage)
    train_steps(model, zoo.CASES["tied_head"], rank, 5)
    params = dict(model.named_parameters(remove_duplicate=False))
    assert params["embed.weight"] is params["head.weight"] and len(list(model.parameters())) == 3
    full = zero_fx.full_state_dict(model)
    assert full["embed.weight"].data_ptr() == full["head.weight"].data_ptr()


def check_pickle(rank: int, world: int, stage: int) -> None:
    model = compiled("mlp", stage)
    for save in (lambda: pickle.dumps(model), lambda: torch.save(model, io.BytesIO())):
        with raises(pickle.PicklingError, "full_state_dict"):
            save()


def check_print(rank: int, world: int, name: str, stage: int) -> None:
    """Only one rank looks at the model: nothing of it may be a collective."""
    model, plain = compiled(name, stage), parity.build(zoo.CASES[name])
    train_steps(model, zoo.CASES[name], rank, 1)
    if rank == 0:
        assert repr(model) == repr(plain), f"{model!r}\ninstead of\n{plain!r}"
        assert sum(param.numel() for param in model.parameters()) == sum(p.numel() for p in plain.parameters())
        assert [param.shape for param in model.parameters()] == [param.shape for param in plain.parameters()]
        for module in model.modules():
            repr(module), list(module.named_parameters(recurse=False)), len(list(module.buffers()))
    dist.barrier()


def check_eval_first(rank: int, world: int, stage: int) -> None:
    """Evaluating before the first step changes no loss."""
    case, losses = zoo.CASES["batch_norm"], []
    for eval_first in (False, True):
        torch._dynamo.reset()
        model = compiled("batch_norm", stage)
        for context in (torch.no_grad, torch.inference_mode) if eval_first else ():
            model.eval()
            with context():
                loss_of(model(case.batch(Draw(rank, 8, 0))))
        losses.append(train_steps(model.train(), case, rank, 4))
    assert all(torch.equal(a, b) for a, b in zip(*losses)), losses


def check_freed(rank: int, world: int, stage: int) -> None:
    """A deleted model is freed, its parameters with it."""
    model = compiled("mlp", stage)
    train_steps(model, zoo.CASES["mlp"], rank, 2)
    refs = [weakref.ref(model), *(weakref.ref(param) for param in model.parameters())]
    del model
    torch._dynamo.reset()
    gc.collect()
    alive = [ref() for ref in refs if ref() is not None]
    assert not alive, [type(item).__name__ for item in alive]


def check_failed_backward(rank: int, world: int, stage: int) -> None:
    """A backward pass that raises on every rank leaves a model that trains on."""
    twin, case = twin_of("hooked", stage), zoo.CASES["hooked"]
    x = Draw(rank, 0, 0).normal(4, 6).requires_grad_()
    x.register_hook(lambda grad: 1 / 0)
    with raises(ZeroDivisionError, "zero"):
        case.train(twin.sharded, x)
    for model in (twin.plain, twin.sharded):
        model.zero_grad()
    train_twin(twin, "hooked", rank, 2)


def check_failed_forward(rank: int, world: int, stage: int) -> None:
    """A forward that raises on every rank leaves a model that trains on."""
    twin = twin_of("mlp", stage)
    for _ in range(2):
        try:
            twin.sharded(torch.zeros(4, 5))  # of the wrong width
        except Exception:
            continue
        raise AssertionError("a wrong input was accepted")
    train_twin(twin, "mlp", rank, 2)
