"""Measure model states over precision, stage and number of ranks beside the formula: results/memory.md and memory.json.

    python benchmarks/memory_table.py       # 36 runs of `zero-fx train`, about 6 minutes on 2 cores

States are parameters (with what is gathered and held), gradients and the two moments of AdamW, looked at after each backward pass,
when most of them live; each storage counted once.
"""

from __future__ import annotations

import json
import pathlib

import stages
from tabulate import tabulate
from tqdm import tqdm

RESULTS = pathlib.Path(__file__).resolve().parent / "results"
PRECISIONS = ("fp32", "bf16", "fp16")
RANKS = (1, 2, 4)


def measure_all() -> list[dict]:
    """One row for each combination; bytes of rank 0."""
    rows = []
    cases = [(precision, stage, ranks) for precision in PRECISIONS for stage in stages.STAGES for ranks in RANKS]
    for precision, stage, ranks in tqdm(cases, unit="run"):
        more = () if precision == "fp32" else ("--precision", precision)
        result = stages.measure(stage, ranks, 1, *more)
        measured, formula = result["state_bytes"], result["state_formula_bytes"]
        rows.append({"precision": precision, "stage": stage, "ranks": ranks, "measured": measured, "formula": formula})
    return rows


def table(rows: list[dict]) -> str:
    whole = next(row["measured"] for row in rows if (row["precision"], row["stage"], row["ranks"]) == ("fp32", 0, 1))
    headers = ["precision", "stage", "ranks", "measured MB", "formula MB", "measured / formula", "bytes a parameter"]
    body = [
        [r["precision"], r["stage"], r["ranks"], f"{r['measured'] / 1e6:.3f}", f"{r['formula'] / 1e6:.3f}",
         f"{r['measured'] / r['formula']:.4f}", f"{16 * r['measured'] / whole:.2f}"]
        for r in rows
    ]  # fmt: skip
    return tabulate(body, headers, tablefmt="github", disable_numparse=True, colalign=("left", *["right"] * 6))


def main() -> None:
    rows = measure_all()
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "memory.json").write_text(json.dumps(rows, indent=1) + "\n")
    text = (
        "# Model states of a rank, peak\n\n`python benchmarks/memory_table.py`: the GPT of `zero-fx train`, AdamW, one micro-batch a step, gloo ranks. "
        "Formula: `zero_fx/formulas.py`\n(arXiv 1910.02054, section 3). The last column is of a rank: 16 bytes a parameter without partitioning, "
        "16/N at stage 3.\n\n"
    )
    (RESULTS / "memory.md").write_text(text + table(rows) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
