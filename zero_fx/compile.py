"""`zero_fx.compile`: shard a model in place and compile its forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .capture import ShardedMethods, StaleParameter, shard_model
from .config import Config, make_config
from .hardware import HARDWARE, Hardware
from .local_step import step_locally
from .materialise import check_init, materialise
from .model import CompiledModel
from .runtime.agree import Agreement
from .runtime.layout import own_copy
from .runtime.state import ModelState
from .runtime.tensors import backend_of, hooks_of
from .setup import default_mesh, device_of, repoint_optimizer, sync_from_rank_0
from .torch_compat import engine, get_default_store

if TYPE_CHECKING:
    from collections.abc import Callable


def compile(  # noqa: A001
    model: nn.Module,
    stage: int | str | None = None,
    *,
    example: tuple | dict | torch.Tensor | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    init: Callable[[nn.Module], object] | str | None = None,
    mesh: DeviceMesh | None = None,
    config: Config | None = None,
    **options,
) -> nn.Module:
    """Partition `model` over the ranks of a data-parallel group and compile it; returns the same object.

    stage: 0, 1, 2 or 3 (the default): which of optimizer states, gradients and parameters are partitioned
        (ZeRO, arXiv 1910.02054, section 5). "auto": the fastest one that zero_fx.plan finds to fit the device's memory
        (or `memory_budget`) with `example`, forward's arguments; before the process group is initialised.
    optimizer: one that was built before, over this model's parameters; it is re-pointed at the sharded ones, with
        param groups, learning rates and state kept.
    init: for a model on the meta device, which gets its values here, a block at a time, each rank keeping its rows. None: by
        the modules' own `reset_parameters`. A function: called with each module, children first, as nn.Module.apply does;
        it may set what is in that module's block. "load": nothing sets them, so zero_fx.load_full_state_dict or
        zero_fx.load_checkpoint has to before the first forward, which raises ValueError otherwise. The values are those
        that the same calls give an unsharded model with the same seed on this device.
    mesh: a 1-dimensional DeviceMesh; by default all ranks of the process group, which is initialised from torchrun's
        environment if it is not yet (nccl on CUDA, gloo on CPU), and is of one rank without such an environment.
    config, options: see zero_fx.Config.

    Parameters keep their names and become DTensors: `Shard(0)`, or `Replicate()` where kept whole. Gradients are
    averaged over the ranks. Raises ValueError or TypeError for a model or an option that cannot be used.
    """
    if stage == "auto":
        return compile_with(model, automatic(model, example, make_config(config, options), mesh), optimizer, init=init)
    if example is not None:
        raise ValueError('example= has an effect with stage="auto" only')
    if stage is not None:
        options["stage"] = stage
    return compile_with(model, make_config(config, options), optimizer, mesh, init)


def automatic(model: nn.Module, example, config: Config, mesh: DeviceMesh | None) -> Config:
    """`config` with the stage and the budget for stage="auto"."""
    from .plan import choose_stage  # which captures with this module

    check_model(model)
    if example is None:
        raise ValueError('stage="auto" needs example=, the arguments of one forward: what fits depends on the batch')
    if mesh is not None or dist.is_initialized():
        raise ValueError(
            'stage="auto" plans before a process group exists: leave it to zero_fx.compile to initialise it from torchrun\'s '
            "environment, or call zero_fx.plan in a process of its own and give its stage and memory_budget"
        )
    return choose_stage(model, example, config, device_of(model))


def compile_with(model: nn.Module, config: Config, optimizer=None, mesh=None, init=None, own=own_copy) -> nn.Module:
    """compile, with all options in `config`. own(rows): memory of a rank's own for its rows of a parameter, a view."""
    check_model(model)
    check_init(init)
    device = device_of(model, mesh)
    mesh = default_mesh(device, config.timeout_s) if mesh is None else check_mesh(mesh, device)
    check_optimizer(optimizer, model)
    if config.sync_module_states:
        sync_from_rank_0(model, mesh)
    made = materialise(model, init, config, mesh, device)
    state = ModelState(mesh, mesh.get_group().group_name, mesh.size(), mesh.get_local_rank(), engine, transport_of(mesh, config))
    replaced = shard_model(model, config, state, made.rows, own)
    if optimizer is not None:
        repoint_optimizer(optimizer, replaced)
        step_locally(optimizer, state)
    model.__dict__["_zero_fx_compiled"] = CompiledModel(config, state, agreement_for(state, config), made.unset)
    return model


