"""prefetch: gathers start early enough to be hidden and no earlier; waits sink to the first use.

    before                                       after
    %2: f32[4,3] = all_gather(%0, N, "a")        %2: f32[4,3] = all_gather(%0, N, "a")
    %3: f32[4,3] = wait(%2, %0, "a")             %3: f32[4,3] = wait(%2, %0, "a")
    %4: f32[5,3] = mm(%x, %3)                    %5: f32[3,3] = all_gather(%1, N, "b")
    %5: f32[3,3] = all_gather(%1, N, "b")        %4: f32[5,3] = mm(%x, %3)
    %6: f32[3,3] = wait(%5, %1, "b")             %6: f32[3,3] = wait(%5, %1, "b")
    %7: f32[5,3] = mm(%4, %6)                    %7: f32[5,3] = mm(%4, %6)

Two lanes are planned on, compute and links, with the times of `zero_fx.costs`. Going backwards from each gather's first
use, it starts as late as its own time and that of the gathers behind it allow; then the plan is played forwards, and
what reductions on the same links delayed starts earlier by as much. Reductions start when their gradients are ready and
are awaited when more than `config.inflight_bytes` of them are under way, or at the end. No more than that many bytes of
gathered parameters wait for their use, and at least one may.

Ranks whose inputs have other shapes would plan otherwise, and mix up their data. So the order in which collectives start
is the first rank's: `start_order` proposes one, `config.order` decides.

requires  collectives that are awaited where they start
ensures   gathers among themselves, and reductions among themselves, keep their order; collectives start in the order
          of `config.order`, if it is given
numerics  bitwise
leaves    which gathers there are to plan_gathers and bucket_collectives
"""

from __future__ import annotations

import bisect
import dataclasses
from collections import deque

from torch import fx

from ..costs import bytes_of, collective_s, compute_s, size_of
from ..vocabulary import COLLECTIVES, REDUCTIONS, PassConfig, Report, is_op

REPAIRS = 4  # times that the plan is played and mended


@dataclasses.dataclass(eq=False)
class Transfer:
    """A collective: `before` it what makes its source, `after` it the wait and what passes inserted behind that.

    number: among the collectives of the graph. ready, need: positions among the computing nodes before which it can
    start and must be awaited. start: the plan. turn: in the order that ranks agreed on.
    """

    node: fx.Node
    before: list[fx.Node]
    after: list[fx.Node]
    is_gather: bool
    seconds: float
    size: int
    number: int
    ready: int = 0
    need: int = 0
    start: int = 0
    turn: int = 0


def prefetch(gm: fx.GraphModule, config: PassConfig) -> Report:
    transfers, computing = plan(gm.graph, config)
    if not transfers:
        return Report(False)
    if config.order is not None and (mine := in_order(transfers)) != config.order:
        raise RuntimeError(
            f"zero_fx: the first rank starts its collectives in the order {config.order} and this rank's graph only "
            f"allows {mine}: their data would be mixed up. Give all ranks inputs of one shape, or passes=() without prefetch"
        )
    changed = lay_out(gm.graph, computing, transfers, config)
    gathers = [t for t in transfers if t.is_gather]
    ahead = sum(1 for t in gathers if t.start < t.need)
    return Report(changed, {"gathers_ahead": ahead, "reductions": len(transfers) - len(gathers)})


def start_order(gm: fx.GraphModule, config: PassConfig) -> tuple[int, ...]:
    """In which order this rank would start the collectives: their numbers in the graph as it is."""
    transfers, _ = plan(gm.graph, config)
    return in_order(transfers)


def in_order(transfers: list[Transfer]) -> tuple[int, ...]:
    return tuple(t.number for t in sorted(transfers, key=start_key))


def start_key(t: Transfer) -> tuple:
    return t.start, t.turn, not t.is_gather, t.need, t.number


