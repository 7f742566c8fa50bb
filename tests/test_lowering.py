"""What Inductor makes of the rewritten graphs: collectives start and are awaited in the order that the passes chose."""

import re

import pytest
import ranks
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code

import zero_fx
from zero_fx.vocabulary import COLLECTIVES, is_op

CALL = re.compile(r"torch\.ops\.zero_fx\.(\w+)\.default\((.*)\)")
LARGE = 600  # squared, in f32: alone in its bucket


def order_in_code(code: str) -> list[tuple[str, str]]:
    """(operator, parameter) of our operators in generated code, in order."""
    return [(kind, args.split("'")[-2]) for kind, args in CALL.findall(code)]


def order_in_graph(gm) -> list[tuple[str, str]]:
    nodes = [node for node in gm.graph.nodes if is_op(node, *COLLECTIVES, "wait")]
    return [(node.target.name().split("::")[1], node.args[-1]) for node in nodes]


def orders(rank: int, world: int, stage: int) -> list[tuple[list, list]]:
    """(in the graph, in the code) of forward and of backward."""
    torch._inductor.config.force_disable_caches = True
    try:
        layers = [nn.Linear(LARGE, LARGE) for _ in range(4)]
        model = zero_fx.compile(nn.Sequential(*layers), stage, keep_whole_below=0, timeout_s=100)
        x = torch.ones(8, LARGE)
        _, codes = run_and_get_code(lambda: model(x).sum().backward())
    finally:
        torch._inductor.config.force_disable_caches = False
    halves = model._zero_fx_compiled.backend.graphs.halves
    assert len(codes) == len(halves) == 2
    return [(order_in_graph(gm), order_in_code(code)) for (_, gm), code in zip(halves, codes)]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=pytest.mark.full)])
def test_generated_code_keeps_the_order(stage):
    forward, backward = ranks.run(orders, stage, timeout_s=220)[0]
    for graph, code in (forward, backward):
        assert code == graph and graph
    if stage == 3:
        started = [name for kind, name in forward[0] if kind == "all_gather"]
        assert any("," in name for name in started), "no bucket"
        kinds = "".join(kind[0] for kind, _ in backward[0])
        assert "aa" in kinds, f"nothing is started ahead in backward: {backward[0]}"
