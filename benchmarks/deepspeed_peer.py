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
    """DeepSpeed's defaults are for billions of parameters: buffers of 2 GB, and weights that stay gathered while fewer
    than a billion elements pass. Its sizes are DDP's bucket here, and weights go after forward as FSDP2's do."""
    zero = {
        "stage": stage,
        "reduce_bucket_size": BUCKET,
        "allgather_bucket_size": BUCKET,
        "overlap_comm": torch.cuda.is_available(),  # on CPU there are no streams, but it would take a second bucket
    }
    if stage == 3:
        zero |= {"stage3_prefetch_bucket_size": BUCKET, "stage3_max_reuse_distance": 0}
    else:
        zero["compute_grad_norm"] = False  # nobody else computes it: nothing clips
    # The micro-batch size is not the model's: DeepSpeed only reports by it. steps_per_print keeps it quiet.
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,  # its default may clip
        "steps_per_print": None,
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
