"""Reports of a model that runs."""

import torch
import torch.distributed as dist
from torch import nn

import zero_fx


OPTIONS = {"lowering": "eager", "keep_whole_below": 100, "dynamic": False}


class Mixer(nn.Module):
    """Rows that 2 ranks share unevenly, one small parameter, dropout."""

    def __init__(self, dim: int = 33):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(dim, 2 * dim + 1), nn.LayerNorm(2 * dim + 1), nn.Linear(2 * dim + 1, dim)

    def forward(self, x):
        return x + self.last(torch.tanh(self.norm(self.first(x))))


def check_report(rank: int, world: int, stage: int, precision) -> dict:
    torch._dynamo.reset()
    torch.manual_seed(0)
    config = zero_fx.Config(stage=stage, precision=precision, hardware="cpu", timeout_s=50, **OPTIONS)
    model = zero_fx.compile(Mixer(), config=config)
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        model.report()
        raise AssertionError("a report of nothing")
    except RuntimeError as error:
        assert "has not run" in str(error)

    def run(rows: int = 8):
        model(torch.ones(rows, 33)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    run(4)
    for _ in range(4):
        run()
    with torch.no_grad():
        model(torch.ones(3, 33))
    report = model.report(run)
    assert report.world == world and report.rank == rank
    rows = model._zero_fx_model.params
    return {
        "graphs": {label: report.graph(label, index=1) for label in ("forward", "backward")},
        "halves": [half.label for half in report.step.halves],
        "text": str(report),
        "measured": report.measured,
        "sent": sum(report.sent.values()),
        "json": report.to_dict(),
        "local": sum(s.param.to_local().nbytes for s in rows.values()),
    }
