"""The step of an optimizer on local shards: what `zero_fx.compile(..., optimizer=)` makes of an elementwise optimizer.

Operators on DTensors cost their dispatch for each parameter. An elementwise step of a shard is the shard of the step, so it may as
well run on plain tensors. What the user sees stays: `param_groups` with DTensors, `state` by DTensor, hooks, schedulers, scalers.
"""

from __future__ import annotations

import collections
import functools

import torch
from torch.distributed.tensor import DTensor

from .runtime.state import ModelState
from .runtime.tensors import local_of
from .setup import is_like

NAMES = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "RMSprop", "ASGD", "Rprop")
ELEMENTWISE = tuple(getattr(torch.optim, name) for name in NAMES)
FROM_SCALER = ("grad_scale", "found_inf")  # which torch.amp.GradScaler sets for the time of a fused step


def step_locally(optimizer: torch.optim.Optimizer, model: ModelState) -> None:
    """Let `optimizer` step on local shards, if its step is known to be elementwise; else it goes on with DTensors."""
    if type(optimizer) in ELEMENTWISE and not any(group.get("differentiable") for group in optimizer.param_groups):
        optimizer.__dict__["_zero_fx_local"] = LocalStep(optimizer, model)
        optimizer.__class__ = local_class(type(optimizer))


@functools.cache
def local_class(kind: type) -> type:
    """A subclass of the same name whose instances step locally."""
    unhooked = kind.step.__wrapped__ if getattr(kind.step, "hooked", False) else kind.step

    @functools.wraps(unhooked)
    def step(self, closure=None):
        local = self.__dict__.get("_zero_fx_local")
        if local is None:  # a copy, or one that was pickled
            return unhooked(self, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        local.step(unhooked)
        return loss

    def state(self):
        local = self.__dict__.get("_zero_fx_local")
        if local is not None:
            local.publish()
        return self.__dict__["state"]

    namespace = {"step": torch.optim.Optimizer.profile_hook_step(step), "__module__": kind.__module__, "__doc__": kind.__doc__}
    namespace["step"].hooked = True  # or PyTorch would hook it once more
    namespace["state"] = property(state, lambda self, value: self.__dict__.update(state=value))
    return type(kind.__name__, (kind,), namespace)


class LocalStep:
    """`outer`: the optimizer that the user has. `inner`: one of its kind over local shards, which has the states of the step.

    Both states share their tensors. The outer one is brought up to date when it is looked at, and the inner one after that, as
    whoever looked may have changed it: a run that does not look pays for neither.
    """

    def __init__(self, outer: torch.optim.Optimizer, model: ModelState):
        self.outer, self.model = outer, model
        self.inner = object.__new__(type(outer))
        self.inner.__dict__.update(outer.__dict__, state=collections.defaultdict(dict), param_groups=[])
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []  # (parameter, local shard)
        self.known: list[list[int]] = []  # ids of the parameters of each group, of which `pairs` was made
        self.pushed = None  # the outer state that the inner one was made of, unless it was looked at since
        self.is_ahead = False  # the inner state is newer

    def step(self, unhooked) -> None:
        if any(state.has_local_grad() for state in self.model.params.values()):
            raise RuntimeError(
                "zero_fx: optimizer.step() was called while gradients of micro-batches under no_sync are not reduced yet; "
                "step after a backward pass outside of no_sync"
            )
        self.match_groups()
        if self.outer.__dict__["state"] is not self.pushed:
            self.push()
        for name in FROM_SCALER:
            self.inner.__dict__.pop(name, None)
            if hasattr(self.outer, name):
                setattr(self.inner, name, getattr(self.outer, name))
        for param, local in self.pairs:
            grad = param.grad
            if grad is not None:
                local.grad = local_of(grad)
        try:
            unhooked(self.inner)
        finally:
            self.is_ahead = True
            for _, local in self.pairs:
                local.grad = None  # zero_grad is to free it

    def match_groups(self) -> None:
        """Options as the outer groups have them now, and shards of the parameters that are in them now."""
        groups = self.outer.param_groups
        ids = [[id(param) for param in group["params"]] for group in groups]
        if ids != self.known:
            self.publish()
            known = {param: local for param, local in self.pairs}
            local_of_param = {param: known.get(param) for group in groups for param in group["params"]}
            self.pairs = [(param, shard_of(param) if local is None else local) for param, local in local_of_param.items()]
            local_of_param = dict(self.pairs)
            self.inner.param_groups = [{"params": [local_of_param[param] for param in group["params"]]} for group in groups]
            self.known = ids
        for mine, theirs in zip(self.inner.param_groups, groups):
            mine.update((name, value) for name, value in theirs.items() if name != "params")

    def publish(self) -> None:
        """Bring the outer state up to date; it may be changed after that."""
        if self.is_ahead:
            state = self.outer.__dict__["state"]
            for param, local in self.pairs:
                if local in self.inner.state:
                    before = state.get(param, {})
                    values = self.inner.state[local].items()
                    state[param] = {key: shown(key, value, before.get(key), param, local) for key, value in values}
            self.is_ahead = False
        self.pushed = None

    def push(self) -> None:
        self.pushed = self.outer.__dict__["state"]
        self.inner.state.clear()
        for param, local in self.pairs:
            if param in self.pushed:
                self.inner.state[local] = {key: local_of(value) for key, value in self.pushed[param].items()}
        self.is_ahead = False


def shard_of(param: torch.Tensor) -> torch.Tensor:
    return torch.nn.Parameter(param._local_tensor.detach()) if isinstance(param, DTensor) else param


def shown(key: str, value, before, param: torch.Tensor, local: torch.Tensor):
    """A state of the step as the user finds it: a DTensor if it is of the parameter's shape."""
    if isinstance(before, torch.Tensor) and local_of(before) is value:
        return before
    if not isinstance(param, DTensor) or not is_like(key, value, tuple(local.shape)):
        return value
    return DTensor.from_local(
        value, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )
