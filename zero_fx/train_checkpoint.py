"""The checkpoints of `zero-fx train`: --save, --save-every, --keep, --resume."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

import torch.distributed as dist

from .checkpoint import async_save_checkpoint
from .checkpoint_load import load_checkpoint
from .runtime import checkpoint_files as files
from .runtime.together import from_rank_0

if TYPE_CHECKING:
    from .train import TrainOptions

SAME = ("data", "seq", "batch", "accumulate", "steps", "lr", "clip", "precision", "seed")  # what a curve depends on


def steps_saved(path: str) -> int | None:
    """Optimizer steps done in the newest complete checkpoint of the folder; None where there is none."""
    if not os.path.isdir(path) or not files.complete_folders(path):
        return None
    return files.read_mark(files.choose(path)[0])["step"]


def check_folder(options: TrainOptions) -> None:
    """Raise ValueError where --save or --resume cannot be done, or would mix two runs."""
    if options.save is None:
        if options.resume:
            raise ValueError("--resume: from which checkpoints? Give their folder too, --save DIR")
        return
    if os.path.exists(options.save) and not os.path.isdir(options.save):
        raise ValueError(f"--save {options.save}: expected a folder, and this is a file")
    if files.has_mark(options.save):
        raise ValueError(f"--save {options.save}: this is one checkpoint; give the folder that it is in")
    done = steps_saved(options.save)
    if done is not None and not options.resume:
        raise ValueError(
            f"--save {options.save}: there is a checkpoint of step {done} already; add --resume to go on from it, "
            "or give another folder"
        )
    if done is not None and done >= options.steps:
        raise ValueError(f"--steps {options.steps}: {done} are done in the checkpoint of {options.save}; give more to go on")


class Checkpoints:
    """Of one run. `first_step`: steps done before it; the model, the optimizer and the scaler are as they were then."""

    def __init__(self, options: TrainOptions, model, optimizer, scaler):
        self.options, self.model, self.optimizer, self.scaler = options, model, optimizer, scaler
        self.first_step = 0
        if options.resume:
            group = model._zero_fx_model.mesh.get_group()
            if from_rank_0(group, "looking for a checkpoint", lambda: steps_saved(options.save)) is not None:
                self.restore()
            elif dist.get_rank() == 0:
                print(f"--resume: {options.save} has no checkpoint yet, so this starts from step 1", flush=True)

    def restore(self) -> None:
        restored = load_checkpoint(self.options.save, self.model, self.optimizer, scaler=self.scaler)
        self.first_step = restored["step"]
        if dist.get_rank() == 0:
            print(f"resumed after step {self.first_step}", flush=True)
            saved = restored.get("options", {})
            for name in SAME:
                before, now = saved.get(name), getattr(self.options, name)
                if name in saved and before != now:
                    print(f"with another --{name.replace('_', '-')}: {now}, saved with {before}", flush=True)

    def after(self, step: int) -> None:
        """`step` steps are done: save in the background where one is due, and wait for it at the end of the run."""
        options, is_last = self.options, step == self.options.steps
        if options.save is None or not (step % options.save_every == 0 or is_last):
            return
        future = async_save_checkpoint(
            options.save, self.model, self.optimizer, step=step, keep=options.keep or None, scaler=self.scaler,
            options=dataclasses.asdict(options),
        )  # fmt: skip
        if is_last:
            future.result()
