"""Identical blocks are captured once: the graph of a model with many, from those of two models with a few of them.

`long` has `period` blocks more than `short`. Where its nodes are those of `short` with one segment inserted, and that
segment stands behind a copy of itself, the graph is periodic there, and the segment is written down as often as the full
model has further blocks. What a copy reads moves along by as much as it did from the segment's predecessor to the segment:

    predecessor  %5 = mm(%4, %w2)        segment  %7 = mm(%6, %w3)        copy  %9 = mm(%8, %w4)      with a new input %w4

Passes, costs and memory then see the whole graph. Where any of this does not hold nothing is guessed: `repeat` returns
None, and the model is captured whole.
"""

from __future__ import annotations

import dataclasses
import re

from torch import fx

from .blocks import Stack
from .text import line
from .vocabulary import is_view

CALL = "call_function"


class AnyNumber(dict):
    """For zero_fx.text: all values have one number, so that lines of equal operators are equal."""

    def __missing__(self, key):
        return "%"

    def __contains__(self, key):
        return True


@dataclasses.dataclass
class Periodic:
    """Where `long` repeats itself. nodes: its computing nodes, in order. start, size: of the segment in `nodes`. times:
    that it is to be repeated. step: by how many blocks it is further on than its predecessor, negative in backward.
    following: of an input that changes from block to block, the next block's."""

    nodes: list[fx.Node]
    position: dict[fx.Node, int]
    start: int
    size: int
    times: int
    step: int
    following: dict[fx.Node, fx.Node] = dataclasses.field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.start + self.size

    def place(self, q: int, times: int) -> int:
        """In the repeated graph, of the node `q` of `long`, or of its copy `times` periods on."""
        return q + times * self.size

    def input(self, node: fx.Node, times: int) -> tuple[fx.Node, int]:
        """The input that is `times` blocks on from `node`: one that `long` has, or the n-th copy of its last."""
        while times and node in self.following:
            node, times = self.following[node], times - 1
        return node, times

    def is_per_block(self, node: fx.Node) -> bool:
        return node in self.following or node in self.following.values()

    def shift(self, times: int) -> int:
        """By how many blocks numbers change. In backward the blocks that come first are the last of the model."""
        return self.step * times + (self.times * -self.step if self.step < 0 else 0)


def repeat(short: fx.GraphModule, long: fx.GraphModule, stack: Stack, period: int, times: int) -> fx.GraphModule | None:
    """`long` with the segment that `period` blocks add to `short` repeated `times` times more; None if not periodic."""
    before, nodes = settled(short), settled(long)
    names = re.compile(rf'(^|"|\]\.){re.escape(stack.prefix)}(\d+)(?!\w)')  # of parameters, and of modules behind L['...']
    mine, theirs = ([names.sub("*", line(node, AnyNumber())) for node in found] for found in (before, nodes))
    size, start = len(nodes) - len(before), common(mine, theirs)
    if size <= 0 or start < size or common(mine[::-1], theirs[::-1]) < len(mine) - start:
        return None
    if theirs[start - size : start] != theirs[start : start + size]:
        return None
    step = direction(nodes[start - size : start], nodes[start : start + size], names) * period
    found = Periodic(nodes, {node: i for i, node in enumerate(nodes)}, start, size, times, step)
    moves, tail = moves_of(found), moves_of_tail(found, before)
    if moves is None or tail is None:
        return None
    return written(long, found, moves + tail, names)


def settled(gm: fx.GraphModule) -> list[fx.Node]:
    """The computing nodes in order, each view right behind what it shows: partitioners leave some at the end."""
    behind: dict[fx.Node, list[fx.Node]] = {}
    roots = []
    for node in gm.graph.nodes:
        if node.op != CALL:
            continue
        source = node.all_input_nodes[0] if is_view(node) and len(node.all_input_nodes) == 1 else None
        if source is not None and source.op == CALL:
            behind.setdefault(source, []).append(node)
        else:
            roots.append(node)
    order = []
    for root in roots:
        waiting = [root]
        while waiting:
            order.append(waiting.pop())
            waiting += reversed(behind.get(order[-1], ()))
    return order


def common(mine: list, theirs: list) -> int:
    """Length of the common beginning."""
    return next((i for i, (a, b) in enumerate(zip(mine, theirs)) if a != b), min(len(mine), len(theirs)))


def direction(previous: list[fx.Node], segment: list[fx.Node], names: re.Pattern) -> int:
    """1 if the segment belongs to a later block than the copy before it, -1 if to an earlier one, 0 if nothing tells."""
    for one, other in zip(previous, segment):
        before, after = (names.search(line(node, AnyNumber())) for node in (one, other))
        if before and after and before[2] != after[2]:
            return 1 if int(after[2]) > int(before[2]) else -1
    return 0


