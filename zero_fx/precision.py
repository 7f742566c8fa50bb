"""Mixed precision: what is computed in which dtype. Master shards, gradients of shards and optimizer states stay fp32.

A parameter is cast on its shard, before it is gathered, so that half the bytes travel; its gradient is cast before it is
reduced. Which parameters: those in float32, but for modules that are kept in fp32. The others are used as they are.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import fnmatch

import torch
from torch import nn

NAMES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclasses.dataclass(frozen=True)
class Precision:
    """What `zero_fx.compile(model, precision=...)` computes in; "bf16" and "fp16" stand for Precision(compute=...).

    compute: torch.bfloat16 or torch.float16: of parameters in forward and backward, and of the floating-point tensors
        among forward's arguments (as FSDP2 casts them), in lists, tuples, dicts and dataclasses too. Buffers keep theirs.
    reduce: torch.float32, or the dtype of `compute`: in which gradients travel. What a rank accumulates over several
        micro-batches is fp32 in either case; so are sums over ranks where zero_fx adds them itself (gloo).
    output: floating-point tensors that forward returns are cast to it; None leaves them.
    keep_fp32: modules to run in fp32, by type, or by name as in fnmatch ("head", "blocks.*.norm"): what they contain is
        gathered in fp32, their inputs are cast to fp32 and their outputs to `compute`. They must be called: a weight that
        another module reads is fp32 there as well. Modules with running statistics in fp32 (BatchNorm) are always kept.
    """

    compute: torch.dtype = torch.bfloat16
    reduce: torch.dtype = torch.float32
    output: torch.dtype | None = None
    keep_fp32: tuple[type | str, ...] = ()

    def __post_init__(self):
        if self.compute not in NAMES.values():
            raise ValueError(
                f"precision: compute={self.compute!r}: expected torch.bfloat16 or torch.float16; to compute in the "
                "parameters' own dtype leave precision out"
            )
        if self.reduce not in (torch.float32, self.compute):
            raise ValueError(f"precision: reduce={self.reduce!r}: expected torch.float32 or {self.compute}, which compute is")
        is_dtype = isinstance(self.output, torch.dtype) and self.output.is_floating_point
        if self.output is not None and not is_dtype:
            raise ValueError(f"precision: output={self.output!r}: expected a floating-point dtype, or None")
        if not isinstance(self.keep_fp32, tuple):
            raise TypeError(f"precision: keep_fp32={self.keep_fp32!r}: expected a tuple of module types and names")
        for entry in self.keep_fp32:
            if not isinstance(entry, str) and not (isinstance(entry, type) and issubclass(entry, nn.Module)):
                raise TypeError(f"precision: keep_fp32 has {entry!r}: expected a type of module, or a name such as 'head'")


def parse_precision(value) -> Precision | None:
    """What the option `precision` means; raises ValueError or TypeError."""
    if value is None or isinstance(value, Precision):
        return value
    if isinstance(value, str):
        if value not in NAMES:
            raise ValueError(f"precision={value!r}: expected 'bf16', 'fp16' or a zero_fx.Precision")
        return Precision(NAMES[value])
    raise TypeError(f"precision={value!r}: expected 'bf16', 'fp16', a zero_fx.Precision or None")


def kept_modules(model: nn.Module, precision: Precision) -> list[nn.Module]:
    """The outermost modules that run in fp32; raises ValueError for an entry of `keep_fp32` that matches none."""
    named = [(name, module) for name, module in model.named_modules(remove_duplicate=False) if name]
    for entry in precision.keep_fp32:
        if not any(matches(entry, name, module) for name, module in named):
            raise ValueError(f"precision: keep_fp32 has {shown(entry)}, which matches no module of the model{near(entry, named)}")
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for name, module in named:  # a module comes before what it contains
        if module not in inside and (has_running_stats(module) or any(matches(e, name, module) for e in precision.keep_fp32)):
            found.append(module)
            inside |= set(module.modules())
    # One that was found by itself may stand in another one too.
    return [m for m in found if not any(m is not other and m in set(other.modules()) for other in found)]


def matches(entry, name: str, module: nn.Module) -> bool:
    return fnmatch.fnmatchcase(name, entry) if isinstance(entry, str) else isinstance(module, entry)


def shown(entry) -> str:
    return repr(entry) if isinstance(entry, str) else entry.__name__


def near(entry, named: list[tuple[str, nn.Module]]) -> str:
    """A hint at names or types that the model does have."""
    known = [name if isinstance(entry, str) else type(module).__name__ for name, module in named]
    known = list(dict.fromkeys(known))
    close = difflib.get_close_matches(entry if isinstance(entry, str) else entry.__name__, known, 3, 0.5) or known[:5]
    return f"; near are {', '.join(map(repr, close))}" if close else ""


def has_running_stats(module: nn.Module) -> bool:
    """Whether it is a norm whose statistics are fp32 buffers, which kernels read together with fp32 parameters only."""
    mean = getattr(module, "running_mean", None)
    is_fp32 = all(param.dtype == torch.float32 for param in module.parameters(recurse=False))
    return isinstance(mean, torch.Tensor) and mean.dtype == torch.float32 and is_fp32


def cast_params(model: nn.Module, precision: Precision, kept: list[nn.Module]) -> set[nn.Parameter]:
    """The parameters that are used in the dtype to compute in: float32 ones outside of `kept` modules. Raises ValueError
    if there is none, for a kept module that has others than float32, and for a parameter that is both."""
    inside = {module for root in kept for module in root.modules()}
    kept_names: dict[nn.Parameter, str] = {}
    other_names: dict[nn.Parameter, str] = {}
    for path, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            (kept_names if module in inside else other_names)[param] = f"{path}.{name}".lstrip(".")
    for param, name in kept_names.items():
        if param.dtype != torch.float32:
            raise ValueError(f"precision: keep_fp32 keeps {name!r}, which is {param.dtype}: cast it, or keep less")
        if param in other_names:
            raise ValueError(
                f"precision: keep_fp32 keeps {name!r}, but it is tied to {other_names[param]!r}, which is not kept: keep both "
                "modules or none"
            )
    found = {param for param in other_names if param.dtype == torch.float32}
    if not found:
        dtypes = ", ".join(sorted({str(param.dtype) for param in model.parameters()})) or "none"
        raise ValueError(
            f"precision: there is nothing to cast to {precision.compute}: no float32 parameter outside of what keep_fp32 "
            f"keeps (dtypes: {dtypes}). Mixed precision keeps float32 masters, so give it the model in float32"
        )
    return found


def cast_floats(value, dtype: torch.dtype):
    """`value` with its floating-point tensors cast; what has none stays the object that it is."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, nn.utils.rnn.PackedSequence):
        return value.to(dtype)
    if isinstance(value, (list, tuple)):
        items = [cast_floats(item, dtype) for item in value]
        if all(new is old for new, old in zip(items, value)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        changed = {k: cast_floats(v, dtype) for k, v in value.items()}
        if all(changed[k] is v for k, v in value.items()):
            return value
        if type(value) is dict:
            return changed
        result = copy.copy(value)
        for k, v in changed.items():
            result[k] = v
        return result
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        changed = {k: new for k, old in fields.items() if (new := cast_floats(old, dtype)) is not old}
        if not changed:
            return value
        result = copy.copy(value)
        for k, v in changed.items():
            object.__setattr__(result, k, v)
        return result
    return value


def run_in_fp32(module: nn.Module) -> None:
    """Let `module`, whose parameters are read in fp32, run in fp32. Its `_zero_fx_model` says when outputs go back."""
    module.register_forward_pre_hook(inputs_to_fp32, with_kwargs=True, prepend=True)
    module.register_forward_hook(outputs_to_compute)


def inputs_to_fp32(module, args, kwargs):
    return cast_floats(args, torch.float32), cast_floats(kwargs, torch.float32)


def outputs_to_compute(module, args, output):
    state = module._zero_fx_model
    return cast_floats(output, state.compute_dtype) if state.is_computing() else output
