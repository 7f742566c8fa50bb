"""What code outside of forward gets for `module.weight`: the full values to compute with, and the parameter to change.

Inside forward a weight is only read. Outside, people also initialise, clip, freeze and hook parameters through the
attribute; on a gathered copy all of that would be lost. So whatever changes a parameter, or belongs to it alone
(`.grad`, `.data`, hooks, `requires_grad`), goes to the sharded parameter, and everything else sees the full values.
"""

from __future__ import annotations

import torch

OWN = ("data", "grad", "requires_grad")  # attributes of the parameter; `requires_grad` when it is set
HOOKS = ("register_hook", "register_post_accumulate_grad_hook", "requires_grad_")
IN_PLACE_DUNDERS = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__ifloordiv__")


class FullParam(torch.Tensor):
    """A gathered parameter (rows, ...), made by `full_param`; `zero_fx_state` is its ParamState."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        target = next(iter(args or (kwargs or {}).values()), None)  # torch.nn.init passes it on by name
        if isinstance(target, FullParam) and changes_parameter(func):
            return change_parameter(func, target, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def change_parameter(func, target: FullParam, args, kwargs):
    """Apply `func` to the sharded parameter behind `target`. In-place operators return the parameter itself."""
    state, map_all = target.zero_fx_state, torch.utils._pytree.tree_map
    if func == torch.Tensor.data.__set__:
        state.param._local_tensor.copy_(state.rows_of(args[1]))
        return None
    sharded_args, sharded_kwargs = map_all(state.as_sharded, (args, kwargs))
    try:
        return func(*sharded_args, **sharded_kwargs)
    except NotImplementedError:
        # DTensor lacks the operator, such as assignment to a part: change the full values, and keep this rank's.
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            full = target.detach()
            args, kwargs = map_all(lambda value: full if value is target else value, (args, kwargs))
            func(*args, **kwargs)
            state.param._local_tensor.copy_(state.rows_of(full))
        return state.param


def full_param(full: torch.Tensor, state) -> FullParam:
    result = full.as_subclass(FullParam)
    result.zero_fx_state = state
    return result


def changes_parameter(func) -> bool:
    """Whether `func`, called on a parameter, writes to it or to what belongs to it, or gives that out."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        return attribute in OWN and (name == "__set__" or attribute != "requires_grad")
    return name in HOOKS or name in IN_PLACE_DUNDERS or (name.endswith("_") and not name.endswith("__"))
