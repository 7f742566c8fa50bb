"""What a training run shows: progress while it runs, and at its end a table of what each rank measured."""

from __future__ import annotations

import dataclasses
import json
import math
import resource
import statistics
import sys

import torch
from tabulate import tabulate
from torch import nn
from tqdm import tqdm

from .formulas import elements_sent, model_state_bytes
from .runtime.markers import WHOLE
from .textdata import TextData

LINES = 10  # progress lines of a whole run where there is no terminal for a bar


@dataclasses.dataclass(frozen=True)
class RankResult:
    """Measured on one rank. Losses in nats/byte. None where a run of one step left nothing to measure."""

    rank: int
    train_loss: float  # of the last step
    held_out_loss: float
    tokens_per_s: float | None  # of this rank, by the median step
    compile_s: float | None  # the first step, less a median one
    state_bytes: int  # peak of parameters, gradients and optimizer states
    state_formula_bytes: float
    peak_bytes: int  # of everything: resident memory of the process, or allocated on the GPU
    elements_sent: float | None  # in one optimizer step, counted at the collectives
    elements_formula: float


class Progress:
    """A bar on a terminal; elsewhere a line each `every` steps (0: now and then), so that a log stays readable. Silent
    unless `is_shown`. `done` steps are done already."""

    def __init__(self, steps: int, is_shown: bool, done: int = 0, every: int = 0):
        self.steps, self.is_shown, self.done = steps, is_shown, done
        self.every = every or math.ceil((steps - done) / LINES)
        self.bar = None

    def __enter__(self) -> Progress:
        if self.is_shown and sys.stderr.isatty():
            self.bar = tqdm(total=self.steps, initial=self.done, unit="step")
        return self

    def __exit__(self, *error) -> None:
        if self.bar is not None:
            self.bar.close()

    def show(self, step: int, loss: float, tokens_per_s: float) -> None:
        """`step` steps are done; `loss` is the mean over ranks, `tokens_per_s` the sum over them."""
        if self.bar is not None:
            self.bar.set_postfix(loss=f"{loss:.3f}", tokens_per_s=f"{tokens_per_s:,.0f}", refresh=False)
            self.bar.update()
        elif self.is_shown and (step in (self.done + 1, self.steps) or step % self.every == 0):
            print(f"step {step}/{self.steps}  loss {loss:.3f}  {tokens_per_s:,.0f} tokens/s", flush=True)


def print_start(model: nn.Module, stage: int, world: int, device: torch.device, data: TextData) -> None:
    size = sum(math.prod(state.shape) for state in model._zero_fx_model.params.values())
    print(
        f"stage {stage}, {world} rank{'s' * (world > 1)} on {device.type}, {size / 1e6:.2f} M parameters, "
        f"{len(data.train) / 1e6:.1f} MB of text: {data.source}; the first step compiles",
        flush=True,
    )


def formulas_of(model: nn.Module, stage: int, world: int, micro_batches: int) -> dict[str, float]:
    """What the formulas say of a compiled model, by the names of RankResult."""
    sizes = {True: 0, False: 0}  # elements, by whether they are kept whole
    for state in model._zero_fx_model.params.values():
        sizes[state.lifetime == WHOLE] += math.prod(state.shape)
    # At stage 0 all are kept whole; the formulas ask which ones the stage is about, and give the same either way.
    facts = (stage, sizes[False], sizes[True], world, micro_batches)
    gathered_bytes = (model._zero_fx_model.compute_dtype or torch.float32).itemsize
    state_bytes = model_state_bytes(*facts, gathered_bytes=gathered_bytes)
    return {"state_formula_bytes": state_bytes, "elements_formula": elements_sent(*facts)}


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that was allocated on an accelerator; on the CPU the peak resident memory of the process."""
    if device.type != "cpu":
        accelerator = getattr(torch, "accelerator", torch.cuda)
        return getattr(accelerator, "max_memory_allocated", torch.cuda.max_memory_allocated)(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts KiB


def print_report(results: list[RankResult], device: torch.device, sample: tuple[bytes, bytes]) -> None:
    everything = "resident" if device.type == "cpu" else "allocated"
    headers = [
        "rank", "train loss\nnats/byte", "held-out\nnats/byte", "tokens/s", "compile\ns", "states\npeak MB",
        "states\nformula MB", f"{everything}\npeak MB", "sent a step\nelements", "sent a step\nformula",
    ]  # fmt: skip
    rows = [
        [
            r.rank, f"{r.train_loss:.3f}", f"{r.held_out_loss:.3f}", number(r.tokens_per_s), number(r.compile_s, 1),
            number(r.state_bytes / 1e6, 2), number(r.state_formula_bytes / 1e6, 2), number(r.peak_bytes / 1e6),
            number(r.elements_sent), number(r.elements_formula),
        ]
        for r in results
    ]  # fmt: skip
    print(tabulate(rows, headers, stralign="right", disable_numparse=True))
    print("states: parameters, gradients and optimizer states. sent: by a ring, as counted at the collectives;")
    print("the one number of gradient clipping is left out.")
    print(f"held-out loss {statistics.fmean(r.held_out_loss for r in results):.3f} nats/byte, mean over ranks")
    prompt, continuation = (part.decode("utf-8", errors="replace") for part in sample)
    if continuation:
        print(f"--- held-out text\n{prompt}\n--- and what the model writes after it\n{continuation}\n---", flush=True)


def number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def write_report(path: str | None, results: list[RankResult]) -> None:
    if path is not None:
        with open(path, "w", encoding="utf-8") as file:
            json.dump([dataclasses.asdict(result) for result in results], file, indent=1)
