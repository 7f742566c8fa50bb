"""From a captured graph to something that runs: the torch.compile backend of one compiled model.

Dynamo hands over a graph with markers; AOTAutograd makes the joint graph, where the JOINT passes run, and cuts it;
the HALVES passes run on forward and backward; then Inductor lowers each, or, with lowering="eager", the rewritten
graph is run operator by operator. The same passes, in the same order, for both.
"""

from __future__ import annotations

import dataclasses

import torch
from functorch.compile import make_boxed_func
from torch import fx

from .budget import Plan, Problem, choose
from .config import Config
from .costs import UNKNOWN_SIZE
from .partition import Partitioner
from .passes.pipeline import BUDGET, HALVES, JOINT, SCHEDULE, PassRun, run_passes
from .passes.prefetch import start_order
from .runtime.agree import Agreement
from .runtime.state import ModelState
from .torch_compat import (
    CustomGraphPass,
    aot_autograd,
    compile_fx,
    inductor_decompositions,
    keep_order_options,
    size_hint,
)
from .vocabulary import WHOLE, Gather, PassConfig, Reduce, collective_sequence, find


NUMBER = "zero_fx_number"  # in the meta of a half: of the Dynamo graph that it was cut from, counted from 1


@dataclasses.dataclass
class Graphs:
    """What was compiled for one model, in the order of compilation; only ever added to, but for `ran`."""

    captured: int = 0  # Dynamo graphs
    plans: list[Plan] = dataclasses.field(default_factory=list)  # one a joint graph, under a memory budget
    halves: list[tuple[str, fx.GraphModule]] = dataclasses.field(default_factory=list)  # ("forward", rewritten graph)
    ran: set[int] = dataclasses.field(default_factory=set)  # numbers (NUMBER) of Dynamo graphs, in the last forward with gradients
    runs: list[PassRun] = dataclasses.field(default_factory=list)  # of all passes on all graphs, in order


class Backend:
    """`torch.compile(backend=...)` for one model; each run of a graph is noted in `trace`, to be compared over ranks."""

    def __init__(self, config: Config, passes: PassConfig, agreement: Agreement, state: ModelState):
        self.config, self.passes, self.agreement, self.trace = config, passes, agreement, state.trace
        self.resident_bytes, self.held_bytes = resident_bytes(state), held_bytes(state)
        self.graphs = Graphs()
        self.executes = True  # else nothing is lowered, and a graph answers with empty tensors: see dry_run.py
        self.rewrites = True  # else halves stay as they were cut: see inspect.py
        self.markers = ""  # of the joint graph that was rewritten last

    def __call__(self, gm: fx.GraphModule, example_inputs):
        refuse_weight_edits(gm)
        self.graphs.captured += 1
        is_inductor = self.config.lowering == "inductor" and self.executes
        lower = self.lower_inductor if is_inductor else self.lower_eager
        self.markers, number, ran = "", self.graphs.captured, self.graphs.ran
        compiled, markers, trace = lower(gm, example_inputs, number), self.markers, self.trace

        def run(*args):
            if torch.is_grad_enabled():
                ran.add(number)
            if markers:
                trace.note(markers)
            return compiled(*args)

        return run

    def lower_inductor(self, gm: fx.GraphModule, example_inputs, number: int):
        return compile_fx(
            gm,
            example_inputs,
            {
                "joint_custom_post_pass": GraphHook(self, number, joint=True),
                "custom_partitioner_fn": self.partitioner(),
                "post_grad_custom_post_pass": GraphHook(self, number, joint=False),
                **keep_order_options("zero_fx", near=self.passes.memory_budget is not None),
            },
        )

    def lower_eager(self, gm: fx.GraphModule, example_inputs, number: int):
        def half(label: str):
            def compile_half(gm: fx.GraphModule, example_inputs):
                if label == "inference":  # there is nothing to cut, so the partitioner's hook was not called
                    self.rewrite_joint(gm)
                self.rewrite_half(gm, label, number)
                if not self.executes:
                    return boxed(empty_outputs(gm))
                if label == "backward":  # node by node: it frees what forward saved as soon as it is read
                    return boxed(fx.Interpreter(gm).boxed_run)
                return make_boxed_func(gm.forward)

            return compile_half

        def partition(gm: fx.GraphModule, joint_inputs, **kwargs):
            self.rewrite_joint(gm)
            return self.partitioner()(gm, joint_inputs, **kwargs)

        compiler = aot_autograd(
            fw_compiler=half("forward"),
            bw_compiler=half("backward"),
            inference_compiler=half("inference"),
            partition_fn=partition,
            decompositions=inductor_decompositions() if self.config.lowering == "inductor" else {},
        )
        return compiler(gm, example_inputs)

    def partitioner(self) -> Partitioner:
        return Partitioner(None if self.passes.memory_budget is None else self.plan_memory)

    def plan_memory(self, gm: fx.GraphModule, cut) -> float:
        """Decide, as all ranks do, what is saved and kept under the memory budget; tags `gm`."""
        fused = self.config.lowering == "inductor"
        problem = Problem(gm, cut, self.passes, self.resident_bytes, self.held_bytes, fused)
        plan, names = choose(problem), gather_names(gm)
        # Ranks with inputs of other shapes would plan otherwise: the first rank's plan holds, as numbers.
        proposed = (round(plan.fraction * 100), *[i for i, name in enumerate(names) if name in plan.kept])
        percent, *kept = self.agreement.check("joint", ("what to save", *names), proposed)
        plan = Plan(percent / 100, tuple(names[i] for i in kept), plan.peak_bytes)
        self.graphs.plans.append(plan)
        self.run(gm, BUDGET, dataclasses.replace(self.passes, fraction=plan.fraction, kept=plan.kept), "joint")
        return plan.fraction

    def rewrite_joint(self, gm: fx.GraphModule) -> None:
        self.run(gm, JOINT, self.passes, "joint")
        self.markers = marker_names(gm)

    def rewrite_half(self, gm: fx.GraphModule, label: str, number: int) -> None:
        gm.meta[NUMBER] = number
        if not self.rewrites:
            self.graphs.halves.append((label, gm))
            return
        self.run(gm, HALVES, self.passes, label)
        # Ranks with inputs of other shapes would start their collectives in another order: the first rank decides.
        proposed = start_order(gm, self.passes)
        order = self.agreement.check(label, collective_sequence(gm), proposed)
        self.run(gm, SCHEDULE, dataclasses.replace(self.passes, order=order), label)
        self.graphs.halves.append((label, gm))

    def run(self, gm: fx.GraphModule, passes: tuple, config: PassConfig, label: str) -> None:
        self.graphs.runs += run_passes(gm, passes, config, label)


