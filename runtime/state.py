"""One compiled model at run time: where it stands in its optimizer step.

The states of a step:

    idle ──forward──▶ in_forward ──▶ ... ──backward──▶ end_backward: reduce, release ──▶ idle
    no_sync() makes it accumulate: gathered parameters and local gradients stay until the first backward pass
    outside of no_sync is over.

A backward pass is noticed by the hooks of the parameters that it accumulates into, so it does not matter by
which method or output it was reached.
"""

from __future__ import annotations

import contextlib
import copy
import weakref

import torch
import torch.distributed as dist

from .markers import STEP, WHOLE
from .param import ParamState
from .trace import Trace


MOST_BROADCASTS = 8  # ranks: a gather is as many broadcasts, each of which has a latency


class ModelState:
    """`params` maps names (the first one of tied parameters) to states.

    `engine` is PyTorch's autograd engine as torch_compat shows it: `queue_after_backward(f)` and `backward_id()`.
    `transport` is the backend of the group: "nccl", "gloo", or what a fake group stands for.
    """

    def __init__(self, mesh, group: str, world: int, rank: int, engine, transport: str):
        self.mesh, self.group, self.world, self.rank, self.engine = mesh, group, world, rank, engine
        self.params: dict[str, ParamState] = {}
        self.is_accumulating = False  # gradients of stages 0 and 1 stay local, gathered parameters stay gathered
        self.is_syncing = True  # False inside no_sync
        self.in_forward = False
        self.compute_dtype: torch.dtype | None = None  # in mixed precision
        self.was_in_forward = False  # what backward may run again was read in forward, and not outside of it
        self.backward_id = None  # of the backward pass that was noticed last
        self.before_release = None  # called with this state at the end of each backward pass, when most is alive
        self.is_peeking = False  # reads give meta tensors: something only asks for shapes
        self.trace = Trace()
        # gloo has no reduce-scatter of its own: PyTorch runs it as an all-reduce, of twice the volume.
        self.transport = transport
        self.exchanges = world > 1 and transport == "gloo"
        # Its all-gather copies too much. This rank's number if gathers are broadcasts, see runtime/collectives.py.
        self.broadcasts = rank if self.exchanges and world <= MOST_BROADCASTS else None

    def __deepcopy__(self, memo) -> ModelState:
        new = memo[id(self)] = ModelState(self.mesh, self.group, self.world, self.rank, self.engine, self.transport)
        new.compute_dtype = self.compute_dtype
        new.params = copy.deepcopy(self.params, memo)
        return new

    # --- forward

    @contextlib.contextmanager
    def forward(self):
        """Around a forward of the whole model."""
        self.begin_forward()
        self.in_forward = True
        try:
            yield
            for state in self.params.values():
                state.check_unedited()
            if not torch.is_grad_enabled():  # no backward pass will compare, and the caller gets what was gathered
                self.compare_gathers()
        finally:
            self.in_forward = False
            for state in self.params.values():
                state.last_read = None
            if not torch.is_grad_enabled() and not self.is_accumulating:
                self.release()

    def compare_gathers(self) -> None:
        """Raise unless ranks ran the same collectives, where forward has any."""
        if any(state.lifetime != WHOLE for state in self.params.values()):
            self.trace.compare(self.mesh.get_group(), self.mesh.device_type)

    def is_computing(self) -> bool:
        """Whether a read is one of forward, which in mixed precision has a dtype to compute in; or of a part of forward
        that runs again in backward (checkpointing)."""
        if torch.compiler.is_dynamo_compiling() or self.in_forward:
            return self.in_forward
        if self.engine.backward_id() >= 0:
            return self.was_in_forward
        if not self.trace.is_open:  # no forward waits for its backward: what is read now is what may run again
            self.was_in_forward = False
        return False

    def begin_forward(self) -> None:
        if self.trace.is_open:
            self.compare_gathers()  # of a forward whose backward has not come, and may never
        self.trace.is_open = self.was_in_forward = True
        for state in self.params.values():
            self.hook_param(state)
        if self.is_accumulating:
            for state in self.params.values():
                state.drop_zeroed_grad()
            self.check_held()
            local = [state for state in self.params.values() if state.local is not None and state.param.requires_grad]
            if self.is_syncing and local and not any(state.has_local_grad() for state in local):
                self.is_accumulating = False  # the gradients of the no_sync micro-batches were zeroed
        if not self.is_accumulating:
            # A step, a load or an edit may have changed the shards since, and nothing tells: gather anew.
            self.release()

    def check_held(self) -> None:
        """Raise if parameters changed since they were gathered; only looks at the first elements of each."""
        for state in self.params.values():
            if state.held is None or state.held.untyped_storage().size() == 0:
                continue
            shard = state.param._local_tensor.flatten()[:32].to(state.held.dtype)
            mine = state.rows_of(state.held)
            if not torch.equal(shard, mine.flatten()[:32]):
                self.is_accumulating = False
                raise RuntimeError(
                    f"zero_fx: parameter {state.name!r} changed between micro-batches of one optimizer step. "
                    "Step the optimizer after the backward pass outside of no_sync()"
                )

    # --- backward

    def hook_param(self, state: ParamState) -> None:
        if state.own_hook is not None or not state.param.requires_grad:
            return
        me = weakref.ref(self)  # a strong one would be a cycle through C++ that the collector does not see

        def notice(_) -> None:
            model = me()
            if model is not None:
                model.notice_backward()

        state.own_hook = notice
        state.param.register_post_accumulate_grad_hook(notice)
        if state.local is not None:
            state.local.register_post_accumulate_grad_hook(notice)

    def notice_backward(self) -> None:
        current = self.engine.backward_id()
        if current != self.backward_id:  # by number and not by a flag, which a backward that raised would leave on
            self.backward_id = current
            self.engine.queue_after_backward(self.end_backward)

    def end_backward(self) -> None:
        self.trace.compare(self.mesh.get_group(), self.mesh.device_type)
        if self.before_release is not None:
            self.before_release(self)
        if not self.is_syncing:
            for state in self.params.values():
                state.show_local_grad()
            return
        # A checkpointed region may have a backward pass of its own inside the whole one, which ends here first: so
        # what the gradients say decides, and not only the switch.
        if self.is_accumulating or any(state.has_local_grad() for state in self.params.values()):
            self.is_accumulating = False
            self.reduce_local_grads()
        self.release()

    def reduce_local_grads(self) -> None:
        """The one reduction of stages 0 and 1 after several micro-batches. Which parameters have a gradient on any
        rank is agreed upon first: each rank may have used others."""
        states = [state for state in self.params.values() if state.local is not None]
        if not states:
            return
        device = states[0].local.device
        used = torch.tensor([state.has_local_grad() for state in states], dtype=torch.uint8, device=device)
        dist.all_reduce(used, dist.ReduceOp.MAX, group=self.mesh.get_group())
        for state, is_used in zip(states, used.tolist()):
            if is_used:
                state.reduce_local_grad()

    def release(self) -> None:
        for state in self.params.values():
            state.release()

    # --- what a user switches

    @contextlib.contextmanager
    def no_sync(self):
        if not self.is_syncing:
            raise RuntimeError("zero_fx: no_sync() is already active for this model; leave it before entering again")
        self.is_syncing, self.is_accumulating = False, True
        try:
            yield
        finally:
            self.is_syncing = True

    @contextlib.contextmanager
    def peek(self):
        """Reads give meta tensors of the full shape: no collective for code that only asks what a parameter is."""
        before, self.is_peeking = self.is_peeking, True
        try:
            yield
        finally:
            self.is_peeking = before

    def held_bytes(self) -> int:
        """Bytes of gathered parameters that live now."""
        return sum(s.held.untyped_storage().nbytes() for s in self.params.values() if s.lifetime == STEP)
