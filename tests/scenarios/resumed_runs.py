"""Runs that are saved, interrupted, killed, and resumed: they go on bit by bit."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
import warnings

import torch
import torch.distributed as dist
from torch import nn

import zero_fx

from .checkpoints import assert_equal, everything, make


def losses_of(model, optimizer, scheduler, rank: int, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        tokens = torch.randint(10, (6,), generator=torch.Generator().manual_seed(100 * step + rank))
        loss = nn.functional.cross_entropy(model(tokens), (tokens + 1) % 10)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return losses


def resume(rank: int, world: int, path: str, stage: int, save_with) -> None:
    """A resumed run goes on bit by bit as the uninterrupted one: dropout, each rank's own BatchNorm statistics, Python's
    random numbers, and an extra that differs by rank included."""
    model, optimizer, scheduler = make(stage)
    random.seed(rank)
    torch.manual_seed(rank)
    losses_of(model, optimizer, scheduler, rank, 0, 3)
    save_with(path, model, optimizer, step=3, scheduler=scheduler, position=rank * 10)
    expected = losses_of(model, optimizer, scheduler, rank, 3, 6), random.random(), everything(model, optimizer)
    model, optimizer, scheduler = make(stage, seed=5)
    restored = zero_fx.load_checkpoint(path, model, optimizer, scheduler=scheduler)
    assert restored == {"step": 3, "position": rank * 10}
    found = losses_of(model, optimizer, scheduler, rank, 3, 6), random.random(), everything(model, optimizer)
    assert_equal(found, expected)


def save_both(path, *args, **kwargs) -> None:
    """In the background: the values are those of the call, whatever training does meanwhile."""
    model, optimizer = args
    future = zero_fx.async_save_checkpoint(path, *args, **kwargs)
    with torch.no_grad():
        before = [param._local_tensor.clone() for param in model.parameters()]
        for param in model.parameters():
            param._local_tensor.add_(1)
        folder = future.result(60)
        for param, values in zip(model.parameters(), before):
            param._local_tensor.copy_(values)
    assert os.path.isfile(os.path.join(folder, "COMPLETE"))


def resume_async(rank: int, world: int, path: str, stage: int) -> None:
    resume(rank, world, path, stage, save_both)


def resume_sync(rank: int, world: int, path: str, stage: int) -> None:
    resume(rank, world, path, stage, zero_fx.save_checkpoint)


KILL_STEPS = 8  # of a run in which a rank is killed; it saves after each


def uninterrupted(rank: int, world: int) -> list[float]:
    model, optimizer, scheduler = begun(rank)
    return losses_of(model, optimizer, scheduler, rank, 0, KILL_STEPS)


def begun(rank: int):
    made = make(3)
    torch.manual_seed(rank)  # of dropout
    return made


def saved_until_killed(rank: int, world: int, path: str, seed: int) -> None:
    """Train and save; one rank ends itself by SIGKILL at a random moment of a random save, and the others cannot go on."""
    draw = random.Random(seed)
    victim, fatal, moment = draw.randrange(world), draw.randrange(3, KILL_STEPS), draw.random()
    save_with = zero_fx.async_save_checkpoint if seed % 2 else zero_fx.save_checkpoint
    model, optimizer, scheduler = begun(rank)
    ballast = torch.zeros(1 << 20)  # 4 MB, so that a moment is as likely in the writing as around it
    lasted = []
    for step in range(1, KILL_STEPS + 1):
        losses_of(model, optimizer, scheduler, rank, step - 1, step)
        start = time.perf_counter()
        if step == fatal and rank == victim:
            threading.Timer(moment * lasted[-1], os.kill, (os.getpid(), signal.SIGKILL)).start()
        future = save_with(path, model, optimizer, step=step, keep=2, scheduler=scheduler, ballast=ballast)
        if save_with is zero_fx.async_save_checkpoint and step < fatal:
            future.result()  # so that it is known how long one lasts; the fatal one goes on while training does
        lasted.append(time.perf_counter() - start)


def resumed_after_kill(rank: int, world: int, path: str, expected: list[float]) -> int:
    """The step that was resumed from; the losses go on bit by bit as those of the run that was not interrupted."""
    model, optimizer, scheduler = make(3, seed=9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that what was cut off is passed over
        step = zero_fx.load_checkpoint(path, model, optimizer, scheduler=scheduler)["step"]
    assert losses_of(model, optimizer, scheduler, rank, step, KILL_STEPS) == expected[rank][step:]
    zero_fx.save_checkpoint(path, model, optimizer, step=KILL_STEPS, keep=1)
    dist.barrier()
    assert os.listdir(path) == [f"step-{KILL_STEPS:08d}"], os.listdir(path)  # what was cut off is gone
    return step
