"""Figures that need no ranks and no devices: counted and simulated on captured graphs."""

from __future__ import annotations

import dataclasses

import torch

from zero_fx.dry_run import dry_run
from zero_fx.passes.bucket_collectives import bucket_collectives
from zero_fx.passes.pipeline import run_passes
from zero_fx.passes.prefetch import prefetch
from zero_fx.shapes import LLAMA, llama
from zero_fx.vocabulary import COLLECTIVES, is_op

from .models import ManySmall
from .report import Target


def targets() -> list[Target]:
    return [many_small(), exposed_8b()]


def many_small() -> Target:
    """Collectives of the model of many small parameters, bucketed and not."""

    def count(**options) -> int:
        with torch.device("meta"):
            model, batch = ManySmall(30, 48), torch.empty(64, 48)  # a quarter of the suite's, for time's sake
        labels = torch.zeros(64, dtype=torch.long)
        graphs = dry_run(model, (batch, labels), world=2, hardware="cpu", **options)
        return sum(is_op(node, *COLLECTIVES) for _, gm in graphs.halves for node in gm.graph.nodes)

    return Target("many small parameters: collectives, bucketed / not", 0.1, count() / count(passes=()))


def exposed_8b() -> Target:
    """Llama 3 8B in bf16 on 64 H100, 8 a node, stage 3, one sequence of 8,192 a rank: exposed communication. One capture,
    played as it is and again after the passes."""
    model, args = llama(LLAMA["llama-8b"], batch=1, seq=8192)
    graphs = dry_run(model, args, world=64, hardware="h100", passes=())
    without = graphs.predict().exposed_s
    for label, gm in graphs.halves:
        run_passes(gm, (bucket_collectives, prefetch), dataclasses.replace(graphs.passes, without=()), label)
    ratio = graphs.predict().exposed_s / without
    return Target("simulated Llama 3 8B, 64 H100: exposed communication, with passes / without", 0.3, ratio)