def plan(graph: fx.Graph, config: PassConfig) -> tuple[list[Transfer], list[fx.Node]]:
    """The collectives with their planned starts, and the nodes that compute, in order."""
    nodes = body(graph)
    transfers = transfers_of(nodes, config)
    moved = {node for t in transfers for node in (t.node, *t.before, *t.after)}
    computing = [node for node in nodes if node not in moved]
    place(transfers, computing)
    clock = [0.0]  # seconds of compute before each position
    for node in computing:
        clock.append(clock[-1] + compute_s(node, config.hardware))
    gathers = sorted((t for t in transfers if t.is_gather), key=lambda t: (t.need, t.number))
    plan_starts(gathers, transfers, clock, config)
    if config.order is not None:
        follow(gathers, transfers, config.order)
    return transfers, computing


def body(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op not in ("placeholder", "output")]


def follow(gathers: list[Transfer], transfers: list[Transfer], order: tuple[int, ...]) -> None:
    """Shift gathers to between the reductions that `order` has them between."""
    turn = {number: i for i, number in enumerate(order)}
    for t in transfers:
        t.turn = turn[t.number]
    reductions = [t for t in transfers if not t.is_gather]
    for t in gathers:
        first = max([r.start for r in reductions if r.turn < t.turn], default=0)
        last = min([r.start for r in reductions if r.turn > t.turn], default=t.need)
        t.start = min(max(t.start, first, t.ready), last, t.need)


def transfers_of(nodes: list[fx.Node], config: PassConfig) -> list[Transfer]:
    found = []
    for node in nodes:
        if not is_op(node, *COLLECTIVES):
            continue
        is_held, is_gather = is_op(node, "gather_held"), not is_op(node, *REDUCTIONS)
        source = node.args[1 if is_held else 0]
        written = node.args[0] if is_held else node
        wait = next(user for user in written.users if is_op(user, "wait") and user.args[0] is written)
        after = [wait, *followers(wait)]
        before = movable_sources(source) if is_gather else []
        if any(user not in (node, wait, *before) for n in before for user in n.users):
            before = []  # something else reads it, which may come earlier
        value = source.meta["val"]
        kind = node.target.name().split("::")[1]
        seconds = collective_s(kind, size_of(value), value.element_size(), config.world, config.hardware)
        size = bytes_of(written.meta["val"]) if is_gather else bytes_of(value)
        found.append(Transfer(node, before, after, is_gather, seconds, size, len(found)))
    return found


def movable_sources(source: fx.Node) -> list[fx.Node]:
    """What makes a gather's source out of inputs, in order; empty if something computes it."""
    if source.op == "placeholder":
        return []
    found = []
    for node in source.all_input_nodes:
        found += [n for n in movable_sources(node) if n not in found]
    return [*found, source]


def followers(wait: fx.Node) -> list[fx.Node]:
    """What passes inserted behind a wait, in order, as far as nothing else is needed for it."""
    found = [wait]
    for node in found:
        for user in sorted(node.users):
            inserted = user.meta.get("zero_fx_inserted") and not is_op(user, *COLLECTIVES, "wait")
            if inserted and user not in found and all(arg in found for arg in user.all_input_nodes):
                found.append(user)
    return found[1:]


def place(transfers: list[Transfer], computing: list[fx.Node]) -> None:
    """Fill in `ready` and `need`."""
    position = {node: i for i, node in enumerate(computing)}
    end = len(computing)
    made_by = {node: t for t in transfers for node in t.after}
    for t in transfers:
        inside = {t.node, *t.before, *t.after}
        outside = [arg for node in (*t.before, t.node) for arg in node.all_input_nodes if arg not in inside]
        t.ready = max([position[arg] + 1 for arg in outside if arg in position], default=0)
        readers = [user for node in t.after for user in node.users if user not in inside]
        t.need = min([position[user] for user in readers if user in position], default=end)
    for t in transfers:  # a collective of another's result
        for node in (*t.before, t.node):
            for arg in node.all_input_nodes:
                if arg in made_by and made_by[arg] is not t:
                    made_by[arg].need = min(made_by[arg].need, t.ready)
                    t.ready = max(t.ready, made_by[arg].need)


