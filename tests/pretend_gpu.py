"""An H100 that is not there: enough of one for Inductor to lower a graph to Triton, and for Triton to compile.

PyTorch remembers what it once found out about devices, so a process that pretended is good for nothing else.
"""

from __future__ import annotations

import contextlib
import types
from unittest import mock

import torch
import triton
from torch import fx
from torch._dynamo.device_interface import CudaInterface
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._triton import has_triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver

GPU = torch.device("cuda", 0)
CAPABILITY = (9, 0)
TARGET = GPUTarget("cuda", 90, 32)
PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30, warp_size=32,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
    shared_memory_per_block=48 << 10, shared_memory_per_block_optin=227 << 10,
    shared_memory_per_multiprocessor=228 << 10, L2_cache_size=50 << 20, gcnArchName="",
)  # fmt: skip


class Driver(CudaDriver):
    """What Triton asks of the device that it compiles for; whatever would run there is missing."""

    def __init__(self):
        pass  # it would load libcuda

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return GPU


def answers() -> dict:
    """What torch.cuda is to say."""
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "synchronize": lambda device=None: None,
        "get_device_name": lambda device=None: PROPERTIES.name,
        "get_device_properties": lambda device=None: PROPERTIES,
        "get_device_capability": lambda device=None: CAPABILITY,
        "is_bf16_supported": lambda including_emulation=True: True,
    }


def copy_(tensor: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return torch.ops.aten.copy_.default(tensor, source, non_blocking)


@contextlib.contextmanager
def pretended_gpu():
    """Inside, PyTorch and Triton believe in one H100."""
    with contextlib.ExitStack() as stack:
        for name, answer in answers().items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
            if hasattr(CudaInterface, name):  # it took its own references when it was imported
                stack.enter_context(mock.patch.object(CudaInterface, name, staticmethod(answer)))
        stack.enter_context(mock.patch.object(triton.runtime.driver, "_active", Driver()))
        # These two methods enter the tensor's device before fake tensors get to see the call; operators do not.
        stack.enter_context(mock.patch.object(torch.Tensor, "copy_", copy_))
        stack.enter_context(mock.patch.object(torch.Tensor, "__invert__", torch.Tensor.bitwise_not))
        # New fake tensors of a device that is available would initialise it with a real one.
        stack.enter_context(mock.patch("torch._subclasses.fake_tensor.init_gpu_context", lambda device: None))
        has_triton.cache_clear()  # the capture on the CPU may have asked
        yield


def onto_gpu(gm: fx.GraphModule, mode: FakeTensorMode) -> None:
    """Make a graph of CPU fakes one of CUDA fakes: inputs, `device=` arguments, and every recorded value anew."""
    for node in gm.graph.nodes:
        node.args, node.kwargs = fx.node.map_aggregate((node.args, dict(node.kwargs)), moved)
        node.meta.pop("tensor_meta", None)
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, torch.Tensor):
            with mode:
                node.meta["val"] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=GPU)
        elif node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
            with mode, torch.no_grad():
                node.meta["val"] = node.target(*args, **kwargs)
        elif node.op not in ("placeholder", "output"):
            raise NotImplementedError(f"{node.op} {node.target}: only calls of operators can be moved")
    gm.recompile()


def moved(value):
    return GPU if isinstance(value, torch.device) else value
