"""The graphs of a 2-block GPT under zero_fx, through Inductor to Triton and to cubins for sm_90, without a GPU.

The model is captured for one of 7 ranks on the CPU, with a process group that moves nothing; its forward and backward
graph are then moved to a GPU that is not there, and go through Inductor's passes with ours among them, as in training.
Nothing is run on a device.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import re
from unittest import mock

import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch import fx
from torch._inductor import compile_fx as inductor
from torch._inductor import config as inductor_config
from torch._inductor.codecache import PyCodeCache
from torch._inductor.codegen.triton import TritonScheduling
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.distributed.fake_pg import FakeStore

import zero_fx
from tests.lowered_graphs import Inserted, Launch, copies, inserted_nodes, is_model, order_in_code, order_in_graph
from tests.pretend_gpu import onto_gpu, pretended_gpu
from zero_fx.gpt import GPT, GPTConfig
from zero_fx.hardware import HARDWARE

WORLD, RANK = 7, 6  # no matrix has rows divisible by 7, and the last rank has fewer rows than the others
MODEL = GPTConfig(layers=2, dim=96, heads=3, seq=64)
BATCH = 2
BUCKET_BYTES = 140_000  # the MLP's matrices, 148 kB gathered, travel alone, the others together
KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str='cuda'\)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Captured:
    """A half before Inductor's last passes, ours among them, which are in `options`."""

    stage: int
    label: str
    gm: fx.GraphModule
    options: dict


@dataclasses.dataclass(frozen=True)
class Lowered:
    half: Captured
    lowering: GraphLowering
    code: str
    launches: list[Launch]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """operations: of Triton's IR. model: nodes of the model in it, beside ours and views."""

    name: str
    launches: int
    operations: int
    cubin_bytes: int
    model: int


@dataclasses.dataclass(frozen=True)
class Half:
    """What the tool found in one graph. in_graph, in_code: collectives, waits and matrix products in order.
    copies: for operators of ours that cannot take their source as it is, by a kernel or, not contiguous, by themselves.
    """

    stage: int
    label: str
    kernels: list[Kernel]
    inserted: list[Inserted]
    in_graph: list[str]
    in_code: list[str]
    copies: list[str]


def capture(stage: int, autocast: bool, bucket_bytes: int) -> list[Captured]:
    """The halves of one training step, as Inductor gets them from AOTAutograd. Autograd fails on CUDA fakes, so this
    is on the CPU; attention is the explicit one, since the fused one of the CPU is an operator that GPUs lack."""
    found: list[Captured] = []

    def compile_fx(gm, example_inputs, options):
        def keep(gm, example_inputs, **kwargs):
            label = "backward" if kwargs.get("is_backward") else "forward"
            found.append(Captured(stage, label, copy.deepcopy(gm), options))
            return make_boxed_func(gm.forward)

        return inductor.compile_fx(gm, example_inputs, inner_compile=keep, config_patches=options)

    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=WORLD)
    model = zero_fx.compile(GPT(MODEL), stage=stage, bucket_bytes=bucket_bytes)
    backend = model._zero_fx_compiled.backend
    backend.passes = dataclasses.replace(backend.passes, hardware=HARDWARE["h100"])
    tokens = torch.zeros(BATCH, MODEL.seq, dtype=torch.long)
    with mock.patch("zero_fx.lowering.compile_fx", compile_fx), sdpa_kernel(SDPBackend.MATH):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(tokens, tokens)
        loss.backward()
    dist.destroy_process_group()
    torch._dynamo.reset()
    return found


def lower(half: Captured) -> Lowered:
    """Through Inductor's passes, ours at their place, to code; `half.gm` is changed."""
    gm, launches = half.gm, []
    mode = FakeTensorMode(shape_env=ShapeEnv())
    onto_gpu(gm, mode)
    inputs = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    with contextlib.ExitStack() as stack:
        for context in (DebugContext(), inductor_config.patch(half.options), V.set_fake_mode(mode), noted(launches)):
            stack.enter_context(context)
        inductor.record_original_output_strides(gm)
        inductor.view_to_reshape(gm)
        inductor._recursive_post_grad_passes(gm, is_inference=False)
        lowering = GraphLowering(gm, inputs, shape_env=mode.shape_env, graph_id=0, is_backward=half.label == "backward")
        with V.set_graph_handler(lowering), V.set_extern_kernel_nodes([]):
            lowering.run(*inputs)
            code = lowering.codegen()[0]
    return Lowered(half, lowering, getattr(code, "value", code), launches)


@contextlib.contextmanager
def noted(launches: list[Launch]):
    """Add each kernel that Inductor emits to `launches`."""
    define_kernel = TritonScheduling.define_kernel

    def define(self, source, schedule, kernel):
        name = define_kernel(self, source, schedule, kernel)
        nodes, reads = set(), set()
        for item in schedule:
            if getattr(item, "node", None) is not None:  # others separate loops
                nodes |= {origin.name for origin in item.node.get_origins()}
                reads |= {read.name for read in item.read_writes.reads}
        launches.append(Launch(name, nodes, reads))
        return name

    with mock.patch.object(TritonScheduling, "define_kernel", define):
        yield


def cubin(name: str, source: str) -> tuple[int, int]:
    """(operations of Triton's IR, bytes) of a kernel, compiled as Inductor does, in the first of its configurations."""
    autotuner = getattr(PyCodeCache.load(source), name)
    with inductor_config.patch(use_static_triton_launcher=False):  # it would load the cubin
        result = autotuner._precompile_config(autotuner.configs[0])
    asm = result.kernel.asm
    return len(re.findall(r"\b(?:tt|arith|math)\.\w+", asm["ttir"])), len(asm["cubin"])


def inspect(lowered: Lowered) -> Half:
    gm, launches = lowered.half.gm, lowered.launches
    model = {node.name for node in gm.graph.nodes if is_model(node)}
    kernels = []
    for name, source in KERNEL.findall(lowered.code):
        nodes = [launch.nodes for launch in launches if launch.kernel == name]
        kernels.append(Kernel(name, len(nodes), *cubin(name, source), max(len(model & each) for each in nodes)))
    return Half(
        lowered.half.stage,
        lowered.half.label,
        kernels,
        inserted_nodes(gm, lowered.lowering, launches),
        order_in_graph(gm),
        order_in_code(lowered.code),
        copies(gm, launches),
    )


def run(stages: list[int], autocast: bool, bucket_bytes: int) -> list[Half]:
    halves = [half for stage in stages for half in capture(stage, autocast, bucket_bytes)]
    with pretended_gpu(), inductor_config.patch(compile_threads=1):  # workers would not know of the GPU
        return [inspect(lower(half)) for half in halves]