def plan_starts(gathers: list[Transfer], transfers: list[Transfer], clock: list[float], config: PassConfig) -> None:
    for t in transfers:
        t.start = t.ready
    early = {t: 0.0 for t in gathers}  # seconds by which a gather starts earlier than links alone would ask
    for _ in range(REPAIRS):
        start_late(gathers, early, clock)
        bound_bytes(gathers, config.inflight_bytes)
        delays = play(transfers, clock, config)
        if not any(delays.values()):
            break
        for t in gathers:
            early[t] += delays[t]


def start_late(gathers: list[Transfer], early: dict[Transfer, float], clock: list[float]) -> None:
    """As late as is hidden: each gather is done when it is needed, and when the one behind it has to start."""
    free = float("inf")
    behind = len(clock) - 1
    for t in reversed(gathers):
        free = min(free, clock[t.need] - early[t]) - t.seconds
        t.start = max(t.ready, min(bisect.bisect_right(clock, free) - 1, t.need, behind), 0)
        behind = t.start


def bound_bytes(gathers: list[Transfer], limit: int) -> None:
    """Start later where more than `limit` bytes would wait for their use; the gather needed next may always start."""
    waiting: deque[Transfer] = deque()
    start = 0
    for t in gathers:
        t.start = start = max(t.start, start)
        waiting = deque(other for other in waiting if other.need > t.start)
        while waiting and sum(other.size for other in waiting) + t.size > limit:
            t.start = start = min(max(start, waiting.popleft().need), t.need)
        waiting.append(t)


def play(transfers: list[Transfer], clock: list[float], config: PassConfig) -> dict[Transfer, float]:
    """Seconds by which each gather comes too late when both lanes run: links serve in the order of starts."""
    late, links_free, delays = 0.0, 0.0, {}
    done: dict[Transfer, float] = {}
    queue = deque(sorted(transfers, key=start_key))
    for t in sorted((t for t in transfers if t.is_gather), key=lambda t: t.need):
        while queue and t not in done:
            other = queue.popleft()
            links_free = max(links_free, clock[other.start] + late) + other.seconds
            done[other] = links_free
        delay = max(0.0, done[t] - (clock[t.need] + late))
        delays[t] = delay
        late += delay
    return delays


def lay_out(graph: fx.Graph, computing: list[fx.Node], transfers: list[Transfer], config: PassConfig) -> bool:
    """Bring the nodes into the planned order; returns whether any moved."""
    order: list[fx.Node] = []
    under_way: dict[bool, deque[Transfer]] = {True: deque(), False: deque()}  # by is_gather
    starts: dict[int, list[Transfer]] = {}
    needs: dict[int, list[Transfer]] = {}
    for t in sorted(transfers, key=start_key):
        starts.setdefault(t.start, []).append(t)
        needs.setdefault(t.need, []).append(t)

    def finish(t: Transfer) -> None:
        if t in under_way[t.is_gather]:
            under_way[t.is_gather].remove(t)
            order.extend(t.after)

    def begin(t: Transfer, position: int) -> None:
        others = under_way[t.is_gather]
        for other in list(others):
            # A gather that is needed later keeps its place: `bound_bytes` has seen to it.
            fits = t.size + sum(o.size for o in others) <= config.inflight_bytes
            if not fits and (not t.is_gather or other.need <= position):
                finish(other)
        others.append(t)
        order.extend([*t.before, t.node])

    for i in range(len(computing) + 1):
        for t in starts.get(i, ()):
            begin(t, i)
        for t in needs.get(i, ()):
            finish(t)
        order.extend(computing[i : i + 1])
    if order == body(graph):
        return False
    end = graph.output_node()
    for node in order:
        end.prepend(node)
    return True