def sources(node: fx.Node) -> list[fx.Node]:
    """The nodes that a node reads, in order and as often as it does."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), lambda n: found.append(n) or n)
    return found


def moves_of(found: Periodic) -> list[list[bool]] | None:
    """For each node of the segment and each that it reads: whether a copy reads the next block's. Fills `following`."""
    moves = []
    for q in range(found.start, found.end):
        mine, previous = sources(found.nodes[q]), sources(found.nodes[q - found.size])
        if len(mine) != len(previous):
            return None
        moves.append([])
        for new, old in zip(mine, previous):
            moves[-1].append(new is not old)
            if new is old:
                continue
            if new in found.position and old in found.position:
                if found.position[new] - found.position[old] != found.size:
                    return None
            elif new.op != "placeholder" or old.op != "placeholder" or found.following.setdefault(old, new) is not new:
                return None
    return moves


def moves_of_tail(found: Periodic, short: list[fx.Node]) -> list[list[bool]] | None:
    """For each node behind the segment and each that it reads: whether that moves along with it."""
    place = {node: i for i, node in enumerate(short)}
    moves = []
    for q in range(found.end, len(found.nodes)):
        mine, theirs = sources(found.nodes[q]), sources(short[q - found.size])
        if len(mine) != len(theirs):
            return None
        moves.append([])
        for new, old in zip(mine, theirs):
            if new not in found.position:
                moves[-1].append(True)
                continue
            distance = found.position[new] - place.get(old, -1)
            if old not in place or distance not in (0, found.size):
                return None
            moves[-1].append(distance == found.size)
    return moves


def written(gm: fx.GraphModule, found: Periodic, moves: list[list[bool]], names: re.Pattern) -> fx.GraphModule:
    """The repeated graph. moves: for each node of `found.nodes` from the segment on, see above."""
    layout = [(q, 0) for q in range(found.end)]
    layout += [(q, times) for times in range(1, found.times + 1) for q in range(found.start, found.end)]
    layout += [(q, found.times) for q in range(found.end, len(found.nodes))]
    reads = [reads_of(found, q, times, moves) for q, times in layout]
    used = {key for row in reads for key in row if not isinstance(key, int)}
    graph, inputs = fx.Graph(), {}
    for node in gm.graph.nodes:
        if node.op in (CALL, "output"):
            continue
        inputs[node, 0] = graph.node_copy(node)
        for times in range(1, found.times + 1):
            if (node, times) in used:
                inputs[node, times] = graph.placeholder(f"{node.target}_again_{times}")
                inputs[node, times].meta = dict(node.meta)
    body: list[fx.Node] = []
    for (q, times), row in zip(layout, reads):
        values = iter([body[key] if isinstance(key, int) else inputs[key] for key in row])
        copied = graph.node_copy(found.nodes[q], lambda _, values=values: next(values))
        body.append(copied)
        renumber(copied, found.shift(times), names)
    results = []
    for item in gm.graph.output_node().args[0]:
        results += outputs_of(item, found, body, inputs)
    graph.output(tuple(results)).meta.update(gm.graph.output_node().meta)
    graph.lint()
    result = fx.GraphModule(gm, graph)
    result.meta.update(gm.meta)
    return result


def reads_of(found: Periodic, q: int, times: int, moves: list[list[bool]]) -> list:
    """What the copy of the node `q` that is `times` periods on reads: places in the body, and inputs."""
    keys = []
    for i, source in enumerate(sources(found.nodes[q])):
        is_moved = times > 0 and moves[q - found.start][i]
        if source in found.position:
            keys.append(found.place(found.position[source], times if is_moved else 0))
        else:
            keys.append(found.input(source, times if is_moved and found.is_per_block(source) else 0))
    return keys


def outputs_of(item, found: Periodic, body: list[fx.Node], inputs: dict) -> list:
    """An output and its copies."""
    if not isinstance(item, fx.Node):
        return [item]
    if item in found.position:
        q = found.position[item]
        if found.start <= q < found.end:
            return [body[found.place(q, times)] for times in range(found.times + 1)]
        return [body[found.place(q, found.times if q >= found.end else 0)]]
    return [inputs[item, times] for times in range(found.times + 1) if (item, times) in inputs]


def renumber(node: fx.Node, shift: int, names: re.Pattern) -> None:
    """Name the block that a copy belongs to, in its arguments and in where it came from."""
    if not shift:
        return

    def moved(text: str) -> str:
        return names.sub(lambda m: m[0][: m.start(2) - m.start()] + str(int(m[2]) + shift), text)

    node.args = tuple(moved(arg) if isinstance(arg, str) else arg for arg in node.args)
    for key in ("nn_module_stack", "fwd_nn_module_stack"):
        if node.meta.get(key):
            node.meta[key] = {i: (moved(path), kind) for i, (path, kind) in node.meta[key].items()}
