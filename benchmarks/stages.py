"""Measure model states and traffic at each stage beside the formulas, and draw docs/stages.svg.

    python benchmarks/stages.py [--ranks 2] [--accumulate 2]

Runs `zero_fx train` once a stage (eager lowering: the collectives and the states are the same) and reads its report.
Needs `pip install -e '.[bench]'`.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
STAGES = (0, 1, 2, 3)


def measure(stage: int, ranks: int, accumulate: int, *more: str) -> dict:
    """What rank 0 measured at `stage`: see RankResult in zero_fx/train_report.py. more: flags of `zero-fx train`."""
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command += ["-m", "zero_fx", "train", "--stage", str(stage), "--accumulate", str(accumulate), "--steps", "4"]
        command += ["--lowering", "eager", "--eval-batches", "1", "--sample", "0", "--report", str(report), *more]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL, timeout=600)
        return json.loads(report.read_text())[0]


def draw(results: dict[int, dict], ranks: int, accumulate: int, path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "zero_fx"  # the same file for the same figures
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(8.4, 3.0), layout="constrained")
    panels = (
        ("state_bytes", "state_formula_bytes", 1e6, "model states, peak MB per rank"),
        ("elements_sent", "elements_formula", 1e6, "sent per rank and step, million elements"),
    )
    for axis, (measured, formula, unit, title) in zip(axes, panels):
        axis.bar(STAGES, [results[stage][measured] / unit for stage in STAGES], width=0.55, label="measured", color="#4878a8")
        axis.plot(STAGES, [results[stage][formula] / unit for stage in STAGES], "k_", ms=34, mew=1.6, label="formula")
        axis.set_title(title, fontsize=10)
        axis.set_xticks(STAGES, [f"stage {stage}" for stage in STAGES])
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_ylim(0, 1.25 * max(results[stage][formula] for stage in STAGES) / unit)
    axes[0].legend(frameon=False, fontsize=9)
    figure.suptitle(f"GPT, fp32, AdamW, {ranks} ranks, {accumulate} micro-batches a step", fontsize=10)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--accumulate", type=int, default=2)
    args = parser.parse_args()
    results = {stage: measure(stage, args.ranks, args.accumulate) for stage in STAGES}
    (ROOT / "docs").mkdir(exist_ok=True)
    draw(results, args.ranks, args.accumulate, ROOT / "docs" / "stages.svg")
    for stage, result in results.items():
        print(f"stage {stage}: states {result['state_bytes']:,} of {result['state_formula_bytes']:,.0f} bytes,", end=" ")
        print(f"sent {result['elements_sent']:,.0f} of {result['elements_formula']:,.0f} elements")


if __name__ == "__main__":
    main()
