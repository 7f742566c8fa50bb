"""Options of `zero_fx.compile`, and the environment's debugging switches. Frozen: passes and caches depend on them."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re

from .hardware import CALIBRATED, HARDWARE, Hardware
from .precision import Precision, parse_precision

STAGES = (0, 1, 2, 3)
LOWERINGS = ("inductor", "eager")
PASSES = ("bucket_collectives", "prefetch")  # that a model is right without


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that decides how a model is compiled.

    stage: 0, 1, 2 or 3 (ZeRO, arXiv 1910.02054, section 5): nothing, optimizer states, gradients too, parameters too
        are partitioned over the ranks.
    precision: None: everything in the parameters' own dtype. "bf16", "fp16" or a zero_fx.Precision: float32 parameters are
        used, and gathered, in that dtype; shards, their gradients and optimizer states stay float32.
    lowering: "inductor", or "eager" to run the rewritten graphs operator by operator (quick tests, debugging).
    dynamic: as in torch.compile: None (sizes that change become symbolic), True or False.
    keep_whole_below: a parameter with fewer elements than this is kept whole on every rank and its gradient
        all-reduced: not worth two collectives more. 0-dim and empty parameters are always kept whole.
    sync_module_states: take parameters and buffers from rank 0, so that ranks seeded differently agree.
    timeout_s: seconds that ranks wait for one another to compile the same graphs; and in a collective, where compile
        initialises the process group. (A group that you initialised has the timeout that you gave it.)
    memory_budget: bytes of a rank's whole step: an int, "24GiB", or a fraction of the device's memory (a float). Fewer
        activations are saved until it is met, and gathered parameters stay for backward while it lasts. Sets aside
        Adam's two states of a parameter's size. A model of several graphs has each planned for itself.
    hardware: whose times the plans of passes are made with: None for the device's published profile, the name of one
        ("h100"), a zero_fx.hardware.Hardware of your own (the same on all ranks), or "calibrated" for what
        `zero-fx bench --calibrate` measured on this machine (the first rank's).
    passes: which of the optional passes run, of PASSES; None for all of them.
    bucket_bytes: largest bucket of small collectives. None: ten times what the links move in one latency.
    inflight_bytes: at most so many bytes of gathered parameters wait for their use, and of gradients for the end of
        their reduction; one of each may always be under way. None: four buckets.
    """

    stage: int = 3
    precision: Precision | str | None = None
    lowering: str = "inductor"
    dynamic: bool | None = None
    keep_whole_below: int = 4096
    sync_module_states: bool = True
    timeout_s: float = 1800.0
    memory_budget: int | float | str | None = None
    hardware: str | Hardware | None = None
    passes: tuple[str, ...] | None = None
    bucket_bytes: int | None = None
    inflight_bytes: int | None = None

    def __post_init__(self):
        if isinstance(self.stage, bool) or self.stage not in STAGES:
            raise ValueError(f"stage={self.stage!r}: expected 0, 1, 2 or 3")
        object.__setattr__(self, "precision", parse_precision(self.precision))
        if self.lowering not in LOWERINGS:
            raise ValueError(f"lowering={self.lowering!r}: expected one of {', '.join(map(repr, LOWERINGS))}")
        if self.dynamic not in (None, True, False):
            raise TypeError(f"dynamic={self.dynamic!r}: expected None, True or False, as in torch.compile")
        if isinstance(self.keep_whole_below, bool) or not isinstance(self.keep_whole_below, int):
            raise TypeError(f"keep_whole_below={self.keep_whole_below!r}: expected a number of elements, an int")
        if self.keep_whole_below < 0:
            raise ValueError(f"keep_whole_below={self.keep_whole_below}: expected 0 or more elements")
        if not isinstance(self.sync_module_states, bool):
            raise TypeError(f"sync_module_states={self.sync_module_states!r}: expected True or False")
        if not isinstance(self.timeout_s, (int, float)) or not self.timeout_s > 0:
            raise ValueError(f"timeout_s={self.timeout_s!r}: expected a number of seconds above 0")
        if not isinstance(self.hardware, (Hardware, type(None))) and self.hardware not in (*HARDWARE, CALIBRATED):
            known = ", ".join(map(repr, HARDWARE))
            raise ValueError(f"hardware={self.hardware!r}: expected None, {CALIBRATED!r}, or one of {known}")
        check_passes(self.passes)
        if self.memory_budget is not None:
            object.__setattr__(self, "memory_budget", parse_bytes(self.memory_budget))
        for name in ("bucket_bytes", "inflight_bytes"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise TypeError(f"{name}={value!r}: expected a number of bytes, an int, or None")
            if value is not None and value < 0:
                raise ValueError(f"{name}={value}: expected 0 or more bytes")
        if self.bucket_bytes is not None and "bucket_collectives" not in self.optional_passes():
            raise ValueError(f"bucket_bytes={self.bucket_bytes} has no effect without the pass bucket_collectives")
        if self.inflight_bytes is not None and "prefetch" not in self.optional_passes():
            raise ValueError(f"inflight_bytes={self.inflight_bytes} has no effect without the pass prefetch")

    def optional_passes(self) -> tuple[str, ...]:
        return PASSES if self.passes is None else self.passes


def check_passes(passes) -> None:
    if passes is None:
        return
    if not isinstance(passes, tuple):
        raise TypeError(f"passes={passes!r}: expected a tuple of names out of {', '.join(PASSES)}, or None for all")
    for name in passes:
        if name not in PASSES:
            raise ValueError(f"passes names {name!r}: the optional passes are {', '.join(PASSES)}")


SUFFIXES = {"b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def parse_bytes(value) -> int | float:
    """A budget as bytes (int), or as a fraction of the device's memory (float in (0, 1]); "24GiB", "800 MB" are bytes."""
    if isinstance(value, str):
        found = re.fullmatch(r"\s*([\d.]+)\s*([a-zA-Z]+)\s*", value)
        if not found or found[2].lower() not in SUFFIXES or found[1].count(".") > 1:
            raise ValueError(f"memory_budget={value!r}: expected a number with a unit, such as '24GiB' or '800 MB'")
        value = int(float(found[1]) * SUFFIXES[found[2].lower()])
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"memory_budget={value!r}: expected bytes, a text such as '24GiB', or a fraction of the device")
    if isinstance(value, float) and not 0 < value <= 1:
        raise ValueError(f"memory_budget={value!r}: a float is a fraction of the device's memory, above 0 and at most 1")
    if value <= 0:
        raise ValueError(f"memory_budget={value!r}: expected more than 0 bytes")
    return value


def check_names(options: dict, function: str, *others: str) -> None:
    """Raise TypeError for what is no field of Config, and none of the `others` that `function` takes."""
    names = [field.name for field in dataclasses.fields(Config)]
    for name in options:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{function} has no option {name!r}{hint or '.'} The options are {', '.join([*names, *others])}")


def make_config(config: Config | None, options: dict) -> Config:
    """`config` with `options` that are not None on top; raises TypeError for an unknown option."""
    check_names(options, "zero_fx.compile", "optimizer", "mesh", "config")
    if config is not None and not isinstance(config, Config):
        raise TypeError(f"config={config!r}: expected a zero_fx.Config")
    if config is not None and options:
        clash = ", ".join(sorted(options))
        raise ValueError(f"config= and {clash} were both given: put {clash} into the config with dataclasses.replace")
    return config or Config(**options)


@dataclasses.dataclass(frozen=True)
class Debug:
    """The environment's switches: ZERO_FX_DEBUG (1 reports and times, 2 a diff per pass, 3 whole graphs),
    ZERO_FX_DUMP (a folder for numbered graph files), ZERO_FX_SKIP (names of passes, joined by commas)."""

    level: int = 0
    dump: str | None = None
    skip: tuple[str, ...] = ()

    @staticmethod
    def from_environment(passes: tuple[str, ...]) -> Debug:
        level = os.environ.get("ZERO_FX_DEBUG", "0")
        if level not in ("0", "1", "2", "3"):
            raise ValueError(f"ZERO_FX_DEBUG={level!r}: expected 0, 1, 2 or 3")
        skip = tuple(name for name in os.environ.get("ZERO_FX_SKIP", "").split(",") if name)
        for name in skip:
            if name not in passes:
                raise ValueError(f"ZERO_FX_SKIP names {name!r}: the passes are {', '.join(passes)}")
        return Debug(int(level), os.environ.get("ZERO_FX_DUMP") or None, skip)
