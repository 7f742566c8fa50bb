"""The only file that names private parts of PyTorch, and the range of versions they were seen in.

Everything here was read in the sources of 2.11.0, 2.12.1, 2.13.0 and 2.14.1. A name that a release lacks is
reported at import, by name, so that a PyTorch upgrade fails with one clear line and not inside a training step.
"""

from __future__ import annotations

import functools
import importlib
import re
import unittest.mock
import warnings
from collections.abc import Callable

import sympy
import torch

OLDEST = (2, 11)
NEWEST = (2, 14)


def check_version(version: str) -> None:
    """Raise ImportError below the supported range; warn once above it. `version` is e.g. "2.13.0+cpu"."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if not found:
        raise ImportError(f"zero_fx cannot read the PyTorch version {version!r}; it supports 2.11 to 2.14")
    major_minor = (int(found[1]), int(found[2]))
    if major_minor < OLDEST:
        raise ImportError(
            f"zero_fx needs PyTorch 2.11 or newer and found {version}: older releases lack compiler hooks "
            "that it stands on. Install one with: pip install 'torch>=2.11,<2.15'"
        )
    if major_minor > NEWEST:
        warnings.warn(
            f"zero_fx is tested with PyTorch 2.11 to 2.14 and found {version}; it will try", stacklevel=3
        )


def private(module: str, name: str):
    """Import one private name; ImportError says which one is missing and in which PyTorch."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"zero_fx needs {module}.{name}, which PyTorch {torch.__version__} does not have; "
            "zero_fx supports PyTorch 2.11 to 2.14"
        ) from error


check_version(torch.__version__)

CustomPartitionerFn = private("torch._inductor.custom_graph_pass", "CustomPartitionerFn")
CustomGraphPass = private("torch._inductor.custom_graph_pass", "CustomGraphPass")
aot_autograd = private("torch._dynamo.backends.common", "aot_autograd")
get_default_store = private("torch.distributed.distributed_c10d", "_get_default_store")
detect_fake_mode = private("torch._guards", "detect_fake_mode")
graph_break_reasons = private("torch._dynamo.utils", "graph_break_reasons")  # a list that each graph break is added to
tree_leaves = private("torch.utils._pytree", "tree_leaves")
tree_map = private("torch.utils._pytree", "tree_map")


def fake_store():
    """A store for the process group "fake", which comes with it."""
    return private("torch.testing._internal.distributed.fake_pg", "FakeStore")()


def gloo_group(ranks: list[int], name: str):
    """A process group over gloo of these ranks, which call this alike; the others need not. new_group names it after how
    many groups the process is in, which differs between ranks where one is in more of them: they would wait for ever."""
    distributed = importlib.import_module("torch.distributed.distributed_c10d")
    private(distributed.__name__, "_process_group_name")
    with unittest.mock.patch.object(distributed, "_process_group_name", lambda ranks, use_hashed_name: name):
        return distributed.new_group(ranks, backend="gloo", use_local_synchronization=True)


def watch_writes(note: Callable[[torch.Tensor], None]):
    """A context in which `note` is called with each tensor that an operator is about to write to."""

    class Watch(private("torch.utils._python_dispatch", "TorchDispatchMode")):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            given = [*zip(func._schema.arguments, args), *((a, (kwargs or {}).get(a.name)) for a in func._schema.arguments[len(args) :])]
            for argument, value in given:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    for tensor in tree_leaves(value):
                        note(tensor)
            return func(*args, **(kwargs or {}))

    return Watch()


def inductor_decompositions() -> dict:
    """The operators that Inductor takes apart before it sees a graph."""
    return private("torch._inductor.decomposition", "select_decomp_table")()


def compile_fx(gm: torch.fx.GraphModule, example_inputs, config: dict):
    """Lower a Dynamo graph through Inductor under extra Inductor options."""
    return private("torch._inductor.compile_fx", "compile_fx")(gm, example_inputs, config_patches=config)


def keep_order_options(namespace: str, near: bool = False) -> dict:
    """Inductor's options under which it emits the operators of `namespace` in the order of the graph. It would lower the
    peak of memory by undoing a prefetch; 2.14 moves collectives by itself; and what it fuses pulls along what the
    fused nodes need, past operators that it does not know for collectives. `near`: it fuses only what is near in the
    graph, so that what is computed again is computed where the graph says."""
    options = {"reorder_for_peak_memory": False, "_pre_fusion_custom_pass": functools.partial(hold_order, namespace, near)}
    if hasattr(private("torch._inductor", "config").aten_distributed_optimizations, "enable_simple_overlap"):
        options["aten_distributed_optimizations.enable_simple_overlap"] = False
    return options