def boxed(run):
    """`run`, which takes a list of arguments and empties it, marked as such for AOTAutograd."""

    def call(args):
        return run(args)

    call._boxed_call = True
    return call


def empty_outputs(gm: fx.GraphModule):
    """In place of a graph: tensors of its outputs' types, with nothing in them."""
    inputs = list(gm.graph.find_nodes(op="placeholder"))
    outputs = gm.graph.output_node().args[0]

    def made(value):
        if isinstance(value, torch.Tensor):
            sizes, strides = ([size_hint(n, UNKNOWN_SIZE) for n in numbers] for numbers in (value.shape, value.stride()))
            return torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)
        return size_hint(value, UNKNOWN_SIZE) if isinstance(value, torch.SymInt) else value

    def run(args):
        given = dict(zip(inputs, args))
        args.clear()
        return [given[o] if o in given else made(o.meta["val"]) if isinstance(o, fx.Node) else o for o in outputs]

    return run


ADAM_STATES = 2  # of a parameter's size each: what a budget sets aside for the optimizer


def resident_bytes(state: ModelState) -> int:
    """Bytes of this rank's parameters and of the states that Adam will have for them."""
    total = 0
    for param in state.params.values():
        local = param.param.to_local()
        total += local.numel() * local.element_size() * (1 + ADAM_STATES * param.param.requires_grad)
    return total


def held_bytes(state: ModelState) -> int:
    """Bytes of the gathered parameters that stages 1 and 2 hold through a step."""
    return sum(s.held.numel() * s.held.element_size() for s in state.params.values() if s.held is not None)


def gather_names(gm: fx.GraphModule) -> list[str]:
    return [Gather(*node.args).name for node in find(gm.graph, "gather_param")]


def marker_names(gm: fx.GraphModule) -> str:
    """Which parameters a joint graph gathers and reduces, in one line; empty if it runs no collective."""
    gathers = [Gather(*node.args) for node in find(gm.graph, "gather_param")]
    names = [f"gather {gather.name}" for gather in gathers if gather.lifetime != WHOLE]
    names += [f"reduce {Reduce(*node.args).name}" for node in find(gm.graph, "reduce_grad")]
    return "graph: " + ", ".join(names) if names else ""


class GraphHook(CustomGraphPass):
    """Inductor's hook on a graph: the joint one, or a half after its own rewrites."""

    def __init__(self, backend: Backend, number: int, joint: bool):
        self.backend, self.number, self.joint = backend, number, joint

    def __call__(self, graph: fx.Graph) -> None:
        gm = graph.owning_module
        if self.joint:
            self.backend.rewrite_joint(gm)
        else:
            self.backend.rewrite_half(gm, label_of(graph), self.number)

    def uuid(self):
        # A cache hit would skip the hook, and with it the comparison of collectives across ranks.
        return None


def label_of(graph: fx.Graph) -> str:
    names = {node.target for node in graph.find_nodes(op="placeholder")}
    return "backward" if any("tangents" in name for name in names) else "forward"


def refuse_weight_edits(gm: fx.GraphModule) -> None:
    """Raise for an in-place edit of a weight inside forward: it would edit the gathered copy and be lost."""
    weights: dict[fx.Node, str] = {}
    marker = torch.ops.zero_fx.gather_param
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target in (marker, marker.default):
            weights[node] = node.args[6]
            continue
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        if source not in weights:
            continue
        if name in ("detach", "view", "data", "t", "narrow", "view_as") or "_get_data_attr" in name:
            weights[node] = weights[source]
        elif name.endswith("_") and not name.endswith("__") and name != "requires_grad_":
            raise ValueError(
                f"zero_fx: forward edits parameter {weights[source]!r} in place ({name}). Under ZeRO it would edit a "
                "gathered copy and be lost; edit model.parameters() after optimizer.step() under torch.no_grad()"
            )
