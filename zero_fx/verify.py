"""Check a graph beyond `graph.lint()`, after every pass.

  structure   lint: each value is defined before its use
  types       the recorded type of each of our operators, and of what reads one, equals the recomputed type
  waits       each started collective has exactly one wait, and nothing but that wait reads its result
  markers     a gather marker's shard has the rows that its rank owns
  signature   inputs and outputs are as many, and of the same types, as before the pass

Lint alone accepts an all-gather of the wrong world size.
"""

from __future__ import annotations

import torch
from torch import fx

from .text import line, text, type_of
from .vocabulary import COLLECTIVES, MARKERS, is_op, value_of

WINDOW = 10  # lines of graph shown on each side of an error


class InvalidGraph(AssertionError):
    """A pass left a graph that must not run: a fault of zero_fx, not of the model."""


def signature(gm: fx.GraphModule) -> tuple[list[str], list[str]]:
    """Types of the inputs and outputs."""
    inputs = [type_of(node.meta.get("val")) for node in gm.graph.find_nodes(op="placeholder")]
    outputs = fx.node.map_arg(gm.graph.output_node().args[0], lambda node: node)
    flat = torch.utils._pytree.tree_leaves(outputs)
    return inputs, [type_of(item.meta.get("val")) if isinstance(item, fx.Node) else repr(item) for item in flat]


def verify(gm: fx.GraphModule, before: tuple[list[str], list[str]] | None = None, checked: dict | None = None) -> None:
    """Raise InvalidGraph, with the lines around the fault, unless `gm` is well formed.

    before: the signature that it must have. checked: {node: what was recomputed}, kept by the caller over passes on
    one graph, so that a type is recomputed only where something changed.
    """
    checked = {} if checked is None else checked
    try:
        gm.graph.lint()
    except Exception as error:
        raise InvalidGraph(f"zero_fx: not a valid graph: {error}\n{text(gm)}") from error
    for node in gm.graph.nodes:
        if is_op(node, *COLLECTIVES):
            check_wait(gm, node)
        if is_op(node, "wait") and not is_started(node.args[0]):
            fail(gm, node, "waits for what no collective started")
        if is_ours(node) or any(is_ours(arg) for arg in node.all_input_nodes):
            seen = (node.target, node.args, [type_of(n.meta.get("val")) for n in (node, *node.all_input_nodes)])
            if checked.get(node) != seen:
                check_type(gm, node)
                checked[node] = seen
    if before is not None and (after := signature(gm)) != before:
        raise InvalidGraph(f"zero_fx: the signature changed from {before} to {after}\n{text(gm)}")


def is_ours(node: fx.Node) -> bool:
    return is_op(node, *COLLECTIVES, *MARKERS, "wait")


def check_wait(gm: fx.GraphModule, node: fx.Node) -> None:
    """One wait for the collective `node`, after it, with its source; nothing else reads what it writes."""
    is_held = is_op(node, "gather_held")
    written, source = (node.args[0], node.args[1]) if is_held else (node, node.args[0])
    readers = [user for user in written.users if user is not node]
    waits = [user for user in readers if is_op(user, "wait") and user.args[0] is written]
    if len(waits) != 1:
        fail(gm, node, f"has {len(waits)} waits, expected 1")
    for user in readers:
        if user is not waits[0] and user.op != "output":
            fail(gm, user, "reads a collective's result that no wait has made ready")
    if waits[0] < node:
        fail(gm, waits[0], "waits before the collective is started")
    if waits[0].args[1] is not source:
        fail(gm, waits[0], "does not keep the collective's source alive")


def is_started(output: fx.Node) -> bool:
    return is_op(output, *COLLECTIVES) or any(is_op(user, "gather_held") for user in output.users)


def check_type(gm: fx.GraphModule, node: fx.Node) -> None:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return
    try:
        expected = value_of(node)
    except Exception as error:
        fail(gm, node, f"does not fit its arguments: {error}")
    if type_of(expected) != type_of(node.meta.get("val")):
        fail(gm, node, f"recorded {type_of(node.meta.get('val'))}, recomputed {type_of(expected)}")


def fail(gm: fx.GraphModule, node: fx.Node, reason: str) -> None:
    nodes = [n for n in gm.graph.nodes if n.op != "output"]
    number = {n: f"%{i}" for i, n in enumerate(nodes)}
    at = list(gm.graph.nodes).index(node)
    around = list(gm.graph.nodes)[max(0, at - WINDOW) : at + WINDOW + 1]
    shown = "\n".join(("> " if n is node else "  ") + line(n, number) for n in around)
    user_code = (node.meta.get("stack_trace") or "").strip().splitlines()[-2:]
    where = "\nfrom " + " ".join(part.strip() for part in user_code) if user_code else ""
    raise InvalidGraph(f"zero_fx: {number.get(node, 'return')} {reason}{where}\n{shown}")
