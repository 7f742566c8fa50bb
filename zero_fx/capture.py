"""Shard a model in place, so that its modules read full parameters through markers.

Each parameter becomes a DTensor of this rank's rows, under its old name, and the module that owns it gets a subclass
of its class in which the name is a property. `state_dict`, `named_parameters` and optimizers see the DTensors, because
they look in `_parameters`; the module's own code sees full tensors. Nothing in PyTorch is patched.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .config import Config
from .precision import cast_params, kept_modules, run_in_fp32
from .runtime.layout import own_copy, part_of
from .runtime.markers import STEP, USE, WHOLE
from .runtime.param import ParamState
from .runtime.state import ModelState
from .torch_compat import never_a_frame


def shard_model(
    model: nn.Module, config: Config, state: ModelState, made: dict[nn.Parameter, torch.Tensor], memory: Callable = own_copy
) -> dict[nn.Parameter, ParamState]:
    """Replace every parameter of `model`; return {old parameter: its state}. Tied parameters stay one.

    made: this rank's part of those that have no values themselves. memory(view of a part): a rank's own for it, of the others.
    """
    by_old: dict[nn.Parameter, ParamState] = {}
    classes: dict[tuple, type] = {}
    modules = dict(model.named_modules())  # before any class changes
    dtypes = precision_of(model, config, state)
    for prefix, module in modules.items():
        own = {}
        for name, old in list(module._parameters.items()):
            if old is None:
                continue
            if old not in by_old:
                fqn = f"{prefix}.{name}".lstrip(".")
                lifetime = lifetime_of(old, config)
                accumulates = lifetime == WHOLE or config.stage == 1
                rows = made.get(old)
                if rows is None:
                    rows = memory(part_of(old.detach(), lifetime == WHOLE, state.world, state.rank))
                by_old[old] = ParamState(state, fqn, old, rows, lifetime, accumulates, *dtypes.get(old, ()))
                state.params[fqn] = by_old[old]
            own[name] = by_old[old]
            module._parameters[name] = own[name].param
        if own or module is model:
            module.__dict__["_zero_fx"] = own
            module.__dict__["_zero_fx_model"] = state
            become_sharded(module, tuple(own), classes, is_root=module is model)
    for old, new in by_old.items():
        make_stale(old, new.name)
    return by_old


def precision_of(model: nn.Module, config: Config, state: ModelState) -> dict[nn.Parameter, tuple[torch.dtype, torch.dtype]]:
    """{parameter that is cast: (dtype to compute in, dtype of its reduction)}; lets what stays in fp32 run in it."""
    precision = config.precision
    if precision is None:
        return {}
    kept = kept_modules(model, precision)
    cast = cast_params(model, precision, kept)
    state.compute_dtype = precision.compute
    for module in kept:
        module.__dict__["_zero_fx_model"] = state
        run_in_fp32(module)
    return {param: (precision.compute, precision.reduce) for param in cast}


def lifetime_of(param: nn.Parameter, config: Config) -> str:
    """How long the full parameter lives under this stage."""
    is_small = param.dim() == 0 or param.numel() < config.keep_whole_below or param.numel() == 0
    if config.stage == 0 or is_small:
        return WHOLE
    return USE if config.stage == 3 else STEP


def become_sharded(module: nn.Module, names: tuple[str, ...], classes: dict[tuple, type], is_root: bool) -> None:
    """Give `module` a subclass of its class, with the same name, in which `names` are properties."""
    if isinstance(module, nn.RNNBase):
        del module.__dict__["_flat_weights"]  # the class gets a property in its place
    base = type(module)
    key = (base, names, is_root)
    if key not in classes:
        from .model import RootMethods  # it calls compile for copies of a model

        namespace = {name: full_param(name) for name in names}
        namespace |= {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
        if isinstance(module, nn.RNNBase):
            # RNNs keep their weights in a list as well, which would go on holding the unsharded ones.
            namespace["_flat_weights"] = property(flat_weights, lambda self, value: None)
        namespace["_zero_fx_call"] = staticmethod(base.__call__)
        bases = (RootMethods, ShardedMethods, base) if is_root else (ShardedMethods, base)
        classes[key] = type(base.__name__, bases, namespace)
    module.__class__ = classes[key]


def full_param(name: str) -> property:
    """The property under which a module's own code finds its full parameter."""

    def get(self):
        value = self._parameters.get(name)
        if isinstance(value, DTensor):
            return self._zero_fx[name].read()
        return value  # put there for a while, by torch.func.functional_call

    never_a_frame(get)
    return property(get)


