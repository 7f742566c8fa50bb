"""Real ranks for tests: processes with an initialised gloo group, kept from one test to the next.

    results = ranks.run(function, *args, world=2, timeout_s=60)     # function(rank, world, *args) on every rank

`function` must be importable (a module-level function). A rank that raises fails the test with its traceback; a rank
that hangs fails it with the stacks of all its threads. Starting ranks costs seconds, so they are kept for the session,
one pool per world size, and replaced only when a failure left some of them waiting for a peer.
"""

from __future__ import annotations

import dataclasses
import datetime
import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings

import torch
import torch.distributed as dist

GROUP_TIMEOUT_S = 60.0  # of one collective
GRACE_S = 4.0  # that ranks get to fail by themselves after the first has
START_S = 60.0


class RanksFailed(AssertionError):
    """At least one rank raised, died or did not finish in time; the message has each rank's part."""


@dataclasses.dataclass
class Rank:
    """The parent's side of one rank. `dump_path` is where the rank writes its stacks when asked to."""

    process: multiprocessing.Process
    pipe: multiprocessing.connection.Connection
    dump_path: str


class Pool:
    """`world` ranks that wait for something to run."""

    def __init__(self, world: int):
        self.world = world
        self.folder = tempfile.TemporaryDirectory(prefix="zero_fx_ranks_")
        # The parent serves the store, on a port of the system's choice: no race for it, and it outlives any rank.
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.ranks = [self.start(rank) for rank in range(world)]
        outcomes = self.collect(START_S)
        if any(kind != "ok" for kind, _ in outcomes.values()) or len(outcomes) < world:
            failure = self.failure("start of the ranks", outcomes, START_S)
            self.close()
            raise failure
        self.is_open = True

    def start(self, rank: int) -> Rank:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        path = os.path.join(self.folder.name, f"stacks{rank}.txt")
        process = context.Process(target=serve, args=(rank, self.world, self.store.port, theirs, path), daemon=True)
        process.start()
        theirs.close()
        return Rank(process, ours, path)

    def run(self, function, args: tuple, timeout_s: float, label: str) -> list:
        message = pickle.dumps((function, args))
        for rank in self.ranks:
            rank.pipe.send_bytes(message)
        outcomes = self.collect(timeout_s)
        if len(outcomes) == self.world and all(kind == "ok" for kind, _ in outcomes.values()):
            return [outcomes[rank][1] for rank in range(self.world)]
        failure = self.failure(label, outcomes, timeout_s)
        if len(outcomes) == self.world and self.is_healthy():
            raise failure
        self.close()
        raise failure

    def is_healthy(self) -> bool:
        """Whether ranks that have all answered are in step: a collective of theirs works."""
        message = pickle.dumps((sum_of_ranks, ()))
        try:
            for rank in self.ranks:
                rank.pipe.send_bytes(message)
        except OSError:
            return False
        outcomes = self.collect(GRACE_S)
        return outcomes == {rank: ("ok", sum(range(self.world))) for rank in range(self.world)}

    def collect(self, timeout_s: float) -> dict[int, tuple[str, object]]:
        """{rank: ("ok", result) or ("error", text)} of the ranks that answered in time."""
        outcomes: dict[int, tuple[str, object]] = {}
        deadline = time.monotonic() + timeout_s
        while len(outcomes) < self.world and time.monotonic() < deadline:
            waiting = {self.ranks[rank].pipe: rank for rank in range(self.world) if rank not in outcomes}
            for pipe in multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic())):
                rank = waiting[pipe]
                try:
                    outcomes[rank] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    self.ranks[rank].process.join(1)
                    outcomes[rank] = ("error", f"the process ended with code {self.ranks[rank].process.exitcode}")
                if outcomes[rank][0] != "ok":
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return outcomes

    def failure(self, label: str, outcomes: dict[int, tuple[str, object]], timeout_s: float) -> RanksFailed:
        """What each rank did, as an exception; those that did not answer write their stacks first."""
        parts = [f"{label}, {self.world} ranks:"]
        stuck = [rank for rank in range(self.world) if rank not in outcomes]
        for rank in stuck:
            if self.ranks[rank].process.is_alive():
                os.kill(self.ranks[rank].process.pid, signal.SIGUSR1)
        if stuck:
            time.sleep(0.5)
        for rank in range(self.world):
            if rank in stuck:
                with open(self.ranks[rank].dump_path, encoding="utf-8") as file:
                    parts.append(f"--- rank {rank} did not finish (limit {timeout_s:g} s); it was at\n{file.read()}")
            else:
                kind, value = outcomes[rank]
                parts.append(f"--- rank {rank}: " + ("finished" if kind == "ok" else str(value)))
        return RanksFailed("\n".join(parts))

    def close(self) -> None:
        self.is_open = False
        for rank in self.ranks:
            rank.process.kill()
            rank.process.join(5)
            rank.pipe.close()
        self.folder.cleanup()


POOLS: dict[int, Pool] = {}


def run(function, *args, world: int = 2, timeout_s: float = 120.0) -> list:
    """Results of `function(rank, world, *args)` on each of `world` ranks; raises RanksFailed."""
    label = f"{function.__name__}({', '.join(map(str, args))})"
    if world not in POOLS:
        POOLS[world] = Pool(world)
    try:
        return POOLS[world].run(function, args, timeout_s, label)
    except RanksFailed:
        if not POOLS[world].is_open:
            del POOLS[world]
        raise
    except BaseException:  # an interrupt or pytest's timeout: what the ranks are doing is unknown
        POOLS.pop(world).close()
        raise


def close() -> None:
    while POOLS:
        POOLS.popitem()[1].close()


def serve(rank: int, world: int, port: int, pipe, dump_path: str) -> None:
    """A rank's whole life: join the group, then run what comes until the parent is gone."""
    with open(dump_path, "w", encoding="utf-8") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        torch.set_num_threads(1)
        gc.set_threshold(50_000, 20, 20)  # captures make many objects that live: a fifth of their time was collection
        warnings.simplefilter("ignore")
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        timeout = datetime.timedelta(seconds=GROUP_TIMEOUT_S)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
        answer(pipe, ("ok", None))
        while True:
            try:
                message = pipe.recv_bytes()
            except EOFError:
                return
            answer(pipe, outcome_of(message, rank, world))


def sum_of_ranks(rank: int, world: int) -> int:
    total = torch.tensor(rank)
    dist.all_reduce(total)
    return int(total)


def answer(pipe, outcome: tuple[str, object]) -> None:
    # Plain pickle: multiprocessing's own would pass tensors as files that both sides must keep open.
    pipe.send_bytes(pickle.dumps(outcome))


def outcome_of(message: bytes, rank: int, world: int) -> tuple[str, object]:
    try:
        function, args = pickle.loads(message)
        torch._dynamo.reset()
        torch.manual_seed(0)
        return "ok", function(rank, world, *args)
    except BaseException:
        return "error", traceback.format_exc()
    finally:
        torch._dynamo.reset()
        gc.collect()
