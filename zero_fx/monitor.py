"""What `zero-fx train --log-dir` writes: TensorBoard scalars, the same as JSON lines, and a report of memory."""

from __future__ import annotations

import importlib.util
import json
import os

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
        self.file.write(json.dumps(values) + "\n")
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

    def log(self, step: int, values: dict[str, float | None]) -> None:
        """`step` steps are done. What is None is left out."""
        values = {tag: value for tag, value in values.items() if value is not None}
        for tag, value in values.items():
            self.board.add_scalar(tag, value, step)
        self.lines.write({"step": step, **values})

    def memory_report(self, report) -> None:
        """The tables of a zero_fx Report that are about memory."""
        with open(os.path.join(self.folder, REPORT_FILE), "w", encoding="utf-8") as file:
            for name in ("memory", "parameters"):
                file.write(f"{name}\n{report.table(name)}\n\n")
