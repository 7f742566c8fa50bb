"""`zero-fx plan`: which stage, memory budget and micro-batch fit a device that is not here, fastest first."""

from __future__ import annotations

import dataclasses
import json
import os
import sys

from .config import Config
from .hardware import HARDWARE
from .inspect_cli import model_of, number, precision_of
from .plan import Candidates, plan
from .shapes import NAMES
from .train import option


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """The flags of `zero-fx plan`."""

    model: str = option("llama-8b", f"{', '.join(NAMES)}; or module:function, which returns (model, args)")
    world: int = option(64, "ranks")
    hardware: str = option("h100", ", ".join(HARDWARE))
    ranks_per_node: int = option(8, "ranks of a node")
    memory: str | None = option(None, "of a rank: 80GiB, or 0.8 for a part of the device's memory (default: all of it)")
    stages: tuple[int, ...] = option((), "which to look at: some of 0 1 2 3 (default: all)")
    precision: str | None = option(
        None, "bf16 or fp16: compute in it on float32 parameters; none: in their own dtype (default: bf16, for a model of "
        "your own none)"
    )  # fmt: skip
    batch: int = option(1, "samples of one rank in an optimizer step")
    seq: int = option(0, "tokens of a sample; 0: the context that the model was published with")
    json: str | None = option(None, "write all candidates as JSON")


def run(options: PlanOptions) -> Candidates:
    """Print the table of candidates, write what was asked for. Raises ValueError or TypeError for options that cannot be used."""
    folder = os.path.dirname(options.json or "") or "."
    if not os.path.isdir(folder):
        raise ValueError(f"--json {options.json}: there is no folder {folder}")
    try:
        stages = tuple(int(stage) for stage in options.stages) or (0, 1, 2, 3)
    except ValueError:
        raise ValueError(f"--stages {' '.join(options.stages)}: expected some of 0, 1, 2, 3") from None
    model, args, kwargs = model_of(options)
    found = plan(
        model, *args, world_size=options.world, hardware=options.hardware, memory=number(options.memory),
        ranks_per_node=options.ranks_per_node, stages=stages, config=Config(precision=precision_of(options)), **kwargs,
    )  # fmt: skip
    print(found)
    if not any(candidate.fits for candidate in found):
        print(f"nothing of {options.model} fits; more ranks or a smaller batch may", file=sys.stderr)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump([dataclasses.asdict(candidate) for candidate in found], file, indent=1)
        print(f"wrote {options.json}", file=sys.stderr)
    return found
