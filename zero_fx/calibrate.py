"""Measure this machine's profile for the cost model, as its ranks use it: all of them at once.

Rates are medians over repetitions; a collective's latency and bandwidth are a least-squares line through its seconds over
sizes, weighted so that small ones count. What was measured is kept in the user's cache folder, for
`zero_fx.compile(..., hardware="calibrated")`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import statistics
import time

import torch
import torch.distributed as dist

from .hardware import CALIBRATED, Hardware, hardware_of
from .runtime.collectives import all_gather, wait
from .runtime.tensors import backend_of

REPEATS = 7
MATRIX = {"cpu": (512, 1024), "cuda": (4096, 8192)}  # rows and columns of the products that are timed
STREAM_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
SHARD_BYTES = (1 << 14, 1 << 17, 1 << 20, 1 << 22)  # of the gathers that are timed


def calibrate(device: torch.device) -> Hardware:
    """The profile of the ranks of the default process group, each on a `device` of its own; the mean over them.

    Collective. Takes seconds. Fields that are not measured (memory size, ranks of a node, the links between nodes where
    there is one node) are the published profile's.
    """
    published = hardware_of(device)
    flops = tuple((dtype, matmul_rate(device, dtype)) for dtype, _ in published.matmul_flops)
    measured = {
        "memory_bytes_per_s": memory_rate(device),
        "launch_s": seconds(lambda a: torch.add(a, a), torch.ones(8, device=device)),
        "host_bytes_per_s": host_rate(device),
    }
    if dist.get_world_size() > 1:
        measured |= links(device, published)
    measured = {name: mean_over_ranks(value, device) for name, value in measured.items()}
    rates = tuple((dtype, mean_over_ranks(rate, device)) for dtype, rate in flops)
    source = f"measured on {dist.get_world_size()} ranks ({dist.get_backend()}), {time.strftime('%Y-%m-%d')}"
    return dataclasses.replace(published, name=CALIBRATED, matmul_flops=rates, source=source, **measured)


def mean_over_ranks(value: float, device: torch.device) -> float:
    total = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def seconds(function, *args) -> float:
    """Median seconds of a call, over REPEATS batches of calls that take a millisecond or more."""
    function(*args)
    start = time.perf_counter()
    function(*args)
    synchronize()
    calls = max(1, round(1e-3 / max(time.perf_counter() - start, 1e-9)))
    taken = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(calls):
            function(*args)
        synchronize()
        taken.append((time.perf_counter() - start) / calls)
    return statistics.median(taken)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a product as wide as a model's."""
    rows, columns = MATRIX[device.type]
    if device.type == "cpu" and dtype != torch.float32:
        rows //= 8  # a CPU without instructions for it takes a hundred times as long
    a = torch.randn(rows, columns, device=device).to(dtype)
    b = torch.randn(columns, columns, device=device).to(dtype)
    dist.barrier()
    return 2 * rows * columns * columns / seconds(torch.mm, a, b)


def memory_rate(device: torch.device) -> float:
    """Bytes per second, read and written together."""
    source = torch.ones(STREAM_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    dist.barrier()
    return 2 * STREAM_BYTES[device.type] / seconds(target.copy_, source)


def host_rate(device: torch.device) -> float:
    source = torch.ones(STREAM_BYTES["cpu"] // 4, pin_memory=device.type == "cuda")
    target = torch.empty_like(source, device=device)
    return STREAM_BYTES["cpu"] / seconds(target.copy_, source)


def links(device: torch.device, published: Hardware) -> dict[str, float]:
    """What a collective costs: `latency_s`, the links' bandwidth, and what it takes of the rank's time."""
    world, group = dist.get_world_size(), dist.group.WORLD
    broadcasts = dist.get_rank() if backend_of(group, device.type) == "gloo" else None

    def start(shard):
        return all_gather(shard, world, group.group_name, "calibration", rank=broadcasts)

    def gather(shard):
        return wait(start(shard), shard, "calibration")

    shards = [torch.ones(size // 4, device=device) for size in SHARD_BYTES]
    points = []
    for shard in shards:
        dist.barrier()
        points.append((shard.nbytes * (world - 1), seconds_in_step(gather, shard)))
    latency, byte = line(points)
    known = {"latency_s": latency, "hop_s": 0.0, "node_hop_s": 0.0, "issue_s": issue(start, shards[0])}
    inside = world <= published.ranks_per_node
    known["link_bytes_per_s" if inside else "node_link_bytes_per_s"] = 1 / byte
    return known | {"busy_links": busy(start, shards[-1], points[-1][1], device)}


def seconds_in_step(function, *args) -> float:
    """Median seconds of a collective: the number of calls must be the same on all ranks."""
    taken = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        function(*args)
        synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def line(points: list[tuple[int, float]]) -> tuple[float, float]:
    """(a, b) of seconds = a + b * bytes, the squares of relative errors least; both above 0."""
    x = torch.tensor([[1.0, size] for size, _ in points], dtype=torch.float64)
    y = torch.tensor([taken for _, taken in points], dtype=torch.float64)
    solution = torch.linalg.lstsq(x / y[:, None], torch.ones_like(y)[:, None]).solution.flatten().tolist()
    return max(solution[0], 1e-7), max(solution[1], 1e-13)


def issue(start, shard) -> float:
    """Seconds that starting a small collective keeps the rank."""
    taken = []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        started = start(shard)
        taken.append(time.perf_counter() - began)
        wait(started, shard, "calibration")
    return statistics.median(taken[1:])


def busy(start, shard, alone: float, device: torch.device) -> float:
    """Part of a collective's seconds by which products take longer that run meanwhile; 0 to 1."""
    rows, columns = MATRIX[device.type]
    a, b = torch.randn(rows, columns, device=device), torch.randn(columns, columns, device=device)
    one = seconds(torch.mm, a, b)
    count = max(2, round(1.5 * alone / one))  # products that take longer than the collective

    def products(is_moving: bool) -> float:
        dist.barrier()
        began = time.perf_counter()
        started = start(shard) if is_moving else None
        for _ in range(count):
            torch.mm(a, b)
        synchronize()
        taken = time.perf_counter() - began
        if is_moving:
            wait(started, shard, "calibration")
        return taken

    count = round(mean_over_ranks(count, device))
    excess = statistics.median(products(True) - products(False) for _ in range(REPEATS))
    return min(1.0, max(0.0, excess / alone))


def cache_path(device: torch.device) -> pathlib.Path:
    folder = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(folder) / "zero_fx" / f"hardware_{device.type}.json"


def save(hardware: Hardware, device: torch.device) -> pathlib.Path:
    """Write a profile to the cache, whole or not at all; returns where."""
    path = cache_path(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = dataclasses.asdict(hardware)
    data["matmul_flops"] = [[str(dtype)[6:], rate] for dtype, rate in hardware.matmul_flops]
    aside = path.with_suffix(f".{os.getpid()}")
    aside.write_text(json.dumps(data, indent=1) + "\n")
    aside.replace(path)
    return path


def calibrated(device: torch.device) -> Hardware:
    """The profile in the cache; raises ValueError where there is none that this version can read."""
    path = cache_path(device)
    try:
        data = json.loads(path.read_text())
        data["matmul_flops"] = tuple((getattr(torch, name), rate) for name, rate in data["matmul_flops"])
        return Hardware(**{"transport": hardware_of(device).transport, **data})
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"hardware={CALIBRATED!r}: no profile of this machine in {path} ({error}); measure one with "
            "`zero-fx bench --calibrate`"
        ) from error
