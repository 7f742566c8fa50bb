"""A report's figures as formulas: sympy expressions in the number of ranks and in the sizes of dynamic dimensions.

Each storage of the report's graphs is given its size as an expression. What N changes is known by its provenance: a
collective names the parameters that it serves, so its source, its result and what passes inserted around it have those
parameters' padded, own or full size. What the graphs are is not a formula: another N has other buckets, another order
and other padding, so the peak and the links' seconds are those of *these* graphs. All other formulas hold at any N.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

import sympy
import torch
from torch import fx

from .costs import collective_s, compute_s, flops_of
from .events import Storages, sent
from .formulas import elements_sent, model_state_bytes
from .lowering import ADAM_STATES
from .params import ParamRow
from .predict import ADAM_TRAFFIC, StepGraphs
from .torch_compat import dimension_names, expression_of
from .vocabulary import COLLECTIVES, STEP, WHOLE, is_op

N = sympy.Symbol("N", integer=True, positive=True)
PSI = sympy.Symbol("Ψ", integer=True, positive=True)
KEPT = sympy.Symbol("Ψ_whole", integer=True, nonnegative=True)


@dataclasses.dataclass(frozen=True)
class Formulas:
    """Of one rank's step of one micro-batch. `str()` lists them; `at()` gives numbers; each is a sympy expression, so that
    `sympy.lambdify(zero_fx.symbolic.N, formulas.sent["all_gather"])` is a function of N.

    memory: bytes. "parameters", "optimizer states" (Adam's) and "gradients" of this rank, "saved activations" when backward
        begins, "held parameters" that stages 1 and 2 gather once a step, and the "peak" of these graphs.
    sent: elements in rings, by collective, padding included, and "total".
    time: seconds. "compute", "collectives" (of these graphs' buckets), "optimizer"; "nothing hidden" is their sum, and
        "all hidden" the least that overlap can reach.
    ideal: in Ψ, without padding (arXiv 1910.02054, sections 3 and 7): "model states" in bytes, fp32 masters, Adam;
        "elements sent". Ψ_whole are elements of parameters that are kept whole.
    values: what each symbol is in this report. names: what a dimension's symbol is the size of.
    """

    memory: dict[str, sympy.Expr]
    sent: dict[str, sympy.Expr]
    time: dict[str, sympy.Expr]
    ideal: dict[str, sympy.Expr]
    values: dict[sympy.Symbol, int]
    names: dict[sympy.Symbol, str]

    def at(self, **sizes: int) -> dict[str, float]:
        """All formulas as numbers, by name ("memory: peak"); `sizes` by symbol, such as N=512, others as in this report."""
        known = {symbol.name: symbol for symbol in self.values}
        if unknown := sizes.keys() - known.keys():
            raise ValueError(f"no symbol {', '.join(sorted(unknown))}: these formulas have {', '.join(known)}")
        values = self.values | {known[name]: value for name, value in sizes.items()}
        return {name: number(expr.subs(values)) for name, expr in self.named().items()}

    def named(self) -> dict[str, sympy.Expr]:
        groups = {"memory": self.memory, "sent": self.sent, "time": self.time, "ideal": self.ideal}
        return {f"{group}: {name}": expr for group, found in groups.items() for name, expr in found.items()}

    def __str__(self) -> str:
        hidden = {"time: nothing hidden": "compute + collectives + optimizer", "time: all hidden": "Max(compute, collectives) + optimizer"}
        lines = [f"{name} = {hidden.get(name) or short(expr)}" for name, expr in self.named().items()]
        legend = [f"{symbol} = {self.names.get(symbol, 'elements')}, here {value:,}" for symbol, value in self.values.items()]
        return "\n".join([*lines, "", *legend])


def formulas_of(graphs: StepGraphs, rows: tuple[ParamRow, ...], rank: int) -> Formulas:
    """Raises ValueError for a world of one rank, whose graphs have no collectives."""
    world = graphs.passes.world
    if world == 1:
        raise ValueError("formulas of a world of one rank: it has no collectives to count; inspect it with 2 ranks or more")
    halves = [Sizes(label, gm, graphs, rows) for label, gm in graphs.halves if label != "inference"]
    resident = {name: local_bytes(rows, rank, name) for name in ("parameters", "optimizer states", "gradients")}
    memory = resident | {
        "saved activations": sum((half.saved for half in halves), sympy.Integer(0)),
        "held parameters": held_bytes(rows),
    }
    fronts = widest([live for half in halves for live in half.live()])
    states = resident["parameters"] + resident["optimizer states"]
    memory["peak"] = states + (sympy.Max(*fronts, evaluate=False) if len(fronts) > 1 else sum(fronts))
    sent_by, links = collective_totals(halves, graphs)
    compute = sum((half.compute(graphs.passes.hardware) for half in halves), sympy.Integer(0))
    optimizer = states / (1 + ADAM_STATES) * ADAM_TRAFFIC / graphs.passes.hardware.memory_bytes_per_s
    time = {
        "compute": compute, "collectives": links, "optimizer": optimizer, "nothing hidden": compute + links + optimizer,
        "all hidden": sympy.Max(compute, links, evaluate=False) + optimizer,
    }  # fmt: skip
    names, values = {N: "ranks"}, {N: world}
    for half in halves:
        for symbol, (name, hint) in half.dimensions.items():
            names[symbol], values[symbol] = name, hint
    return Formulas(memory, sent_by, time, ideal(rows, graphs.passes.stage), values | totals(rows), names)


def totals(rows) -> dict[sympy.Symbol, int]:
    whole = sum(row.elements for row in rows if row.lifetime == WHOLE)
    return {PSI: sum(row.elements for row in rows), KEPT: whole}


def ideal(rows, stage: int) -> dict[str, sympy.Expr]:
    gathered = max((row.used_dtype.itemsize for row in rows if row.lifetime == STEP), default=4)
    return {
        "model states": sympy.nsimplify(model_state_bytes(stage, PSI - KEPT, KEPT, N, gathered_bytes=gathered)),
        "elements sent": elements_sent(stage, PSI - KEPT, KEPT, N),
    }


# --- parameters


def chunk(row: ParamRow) -> sympy.Expr:
    """Elements that every rank sends of a sharded parameter, padding included."""
    return sympy.ceiling(row.shape[0] / N) * (row.elements // row.shape[0])


def own(row: ParamRow, rank: int) -> sympy.Expr:
    """Elements of a rank's own rows."""
    if row.lifetime == WHOLE:
        return sympy.Integer(row.elements)
    per_rank = sympy.ceiling(row.shape[0] / N)
    if rank == 0:
        return chunk(row)
    rows = sympy.Max(0, sympy.Min(per_rank, row.shape[0] - rank * per_rank))
    return rows * (row.elements // row.shape[0])


def local_bytes(rows, rank: int, what: str) -> sympy.Expr:
    """Of this rank's parameters, Adam's states for them, or their gradients. Equal shapes are one term."""
    count = Counter()
    for row in rows:
        copies = {"parameters": 1, "optimizer states": ADAM_STATES * row.trains, "gradients": int(row.trains)}[what]
        count[own(row, rank)] += row.dtype.itemsize * copies
    return sympy.Add(*(times * expr for expr, times in count.items()))


def held_bytes(rows) -> sympy.Expr:
    return sympy.Add(*(N * chunk(row) * row.used_dtype.itemsize for row in rows if row.lifetime == STEP))


# --- graphs


class Sizes:
    """The storages of one half, with sizes as expressions."""

    def __init__(self, label: str, gm: fx.GraphModule, graphs: StepGraphs, rows):
        self.gm, self.world = gm, graphs.passes.world
        self.rows = {row.name: row for row in rows}
        is_backward = label == "backward"
        self.held = held_bytes(rows) if is_backward else sympy.Integer(0)
        self.storages = Storages(gm, graphs.fused, graphs.held_bytes * is_backward, is_backward)
        self.dimensions = dimension_names(gm)
        self.saved = sympy.Add(*(self.bytes(node) for node in self.storages.saved))

    def bytes(self, node: fx.Node) -> sympy.Expr:
        value, names = node.meta.get("val"), self.served(node)
        return self.of_parameters(value, names) * value.element_size() if names else value_bytes(value)

    def of_parameters(self, value: torch.Tensor, names: tuple[str, ...]) -> sympy.Expr:
        """Elements of a tensor that has a size of the parameters `names`, which are never dynamic."""
        counted = int(elements(value))
        return next((e for e in self.candidates(names) if e.subs(N, self.world) == counted), sympy.Integer(counted))

    def candidates(self, names: tuple[str, ...]) -> list[sympy.Expr]:
        """Padded, own and full size of the parameters together, then of each."""
        found = []
        for group in (names, *((name,) for name in names if len(names) > 1)):
            rows = [self.rows[name] for name in group]
            chunks = sympy.Add(*(chunk(row) for row in rows if row.lifetime != WHOLE))
            found += [N * chunks, chunks, sympy.Integer(sum(row.elements for row in rows))]
        return found

    def served(self, node: fx.Node) -> tuple[str, ...]:
        """Names of the parameters of the collective that a node is inserted for; none for any other node."""
        waiting, seen = [node], set()
        while waiting:
            one = waiting.pop()
            if is_op(one, *COLLECTIVES):
                return tuple(one.meta.get("zero_fx_bucket", [one.args[-1]]))
            if one in seen or not (one.meta.get("zero_fx_inserted") or is_op(one, "wait")):
                continue
            seen.add(one)
            waiting += [*one.users, *one.all_input_nodes]
        return ()

    def live(self) -> list[Counter]:
        """What lives while each event allocates, as counts of terms that are never negative."""
        now = Counter(terms(self.held))
        sizes = {node: terms(self.bytes(value)) for node, value in self.storages.values.items()}
        for node in self.storages.saved:
            sizes[node] = terms(self.bytes(node))
            now.update(sizes[node])
        found = [Counter(now)]
        for node in self.gm.graph.nodes:
            if node in self.storages.values:
                now.update(sizes[node])
                found.append(Counter(now))
            for freed in self.storages.frees.get(node, ()):
                now.subtract(sizes.get(freed, {}))
        return found

    def compute(self, hardware) -> sympy.Expr:
        """Seconds on the compute lane."""
        if not self.dimensions:
            return sympy.Float(sum(compute_s(node, hardware) for node in self.gm.graph.nodes))
        return sympy.Add(*(
            sympy.sympify(compute_s(node, hardware, value_bytes, symbolic_flops, sympy.Max)) for node in self.gm.graph.nodes
        ))  # fmt: skip


def terms(expr: sympy.Expr) -> dict[sympy.Expr, int]:
    """`expr` as a sum of counted terms; as one where a count is negative, since `widest` compares terms one by one."""
    found = expr.expand().as_coefficients_dict()
    return dict(found) if all(count > 0 for count in found.values()) else {expr: 1}


def widest(lives: list[Counter]) -> list[sympy.Expr]:
    """Of all that lives at some time, what is not less than something else in every term."""
    front: list[dict] = []
    distinct = {frozenset((term, count) for term, count in live.items() if count) for live in lives}
    for one in map(dict, sorted(distinct, key=lambda live: -sum(count for _, count in live))):
        if not any(all(other.get(term, 0) >= count for term, count in one.items()) for other in front):
            front.append(one)
    return [sympy.Add(*(count * term for term, count in one.items())) for one in front]


def collective_totals(halves: list[Sizes], graphs: StepGraphs) -> tuple[dict[str, sympy.Expr], sympy.Expr]:
    """(elements sent by kind and in all, seconds on the links). Backward's held gathers find what forward gathered."""
    hardware, by_kind, count = graphs.passes.hardware, {}, Counter()
    for half in halves:
        for node in half.gm.graph.nodes:
            kind, is_held = node.target.name().split("::")[1] if is_op(node, *COLLECTIVES) else "", is_op(node, "gather_held")
            if not kind or (is_held and half.storages.held):
                continue
            source = node.args[1 if is_held else 0]
            value = source.meta["val"]
            expr, size = half.of_parameters(value, half.served(node)), value.element_size()
            count[collective_s(kind, expr, size, N, hardware, sympy.Max)] += 1
            kind = "all_gather" if is_held else kind
            by_kind[kind] = by_kind.get(kind, sympy.Integer(0)) + sent(kind, expr, N)
    by_kind["total"] = sum(by_kind.values(), sympy.Integer(0))
    return by_kind, sympy.Add(*(times * expr for expr, times in count.items()))


def elements(value) -> sympy.Expr:
    """Of a fake tensor."""
    return sympy.Mul(*(expression_of(size) for size in value.shape)) if isinstance(value, torch.Tensor) else sympy.Integer(0)


def value_bytes(value) -> sympy.Expr:
    if isinstance(value, (list, tuple)):
        return sympy.Add(*map(value_bytes, value))
    return elements(value) * value.element_size() if isinstance(value, torch.Tensor) else sympy.Integer(0)


def symbolic_flops(node: fx.Node) -> sympy.Expr:
    return flops_of(node, known=lambda value: value, number=expression_of)


def short(expr: sympy.Expr) -> sympy.Expr:
    """For people: figures of three digits."""
    return expr.xreplace({figure: figure.n(3) for figure in expr.atoms(sympy.Float)})


def number(value: sympy.Expr) -> float | int:
    value = value.doit()
    return int(value) if value.is_Integer else float(value)
