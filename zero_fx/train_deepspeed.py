"""`zero-fx train --deepspeed-config FILE`: the options that DeepSpeed's file decides, and what the flags beside it may be."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection
from typing import TYPE_CHECKING

from .from_deepspeed import DeepSpeedConfig, from_deepspeed

if TYPE_CHECKING:
    from .train import TrainOptions


def with_deepspeed(options: TrainOptions, given: Collection[str]) -> tuple[TrainOptions, DeepSpeedConfig]:
    """`options` as the file says, and its Config. given: names of the options that the user set beside it.

    Raises ValueError where the two contradict each other, and for what from_deepspeed raises it.
    """
    path = options.deepspeed_config
    config = from_deepspeed(path, lowering=options.lowering)
    found = {"stage": config.stage, "keep_whole_below": config.keep_whole_below, "clip": config.gradient_clipping}
    found["precision"] = None if config.precision is None else {"bfloat16": "bf16", "float16": "fp16"}[dtype_name(config)]
    if config.steps_per_print is not None:
        found["log_every"] = config.steps_per_print
    found |= batches(options, config, given)
    for name, value in found.items():
        flag = getattr(options, name)
        if name in given and flag != value:
            raise ValueError(f"--{name.replace('_', '-')} {flag}: {path} says {value}; leave the flag out, or change the file")
    return dataclasses.replace(options, **found), config


def dtype_name(config: DeepSpeedConfig) -> str:
    return str(config.precision.compute).removeprefix("torch.")


def batches(options: TrainOptions, config: DeepSpeedConfig, given: Collection[str]) -> dict[str, int]:
    """{"batch", "accumulate"}. As DeepSpeed has it, train_batch_size is their product with the number of ranks, and gives the one
    that neither the file nor a flag says; without either, there is one micro-batch."""
    flags = {name: getattr(options, name) if name in given else None for name in ("batch", "accumulate")}
    batch = flags["batch"] if config.micro_batch_size is None else config.micro_batch_size
    accumulate = flags["accumulate"] if config.gradient_accumulation_steps is None else config.gradient_accumulation_steps
    whole, world = config.train_batch_size, int(os.environ.get("WORLD_SIZE", "1"))
    if whole is not None:
        if batch is None:
            accumulate = accumulate or 1
            batch = whole // (accumulate * world)
        elif accumulate is None:
            accumulate = whole // (batch * world)
        if batch * accumulate * world != whole:
            raise ValueError(
                f"train_batch_size={whole} of {options.deepspeed_config} is not {batch} a micro-batch * {accumulate} micro-batches * "
                f"{world} ranks = {batch * accumulate * world}"
            )
    return {"batch": batch or options.batch, "accumulate": accumulate or options.accumulate}
