"""Scaling: a report for other numbers of ranks, and the batch of one rank changed."""

import pytest
import torch
from torch import nn

import zero_fx
from zero_fx.batch import samples_of, with_samples


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x, mask=None):
        x = self.second(torch.relu(self.first(x)))
        return (x if mask is None else x + mask).square().mean()


@pytest.fixture(autouse=True)
def clean():
    yield
    torch._dynamo.reset()


def test_samples():
    x, y, mask = torch.arange(6.0).reshape(3, 2), torch.arange(3), torch.ones(5, 2)
    assert samples_of((x, mask), {"y": y}) == 3
    assert samples_of((torch.tensor(1.0), torch.ones(1), "text"), {"y": y}) == 3, "a number is no batch"
    assert samples_of((1, None), {}) is None
    (more, same), kwargs = with_samples((x, mask), {"y": y}, 7)
    assert torch.equal(more, torch.cat([x, x, x[:1]])) and same is mask
    assert kwargs["y"].tolist() == [0, 1, 2, 0, 1, 2, 0]
    (fewer,), _ = with_samples((x.requires_grad_(),), {}, 2)
    assert torch.equal(fewer, x[:2]) and fewer.requires_grad and fewer.is_leaf
    assert with_samples((x.detach().to("meta"),), {}, 4)[0][0].shape == (4, 2)
    with pytest.raises(ValueError, match="samples=0: expected a number of samples"):
        with_samples((x,), {}, 0)
    with pytest.raises(ValueError, match="no argument of forward is a tensor with a batch dimension"):
        with_samples((1,), {}, 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind, samples", [("weak", [8, 8, 8]), ("strong", [32, 8, 1])])
def test_equal_to_reports_of_each_world(kind, samples):
    report = zero_fx.inspect(Net(), torch.ones(8, 64), world_size=16)
    found = report.scale([4, 16, 128], kind)
    assert [point.samples for point in found.points] == samples
    for point in found.points:
        torch._dynamo.reset()
        alone = zero_fx.inspect(Net(), torch.ones(point.samples, 64), world_size=point.world)
        assert point.peak_bytes == alone.prediction.peak_bytes
        assert point.step_s == alone.prediction.step_s and point.exposed_s == alone.prediction.exposed_s
        assert point.sent == sum(alone.sent.values()) and point.fits
    first, _, last = found.points
    ideal = 1 if kind == "weak" else 4 / 128
    assert last.efficiency == pytest.approx(first.step_s / last.step_s * ideal) and first.efficiency == 1
    assert f"Net on h100, {kind} scaling" in str(found) and "samples a rank" in str(found) and "fits" not in str(found)


def test_what_does_not_fit_is_said(tmp_path):
    with torch.device("meta"):
        model = nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(1 << 15, 1 << 16), nn.Linear(1 << 16, 1 << 15))])
        found = zero_fx.inspect(model, torch.ones(1, 1 << 15), world_size=2).scale([2, 64])
    assert [point.fits for point in found.points] == [False, True] and "fits" in str(found)
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    found.plot(tmp_path / "scale.svg")
    assert "<svg" in (tmp_path / "scale.svg").read_text()


def test_refusals():
    report = zero_fx.inspect(Net(), torch.ones(6, 64), world_size=2)
    with pytest.raises(ValueError, match="kind='both': expected 'weak'"):
        report.scale([2], "both")
    with pytest.raises(ValueError, match="worlds is empty"):
        report.scale([])
    with pytest.raises(ValueError, match="worlds has 0: expected numbers of ranks"):
        report.scale([2, 0])
    with pytest.raises(ValueError, match="12 samples .* cannot be divided over 8 ranks"):
        report.scale([2, 8], "strong")
