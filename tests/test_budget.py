"""memory_budget: what it may be, the knapsack, and a model whose measured memory follows it."""

import itertools

import pytest
import ranks
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.profiler import ProfilerActivity, profile

import zero_fx
from zero_fx.budget import knapsack
from zero_fx.config import Config

MIB = 1 << 20


@pytest.mark.parametrize(
    ("given_as", "value"),
    [(1000, 1000), ("24GiB", 24 << 30), ("800 MB", 800_000_000), ("1.5kib", 1536), (0.5, 0.5), (None, None)],
)
def test_what_a_budget_may_be(given_as, value):
    assert Config(memory_budget=given_as).memory_budget == value


@pytest.mark.parametrize(
    ("given_as", "error", "message"),
    [
        ("24 apples", ValueError, "expected a number with a unit"), ("1.2.3GB", ValueError, "expected a number"),
        (0, ValueError, "more than 0"), (1.5, ValueError, "fraction"), (True, TypeError, "expected bytes"),
        (-4, ValueError, "more than 0"), ([], TypeError, "expected bytes"),
    ],
)  # fmt: skip
def test_what_it_may_not_be(given_as, error, message):
    with pytest.raises(error, match=message):
        Config(memory_budget=given_as)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9)), max_size=8), st.integers(-5, 120))
def test_the_knapsack_is_the_best_that_fits(items, capacity):
    named = [(str(i), size, float(worth)) for i, (size, worth) in enumerate(items)]
    chosen = knapsack(named, capacity)
    best = 0.0
    for subset in itertools.product([False, True], repeat=len(named)):
        picked = [item for item, is_in in zip(named, subset) if is_in]
        if sum(size for _, size, _ in picked) <= capacity:
            best = max(best, sum(worth for *_, worth in picked))
    picked = [item for item in named if item[0] in chosen]
    assert sum(size for _, size, _ in picked) <= max(capacity, 0)
    assert sum(worth for *_, worth in picked) == best


class Layer(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim), nn.LayerNorm(dim)

    def forward(self, x):
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1)


def run_with(budget, data, lowering: str) -> tuple[int, list[float], list]:
    """(measured peak bytes, losses, plans) of a few steps under a budget."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = nn.Sequential(*[Layer(64) for _ in range(5)])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        model = zero_fx.compile(plain, 3, lowering=lowering, memory_budget=budget, keep_whole_below=100, timeout_s=100)
        optimizer = torch.optim.AdamW(model.parameters())
        losses = []
        for step in range(3):
            torch.manual_seed(step)
            loss = model(data).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    live, peak = 0, 0
    for event in sorted(recorded.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak, losses, model._zero_fx_compiled.backend.graphs.plans


BUDGETS = (100 * MIB, 40 * MIB, 24 * MIB, 18 * MIB, 15 * MIB)  # from generous to tight


def check_sweep(rank: int, world: int, lowering: str) -> list:
    import gc

    data = torch.randn(2048, 64, generator=torch.Generator().manual_seed(rank))
    results = []
    for budget in (None, *BUDGETS):
        gc.collect()
        results.append((budget, *run_with(budget, data, lowering)))
    with pytest.raises(Exception, match=r"memory_budget=1,048,576 bytes cannot be met: the smallest feasible is [\d,]+ bytes"):
        run_with(MIB, data, lowering)
    return [(budget, peak, losses, [(p.fraction, len(p.kept), p.peak_bytes) for p in plans]) for budget, peak, losses, plans in results]


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_measured_memory_follows_the_budget_and_losses_do_not(lowering):
    for results in ranks.run(check_sweep, lowering, timeout_s=390):
        print(*results, sep="\n")
        (_, without, losses, _), *budgeted = results
        for budget, peak, these, plans in budgeted:
            # Inductor fuses what is computed again with other operators, which may round otherwise.
            assert these == losses if lowering == "eager" else these == pytest.approx(losses, rel=1e-5)
            assert peak <= 1.05 * budget
            assert plans and plans[0][2] <= budget
        peaks = [peak for _, peak, *_ in budgeted]
        # Two budgets that are both met without a sacrifice differ by what the measurement does, up to 4 %.
        assert all(less <= 1.05 * more for more, less in zip(peaks, peaks[1:])) and peaks[-1] < peaks[2] < 0.8 * peaks[0]
        assert budgeted[0][3][0][0] == 1.0 and budgeted[0][3][0][1] == 10, "a generous budget keeps every weight"
        assert peaks[-1] < 0.8 * without
