"""`from_deepspeed`: a DeepSpeed configuration as a `zero_fx.Config`, and what became of each of its keys."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
from collections.abc import Mapping

import torch

from .config import STAGES, Config
from .config import check_names as check_options
from .deepspeed_keys import IGNORED, KNOWN, OFF, OFF_BY_KEY, REFUSED
from .precision import Precision, parse_precision

AUTO = "auto"  # which Hugging Face's Trainer fills in; here: not given


@dataclasses.dataclass(frozen=True)
class DeepSpeedConfig(Config):
    """A Config for `zero_fx.compile(model, config=...)`, and what the file says of the training loop, which stays yours.

    gradient_clipping: for `model.clip_grad_norm_`; 0: none. DeepSpeed clips at 1.0 where the file says nothing.
    train_batch_size, micro_batch_size, gradient_accumulation_steps: samples of all ranks in an optimizer step, samples of
        one rank in a micro-batch, and micro-batches; None where the file leaves it open.
    steps_per_print: None where the file leaves it open.
    scaler: arguments for `zero_fx.GradScaler(device, **dict(scaler))`; enabled only in float16.
    ignored: (key, reason) of what has no effect here, in the order of the file.
    """

    gradient_clipping: float = 1.0
    train_batch_size: int | None = None
    micro_batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    steps_per_print: int | None = None
    scaler: tuple[tuple[str, object], ...] = ()
    ignored: tuple[tuple[str, str], ...] = ()


def from_deepspeed(source: str | os.PathLike | Mapping, **options) -> DeepSpeedConfig:
    """Read a DeepSpeed configuration.

    source: the path of a JSON file, or its content as a dict.
    options: fields of zero_fx.Config, which go before the file's: from_deepspeed("ds_config.json", lowering="eager").

    Raises ValueError for a key that DeepSpeed does not have (with the nearest one), for keys that contradict each other, and
    for what would train otherwise and zero_fx does not do; what only has no meaning here is in `.ignored`. FileNotFoundError.
    """
    check_options(options, "zero_fx.from_deepspeed")
    values = read(source)
    check_names(values)
    ignored = dict(without_effect(values))
    check_refused(values)
    values = without_auto(values)
    zero = section(values, "zero_optimization")
    stage = number(zero, "zero_optimization.stage", int, 0)
    if stage not in STAGES:
        raise ValueError(f"zero_optimization.stage={stage!r}: expected 0, 1, 2 or 3")
    precision = precision_of(values)
    found = {"stage": stage, "precision": precision, **passes_of(zero, stage, precision.reduce if precision else torch.float32)}
    if stage == 3:
        found["keep_whole_below"] = number(zero, "zero_optimization.stage3_param_persistence_threshold", int, 100_000)
    found |= options
    found["precision"] = parse_precision(found["precision"])
    is_fp16 = found["precision"] is not None and found["precision"].compute == torch.float16
    return DeepSpeedConfig(
        **found, **batch_of(values), scaler=scaler_of(values) if is_fp16 else (("enabled", False),),
        gradient_clipping=number(values, "gradient_clipping", float, 1.0),
        steps_per_print=number(values, "steps_per_print", int, None), ignored=tuple(ignored.items()),
    )  # fmt: skip


def read(source) -> dict:
    if isinstance(source, Mapping):
        return dict(source)
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(f"source={source!r}: expected the path of a JSON file, or a dict")
    if not os.path.isfile(source):
        raise FileNotFoundError(f"there is no file {os.fspath(source)} to read DeepSpeed's configuration from")
    with open(source, encoding="utf-8") as file:
        try:
            values = json.load(file, object_pairs_hook=unique)
        except json.JSONDecodeError as error:
            raise ValueError(f"{os.fspath(source)} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{os.fspath(source)}: expected a JSON object, found {type(values).__name__}")
    return values


def unique(pairs: list[tuple[str, object]]) -> dict:
    """JSON keeps the last of two equal keys, without a word."""
    values = dict(pairs)
    for name in values:
        if sum(name == other for other, _ in pairs) > 1:
            raise ValueError(f"the key {name!r} stands twice in one object")
    return values


def check_names(values: Mapping) -> None:
    for name, value in values.items():
        check_name(name, list(KNOWN), name)
        inside = KNOWN[name]
        if inside is None:
            continue
        if not isinstance(value, Mapping):
            raise ValueError(f"{name}={value!r}: expected an object")
        for key in value:
            check_name(key, list(inside), f"{name}.{key}")


def check_name(name: str, known: list[str], path: str) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, known, 1, 0.5)
        elsewhere = [f"{group}.{name}" for group, inside in KNOWN.items() if inside and name in inside]
        hint = elsewhere[:1] or ([path[: len(path) - len(name)] + near[0]] if near else [])
        raise ValueError(f"DeepSpeed has no key {path!r}" + (f"; did you mean {hint[0]!r}?" if hint else ""))


def flat(values: Mapping) -> dict[str, object]:
    """{"group.key": value}"""
    found = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and KNOWN[name] is not None:
            found |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            found[name] = value
    return found


def without_effect(values: Mapping) -> list[tuple[str, str]]:
    found = []
    for path, value in flat(values).items():
        reason = IGNORED.get(path) or IGNORED.get(path.partition(".")[0])
        if reason:
            found.append((path, reason))
        elif value == AUTO:
            found.append((path, "'auto' is filled in by Hugging Face's Trainer; here it is as if it was not given"))
    return found


def check_refused(values: Mapping) -> None:
    """Features that change what is trained, or what fits: leaving them out in silence would be another run."""
    for path, value in flat(values).items():
        group = path.partition(".")[0]
        reason = REFUSED.get(path) or REFUSED.get(group)
        is_off = is_unused(value) or value is not True and value in OFF_BY_KEY.get(path, ()) or is_unused(values[group])
        if reason and not is_off:
            raise ValueError(f"{path}={value!r}: {reason}")


def is_unused(value) -> bool:
    """Whether a feature with this value, or this object of options, is not used."""
    if isinstance(value, Mapping):
        switches = [value[name] for name in ("enabled", "device") if name in value]
        return all(map(is_unused, switches or value.values()))
    return value is not True and value in OFF


def without_auto(values: Mapping) -> dict:
    kept = {name: value for name, value in values.items() if value != AUTO}
    return {name: without_auto(value) if isinstance(value, Mapping) else value for name, value in kept.items()}


def section(values: Mapping, name: str) -> Mapping:
    return values.get(name, {})


def number(values: Mapping, path: str, kind: type, default):
    """A number of 0 or more. DeepSpeed's files write counts as 5e8, which JSON reads as a float."""
    value = values.get(path.rpartition(".")[2], default)
    if value is default:
        return value
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value < 0 or kind(value) != value:
        raise ValueError(f"{path}={value!r}: expected {'an integer' if kind is int else 'a number'} of 0 or more")
    return kind(value)


