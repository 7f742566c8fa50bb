"""`python -m benchmarks`, `zero-fx bench`: compare passes with each other and with DDP, FSDP2 and DeepSpeed. See README.md here.

Without torchrun's environment it starts itself under torchrun.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from tqdm import tqdm

from zero_fx.calibrate import calibrate, save

from . import compile_time, report, static
from .measure import WARM_STEPS, Result, Running, batches, time_rounds, warm_up
from .models import NAMES, workload
from .variants import Variant, ablations, ours, peers

LOSS_TOLERANCE = 2e-3
HERE = pathlib.Path(__file__).resolve().parent


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the model of the figures only, few rounds: 10 minutes")
    parser.add_argument("--model", nargs="+", choices=NAMES, default=None, help="default: all; with --quick: gpt")
    parser.add_argument("--only", nargs="+", default=None, help="variants by name, such as 'zero 3' 'fsdp2'")
    parser.add_argument("--ablate", action="store_true", help="each pass alone, each left out, none; with --quick off: on")
    parser.add_argument("--world", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--rounds", type=int, default=None, help="timed rounds of one step each (default: 12; quick: 6)")
    parser.add_argument("--calibrate", action="store_true", help="only measure this machine's profile, and keep it")
    parser.add_argument("--targets", type=pathlib.Path, help=argparse.SUPPRESS)  # where a worker leaves its figures
    parser.add_argument("--out", type=pathlib.Path, default=None, help="folder for JSON and plots")
    return parser.parse_args(arguments)


def launch(args: argparse.Namespace, arguments: list[str]) -> int:
    """One torchrun for each model, so that no model's memory or caches burden the next; then what needs no ranks."""
    names = args.model or (["gpt"] if args.quick else NAMES)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "targets.json"
        for name in ["gpt"] if args.calibrate else names:
            rest = [a for a in arguments if a not in NAMES and a != "--model"]
            command = ["-m", __package__, "--model", name, "--targets", str(path), *rest]
            if code := torchrun(args.world, command):
                return code
        if args.calibrate or args.only:
            return 0
        found = report.read_targets(path) + static.targets() + compile_time.targets(args.world)
    print("\n" + report.show_targets(found))
    if args.out:
        report.add_targets(args.out / "targets.json", found)
    return 0


def torchrun(world: int, command: list[str]) -> int:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    quiet = {"OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "6"}  # the profiler's own lines
    if not torch.cuda.is_available():
        quiet["DS_ACCELERATOR"] = "cpu"  # else DeepSpeed warns that it has looked for others
    return subprocess.run([*launcher, *command], env={**quiet, **os.environ}).returncode


def chosen(args: argparse.Namespace) -> list[Variant]:
    found = peers() + ours()
    if args.ablate or not args.quick:
        found += ablations()
    if args.only:
        unknown = set(args.only) - {variant.name for variant in found}
        if unknown:
            raise SystemExit(f"--only: unknown variants {sorted(unknown)}; known: {[v.name for v in found]}")
        found = [variant for variant in found if variant.name in args.only]
    return found


def work(args: argparse.Namespace) -> None:
    """One rank: measure every variant on one model; the first rank reports."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group()
    hardware = calibrate(torch.device(device))
    if args.calibrate:
        if dist.get_rank() == 0:
            print(f"{hardware}\nkept in {save(hardware, torch.device(device))}")
        dist.destroy_process_group()
        return
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    torch._dynamo.config.recompile_limit = 64  # variants share code objects
    rank, name = dist.get_rank(), args.model[0]
    job, variants = workload(name), chosen(args)
    rounds = args.rounds or (6 if args.quick else 12)
    data = batches(job, rank, WARM_STEPS + 3)
    bar = tqdm(total=len(variants) + rounds, desc=name, disable=rank > 0, file=sys.stderr)
    running = []
    for variant in variants:
        bar.set_postfix_str(variant.name)
        running.append(warm_up(job, variant, mesh, data, hardware))
        bar.update()
    if rank == 0:
        check_losses(running)
    bar.set_postfix_str("timing")
    time_rounds(running, data, rounds, bar.update)
    bar.close()
    if rank == 0:
        tell(args, name, {one.result.name: one.result for one in running}, job, data)
    dist.barrier()
    dist.destroy_process_group()


def check_losses(running: list[Running]) -> None:
    """No time is believed of a variant that trains another model."""
    compared = [one.result for one in running if one.result.name != "alone"]
    for result in compared[1:]:
        worst = max(abs(a - b) for a, b in zip(result.losses, compared[0].losses))
        if not worst <= LOSS_TOLERANCE:
            raise SystemExit(f"{result.name} has losses {result.losses}, {compared[0].name} {compared[0].losses}")


def tell(args, name: str, results: dict[str, Result], job, data) -> None:
    first = data[0][0]
    tokens = first.numel() if first.dtype == torch.int64 else first.shape[0]
    found = report.targets(results, formulas(job, args.world))
    print(f"\n{name}, {args.world} ranks, fp32, AdamW; times are of {len(next(iter(results.values())).step_s)} interleaved rounds")
    print(report.table(results, tokens) + "\n")
    print(report.show_targets(found))
    if args.targets:
        report.add_targets(args.targets, found)
    if args.out:
        setting = {"model": name, "world": args.world, "parameters": sum(p.numel() for p in job.build().parameters())}
        report.write_json(args.out / f"{name}_{args.world}.json", setting, results, found)
        report.draw_memory(args.out / f"{name}_{args.world}_memory.svg", results, f"{name}, {args.world} ranks")
        report.draw_steps(args.out / f"{name}_{args.world}.svg", results, f"{name}, {args.world} ranks")


def formulas(job, world: int) -> dict[str, float]:
    """Elements that each stage sends per rank and step, by the design's table."""
    from zero_fx.config import Config
    from zero_fx.formulas import elements_sent

    sizes = [param.numel() for param in job.build().parameters()]
    sharded = sum(size for size in sizes if size >= Config.keep_whole_below)
    return {f"zero {stage}": elements_sent(stage, sharded, sum(sizes) - sharded, world, 1) for stage in (1, 2, 3)}


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    if "RANK" not in os.environ:
        return launch(args, arguments)
    work(args)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
