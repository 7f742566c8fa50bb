"""Figures that need no ranks and no devices: counted and simulated on captured graphs."""

from __future__ import annotations

import torch

from zero_fx.dry_run import dry_run
from zero_fx.predict import StepGraphs
from zero_fx.shapes import LLAMA, llama
from zero_fx.vocabulary import COLLECTIVES, is_op

from .models import workload
from .report import Target


def targets() -> list[Target]:
    return [many_small(), exposed_8b()]


def many_small() -> Target:
    """Collectives of the model of many small parameters, bucketed and not."""

    def count(**options) -> int:
        with torch.device("meta"):
            model, batch = workload("small").build(), torch.empty(64, 48)
        labels = torch.zeros(64, dtype=torch.long)
        graphs = dry_run(model, (batch, labels), world=2, hardware="cpu", **options)
        return sum(is_op(node, *COLLECTIVES) for _, gm in graphs.halves for node in gm.graph.nodes)

    return Target("many small parameters: collectives, bucketed / not", 0.1, count() / count(passes=()))


def exposed_8b() -> Target:
    """Llama 3 8B in bf16 on 64 H100, 8 a node, stage 3, one sequence of 8,192 a rank: exposed communication."""

    def graphs(**options) -> StepGraphs:
        model, args = llama(LLAMA["llama-8b"], batch=1, seq=8192)
        return dry_run(model, args, world=64, hardware="h100", **options)

    ratio = graphs().predict().exposed_s / graphs(passes=()).predict().exposed_s
    return Target("simulated Llama 3 8B, 64 H100: exposed communication, with passes / without", 0.3, ratio)
