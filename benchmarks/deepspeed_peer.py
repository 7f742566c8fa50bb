"""DeepSpeed as a peer: its engine behind the suite's (model, optimizer)."""

from __future__ import annotations

import contextlib
import io
import warnings

import torch
import torch.nn.functional as F
from torch import nn

BUCKET = 25 * 2**20 // 4  # elements: DDP's bucket size in fp32


class Engine:
    """DeepSpeed's engine as an optimizer: it steps and zeroes by itself."""

    def __init__(self, engine):
        self.engine = engine

    def step(self):
        self.engine.step()

    def zero_grad(self):
        pass


class DeepSpeedModel(nn.Module):
    """The engine as a module, whose backward `train_step` asks the engine for. `linear` is F.linear during forward."""

    def __init__(self, engine, linear):
        super().__init__()
        self.engine, self.linear = engine, linear

    def forward(self, *batch):
        plain, F.linear = F.linear, self.linear
        try:
            return self.engine(*batch)
        finally:
            F.linear = plain


def configuration(stage: int) -> dict:
    """DeepSpeed's default sizes are for billions of parameters: buffers of 2 GB, and no weight released while its next
    use is within a billion elements. Here all are scaled alike, so that its bucket is DDP's."""
    zero = {"stage": stage, "reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET}
    zero["overlap_comm"] = torch.cuda.is_available()  # CPU has no streams: it would only take a second bucket
    if stage == 3:
        reach = {"stage3_max_live_parameters": 2 * BUCKET, "stage3_max_reuse_distance": 2 * BUCKET}
        zero |= {"stage3_prefetch_bucket_size": BUCKET // 10, **reach}
    else:
        zero["compute_grad_norm"] = False  # as nothing clips, no other variant computes it; stage 3 always does
    return {
        "train_micro_batch_size_per_gpu": 1,  # the engine only reports by it
        "gradient_clipping": 0.0,  # it clips to 1 where this is left out
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
    }


def build(model: nn.Module, optimizer: torch.optim.Optimizer, stage: int) -> tuple[nn.Module, Engine]:
    import deepspeed

    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    plain = F.linear
    with contextlib.redirect_stdout(io.StringIO()):  # it prints that it built its shared-memory operator
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=configuration(stage), dist_init_required=False
        )
    # At stage 3 it replaces F.linear by one that keeps no gathered weight alive until backward, for good. The other
    # variants are not to run or trace that one.
    linear, F.linear = F.linear, plain
    return DeepSpeedModel(engine, linear), Engine(engine)