def flat_weights(self) -> list:
    return [getattr(self, name, None) for name in self._flat_weights_names]


class ShardedMethods:
    """What a module that owns sharded parameters does differently."""

    def extra_repr(self) -> str:
        with self._zero_fx_model.peek():  # `print(model)` on one rank must not start a collective
            return super().extra_repr()

    def get_parameter(self, target: str) -> nn.Parameter:
        path, _, name = target.rpartition(".")
        module = self.get_submodule(path)
        param = module._parameters.get(name)  # the attribute would be the gathered value
        return super().get_parameter(target) if param is None else param

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args, **kwargs):
        """Accept full tensors, as a plain model's checkpoint has them, beside DTensors. Values are copied, with
        `assign=True` too: the sharded parameters have to stay the objects that they are."""
        local_metadata = {**local_metadata, "assign_to_params_buffers": False}
        for name, state in self._zero_fx.items():
            value = state_dict.get(prefix + name)
            if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.shape == state.shape:
                rows = state.rows_of(value.to(state.param.device))
                state_dict[prefix + name] = state.as_dtensor(rows)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args, **kwargs)

    def _apply(self, fn, recurse=True):
        """Moving or casting a compiled model would leave its gathered values and graphs behind: refuse it, unless
        it changes nothing (`model.to(device)` on the device where it is)."""
        for state in self._zero_fx.values():
            probe = torch.empty(0, dtype=state.param.dtype, device=state.param.device)
            moved = fn(probe)
            if (moved.dtype, moved.device) != (probe.dtype, probe.device):
                raise RuntimeError(
                    f"zero_fx: {state.name!r} would change from {probe.dtype} on {probe.device} to {moved.dtype} on "
                    f"{moved.device} after zero_fx.compile; move or cast the model before compiling it"
                )
        if not recurse:
            return self
        for module in self.children():
            module._apply(fn)
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = fn(buffer)
        return self

    def __deepcopy__(self, memo):
        new = memo[id(self)] = type(self).__new__(type(self))
        for state in self._zero_fx.values():
            state.copy_param(memo)
        values = self.__dict__.copy()
        values.pop("_compiled_call_impl", None)
        new.__dict__.update(copy.deepcopy(values, memo))
        return new

    def __reduce_ex__(self, protocol):
        raise pickle.PicklingError(
            "zero_fx: a compiled model cannot be pickled whole: each rank has only its shards. Save "
            "zero_fx.full_state_dict(model) (plain tensors), or model.state_dict() with torch.distributed.checkpoint"
        )


class StaleParameter(nn.Parameter):
    """A parameter as it was before compile: every use of it is a mistake that would train nothing."""

    def stale(self):
        return RuntimeError(
            f"zero_fx: this is parameter {self.zero_fx_name!r} from before zero_fx.compile, which replaced it by a "
            "sharded one. An optimizer built before must be given to zero_fx.compile(..., optimizer=optimizer), or be "
            "built after it; other code must read the parameter from its module"
        )

    @property
    def grad(self):
        raise self.stale()

    @grad.setter
    def grad(self, value):
        raise self.stale()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        raise next(leaf for leaf in leaves if isinstance(leaf, StaleParameter)).stale()


def make_stale(param: nn.Parameter, name: str) -> None:
    """Free the storage of a replaced parameter and make its use an error that says what to do."""
    param.data = torch.empty(0, dtype=param.dtype, device=param.device)
    param.zero_fx_name = name
    param.__class__ = StaleParameter