def transport_of(mesh: DeviceMesh, config: Config) -> str:
    """The backend of the mesh's group; of a fake one, what the hardware that a dry run names would have."""
    backend = backend_of(mesh.get_group(), mesh.device_type)
    if backend != "fake" or config.hardware is None:
        return backend
    return (config.hardware if isinstance(config.hardware, Hardware) else HARDWARE[config.hardware]).transport


def check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"zero_fx.compile takes a torch.nn.Module, got {type(model).__name__}")
    if hasattr(model, "_orig_mod"):
        raise ValueError("the model was given to torch.compile; give zero_fx.compile the plain model")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError("the model is wrapped in DistributedDataParallel; give zero_fx.compile the plain model")
    for name, module in model.named_modules():
        if isinstance(module, ShardedMethods):
            what = f"submodule {name!r} belongs to a model that was" if name else "this model was"
            raise ValueError(f"{what} compiled by zero_fx before; a model can be compiled once")
        if getattr(module, "sparse", False) is True and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            raise ValueError(f"{name!r} has sparse=True: sparse gradients cannot be reduce-scattered; use sparse=False")
    for name, param in model.named_parameters(remove_duplicate=False):
        check_param(name, param)


def check_param(name: str, param: nn.Parameter) -> None:
    if isinstance(param, StaleParameter):
        raise ValueError(f"parameter {name!r} belongs to a model that zero_fx compiled before")
    if isinstance(param, nn.parameter.UninitializedTensorMixin):
        raise ValueError(f"parameter {name!r} is lazy: run the model once so that it has a shape, then compile")
    if hooks_of(param, "gradient") or hooks_of(param, "accumulated"):
        raise ValueError(
            f"parameter {name!r} has hooks, which would stay on the unsharded parameter; register them after "
            "zero_fx.compile, where they see the reduced gradient"
        )
    if not param.dtype.is_floating_point:
        raise ValueError(
            f"parameter {name!r} has dtype {param.dtype}; zero_fx shards real floating-point parameters. Make an "
            "integer tensor a buffer, and a complex one two real ones (torch.view_as_real)"
        )
    if type(param.data) is not torch.Tensor:
        raise ValueError(f"parameter {name!r} is a {type(param.data).__name__}; zero_fx shards plain tensors")


def check_mesh(mesh: DeviceMesh, device: torch.device) -> DeviceMesh:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh={mesh!r}: expected a torch.distributed.device_mesh.DeviceMesh")
    if mesh.ndim != 1:
        raise ValueError(f"mesh has {mesh.ndim} dimensions {mesh.shape}; pass a 1-dimensional one, such as mesh['dp']")
    if mesh.device_type != device.type:
        raise ValueError(f"mesh is of {mesh.device_type!r} and the model is on {device}; they must agree")
    return mesh


def check_optimizer(optimizer, model: nn.Module) -> None:
    if optimizer is None:
        return
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer={optimizer!r}: expected a torch.optim.Optimizer")
    ours = set(model.parameters())
    if not any(p in ours for group in optimizer.param_groups for p in group["params"]):
        raise ValueError("optimizer= holds no parameter of this model; build it over model.parameters()")


def agreement_for(state: ModelState, config: Config) -> Agreement:
    """The comparison of collectives over the group's ranks."""
    group = state.mesh.get_group()
    store = None
    if state.world > 1 and backend_of(group, state.mesh.device_type) != "fake":
        store = dist.PrefixStore(f"zero_fx/{group.group_name}", get_default_store())
    return Agreement(store, state.world, state.rank, config.timeout_s)
