"""2,000 steps: memory, step time and the number of graphs stay as they were after the warm-up."""

from __future__ import annotations

import statistics

import pytest
import ranks
from scenarios import endurance

slow, full = pytest.mark.slow, pytest.mark.full


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "stage, lowering, steps",
    [pytest.param(3, "eager", 400, marks=slow), *(pytest.param(*case, 2000, marks=full) for case in ((3, "eager"), (1, "eager"), (3, "inductor")))],
)
def test_flat(stage, lowering, steps):
    for found in ranks.run(endurance.run, stage, lowering, steps, timeout_s=280):
        growth = max(found["bytes"][5:]) - max(found["bytes"][1:5])
        # Quartiles, since other processes of the machine only add.
        middle = steps * 11 // 20
        first, last = (statistics.quantiles(part)[0] for part in (found["seconds"][steps // 10 : middle], found["seconds"][middle:]))
        print(f"{growth / 1e6:.2f} MB more in the second half; a step takes {last / first:.3f} of its time, {1e3 * first:.2f} ms")
        assert growth < 1 << 20, [value / 1e6 for value in found["bytes"]]
        assert last < 1.15 * first
        assert found["captured"][0] == found["captured"][-1], found["captured"]
