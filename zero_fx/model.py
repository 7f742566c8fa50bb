"""The compiled model as its user sees it: call it, `no_sync`, `clip_grad_norm_`, copies, full state dicts."""

from __future__ import annotations

import collections
import copy
import time
import types
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from .calibrate import calibrated
from .config import PASSES
from .costs import byte_s, latency_s
from .hardware import CALIBRATED, HARDWARE, Hardware, hardware_of
from .lowering import Backend
from .precision import cast_floats
from .runtime.clip import clip_grad_norm
from .runtime.tensors import local_of
from .runtime.together import together
from .vocabulary import PassConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from .config import Config
    from .report import Report
    from .runtime.agree import Agreement
    from .runtime.state import ModelState


STARTS = 65  # of forwards, that are kept for the time of a step


class CompiledModel:
    """The compiled forward of one model, made at the first call."""

    def __init__(self, config: Config, state: ModelState, agreement: Agreement, unset: tuple[str, ...] = ()):
        self.config, self.state, self.agreement = config, state, agreement
        self.unset = unset  # names of what had no values after compile
        self.known = {param.param for param in state.params.values()}
        self.starts: collections.deque[float] = collections.deque(maxlen=STARTS)  # of forwards with gradients
        self.backend = Backend(config, pass_config(config, state), agreement, state)
        self.forward = torch.compile(own_code(call_module), backend=self.backend, dynamic=config.dynamic)

    @torch.compiler.disable(recursive=False)  # a caller's own torch.compile must not trace into the state of a step
    def __call__(self, model: nn.Module, args, kwargs):
        hooks = check_params(model, self.known)
        if self.unset:
            check_set(model, self.unset)
            self.unset = ()
        precision = self.config.precision
        if precision is not None:
            args, kwargs = cast_floats(args, precision.compute), cast_floats(kwargs, precision.compute)
        if torch.is_grad_enabled():
            self.starts.append(time.perf_counter())
            self.backend.graphs.ran.clear()
        with self.state.forward():
            outputs = self.forward(model, hooks, *args, **kwargs)
        return cast_floats(outputs, precision.output) if precision is not None and precision.output else outputs

    def __deepcopy__(self, memo) -> CompiledModel:
        from .compile import agreement_for

        state = copy.deepcopy(self.state, memo)
        return CompiledModel(self.config, state, agreement_for(state, self.config), self.unset)


def pass_config(config: Config, state: ModelState) -> PassConfig:
    """What passes may know of a model and of where it runs."""
    hardware = chosen_hardware(config, state)
    bucket_bytes = config.bucket_bytes
    if bucket_bytes is None:
        world = max(state.world, 2)
        moved_per_s = (world - 1) / world / byte_s("all_gather", world, hardware)
        bucket_bytes = round(10 * latency_s(world, hardware) * moved_per_s)
    budget = config.memory_budget
    if isinstance(budget, float):
        budget = round(budget * device_bytes(state.mesh.device_type))
    return PassConfig(
        stage=config.stage,
        world=state.world,
        rank=state.rank,
        exchange=state.exchanges,
        broadcasts=state.broadcasts,
        hardware=hardware,
        bucket_bytes=bucket_bytes,
        inflight_bytes=4 * bucket_bytes if config.inflight_bytes is None else config.inflight_bytes,
        memory_budget=budget,
        without=tuple(name for name in PASSES if name not in config.optional_passes()),
    )


def chosen_hardware(config: Config, state: ModelState) -> Hardware:
    """The profile that `config.hardware` asks for; the same on all ranks, since buckets depend on it."""
    device = torch.device(state.mesh.device_type)
    if config.hardware is None:
        return hardware_of(device)
    if isinstance(config.hardware, Hardware):
        return config.hardware
    if config.hardware != CALIBRATED:
        return HARDWARE[config.hardware]
    found: list = [None]
    if state.rank == 0:
        try:
            found = [calibrated(device)]
        except ValueError as error:
            found = [error]  # which the others are to raise as well
    if state.world > 1:
        dist.broadcast_object_list(found, group_src=0, group=state.mesh.get_group())
    if isinstance(found[0], ValueError):
        raise found[0]
    return found[0]


def device_bytes(device_type: str) -> int:
    if device_type == "cpu":
        raise ValueError("memory_budget as a fraction is of a device's memory, and the CPU has none of its own; give bytes")
    return torch.get_device_module(device_type).mem_get_info()[1]