def switch(values: Mapping, path: str, default: bool) -> bool:
    value = values.get(path.rpartition(".")[2], default)
    if not isinstance(value, bool):
        raise ValueError(f"{path}={value!r}: expected true or false")
    return value


def passes_of(zero: Mapping, stage: int, dtype: torch.dtype) -> dict:
    """overlap_comm is the pass prefetch. Of the sizes of buckets, which are elements there (of `dtype`), the largest: ours
    have one size."""
    found: dict = {}
    if not switch(zero, "zero_optimization.overlap_comm", True):
        found["passes"] = ("bucket_collectives",)
    names = ["reduce_bucket_size"] + ["stage3_prefetch_bucket_size"] * (stage == 3) + ["allgather_bucket_size"] * (stage in (1, 2))
    sizes = [number(zero, f"zero_optimization.{name}", int, None) for name in names]
    sizes = [size for size in sizes if size is not None]
    if sizes:
        found["bucket_bytes"] = max(sizes) * dtype.itemsize
    return found


def precision_of(values: Mapping) -> Precision | None:
    chosen = [name for name in ("bf16", "fp16") if switch(section(values, name), f"{name}.enabled", False)]
    if len(chosen) == 2:
        raise ValueError("bf16.enabled and fp16.enabled are both true: turn one off")
    sent = values.get("communication_data_type")
    names = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "bfp16": torch.bfloat16}
    if sent is not None and sent not in names:
        raise ValueError(f"communication_data_type={sent!r}: expected one of {', '.join(names)}")
    if not chosen:
        if sent not in (None, "fp32"):
            raise ValueError(f"communication_data_type={sent!r} without bf16 or fp16: gradients of float32 travel in float32")
        return None
    compute, reduce = names[chosen[0]], names[sent or "fp32"]
    if reduce not in (torch.float32, compute):
        raise ValueError(f"communication_data_type={sent!r}: expected 'fp32' or {chosen[0]!r}, in which {chosen[0]}.enabled computes")
    return Precision(compute, reduce=reduce)


def scaler_of(values: Mapping) -> tuple[tuple[str, object], ...]:
    fp16 = section(values, "fp16")
    fixed = number(fp16, "fp16.loss_scale", float, 0.0)
    if fixed:  # a scale that neither grows nor falls
        raise ValueError(f"fp16.loss_scale={fixed:g}: a fixed scale is not supported; 0 is a dynamic one")
    power = number(fp16, "fp16.initial_scale_power", int, 16)
    window = number(fp16, "fp16.loss_scale_window", int, 1000)
    return ("enabled", True), ("init_scale", 2.0**power), ("growth_interval", window)


def batch_of(values: Mapping) -> dict[str, int | None]:
    """Of the three, two give the third only with the number of ranks, which is not known here; one against all is checked."""
    names = {"train_batch_size": "train_batch_size", "micro_batch_size": "train_micro_batch_size_per_gpu",
             "gradient_accumulation_steps": "gradient_accumulation_steps"}  # fmt: skip
    found = {ours: number(values, theirs, int, None) for ours, theirs in names.items()}
    for ours, theirs in names.items():
        if found[ours] == 0:
            raise ValueError(f"{theirs}=0: expected 1 or more")
    micro, steps, whole = found["micro_batch_size"], found["gradient_accumulation_steps"], found["train_batch_size"]
    a_rank = (micro or 1) * (steps or 1)
    if whole is not None and whole % a_rank:
        raise ValueError(
            f"train_batch_size={whole} is no multiple of train_micro_batch_size_per_gpu * gradient_accumulation_steps = {a_rank}: "
            "it is their product with the number of ranks"
        )
    return found
