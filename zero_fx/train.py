"""`zero-fx train`: train a small GPT on text under ZeRO, and measure what ZeRO promises while it runs.

Started by torchrun, one process a rank, or without it as a world of one rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import statistics
import time
from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import nn

from .compile import compile as zero_compile
from .config import LOWERINGS, Config
from .gpt import GPT, GPTConfig
from .monitor import Logs, check_log_dir
from .runtime.count import count_collectives
from .runtime.memory import state_bytes
from .scaler import GradScaler
from .textdata import TextData, load_text
from .train_checkpoint import Checkpoints, check_folder
from .train_deepspeed import with_deepspeed
from .train_report import RankResult, formulas_of, peak_memory, print_report, print_start, write_report

WARMUP_STEPS = 20  # at most; a tenth of a short run
FINAL_LR = 0.1  # of --lr, at the end of the cosine
MEASURED_STEP = 2  # whose collectives are counted: not the first, which compiles
PROMPT_BYTES = 64


def option(default, text: str):
    """A field that is a command-line option, with its help."""
    return dataclasses.field(default=default, metadata={"help": text})


@dataclasses.dataclass(frozen=True)
class TrainOptions:
    """The options of `zero-fx train`; `zero_fx/cli.py` makes flags of the fields."""

    stage: int = option(3, "what is partitioned: 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too")
    steps: int = option(300, "optimizer steps")
    data: tuple[str, ...] = option((), "text files or folders; by default the sources of Python's standard library")
    layers: int = option(3, "blocks of the GPT")
    dim: int = option(128, "width of the GPT")
    heads: int = option(4, "attention heads")
    seq: int = option(128, "bytes of context")
    batch: int = option(8, "windows of text in a micro-batch of one rank")
    accumulate: int = option(1, "micro-batches in an optimizer step")
    lr: float = option(4e-3, "highest learning rate of AdamW")
    precision: str | None = option(None, "bf16 or fp16: what parameters are gathered and computed in; fp32 without it")
    lowering: str = option("inductor", f"how graphs are run: {' or '.join(LOWERINGS)}")
    keep_whole_below: int = option(Config.keep_whole_below, "a parameter of fewer elements is not partitioned")
    clip: float = option(1.0, "the gradient's norm, above which it is scaled down to it; 0: never")
    seed: int = option(0, "of the weights, the batches and the sample")
    eval_batches: int = option(8, "held-out batches that each rank evaluates at the end")
    sample: int = option(200, "bytes of text to generate at the end")
    device: str = option("auto", "cpu, cuda or auto: cuda where each rank of this machine has a GPU of its own")
    loss_log: str | None = option(None, "file for the loss of each step, as JSON lines")
    report: str | None = option(None, "file for what was measured, as JSON, one object for each rank")
    save: str | None = option(None, "folder for checkpoints, written in the background; one is saved at the end too")
    save_every: int = option(100, "steps between two checkpoints")
    keep: int = option(0, "how many checkpoints stay in the folder; 0: all")
    resume: bool = option(False, "go on from the newest checkpoint of --save, where it has one")
    log_dir: str | None = option(None, "folder for TensorBoard scalars of each step, the same as JSON lines, and a memory report")
    log_every: int = option(0, "steps between two lines of progress; 0: ten lines in all")
    deepspeed_config: str | None = option(None, "DeepSpeed's JSON file, in place of the flags that it has keys for")

    def __post_init__(self):
        for name in ("steps", "batch", "accumulate", "eval_batches", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: expected 1 or more")
        for name in ("sample", "seed", "keep", "log_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: expected 0 or more")
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise ValueError(f"--lr {self.lr:g}: expected a finite number above 0, such as 3e-3")
        if not (self.clip >= 0 and math.isfinite(self.clip)):
            raise ValueError(f"--clip {self.clip:g}: expected a finite number of 0 or more")
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"--device {self.device}: expected auto, cpu or cuda")
        for name in ("loss_log", "report"):
            folder = os.path.dirname(os.path.abspath(getattr(self, name) or "x"))
            if not os.path.isdir(folder):
                raise ValueError(f"--{name.replace('_', '-')}: there is no folder {folder}; make it first")
        check_folder(self)
        check_log_dir(self.log_dir)


@dataclasses.dataclass(frozen=True)
class Setup:
    """All that a run needs, checked, before anything is shared with other ranks."""

    options: TrainOptions
    config: Config
    gpt: GPTConfig
    data: TextData
    device: torch.device
    scaler: tuple[tuple[str, object], ...]  # arguments of GradScaler: enabled only in float16, whose gradients would underflow


def prepare(options: TrainOptions, given: Collection[str] = ()) -> Setup:
    """Read the data and check all options; raises ValueError for what cannot be used. given: names of those that were set."""
    if options.deepspeed_config is not None:
        options, config = with_deepspeed(options, given)
        scaler = config.scaler
    else:
        names = ("stage", "precision", "lowering", "keep_whole_below")
        config = Config(**{name: getattr(options, name) for name in names})
        scaler = (("enabled", config.precision is not None and config.precision.compute == torch.float16),)
    gpt = GPTConfig(options.layers, options.dim, options.heads, options.seq)
    return Setup(options, config, gpt, load_text(list(options.data), options.seq), choose_device(options.device), scaler)


def choose_device(name: str) -> torch.device:
    """This rank's device. Ranks of one machine never share a GPU: nccl cannot, and it would only be slower."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    gpus = torch.cuda.device_count()
    if name == "cuda" and gpus < ranks_here:
        raise ValueError(
            f"--device cuda: {ranks_here} ranks on this machine need as many GPUs and PyTorch finds {gpus}; "
            f"start fewer ranks (--nproc-per-node {max(gpus, 1)}) or use --device cpu"
        )
    if name == "cpu" or gpus < ranks_here:
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def train(setup: Setup) -> None:
    """Train, evaluate, report and sample; every rank of the job runs this. A process group that the caller made is
    used and left; otherwise one is made, and destroyed at the end."""
    options = setup.options
    is_group_ours = not dist.is_initialized()
    torch.manual_seed(options.seed)
    model = zero_compile(GPT(setup.gpt).to(setup.device), config=setup.config)
    rank, world = dist.get_rank(), dist.get_world_size()
    optimizer = make_optimizer(model, options.lr)
    peak = watch_state_bytes(model, optimizer)
    if rank == 0:
        print_start(model, options.stage, world, setup.device, setup.data)
        for key, reason in getattr(setup.config, "ignored", ()):
            print(f"{options.deepspeed_config}: {key} has no effect: {reason}", flush=True)
    losses, times_s, elements = run_steps(setup, model, optimizer, rank, world)
    steady_s = statistics.median(times_s[1:]) if len(times_s) > 1 else None
    result = RankResult(
        rank=rank,
        train_loss=losses[-1],
        held_out_loss=evaluate(setup, model, rank, world),
        tokens_per_s=options.accumulate * options.batch * options.seq / steady_s if steady_s else None,
        compile_s=times_s[0] - steady_s if steady_s else None,
        state_bytes=peak["bytes"],
        peak_bytes=peak_memory(setup.device),
        elements_sent=elements,
        **formulas_of(model, options.stage, world, options.accumulate),
    )
    results = [None] * world
    dist.all_gather_object(results, result)
    sample = generate_sample(setup, model)
    if rank == 0:
        print_report(results, setup.device, sample)
        write_report(options.report, results)
    dist.barrier()  # nobody leaves while another still talks to it
    if is_group_ours:
        dist.destroy_process_group()


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """AdamW; matrices decay, gains of norms do not. Fused: it spares the dispatch of a DTensor operator each."""
    matrices = [param for param in model.parameters() if param.dim() > 1]
    gains = [param for param in model.parameters() if param.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def watch_state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """{"bytes"}: the most bytes of parameters, gradients and optimizer states so far, looked at after each backward
    pass before anything is released, which is when most of them live."""
    peak = {"bytes": 0}

    def look(state) -> None:
        peak["bytes"] = max(peak["bytes"], sum(state_bytes(state, optimizer).values()))

    model._zero_fx_model.before_release = look
    return peak


def run_steps(setup: Setup, model, optimizer, rank: int, world: int) -> tuple[list[float], list[float], float | None]:
    """All optimizer steps: this rank's losses (nats/byte), seconds of each, elements it sent in the measured one."""
    options = setup.options
    tokens = options.accumulate * options.batch * options.seq * world
    losses, times_s, counted = [], [], None
    scaler = GradScaler(setup.device.type, **dict(setup.scaler))
    checkpoints = Checkpoints(options, model, optimizer, scaler)
    first = checkpoints.first_step
    with Logs(options, setup.device, rank == 0, first) as logs:
        for step in range(first, options.steps):
            for group in optimizer.param_groups:
                group["lr"] = lr_at(step, options.steps, options.lr)
            start = time.perf_counter()
            with count_collectives(world) if step == first + MEASURED_STEP else contextlib.nullcontext() as count:
                loss, grad_norm = train_step(setup, model, optimizer, scaler, step, rank)
            counted = count or counted
            losses.append(loss.item())
            dist.all_reduce(loss)  # sum over ranks
            times_s.append(time.perf_counter() - start)
            scalars = {"loss": loss.item() / world, "lr": optimizer.param_groups[0]["lr"], "grad_norm": grad_norm.item()}
            logs.step(step + 1, scalars | {"step_s": times_s[-1], "tokens_per_s": tokens / times_s[-1]}, model, count)
            checkpoints.after(step + 1)
    return losses, times_s, counted.elements if counted else None


def train_step(setup: Setup, model, optimizer, scaler: GradScaler, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One optimizer step. 0-dim tensors: this rank's loss, the mean over its micro-batches; the norm of the gradient before
    it is clipped, which is all ranks'."""
    options = setup.options
    total = torch.zeros((), device=setup.device)
    for micro_batch in range(options.accumulate):
        batch = setup.data.batch(options.batch, options.seq, options.seed, step, micro_batch, rank)
        tokens, targets = (part.to(setup.device) for part in batch)
        is_last = micro_batch == options.accumulate - 1
        with contextlib.nullcontext() if is_last else model.no_sync():
            loss = model(tokens, targets) / options.accumulate
            scaler.scale(loss).backward()
        total += loss.detach()
    scaler.unscale_(optimizer)
    grad_norm = model.clip_grad_norm_(options.clip or math.inf)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return total, grad_norm


def lr_at(step: int, steps: int, highest: float) -> float:
    """Learning rate of a step, counted from 0: a linear rise, then a cosine down to FINAL_LR of the highest."""
    warmup = min(WARMUP_STEPS, steps // 10)
    if step < warmup:
        return highest * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return highest * (FINAL_LR + (1 - FINAL_LR) * (1 + math.cos(math.pi * progress)) / 2)


@torch.no_grad()
def evaluate(setup: Setup, model: nn.Module, rank: int, world: int) -> float:
    """Mean held-out loss of this rank's share of the held-out batches, in nats/byte. By `forward` itself, operator by
    operator: a graph without gradients would take longer to compile than these few batches to run. So in fp32: outside of
    a call of the model its weights are the masters."""
    options = setup.options
    count = options.eval_batches * world
    total = 0.0
    for index in range(rank, count, world):
        tokens, targets = setup.data.held_out_batch(options.batch, options.seq, index, count)
        total += model.forward(tokens.to(setup.device), targets.to(setup.device)).item()
    return total / options.eval_batches


def generate_sample(setup: Setup, model: nn.Module) -> tuple[bytes, bytes]:
    """(prompt, continuation): held-out bytes, and what the model writes after them. Collective."""
    options = setup.options
    prompt = setup.data.held_out[: min(PROMPT_BYTES, options.seq)].long()[None].to(setup.device)
    generator = torch.Generator(setup.device).manual_seed(options.seed)
    text = model.generate(prompt, options.sample, temperature=0.8, generator=generator)[0]
    return bytes(text[: prompt.shape[1]].tolist()), bytes(text[prompt.shape[1] :].tolist())
