"""What `zero-fx train` writes while it goes on: progress, the log of losses (--loss-log), and in --log-dir TensorBoard
scalars, the same as JSON lines, and a report of memory."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
from typing import TYPE_CHECKING

import torch

from .train_report import Progress, peak_memory

if TYPE_CHECKING:
    from .runtime.count import CollectiveCount
    from .train import TrainOptions

LINES_FILE, REPORT_FILE = "scalars.jsonl", "memory.txt"


def check_log_dir(path: str | None) -> None:
    """Raise ValueError where --log-dir cannot be done."""
    if path is None:
        return
    if importlib.util.find_spec("tensorboard") is None:
        raise ValueError("--log-dir: needs TensorBoard; install it with: pip install 'zero_fx[log]'")
    if os.path.exists(path) and not os.path.isdir(path):
        raise ValueError(f"--log-dir {path}: expected a folder, and this is a file")


class JsonLines:
    """A file with one JSON object a line, each of a "step". Of a run that is resumed after `first_step`, the lines of
    later steps go: they are written again."""

    def __init__(self, path: str, first_step: int):
        kept = []
        if first_step and os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                kept = [line for line in file if step_of(line) <= first_step]
        self.file = open(path, "w", encoding="utf-8")
        self.file.writelines(kept)

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *error) -> None:
        self.file.close()

    def write(self, values: dict) -> None:
        """JSON has no number for NaN and infinity; null stands for them."""
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self.file.write(json.dumps(finite) + "\n")
        self.file.flush()


def step_of(line: str) -> float:
    """Of a line; after all others for one that was cut off."""
    try:
        return json.loads(line)["step"]
    except ValueError:
        return float("inf")


class Monitor:
    """Scalars of each step, by tags such as "train/loss", in `folder`, which is made if it is not there."""

    def __init__(self, folder: str, first_step: int):
        from torch.utils.tensorboard import SummaryWriter

        os.makedirs(folder, exist_ok=True)
        self.folder = folder
        # TensorBoard shows no step after the first of these twice.
        self.board = SummaryWriter(folder, purge_step=first_step + 1 if first_step else None)
        self.lines = JsonLines(os.path.join(folder, LINES_FILE), first_step)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *error) -> None:
        self.board.close()
        self.lines.file.close()

    def log(self, step: int, values: dict[str, float]) -> None:
        """`step` steps are done."""
        for tag, value in values.items():
            self.board.add_scalar(tag, value, step)
        self.lines.write({"step": step, **values})

    def memory_report(self, report) -> None:
        """The tables of a zero_fx Report that are about memory."""
        with open(os.path.join(self.folder, REPORT_FILE), "w", encoding="utf-8") as file:
            for name in ("memory", "parameters"):
                file.write(f"{name}\n{report.table(name)}\n\n")


class Logs:
    """All of a run's, where `is_shown`: on rank 0. `first_step` steps are done already."""

    def __init__(self, options: TrainOptions, device: torch.device, is_shown: bool, first_step: int):
        self.options, self.device, self.is_shown = options, device, is_shown
        self.stack = contextlib.ExitStack()
        enter = self.stack.enter_context
        self.progress = enter(Progress(options.steps, is_shown, first_step, options.log_every))
        self.losses = enter(JsonLines(options.loss_log, first_step)) if options.loss_log and is_shown else None
        self.monitor = enter(Monitor(options.log_dir, first_step)) if options.log_dir and is_shown else None

    def __enter__(self) -> Logs:
        return self

    def __exit__(self, *error) -> None:
        self.stack.close()

    def step(self, step: int, scalars: dict[str, float], model, count: CollectiveCount | None) -> None:
        """`step` steps are done. scalars: "loss", "lr", "tokens_per_s" and others; count: where the step was measured."""
        self.progress.show(step, scalars["loss"], scalars["tokens_per_s"])
        if self.losses:
            self.losses.write({"step": step, "loss": scalars["loss"], "lr": scalars["lr"]})
        if self.monitor:
            found = {f"train/{name}": value for name, value in scalars.items()}
            found["memory/peak_bytes"] = peak_memory(self.device)
            self.monitor.log(step, found | (self.measured(model, count) if count else {}))

    def measured(self, model, count: CollectiveCount) -> dict[str, float]:
        """What this rank sent, how long it waited for that, and the flops of its matrix products in the measured step.
        Writes the report of memory as well."""
        report = model.report()
        self.monitor.memory_report(report)
        flops = self.options.accumulate * sum(event.flops for half in report.step.halves for event in half.events)
        found = {"step/elements_sent": count.elements, "step/collectives": count.collectives, "step/flops": flops}
        if self.device.type == "cpu":  # with nccl the host does not wait
            found["step/exposed_communication_s"] = count.waited_s
        return found
