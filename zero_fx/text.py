"""The one text form of a graph: docstrings, dumps, errors, golden tests and the README use it.

    %0: f32[2,3] = input
    %1: f32[4,3] = all_gather(%0, 2, "weight")
    return %1

Values are numbered in order; FX's own names, group names and memory formats are left out.
"""

from __future__ import annotations

import operator
import os
import re

import torch
from torch import fx

from .vocabulary import COLLECTIVES, MARKERS, is_op

SHORT = {
    torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "b8",
}  # fmt: skip


def text(gm: fx.GraphModule, places: bool = False) -> str:
    """The graph as text. Inputs that are no values, such as the meshes of DTensors, are left out. places: each line ends
    with the user's module and source line that it came from."""
    shown = [node for node in gm.graph.nodes if node.op == "output" or type_of(node.meta.get("val")) != "object"]
    number = {node: f"%{i}" for i, node in enumerate(shown)}
    if not places:
        return "\n".join(line(node, number) for node in shown)
    return "\n".join(f"{line(node, number)}  # {module_of(node)} {line_of(node)}".rstrip(" #") for node in shown)


def line(node: fx.Node, number: dict[fx.Node, str]) -> str:
    if node.op == "output":
        return f"return {argument(node.args[0], number)}"
    call = "input" if node.op in ("placeholder", "get_attr") else f"{name_of(node)}({arguments(node, number)})"
    note = "  # again in backward" if node.meta.get("zero_fx_again") else ""
    note = "  # saved for backward" if node.meta.get("zero_fx_saved") else note
    return f"{number[node]}: {type_of(node.meta.get('val'))} = {call}{note}"


def name_of(node: fx.Node) -> str:
    if node.target is operator.getitem:
        return "getitem"
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target.name().split("::")[1].split(".")[0]
    return getattr(node.target, "__name__", str(node.target))


def arguments(node: fx.Node, number) -> str:
    args = node.args
    if is_op(node, *COLLECTIVES):
        args = (*args[:-2], args[-1])  # without the group
    elif is_op(node, *MARKERS):
        args = args[:-1]
    parts = [argument(arg, number) for arg in args]
    kwargs = {} if is_op(node, *COLLECTIVES) else node.kwargs  # how the transport is used differs by rank
    return ", ".join(parts + [f"{key}={argument(value, number)}" for key, value in kwargs.items()])


def argument(value, number) -> str:
    if isinstance(value, fx.Node):
        return number[value]
    if isinstance(value, (list, tuple)):
        items = [item for item in value if not isinstance(item, fx.Node) or item in number]
        return "[" + ", ".join(argument(item, number) for item in items) + "]"
    if isinstance(value, str):
        return f'"{value}"'
    return str(value)


def type_of(value) -> str:
    """Short type of a fake value: f32[2,3], or a tuple of such."""
    if isinstance(value, torch.Tensor):
        return f"{SHORT.get(value.dtype, str(value.dtype)[6:])}[{','.join(map(str, value.shape))}]"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(map(type_of, value)) + ")"
    if value is None:
        return "none"
    names = {int: "int", torch.SymInt: "int", float: "float", torch.SymFloat: "float", bool: "bool"}
    return names.get(type(value), "object")


def module_of(node: fx.Node) -> str:
    """Path of the user's module that a node came from; of a backward node, that of its forward."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = next(reversed(list(stack.values())), ("",))[0] if stack else ""
    return re.sub(r"^L\['\w+'\]\.?", "", path)


FRAME = re.compile(r'File "([^"]+)", line (\d+), in ')
OWN = tuple(os.path.join(os.path.dirname(os.path.abspath(__file__)), name) for name in ("capture.py", "model.py"))


def line_of(node: fx.Node) -> str:
    """ "file:number" of the user's innermost line of code, the file without its folders; "" if there is none."""
    frames = FRAME.findall(node.meta.get("stack_trace") or "")
    for path, number in reversed(frames):
        if is_users(path):
            return f"{os.path.basename(path)}:{number}"
    return ""


def is_users(path: str) -> bool:
    """Whether a source file is neither PyTorch's nor of what zero_fx puts around a model."""
    return not (f"{os.sep}torch{os.sep}" in path or path in OWN or path.endswith(os.path.join("runtime", "param.py")))
