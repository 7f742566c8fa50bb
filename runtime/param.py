"""One sharded parameter at run time: where its shard, its gathered values and its local gradient are.

N = ranks. The model's parameter is a DTensor: `Shard(0)`, or `Replicate()` where it is kept whole. Modules read the
full value through `read`: inside a captured graph that is the marker `gather_param`, outside it the same collectives
run at once, under an autograd function whose backward reduces the gradient.
"""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from .collectives import all_gather, all_to_all, gather_held, is_held, release, sum_of_pieces, wait, without_storage
from .full import FullParam, full_param
from .layout import chunk_rows, owned_rows, pad_rows
from .markers import STEP, WHOLE, as_dtype, reduce_grad
from .tensors import hooks_of

if TYPE_CHECKING:
    from .state import ModelState


class ParamState:
    """Everything about one parameter that is not its values.

    `compute_dtype`, `reduce_dtype`: in mixed precision, in which forward reads the parameter and in which its gradient
            travels; None: in its own.
    `held`  (N*ceil(rows/N), the rest) the gathered values of lifetime "step", as a matrix if they have more than two
            dimensions (see passes/shard_params.py), in the dtype to compute in; no storage while released. Else None.
    `local` (rows, ...) leaf without storage whose `.grad` is this rank's own, unreduced gradient over several
            micro-batches, where the stage accumulates locally (stages 0 and 1, and whole parameters). Else None.
    """

    def __init__(
        self,
        model: ModelState,
        name: str,
        full: torch.Tensor,
        rows: torch.Tensor,
        lifetime: str,
        accumulates: bool,
        compute_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
    ):
        self.model = model
        self.name = name
        self.shape = tuple(full.shape)
        self.lifetime = lifetime
        self.world = model.world
        self.group = model.group
        self.accumulates = accumulates
        self.compute_dtype, self.reduce_dtype = compute_dtype, reduce_dtype
        self.param = self.make_param(full, rows)
        self.make_buffers()

    def make_buffers(self) -> None:
        self.own_hook = None
        self.last_read = None  # the full value that eager code got last in this forward
        self.held = self.local = None
        dtype, device = self.param.dtype, self.param.device
        if self.lifetime == STEP:
            rest = self.shape[1:] if len(self.shape) <= 2 else (math.prod(self.shape[1:]),)
            padded = (chunk_rows(self.shape[0], self.world) * self.world, *rest)
            self.held = without_storage(padded, self.compute_dtype or dtype, device)
        if self.accumulates:
            self.local = torch.zeros((), dtype=dtype, device=device).expand(self.shape).detach().requires_grad_()

    def __deepcopy__(self, memo) -> ParamState:
        """A copy with shards of its own and nothing gathered or accumulated."""
        new = memo[id(self)] = object.__new__(ParamState)
        new.__dict__.update(self.__dict__)
        new.model = copy.deepcopy(self.model, memo)
        new.param = self.copy_param(memo)
        new.make_buffers()
        return new

    def make_param(self, full: torch.Tensor, rows: torch.Tensor) -> torch.nn.Parameter:
        """The DTensor parameter of `rows`, this rank's own memory of its part, that takes the place of `full`."""
        tensor = self.as_dtensor(rows)
        param = torch.nn.Parameter(tensor, requires_grad=full.requires_grad)
        for name, value in vars(full).items():  # what people note on parameters, to sort them into groups
            setattr(param, name, value)
        return param

    def copy_param(self, memo) -> torch.nn.Parameter:
        """For copy.deepcopy: a parameter of its own without a gradient, as for a plain one. DTensor would copy the
        gradient too, which fails for those that a compiled graph returned."""
        if id(self.param) not in memo:
            tensor = self.as_dtensor(self.param._local_tensor.detach().clone())
            param = memo[id(self.param)] = torch.nn.Parameter(tensor, requires_grad=self.param.requires_grad)
            for name, value in vars(self.param).items():
                if not name.startswith("_"):
                    setattr(param, name, copy.deepcopy(value, memo))
        return memo[id(self.param)]

    def rows_of(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor of the full shape, or padded to N*ceil(rows/N) rows: a view of its rows, or all of it
        if kept whole."""
        if self.lifetime == WHOLE:
            return full
        return full.narrow(0, *owned_rows(self.shape[0], self.world, self.model.rank))

    def as_dtensor(self, local: torch.Tensor, placement=None) -> DTensor:
        placement = placement or (Replicate() if self.lifetime == WHOLE else Shard(0))
        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(
            local, self.model.mesh, [placement], run_check=False, shape=torch.Size(self.shape), stride=stride
        )

    # --- reading

    def read(self) -> torch.Tensor:
        """The full parameter (rows, ...); differentiable. In mixed precision forward gets it in the dtype to compute in;
        outside of it the full values are those of the shards."""
        param, model = self.param, self.model
        compute = self.compute_dtype if self.compute_dtype is not None and model.is_computing() else None
        if torch.compiler.is_dynamo_compiling():
            # The order of the tests keeps graphs of parameters that never accumulate free of a guard on the switch.
            local = self.local if self.local is not None and param.requires_grad and model.is_accumulating else None
            # Where the gradient stays local the parameter itself is left out of the graph: as an input without a
            # gradient it would have its hooks called with None.
            shard = param.to_local() if local is None else param._local_tensor
            where = (self.shape, self.lifetime, self.world, self.name, self.group)
            if compute is None:
                return torch.ops.zero_fx.gather_param(shard, self.held, local, *where)
            return torch.ops.zero_fx.gather_param(
                shard, self.held, local, *where, compute_dtype=compute, reduce_dtype=self.reduce_dtype
            )
        if model.is_peeking:
            return torch.empty(self.shape, dtype=param.dtype, device="meta")
        model.hook_param(self)
        if self.lifetime != WHOLE or param.requires_grad:
            model.trace.note(self.name)
        if model.is_accumulating and self.local is not None and param.requires_grad:
            full = ReadParam.apply(param._local_tensor, self.local, self, compute)
        else:
            full = ReadParam.apply(param.to_local(), None, self, compute)
        if not model.in_forward:
            return full_param(full, self)
        self.check_unedited()
        self.last_read = full.detach() if torch.is_grad_enabled() else None
        return full

    def as_sharded(self, value):
        """What stands for `value` in an operation on the sharded parameter: the parameter for its full values, this
        rank's part for a plain tensor of the full shape, anything else as it is."""
        if isinstance(value, FullParam):
            return value.zero_fx_state.param
        if type(value) is torch.Tensor and tuple(value.shape) == self.shape and value.dim():
            return self.as_dtensor(self.rows_of(value))
        return value

    def full_value(self, shard: torch.Tensor, compute: torch.dtype | None) -> torch.Tensor:
        """The full parameter now, in `compute` or its own dtype, outside autograd; a view of `shard`, of `held`, or fresh."""
        source = as_dtype(shard, compute)
        if self.lifetime == WHOLE:
            return source.view_as(source)
        padded = pad_rows(source, chunk_rows(self.shape[0], self.world))
        is_held = self.lifetime == STEP and compute == self.compute_dtype
        if is_held and (self.model.in_forward or self.model.is_accumulating):
            gather_held(self.held, padded, self.world, self.group, self.name, rank=self.model.broadcasts)
            full = wait(self.held, padded, self.name).data
        else:
            started = all_gather(padded, self.world, self.group, self.name, rank=self.model.broadcasts)
            full = wait(started, padded, self.name)
        return full.narrow(0, 0, self.shape[0]).view(self.shape)

    def check_unedited(self) -> None:
        """Raise if the copy that eager code read last was edited: the edit of a gathered copy would be lost."""
        full, self.last_read = self.last_read, None
        if full is None or (self.lifetime == WHOLE and full.dtype == self.param.dtype):
            return  # not read, or a view of the parameter itself
        if torch.equal(self.rows_of(full), self.param._local_tensor.to(full.dtype)):
            return
        raise RuntimeError(
            f"zero_fx: forward edits parameter {self.name!r} in place. Under ZeRO it would edit a gathered copy and be "
            "lost; edit model.parameters() after optimizer.step() under torch.no_grad()"
        )

    def reduce(self, grad: torch.Tensor, reduce_dtype: torch.dtype | None) -> torch.Tensor:
        """This rank's part of the mean over ranks of `grad` (rows, ...), which travels in `reduce_dtype` or its own."""
        dtype = self.param.dtype
        if self.lifetime == WHOLE or not self.model.exchanges:
            rows = owned_rows(self.shape[0], self.world, self.model.rank)[1] if self.shape else 0
            where = (rows, self.lifetime == WHOLE, self.world, self.name, self.group)
            return reduce_grad(grad, *where, reduce_dtype=reduce_dtype, shard_dtype=dtype)
        padded = pad_rows(as_dtype(grad, reduce_dtype), chunk_rows(grad.shape[0], self.world) * self.world)
        pieces = wait(all_to_all(padded, self.world, self.group, self.name), padded, self.name)
        rows = owned_rows(self.shape[0], self.world, self.model.rank)[1]
        return sum_of_pieces(pieces, self.world, dtype).narrow(0, 0, rows)

    def release(self) -> None:
        if self.held is not None and is_held(self.held):
            release(self.held)

    # --- gradients that wait for the last micro-batch

    def show_local_grad(self) -> None:
        """Let the unreduced gradient be `param.grad`, as a DTensor that is `Partial`: what it is, and so that
        `zero_grad` and `full_tensor` mean what they say. The storage is the one autograd goes on adding to."""
        if not self.has_local_grad():
            return
        reduced = self.param.grad
        if reduced is not None and not reduced.placements[0].is_partial():
            # From an earlier backward. Added so that the mean over ranks of the sum has it once.
            share = 1 if self.lifetime == WHOLE else self.world
            self.rows_of(self.local.grad).add_(reduced._local_tensor, alpha=share)
        self.param.grad = self.as_dtensor(self.local.grad, Partial("avg"))

    def drop_zeroed_grad(self) -> None:
        """After `zero_grad(set_to_none=True)` the local gradient must go as well."""
        if self.local is not None and self.local.grad is not None and self.param.grad is None:
            self.local.grad = None

    def has_local_grad(self) -> bool:
        return self.local is not None and self.local.grad is not None

    def reduce_local_grad(self) -> None:
        """Reduce what the micro-batches left on this rank, into `param.grad`. A rank that never used the parameter
        adds zeros, so that ranks agree on the collectives whatever each of them ran."""
        grad = self.local.grad
        if grad is None:
            grad = torch.zeros(self.shape, dtype=self.param.dtype, device=self.local.device)
        self.local.grad = None
        reduced = self.as_dtensor(self.reduce(grad, self.reduce_dtype))
        # Autograd never had this gradient at the parameter, so the hooks of its users are called here.
        for hook in list(hooks_of(self.param, "gradient").values()):
            changed = hook(reduced)
            reduced = reduced if changed is None else changed
        kept = self.param.grad
        is_shown = kept is None or kept.placements[0].is_partial()
        self.param.grad = reduced if is_shown else kept + reduced
        for hook in list(hooks_of(self.param, "accumulated").values()):
            if hook is not self.own_hook:
                hook(self.param)


class ReadParam(torch.autograd.Function):
    """Full value forward, reduction (or local accumulation) backward: the marker, outside a captured graph."""

    @staticmethod
    def forward(shard, local, state, compute):
        return state.full_value(shard, compute)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, local, ctx.state, compute = inputs
        ctx.is_local = local is not None
        ctx.reduce_dtype = None if compute is None else ctx.state.reduce_dtype

    @staticmethod
    def backward(ctx, grad):
        if ctx.is_local:
            return None, grad.to(ctx.state.param.dtype), None, None
        return ctx.state.reduce(grad, ctx.reduce_dtype), None, None, None
