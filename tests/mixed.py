"""What mixed precision means, written down once more without zero_fx: an unsharded model with fp32 masters.

`reference(model)` keeps the float32 parameters; each read of one is a cast of it (autograd goes through the cast), but in
the modules that are kept, which get float32 inputs and give outputs in the dtype to compute in.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils import _pytree as pytree


def reference(model: nn.Module, dtype: torch.dtype, kept: tuple = ()) -> nn.Module:
    """Change `model` in place. kept: types of modules and names."""
    inside = set()
    for name, module in model.named_modules():
        is_kept = isinstance(module, (nn.modules.batchnorm._BatchNorm, *[k for k in kept if not isinstance(k, str)])) or name in kept
        if is_kept and module not in inside:
            module.register_forward_pre_hook(lambda m, a, k: (floats(a, torch.float32), floats(k, torch.float32)), with_kwargs=True)
            module.register_forward_hook(lambda m, a, out: floats(out, dtype))
            inside |= set(module.modules())
    for module in list(model.modules()):
        names = [name for name, param in module._parameters.items() if param is not None]
        if module not in inside and names:
            module.__class__ = casting(type(module), tuple(names), dtype)
            module.__dict__.pop("_flat_weights", None)
    model.register_forward_pre_hook(lambda m, a, k: (floats(a, dtype), floats(k, dtype)), with_kwargs=True, prepend=True)
    return model


def casting(base: type, names: tuple[str, ...], dtype: torch.dtype) -> type:
    def read(name: str) -> property:
        def get(self):
            param = self._parameters[name]
            return param.to(dtype) if param.dtype == torch.float32 else param

        return property(get)

    namespace = {name: read(name) for name in names}
    if issubclass(base, nn.RNNBase):
        namespace["_flat_weights"] = property(lambda self: [getattr(self, n) for n in self._flat_weights_names], lambda self, _: None)
    return type(base.__name__, (base,), namespace)


def floats(values, dtype: torch.dtype):
    """Floating-point tensors in nested values, cast."""

    def one(value):
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if is_float else value

    return pytree.tree_map(one, values)
