"""Save a training run: `save_checkpoint`, `async_save_checkpoint`. See checkpoint_load.py for the way back."""

from __future__ import annotations

import concurrent.futures
import os
import shutil
import uuid
import weakref
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint import save as dcp_save
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .model import check_compiled
from .runtime import checkpoint_files as files
from .runtime.checkpoint_state import extra_state, model_state, optimizer_state, rank_state
from .runtime.together import described, from_rank_0, raise_failures, together
from .torch_compat import gloo_group, tree_map

if TYPE_CHECKING:
    from concurrent.futures import Future

SAVE = "saving a checkpoint"


class Saver:
    """What saves of one model share: the thread that writes in the background, and a process group of its own for it,
    since collectives of training run meanwhile. `last` is the save in flight."""

    def __init__(self):
        self.thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="zero_fx_checkpoint")
        self.mesh: DeviceMesh | None = None
        self.last: Future | None = None

    def wait(self) -> None:
        """Until the last save is done; raises its error."""
        last, self.last = self.last, None
        if last is not None:
            last.result()

    def cpu_mesh(self, group: dist.ProcessGroup) -> DeviceMesh:
        """Of the ranks of `group`, over gloo. Collective at the first call."""
        if self.mesh is None:
            name = from_rank_0(group, SAVE, lambda: f"zero_fx_checkpoint_{uuid.uuid4().hex}")
            own = gloo_group(dist.get_process_group_ranks(group), name)
            self.mesh = DeviceMesh.from_group(own, "cpu")
        return self.mesh


SAVERS: weakref.WeakKeyDictionary[nn.Module, Saver] = weakref.WeakKeyDictionary()


def save_checkpoint(
    path: str | os.PathLike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int | None = None,
    keep: int | None = None,
    **extra,
) -> str:
    """Write a checkpoint into `path/step-00000100`, and return that folder. Collective: every rank calls it alike.

    path: a folder that all ranks see, of one run's checkpoints; it is made if it is not there.
    model: what zero_fx.compile returned; its parameters and buffers, under the plain model's names.
    step: optimizer steps done; by default one more than the last checkpoint's in `path`.
    keep: how many checkpoints stay in `path`, this one included; None: all.
    extra: objects with state_dict and load_state_dict (LR scheduler, GradScaler, data loader), or values that pickle can
        write. What differs between ranks is kept for each of them. Random states are saved without being asked for.

    The files are those of torch.distributed.checkpoint, with the names that FSDP2's users have: model.*, optim.*. A crash at
    any moment leaves the earlier checkpoints as they were: files are written aside, synced to disk, and marked complete
    last. Raises OSError, ValueError or TypeError on all ranks if any of them fails.
    """
    saver, group = begin(model, step, keep)
    state = together(group, SAVE, lambda: gathered_state(model, optimizer, extra))
    state |= ranks_state(model, group, state)
    return write(os.fspath(path), state, step, keep, group)


def async_save_checkpoint(
    path: str | os.PathLike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int | None = None,
    keep: int | None = None,
    **extra,
) -> Future:
    """As save_checkpoint, with the writing done in the background. Returns a concurrent.futures.Future of the folder.

    Training may go on at once: the call copies this rank's shards to host memory, which it costs for the time of writing. An
    error is raised by the future's result(), or else by the next save. Call result() before the process group is destroyed.
    """
    saver, group = begin(model, step, keep)
    mesh = saver.cpu_mesh(group)
    state = together(group, SAVE, lambda: gathered_state(model, optimizer, extra))
    state |= ranks_state(model, group, state)
    state = tree_map(lambda value: staged(value, mesh), state)
    saver.last = saver.thread.submit(write, os.fspath(path), state, step, keep, mesh.get_group())
    return saver.last


def begin(model: nn.Module, step: int | None, keep: int | None) -> tuple[Saver, dist.ProcessGroup]:
    """Check the arguments, and wait for the save before."""
    check_compiled(model)
    for name, value, least in (("step", step, 0), ("keep", keep, 1)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise TypeError(f"{name}={value!r}: expected an int")
        if value is not None and value < least:
            raise ValueError(f"{name}={value}: expected {least} or more")
    saver = SAVERS.setdefault(model, Saver())
    saver.wait()
    return saver, model._zero_fx_model.mesh.get_group()


def gathered_state(model: nn.Module, optimizer, extra: dict) -> dict:
    """This rank's part of the checkpoint, but for what needs a comparison with other ranks."""
    rank = model._zero_fx_model.rank
    blobs, tensors = extra_state(extra)
    state = {"model": model_state(model, rank), "extra": blobs, "extra_tensors": tensors}
    if optimizer is not None:
        state["optim"] = optimizer_state(model, optimizer, rank)
    return state


def ranks_state(model: nn.Module, group: dist.ProcessGroup, state: dict) -> dict:
    """{"ranks", "extra"}: this rank's own values. Extras in common are rank 0's to write."""
    ranks = rank_state(model, group, state["extra"])
    return {"ranks": ranks, "extra": state["extra"] if dist.get_rank(group) == 0 else {}}


def staged(value, mesh: DeviceMesh):
    """A copy in host memory, which training does not change."""
    if isinstance(value, DTensor):
        local = value._local_tensor.detach().to("cpu", copy=True)
        return DTensor.from_local(
            local, mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
        )
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def write(path: str, state: dict, step: int | None, keep: int | None, group: dist.ProcessGroup) -> str:
    """Write `state` as a checkpoint of `path`; the ranks of `group` each write their part."""
    step, aside = from_rank_0(group, SAVE, lambda: start(path, step))
    try:
        together(group, SAVE, lambda: check_shared(aside))
        try:
            dcp_save(state, storage_writer=Writer(aside), process_group=group)
        except CheckpointException as error:  # not an Exception; it has every rank's
            failures = {rank: described(cause) for rank, (cause, _) in error.failures.items()}
            raise_failures(SAVE, failures, error)
        written = together(group, SAVE, lambda: files.checksums(aside, own_files(aside, group)))
        parts = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, written, group=group)
        written = {name: value for part in parts for name, value in part.items()}
        return from_rank_0(group, SAVE, lambda: files.finish(aside, step, len(parts), written, keep))
    except BaseException:
        if dist.get_rank(group) == 0:
            shutil.rmtree(aside, ignore_errors=True)
        raise


class Writer(FileSystemWriter):
    """Says why a write failed: torch.save hides an error of the disk behind one about its own file."""

    def write_data(self, plan, planner):
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            cause = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            raise cause or error from None


def start(path: str, step: int | None) -> tuple[int, str]:
    """(step, folder to write into)"""
    if os.path.exists(path) and not os.path.isdir(path):
        raise NotADirectoryError(f"{path} is not a folder; give a folder for the checkpoints of a run")
    if step is None:
        saved = [files.step_of(folder) for folder in files.complete_folders(path)] if os.path.isdir(path) else []
        step = max(saved, default=0) + 1
    return step, files.make_aside(path, step)


def check_shared(aside: str) -> None:
    if not os.path.isdir(aside):
        raise FileNotFoundError(f"this rank does not see {aside}, which rank 0 made; checkpoints need a shared file system")


def own_files(aside: str, group: dist.ProcessGroup) -> list[str]:
    """Of the checkpoint's files, those that this rank is to look at: each file is one rank's."""
    names = sorted(os.listdir(aside))
    return names[dist.get_rank(group) :: dist.get_world_size(group)]
