"""Checkpoints: loaded on other numbers of ranks and at other stages, damaged, many; and what cannot be saved."""

from __future__ import annotations

import os
import random
import time
import warnings

import torch
import torch.distributed as dist
from torch import nn

import zero_fx

from .api import raises
from .endurance import resident_bytes

LR = 0.05


class Small(nn.Module):
    """Tied weights, buffers, dropout, a 1-row parameter (which leaves most ranks without rows), a 0-dim one, a frozen one."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.body = nn.Sequential(nn.Linear(6, 13), nn.BatchNorm1d(13), nn.Tanh(), nn.Dropout(0.2), nn.Linear(13, 6))
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight
        self.row = nn.Parameter(torch.ones(1, 6))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.randn(5, 3), requires_grad=False)

    def forward(self, tokens):
        return self.head(self.body(self.embed(tokens)) * self.row) * self.scale + self.frozen.sum()


def make(stage: int, seed: int = 0, **options):
    """(model, optimizer, scheduler); AdamW with two groups."""
    torch.manual_seed(seed)
    options = {"lowering": "eager", "keep_whole_below": 10, **options}
    model = zero_fx.compile(Small(), stage, **options)
    matrices = [param for param in model.parameters() if param.dim() > 1]
    rest = [param for param in model.parameters() if param.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": rest, "weight_decay": 0.0}], lr=LR)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def step_without_forward(model, optimizer, scheduler) -> None:
    """A step on made-up gradients, the same on any number of ranks: nothing has to be captured."""
    for number, (name, state) in enumerate(model._zero_fx_model.params.items()):
        if not state.param.requires_grad:
            continue
        full = torch.randn(state.shape, generator=torch.Generator().manual_seed(number))
        state.param.grad = state.as_dtensor(state.rows_of(full).clone())
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()


def everything(model, optimizer) -> dict:
    return {"model": zero_fx.full_state_dict(model), "optim": zero_fx.full_optimizer_state_dict(model, optimizer)}


def assert_equal(found, expected, where: str = "") -> None:
    """The same structure, and the same bits in every tensor."""
    assert type(found) is type(expected), where
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), (where, found.keys() ^ expected.keys())
        for key, value in expected.items():
            assert_equal(found[key], value, f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for number, value in enumerate(expected):
            assert_equal(found[number], value, f"{where}.{number}")
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and torch.equal(found, expected), where
    else:
        assert found == expected, (where, found, expected)


def save(rank: int, world: int, path: str, stage: int) -> None:
    model, optimizer, scheduler = make(stage)
    for _ in range(3):
        step_without_forward(model, optimizer, scheduler)
    model.body[1].running_mean.fill_(0.25)
    folder = zero_fx.save_checkpoint(path, model, optimizer, scheduler=scheduler, step=3, note={"a": (1, 2)})
    assert folder == os.path.join(path, "step-00000003")
    expected = everything(model, optimizer)
    if rank == 0:
        torch.save({**expected, "scheduler": scheduler.state_dict()}, os.path.join(path, "expected.pt"))
    dist.barrier()


def load_each(rank: int, world: int, paths: list[str], stage: int) -> None:
    for number, path in enumerate(paths):
        expected = torch.load(os.path.join(path, "expected.pt"))
        model, optimizer, scheduler = make(stage, seed=number + 1, precision="bf16" if number % 3 == 2 else None)
        if number % 2:  # states that exist already are filled in place
            step_without_forward(model, optimizer, scheduler)
        restored = zero_fx.load_checkpoint(path, model, optimizer, scheduler=scheduler)
        assert restored == {"step": 3, "note": {"a": (1, 2)}}
        assert scheduler.state_dict() == expected.pop("scheduler")
        assert_equal(everything(model, optimizer), expected, path)
        assert model.embed._parameters["weight"] is model.head._parameters["weight"]
        for param in model.parameters():  # what a step writes to has the parameter's own layout
            for key, value in optimizer.state.get(param, {}).items():
                assert key == "step" or value.placements == param.placements, key


def refuse(rank: int, world: int, path: str, words: list[str]) -> None:
    """The checkpoint in `path` cannot be loaded, for a reason that has these words; nothing of the model changes."""
    model, optimizer, scheduler = make(3, seed=1)
    before = everything(model, optimizer)
    try:
        zero_fx.load_checkpoint(path, model, optimizer, scheduler=scheduler)
    except (ValueError, OSError) as error:
        for word in words:
            assert word in str(error), f"{word!r} is not in: {error}"
    else:
        raise AssertionError("it was loaded")
    assert_equal(everything(model, optimizer), before)


def load_with_warning(rank: int, world: int, path: str, step: int, words: list[str]) -> None:
    model, optimizer, scheduler = make(3, seed=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert zero_fx.load_checkpoint(path, model, optimizer, scheduler=scheduler)["step"] == step
    text = " ".join(str(warning.message) for warning in caught)
    assert rank != 0 or all(word in text for word in words), text


def keep_last(rank: int, world: int, path: str, saves: int, keep: int) -> list[str]:
    model, optimizer, scheduler = make(2)
    for step in range(1, saves + 1):
        step_without_forward(model, optimizer, scheduler)
        zero_fx.save_checkpoint(path, model, optimizer, keep=keep)
    zero_fx.save_checkpoint(path, model, optimizer, step=saves, keep=keep)  # again: it takes the place of the first
    dist.barrier()
    return sorted(os.listdir(path))


def fail_to_save(rank: int, world: int, path: str, kind, words: list[str], elements: int) -> None:
    """Every rank is told, nothing half-written stays, and the next save to another place works."""
    model = zero_fx.compile(nn.Linear(elements, 2), 3, lowering="eager")
    with raises(kind, words[0]) as caught:
        zero_fx.save_checkpoint(path, model)
    future = zero_fx.async_save_checkpoint(path, model)
    with raises(kind, words[0]):
        zero_fx.save_checkpoint(path, model)  # where nobody asked the future
    assert future.exception() is not None
    dist.barrier()
    assert not os.path.isdir(path) or not [name for name in os.listdir(path) if "step" in name], caught


def mistakes(rank: int, world: int, path: str) -> None:
    model, optimizer, scheduler = make(3)
    step_without_forward(model, optimizer, scheduler)
    with raises(TypeError, "zero_fx.compile returned"):
        zero_fx.save_checkpoint(path, nn.Linear(2, 2))
    with raises(ValueError, "keep=0"):
        zero_fx.save_checkpoint(path, model, keep=0)
    with raises(TypeError, "step=1.5"):
        zero_fx.save_checkpoint(path, model, step=1.5)
    with raises(ValueError, "'verify' cannot be the name of an extra"):
        zero_fx.save_checkpoint(path, model, verify=True)
    with raises(ValueError, "not one of this model"):
        zero_fx.save_checkpoint(path, model, torch.optim.SGD(nn.Linear(2, 2).parameters()))
    with raises(FileNotFoundError, "no folder"):
        zero_fx.load_checkpoint(path, model)
    zero_fx.save_checkpoint(path, model, scheduler=scheduler)
    with raises(TypeError, "expected an object with load_state_dict"):
        zero_fx.load_checkpoint(path, model, scheduler=3)
    with raises(ValueError, "has no optimizer"):
        zero_fx.load_checkpoint(path, model, optimizer)
    with raises(ValueError, "no extra 'scaler'; it has scheduler"):
        zero_fx.load_checkpoint(path, model, scaler=zero_fx.GradScaler("cpu"))
    zero_fx.save_checkpoint(path, model, optimizer)
    other = torch.optim.AdamW([{"params": [param]} for param in model.parameters()])
    with raises(ValueError, "param group 0 has other parameters"):
        zero_fx.load_checkpoint(path, model, other)
    wide = zero_fx.compile(nn.Sequential(nn.Linear(3, 3)), 3, lowering="eager")
    with raises(ValueError, "another model"):
        zero_fx.load_checkpoint(path, wide)


def mistaken_shape(rank: int, world: int, path: str) -> None:
    zero_fx.save_checkpoint(path, zero_fx.compile(nn.Linear(3, 4), 3, lowering="eager"))
    with raises(ValueError, "weight is (4, 3) there and (4, 5) here"):
        zero_fx.load_checkpoint(path, zero_fx.compile(nn.Linear(5, 4), 3, lowering="eager"))


def many(rank: int, world: int, path: str, count: int) -> list[int]:
    """Resident bytes after each of `count` saves and loads."""
    model = zero_fx.compile(nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)]), 3, lowering="eager")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 256)).sum().backward()
    optimizer.step()
    found = []
    for number in range(count):
        (zero_fx.save_checkpoint if number % 2 else zero_fx.async_save_checkpoint)(path, model, optimizer, keep=2)
        if number % 5 == 4:
            zero_fx.load_checkpoint(path, model, optimizer)
        found.append(resident_bytes())
    zero_fx.save_checkpoint(path, model, optimizer, keep=2)
    return found


def blocked(rank: int, world: int, path: str, megabytes: int) -> tuple[float, float]:
    """(seconds of a save, seconds that an asynchronous one holds up the loop), the least of three each, interleaved."""
    size = 512
    model = zero_fx.compile(nn.Sequential(*[nn.Linear(size, size) for _ in range(megabytes)]), 3, lowering="eager")
    times: dict = {"sync": [], "async": []}
    for _ in range(4):
        start = time.perf_counter()
        zero_fx.save_checkpoint(path, model, keep=1)
        times["sync"].append(time.perf_counter() - start)
        start = time.perf_counter()
        future = zero_fx.async_save_checkpoint(path, model, keep=1)
        times["async"].append(time.perf_counter() - start)
        future.result()
        dist.barrier()
    return min(times["sync"]), min(times["async"][1:])


def submesh(rank: int, world: int, path: str) -> None:
    """Two models on one rank each, saved and loaded apart from each other; then one on all ranks, which are in different
    numbers of groups by now."""
    from torch.distributed.device_mesh import init_device_mesh

    own = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replica", "dp"))["dp"]
    torch.manual_seed(rank)
    model = zero_fx.compile(nn.Linear(3, 4), 3, lowering="eager", mesh=own)
    expected = zero_fx.full_state_dict(model)
    if rank == 0:  # the other rank takes no part
        zero_fx.async_save_checkpoint(os.path.join(path, "0"), model).result(60)
    zero_fx.save_checkpoint(os.path.join(path, str(rank)), model)
    with torch.no_grad():
        model._parameters["weight"].zero_()
    assert zero_fx.load_checkpoint(os.path.join(path, str(rank)), model)["step"] == 2 - rank
    assert_equal(zero_fx.full_state_dict(model), expected)
    dist.barrier()
    model = zero_fx.compile(nn.Linear(3, 4), 3, lowering="eager")
    zero_fx.async_save_checkpoint(os.path.join(path, "all"), model).result(60)


def more_ranks(rank: int, world: int, path: str, is_first: bool) -> None:
    """Of an extra that differs by rank nothing is restored at another world size; random states differ by rank there too."""
    model = zero_fx.compile(nn.Linear(3, 4), 3, lowering="eager")
    if is_first:
        zero_fx.save_checkpoint(path, model, position=rank, lr=0.5)
        return
    torch.manual_seed(77)
    assert zero_fx.load_checkpoint(path, model) == {"step": 1, "lr": 0.5}
    drawn = [None] * world
    dist.all_gather_object(drawn, (torch.rand(1).item(), random.random()))
    assert len(set(drawn)) == world

    class Position:
        def load_state_dict(self, state):
            raise AssertionError("restored")

    with raises(ValueError, "'position' was another on each of 2 ranks, and there are 3 now"):
        zero_fx.load_checkpoint(path, model, position=Position())


def averaged(rank: int, world: int, path: str) -> None:
    """An extra with DTensors: the moving average of the weights, kept as a copy of the model."""
    import copy

    model, optimizer, _ = make(3)
    average = copy.deepcopy(model)
    with torch.no_grad():
        for param in average.parameters():
            param.mul_(3)
    expected = zero_fx.full_state_dict(average)
    zero_fx.save_checkpoint(path, model, average=average, shapes=[param.detach() for param in average.parameters()])
    other, _, _ = make(3, seed=1)
    restored = zero_fx.load_checkpoint(path, model, average=other)
    assert_equal(zero_fx.full_state_dict(other), expected)
    for value, param in zip(restored["shapes"], average.parameters()):
        assert torch.equal(value.full_tensor(), param.full_tensor())