def hold_order(namespace: str, near: bool, nodes: list) -> list:
    """Let each operator of `namespace` depend on the one before it, as Inductor does with the collectives it knows; with
    `near`, let no two operators be fused that have two or more kernels of libraries (matrix products) between them."""
    found = [n for n in nodes if getattr(getattr(n.node, "op_overload", None), "namespace", "") == namespace]
    for before, node in zip(found, found[1:]):
        run_after(node, before)
    if near:
        stay_near(nodes)
    if nodes:
        nodes[0].scheduler.compute_ancestors()  # by which fusions that would make a cycle are found
    return nodes


def run_after(node, before) -> None:
    """Make one scheduler node depend on another, without a buffer that would have to live as long."""
    weak_dep = private("torch._inductor.dependencies", "WeakDep")
    for name in before.get_buffer_names():
        node.add_fake_dep(weak_dep(name, mutating_buf=node.get_name(), is_fake=True))


def stay_near(nodes: list) -> None:
    """Kernels of libraries are not fused, and mark how far a graph is. What is between two of them runs after the kernel
    before the first and before the one after the second: an operator of another place would close a circle with it."""
    places = [[]]  # the operators before the first kernel, between the first and the second, ...
    kernels = []
    for node in nodes:
        if not node.is_extern():
            places[-1].append(node)
            continue
        if kernels:
            run_after(node, kernels[-1])
        kernels.append(node)
        places.append([])
    for place, there in enumerate(places):
        for node in there:
            if place >= 2:
                run_after(node, kernels[place - 2])
            if place + 1 < len(kernels):
                run_after(kernels[place + 1], node)


def saved_fraction(fraction: float):
    """A context in which the partitioner may save so much of the activations that it would save by itself."""
    config = private("torch._functorch", "config")
    options = {"activation_memory_budget": fraction}
    if hasattr(config, "unsafe_treat_script_objects_as_zero_size"):
        options["unsafe_treat_script_objects_as_zero_size"] = True  # the only ones are the meshes of DTensors
    return config.patch(**options)


def size_hint(size, unknown: int) -> int:
    """The value that a symbolic size had when it was traced; `unknown` if it depends on data; an int as it is."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return unknown if hint is None else int(hint)


def never_a_frame(*functions) -> None:
    """Keep Dynamo from compiling `functions`, or what they call, as frames of their own; it may still trace into them
    from a frame that it compiles. Their code is the same for all parameters, which would count as recompilations."""
    action = private("torch._dynamo.types", "FrameAction").SKIP
    strategy = private("torch._dynamo.types", "FrameExecStrategy")(action, action)
    for function in functions:
        private("torch._C._dynamo.eval_frame", "set_code_exec_strategy")(function.__code__, strategy)


class engine:
    """PyTorch's autograd engine, as far as the runtime needs it."""

    @staticmethod
    def queue_after_backward(callback) -> None:
        """Call `callback()` when the backward pass that runs now is over; only valid inside a backward pass."""
        torch.autograd.Variable._execution_engine.queue_callback(callback)

    backward_id = staticmethod(private("torch._C", "_current_graph_task_id"))


class ScalerBase(torch.amp.GradScaler):
    """torch.amp.GradScaler, with what it does to an optimizer's gradients under a name of ours."""

    def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
        self.unscale_grads(optimizer, inv_scale, found_inf, allow_fp16)
        return {found_inf.device: found_inf}


def unscale_and_check(grads: list[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """Multiply `grads` (of one dtype) in place; set `found_inf` to 1 if one is infinite or NaN."""
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)


def expression_of(size):
    """A size, or a count made of sizes, as a sympy expression."""
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def dimension_names(gm: torch.fx.GraphModule) -> dict:
    """Symbol: (what it is the size of, the size at capture), of the dynamic dimensions of a graph's values."""
    found = {}
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        for size in value.shape if isinstance(value, torch.Tensor) else ():
            if not isinstance(size, torch.SymInt):
                continue
            env = size.node.shape_env
            hints = env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val  # renamed in 2.12
            for symbol in size.node.expr.free_symbols - found.keys():
                found[symbol] = (source_name(env.var_to_sources.get(symbol)), int(hints.get(symbol, 0)))
    return found


def source_name(sources) -> str:
    """"tokens.size(0)" for Dynamo's L['tokens'].size()[0]."""
    if not sources:
        return "a size that depends on data"
    name = sources[0].name() if callable(sources[0].name) else sources[0].name  # a method in 2.11
    return re.sub(r"\.size\(\)\[(\d+)\]$", r".size(\1)", re.sub(r"^L\['(\w+)'\]", r"\1", name))