def call_module(module, hooks, /, *args, **kwargs):
    """The plain model's call. `hooks` is compared with nothing in particular, so that Dynamo guards on its value; it
    does not guard on the hooks of modules."""
    assert hooks != "guard"
    if module._zero_fx_call is nn.Module.__call__:
        return nn.Module._call_impl(module, *args, **kwargs)
    return module._zero_fx_call(module, *args, **kwargs)


def own_code(function):
    """A copy of `function` with a code object of its own. Dynamo counts recompilations by code object, so models
    that shared one would use up each other's limit, after which they would silently run eagerly."""
    code = function.__code__.replace(co_name=f"zero_fx_{function.__name__}")
    return types.FunctionType(code, function.__globals__, function.__name__)


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def check_params(model: nn.Module, known: set[torch.Tensor]) -> str:
    """Raise for parameters that were added or replaced after compile: nothing would reduce their gradients.
    Returns which hooks the modules have, as text that changes when one is added or removed."""
    stack, hooks = [model], []
    while stack:
        module = stack.pop()
        values = module.__dict__
        for name, param in values["_parameters"].items():
            if param is not None and param not in known:
                raise ValueError(
                    f"zero_fx: parameter {name!r} of a {type(module).__name__} was added or replaced after "
                    "zero_fx.compile (by an assignment, or by functional_call on the whole model), so it is not "
                    "sharded; change the model first, then compile it"
                )
        for kind in HOOKS:
            if values[kind]:
                hooks += [kind, *map(str, values[kind])]
        stack.extend(child for child in values["_modules"].values() if child is not None)
    return " ".join(hooks)


def check_set(model: nn.Module, names: tuple[str, ...]) -> None:
    """Raise ValueError, on all ranks, if any of these tensors still has the NaN that stands for no value."""
    values = model.state_dict(keep_vars=True)

    def check() -> None:
        unset = [name for name in names if name in values and local_of(values[name]).isnan().any()]
        if unset:
            more = f" and {len(unset) - 1} more" if len(unset) > 1 else ""
            raise ValueError(
                f"{unset[0]!r}{more} of this model, which was on the meta device, is NaN: nothing has set it. Load the weights "
                "(zero_fx.load_full_state_dict, zero_fx.load_checkpoint), or give zero_fx.compile init=, a function that "
                "sets what the module it is given has; without one it calls reset_parameters of the modules that have it"
            )

    together(model._zero_fx_model.mesh.get_group(), "the first forward", check)


class RootMethods:
    """Mixed into the class of the model that was compiled."""

    def __call__(self, *args, **kwargs):
        return self._zero_fx_compiled(self, args, kwargs)

    def no_sync(self):
        """A context for every micro-batch but the last of an optimizer step; forward and backward both go inside.

        Stages 0 and 1 then keep gradients on the rank and reduce them once, after the first backward outside;
        stages 1 and 2 keep the gathered parameters from one micro-batch to the next. At stage 3 it changes nothing
        for sharded parameters. Raises RuntimeError when entered twice.
        """
        return self._zero_fx_model.no_sync()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False):
        """Scale gradients in place so that their norm over all ranks and parameters is at most `max_norm`.

        Returns the norm before scaling, a 0-dim tensor, the same on every rank. One all-reduce of one number.
        Otherwise as torch.nn.utils.clip_grad_norm_.
        """
        return clip_grad_norm(self._zero_fx_model, max_norm, norm_type, error_if_nonfinite)

    def report(self, run: Callable[[], object] | None = None) -> Report:
        """A Report, as zero_fx.inspect gives it, of what this rank ran in the last forward with gradients and its backward,
        with measured figures beside the predicted ones (`report.measured`, see zero_fx/measure.py).

        run: a function that runs one training step, called once, on every rank, under the profiler: it measures the
            elements sent and the memory of that step. Raises RuntimeError before the first forward.
        """
        from .measure import live_report  # which needs what needs this module

        return live_report(self, self._zero_fx_compiled, run)


def check_compiled(model: nn.Module) -> None:
    if not isinstance(model, RootMethods):
        raise TypeError(f"expected a model that zero_fx.compile returned, got {type(model).__name__}")


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Plain, full tensors under the plain model's names, on every rank; tied names share one tensor.

    Collective: every rank must call it. Costs the full model's memory on each rank.
    """
    check_compiled(model)
    full: dict[int, torch.Tensor] = {}
    result = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if hasattr(tensor, "full_tensor"):
            if id(tensor) not in full:
                full[id(tensor)] = tensor.detach().full_tensor().clone()
            result[name] = full[id(tensor)]
        else:
            result[name] = tensor.detach().clone() if isinstance(tensor, torch.Tensor) else tensor
    return result
