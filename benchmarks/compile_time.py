"""Seconds to compile, from empty caches: zero_fx beside torch.compile of the same model on one rank.

    python -m benchmarks.compile_time zero|alone      # one measurement, in this process or under torchrun
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist

from .measure import batches
from .models import workload
from .report import Target
from .variants import make_alone, make_zero, train_step


def targets(world: int) -> list[Target]:
    alone, zero = measured(["alone"], 1), measured(["zero"], world)
    return [Target("compile seconds, stage 3 / torch.compile on one rank, cold", 1.4, zero / alone)]


def measured(arguments: list[str], world: int) -> float:
    """Seconds of the first step less those of a second, in fresh processes that share an empty cache."""
    with tempfile.TemporaryDirectory() as folder:
        result = pathlib.Path(folder) / "seconds"
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
        command = [sys.executable, *launcher, "-m", __name__, *arguments, str(result)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/cache"}
        subprocess.run(command, env=environment, check=True)
        return float(result.read_text())


def main(kind: str, path: str) -> None:
    dist.init_process_group()
    job = workload("gpt")
    data = batches(job, dist.get_rank(), 2)
    model, optimizer = make_alone(job, None) if kind == "alone" else make_zero(job, None, 3)
    taken = []
    for batch in data:
        dist.barrier()
        start = time.perf_counter()
        train_step(model, optimizer, batch)
        taken.append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        pathlib.Path(path).write_text(str(taken[0] - taken[1]))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
