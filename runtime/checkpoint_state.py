"""What a checkpoint has, as the nested dict that torch.distributed.checkpoint writes.

    model.<name>                    DTensors and buffers, under the plain model's names
    optim.state.<name>.<key>        optimizer states by the parameter's name (the first one of tied parameters)
    optim.param_groups.<i>.<key>    options; "params" has names
    extra.<name>                    what the user gave, as bytes; its DTensors under extra_tensors.<name>.<number>
    ranks.<rank>.rng, .buffers, .extra    what each rank has for itself: random states, and what differs from rank 0's

The first two are what get_state_dict of torch.distributed.checkpoint.state_dict gives for FSDP2. A value that is not a
DTensor is the same on all ranks, so only rank 0 has it in its dict.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import random
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

tree_map = torch.utils._pytree.tree_map
RESERVED = ("model", "optimizer", "step", "keep", "verify", "path")  # names that an extra cannot have


@dataclasses.dataclass(frozen=True)
class Sharded:
    """Stands for the DTensor of this number in pickled extras."""

    number: int


def names_of(model: nn.Module) -> dict[torch.Tensor, str]:
    """{parameter: its name, the first one of tied parameters}."""
    return {param: name for name, param in model.named_parameters()}


def model_state(model: nn.Module, rank: int) -> dict:
    values = model.state_dict()
    return {name: value for name, value in values.items() if rank == 0 or isinstance(value, DTensor)}


def check_optimizer(model: nn.Module, optimizer) -> dict[torch.Tensor, str]:
    """names_of(model); raises unless `optimizer` is one over parameters of `model`."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer={optimizer!r}: expected a torch.optim.Optimizer")
    names = names_of(model)
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param not in names:
                raise ValueError(
                    f"the optimizer holds a parameter of shape {tuple(param.shape)} that is not one of this model; save and "
                    "load one model with one optimizer over its parameters"
                )
    return names


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> dict:
    """{"state": {name: {key: value}}, "param_groups": [{..., "params": names}]}"""
    names = check_optimizer(model, optimizer)
    groups = [{**group, "params": [names[param] for param in group["params"]]} for group in optimizer.param_groups]
    states = {}
    for param, values in optimizer.state.items():
        kept = {key: without_partial(value) for key, value in values.items()}
        states[names[param]] = {key: value for key, value in kept.items() if rank == 0 or isinstance(value, DTensor)}
    return {"state": states, "param_groups": groups} if rank == 0 else {"state": states}


def without_partial(value):
    """A DTensor whose ranks hold terms of a sum is summed; anything else as it is."""
    if isinstance(value, DTensor) and any(placement.is_partial() for placement in value.placements):
        return value.redistribute(placements=[Replicate()])
    return value


# --- each rank's own


def rank_state(model: nn.Module, group: dist.ProcessGroup, extra: dict[str, torch.Tensor]) -> dict:
    """This rank's random states, and the buffers and extras in which it differs from rank 0. Collective."""
    buffers = {name: value for name, value in model.state_dict().items() if is_plain(value)}
    digests = [None] * dist.get_world_size(group)
    ours = {("buffers", name): digest(value) for name, value in buffers.items()}
    ours |= {("extra", name): digest(value) for name, value in extra.items()}
    dist.all_gather_object(digests, ours, group=group)
    differs = {key for key, value in ours.items() if value != digests[0].get(key)}
    own = {"rng": pickled(rng_state(model), [])}
    own["buffers"] = {name: value for name, value in buffers.items() if ("buffers", name) in differs}
    own["extra"] = {name: value for name, value in extra.items() if ("extra", name) in differs}
    return {str(dist.get_rank(group)): {key: value for key, value in own.items() if key == "rng" or value}}


def is_plain(value) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, DTensor)


def digest(tensor: torch.Tensor) -> bytes:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(data.numpy(), digest_size=16).digest()


def device_module(model: nn.Module):
    """torch.cuda or its like; None for a model on the CPU."""
    device_type = model._zero_fx_model.mesh.device_type
    return None if device_type == "cpu" else torch.get_device_module(device_type)


def rng_state(model: nn.Module) -> dict:
    """Of torch on the CPU and on the model's device, of Python, and of NumPy where it is in use."""
    state = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device_module(model) is not None:
        state["device"] = device_module(model).get_rng_state()
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    return state


def set_rng_state(model: nn.Module, state: dict) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "device" in state and device_module(model) is not None:
        device_module(model).set_rng_state(state["device"])
    if "numpy" in state:
        import numpy

        numpy.random.set_state(state["numpy"])


def seed_everything(seed: int) -> None:
    """What rng_state is about, from one number below 2**32."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


# --- what the user gives


def extra_state(extra: dict) -> tuple[dict[str, torch.Tensor], dict[str, dict]]:
    """({name: pickled}, {name: {number: DTensor}}) of objects with a state_dict, or of plain values."""
    blobs, tensors = {}, {}
    for name, value in extra.items():
        if name in RESERVED:
            raise ValueError(f"{name!r} cannot be the name of an extra: it is an argument of its own")
        if callable(getattr(value, "state_dict", None)):
            value = value.state_dict()
        elif callable(getattr(value, "load_state_dict", None)):
            raise TypeError(f"{name}={value!r} has load_state_dict and no state_dict; expected both, or a plain value")
        found: list[DTensor] = []
        blobs[name] = pickled(value, found)
        if found:
            tensors[name] = {str(number): without_partial(tensor.detach()) for number, tensor in enumerate(found)}
    return blobs, tensors


def pickled(value, sharded: list[DTensor]) -> torch.Tensor:
    """`value` as uint8 elements. Its DTensors are appended to `sharded`, and a placeholder stands for each."""

    def one(leaf):
        if not isinstance(leaf, DTensor):
            return leaf
        sharded.append(leaf)
        return Sharded(len(sharded) - 1)

    file = io.BytesIO()
    torch.save(tree_map(one, value), file)
    return torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)


def unpickled(data: torch.Tensor, sharded: dict[int, DTensor]):
    value = torch.load(io.BytesIO(data.cpu().numpy().tobytes()), map_location="cpu", weights_only=False)
    return tree_map(lambda leaf: sharded[leaf.number] if isinstance(leaf, Sharded) else leaf, value)
