"""A long run: what a rank holds, how long its steps take, and what it compiles, from its start to its end."""

from __future__ import annotations

import ctypes
import gc
import os
import time

import torch
from torch import nn

import zero_fx

from .graphs import graphs_of


def resident_bytes() -> int:
    """Of this process, without what the heap keeps for later."""
    gc.collect()
    if hasattr(ctypes.CDLL(None), "malloc_trim"):
        ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm", encoding="utf-8") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Leaky(nn.Module):
    """Dropout, a buffer that each forward changes, and a layer that only some steps use."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.body = nn.Sequential(nn.Linear(32, 128), nn.Dropout(0.1), nn.GELU(), nn.Linear(128, 32))
        self.extra = nn.Linear(32, 32)
        self.norm = nn.BatchNorm1d(32)

    def forward(self, tokens, is_long: bool):
        x = self.norm(self.body(self.embed(tokens)))
        return self.extra(x) if is_long else x


def run(rank: int, world: int, stage: int, lowering: str, steps: int) -> dict[str, list]:
    """{"bytes" after each tenth of the run, "seconds" of each step, "captured": graphs after the first tenth and at the end}

    Steps of two micro-batches with clipping, a scheduler and a loss scale; every third one takes another way through the model.
    """
    torch.manual_seed(0)
    model = zero_fx.compile(Leaky(), stage, lowering=lowering, keep_whole_below=64, timeout_s=120)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    scaler = zero_fx.GradScaler("cpu", init_scale=8.0, growth_interval=50)
    found: dict[str, list] = {"bytes": [], "seconds": [], "captured": []}
    for step in range(steps):
        start = time.perf_counter()
        for is_last in (False, True):
            tokens = torch.randint(50, (16,))
            with torch.enable_grad() if is_last else model.no_sync():
                scaler.scale(model(tokens, step % 3 == 0).square().mean()).backward()
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
        found["seconds"].append(time.perf_counter() - start)
        if (step + 1) % (steps // 10) == 0:
            found["bytes"].append(resident_bytes())
            found["captured"].append(graphs_of(model).captured)
    return found
