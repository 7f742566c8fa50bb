"""The ZeRO paper's table 1 (arXiv 1910.02054) from captured graphs: results/zero_table.md and zero_table.json.

    python benchmarks/zero_table.py [--quick]       # 54 captures, some minutes on 2 cores; --quick: 7.5B only

Elements are counted in the graphs that zero_fx would run at each stage: those of parameters that a rank has through a step, of
gradients that wait for the optimizer, of optimizer states. With the paper's bytes an element (2 for parameters and gradients in 16
bits, 12 for float32 masters and Adam's two moments) they are its table. zero_fx itself keeps gradients in float32 and at stage 3 no 16-bit
copy, which the last column has in its own bytes.
"""

from __future__ import annotations

import argparse
import json
import pathlib

import torch
from tabulate import tabulate
from tqdm import tqdm

import zero_fx
from zero_fx.params import held_bytes, resident_bytes
from zero_fx.shapes import GPT2, TransformerSize
from zero_fx.vocabulary import REDUCTIONS

RESULTS = pathlib.Path(__file__).resolve().parent / "results"
RANKS = (1, 4, 16, 64, 256, 1024)
SEQ = 128
# Ψ as in the table, to half a percent, of GPTs with a vocabulary of 50,257 and as many layers as models of these sizes have.
SIZES = {"7.5B": TransformerSize(36, 4096, 32), "128B": TransformerSize(96, 10528, 56), "1T": TransformerSize(128, 25536, 168)}
# GB a device, of table 1: {model: {stage: at each of RANKS}}.
PAPER = {
    "7.5B": {1: (120, 52.5, 35.6, 31.4, 30.4, 30.1), 2: (120, 41.3, 21.6, 16.6, 15.4, 15.1), 3: (120, 30, 7.5, 1.88, 0.47, 0.12)},
    "128B": {1: (2048, 896, 608, 536, 518, 513), 2: (2048, 704, 368, 284, 263, 257), 3: (2048, 512, 128, 32, 8, 2)},
    "1T": {1: (16000, 7000, 4750, 4187, 4046, 4011), 2: (16000, 5500, 2875, 2218, 2054, 2013), 3: (16000, 4000, 1000, 250, 62.5, 15.6)},
}


def row(name: str, stage: int, ranks: int) -> dict:
    """Bytes of model states of rank 0: "counted", with the paper's bytes an element; "ours"; and the paper's own, to its digits."""
    with torch.device("meta"):
        model, tokens = GPT2(SIZES[name], SEQ), torch.empty(1, SEQ, dtype=torch.long)
    torch._dynamo.reset()
    config = zero_fx.Config(precision="bf16", keep_whole_below=0)
    report = zero_fx.inspect(model, tokens, tokens, stage=stage, world_size=ranks, hardware="h100", config=config)
    own = sum(one.local_bytes for one in report.rows) // 4
    held = held_bytes(report.rows, ranks) // 2 if stage < 3 and ranks > 1 else 0
    # At stage 1 gradients are whole where they wait for the other micro-batches of a step, which is what the paper counts.
    gradients = report.parameters if stage == 1 else gradients_of(report)
    counted = 2 * (held or own) + 2 * gradients + 12 * own
    ours = resident_bytes(report.rows) + 2 * held + 4 * gradients
    paper = 1e9 * PAPER[name][stage][RANKS.index(ranks)]
    return {"model": name, "parameters": report.parameters, "stage": stage, "ranks": ranks, "counted": counted, "paper": paper, "ours": ours}


def gradients_of(report) -> int:
    """Elements of the gradients that backward leaves on this rank: of what it reduces, or of all where there is one rank."""
    reduced = {name for event in report.collectives if event.op in REDUCTIONS for name in event.params}
    return sum(one.local_bytes for one in report.rows if report.world == 1 or one.name in reduced) // 4


def table(rows: list[dict]) -> str:
    headers = ["model", "ranks", "stage", "paper GB", "counted GB", "counted / paper", "zero_fx's own GB"]
    body = [
        [r["model"], r["ranks"], r["stage"], f"{r['paper'] / 1e9:g}", f"{r['counted'] / 1e9:,.4g}", f"{r['counted'] / r['paper']:.3f}",
         f"{r['ours'] / 1e9:,.4g}"]
        for r in rows
    ]  # fmt: skip
    return tabulate(body, headers, tablefmt="github", disable_numparse=True, colalign=("left", *["right"] * 6))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="7.5B only, and write nothing")
    args = parser.parse_args()
    cases = [(name, stage, ranks) for name in list(SIZES)[: 1 if args.quick else None] for ranks in RANKS for stage in (1, 2, 3)]
    rows = [row(*case) for case in tqdm(cases, unit="capture")]
    print(table(rows))
    if args.quick:
        return
    (RESULTS / "zero_table.json").write_text(json.dumps(rows, indent=1) + "\n")
    text = (
        "# Table 1 of the ZeRO paper, from captured graphs\n\n`python benchmarks/zero_table.py`: GB of model states a rank. \"counted\" are elements of "
        "the graphs with the paper's bytes an element,\n\"zero_fx's own\" with ours: gradients in float32 (4 bytes in place of 2), no 16-bit copy "
        "of parameters at stage 3 (0 in place of 2).\nThe paper rounds to the digits shown; models here have as many parameters as it says to half a "
        "percent.\n\n"
    )
    (RESULTS / "zero_table.md").write_text(text + table(rows) + "\n")


if __name__ == "__main__":
    main()
