"""The command line: `zero-fx train`, `inspect`, `plan` and `bench`, also `python -m zero_fx train`."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys

from . import inspect_cli, plan_cli
from .breaks import CaptureError
from .train import TrainOptions, prepare, train


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str):
        raise ValueError(f"{message} (see {self.prog} --help)")


def main(argv: list[str] | None = None) -> int:
    """Run one command; its exit code: 0, or 2 for options or data that cannot be used."""
    parser = Parser(prog="zero-fx", description="ZeRO data-parallel training as a compiler.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    add_train(commands)
    add_inspect(commands)
    add_plan(commands)
    commands.add_parser("bench", help="compare passes with each other and with DDP, FSDP2 and DeepSpeed", add_help=False)
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["bench"]:
        from .benchmarks.__main__ import main as bench  # it needs more than training does

        return bench(argv[1:])
    try:
        args = parser.parse_args(argv)
        if args.command == "inspect":
            inspect_cli.run(options_from(inspect_cli.InspectOptions, args))
            return 0
        if args.command == "plan":
            plan_cli.run(options_from(plan_cli.PlanOptions, args))
            return 0
        setup = prepare(options_from(TrainOptions, args), given(TrainOptions, argv))
    except (ValueError, TypeError, FileNotFoundError, CaptureError) as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # ranks of one machine would all say the same
            print(f"zero-fx: {error}", file=sys.stderr)
        return 2
    # The profiler that counts collectives would write lines of its own into the log.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    train(setup)
    return 0


def add_train(commands) -> None:
    parser = commands.add_parser(
        "train",
        help="train a small GPT on text and measure memory and traffic beside the formulas",
        description="Train a small GPT on text; start it with torchrun for more than one rank: "
        "torchrun --nproc-per-node 2 -m zero_fx train --stage 3",
        allow_abbrev=False,
    )
    add_options(parser, TrainOptions)


def add_inspect(commands) -> None:
    parser = commands.add_parser(
        "inspect",
        help="what a step would take on hardware that is not here: memory, time, elements sent, graphs",
        description="Capture a model as a rank of a large job would run it, without the devices and the peers, and report "
        "what a step would take: zero-fx inspect --model llama-8b --stage 3 --world 64 --hardware h100 --html out.html",
        allow_abbrev=False,
    )
    add_options(parser, inspect_cli.InspectOptions)


def add_plan(commands) -> None:
    parser = commands.add_parser(
        "plan",
        help="which stage, memory budget and micro-batch fit a device, fastest first",
        description="Look at stages, memory budgets and micro-batches for a model on hardware that is not here: "
        "zero-fx plan --model llama-8b --batch 4 --world 64 --hardware h100 --memory 80GiB",
        allow_abbrev=False,
    )
    add_options(parser, plan_cli.PlanOptions)


def add_options(parser: argparse.ArgumentParser, options: type) -> None:
    """One flag for each field of a dataclass; its type is that of the default, str where that is None; a bool takes no value."""
    for field in dataclasses.fields(options):
        flag = "--" + field.name.replace("_", "-")
        default = "" if field.default in (None, ()) else f" (default: {field.default})"
        kind = str if field.default is None else type(field.default)
        if kind is bool:
            parser.add_argument(flag, action="store_true", help=field.metadata["help"])
            continue
        values = {"nargs": "+"} if kind is tuple else {"type": kind}
        parser.add_argument(flag, default=field.default, help=field.metadata["help"] + default, **values)


def options_from(options: type, args: argparse.Namespace):
    """The dataclass with the values of its flags."""
    values = {field.name: getattr(args, field.name) for field in dataclasses.fields(options)}
    return options(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def given(options: type, argv: list[str]) -> set[str]:
    """Names of the fields whose flags are on the command line."""
    flags = {arg.partition("=")[0] for arg in argv}
    return {field.name for field in dataclasses.fields(options) if "--" + field.name.replace("_", "-") in flags}
