"""What passes know of devices and links: peak rates, bandwidths, latencies."""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class Hardware:
    """One kind of device and its links. Bandwidths in bytes/s, per rank and direction; latencies in seconds.

    matmul_flops: ((dtype, operations per second), ...) of dense matrix products; other dtypes as the first.
    issue_s: how long starting a collective keeps the rank from computing; latency_s: of a collective beside that.
    hop_s, node_hop_s: what each further rank of a node, and each further node, adds to that latency.
    link_bytes_per_s: of a rank inside its node; node_link_bytes_per_s: of a rank's own network link.
    busy_links: part of a collective's seconds that the rank cannot compute in, though nobody waits: moving data takes
        cores of the CPU, and some of a GPU's multiprocessors.
    transport: the process group's backend; with "gloo" some collectives take another form.
    """

    name: str
    matmul_flops: tuple[tuple[torch.dtype, float], ...]
    memory_bytes: float
    memory_bytes_per_s: float
    launch_s: float
    link_bytes_per_s: float
    node_link_bytes_per_s: float
    latency_s: float
    issue_s: float
    hop_s: float
    node_hop_s: float
    busy_links: float
    ranks_per_node: int
    host_bytes_per_s: float
    source: str
    transport: str = "nccl"

    def flops(self, dtype: torch.dtype) -> float:
        return dict(self.matmul_flops).get(dtype, self.matmul_flops[0][1])


def gpu(name, bf16, fp32, memory_gb, memory_tb_per_s, nvlink_gb_per_s, host_gb_per_s, source) -> Hardware:
    """A GPU of an 8-GPU node with one 400 Gb/s network link each; nccl's latencies."""
    flops = ((torch.bfloat16, bf16 * 1e12), (torch.float16, bf16 * 1e12), (torch.float32, fp32 * 1e12))
    return Hardware(
        name, flops, memory_gb * 1e9, memory_tb_per_s * 1e12, 5e-6, nvlink_gb_per_s * 1e9, 50e9, 20e-6, 5e-6,
        1e-6, 5e-6, 0.0, 8, host_gb_per_s * 1e9, source,
    )  # fmt: skip


CALIBRATED = "calibrated"  # the name of the profile that was measured here, see calibrate.py

# Dense tensor-core rates, without sparsity; fp32 is TF32. NVLink counts one direction.
HARDWARE = {
    "a100": gpu("a100", 312, 156, 80, 2.039, 300, 32, "NVIDIA A100 80GB SXM datasheet, 2021"),
    "h100": gpu("h100", 989, 494, 80, 3.35, 450, 64, "NVIDIA H100 SXM datasheet, 2023"),
    "h200": gpu("h200", 989, 494, 141, 4.8, 450, 64, "NVIDIA H200 datasheet, 2024"),
    "b200": gpu("b200", 2250, 1125, 180, 7.7, 900, 64, "NVIDIA DGX B200 datasheet, 2024 (an eighth of the system)"),
    # Measured with the suite's calibration on 2 gloo ranks of one thread each; `zero-fx bench --calibrate` replaces it.
    "cpu": Hardware(
        "cpu", ((torch.float32, 60e9), (torch.bfloat16, 30e9)), 16e9, 8e9, 5e-6, 1e9, 1e9, 6e-4, 1e-4,
        0.0, 0.0, 0.0, 64, 8e9,
        "a core of a 2-core virtual machine, gloo over loopback", "gloo",
    ),
}  # fmt: skip


def hardware_of(device: torch.device) -> Hardware:
    """The published profile of a device by its name; of GPUs that are not listed, the nearest by memory."""
    if device.type != "cuda":
        return HARDWARE["cpu"]
    name = torch.cuda.get_device_name(device).lower()
    known = [hardware for key, hardware in HARDWARE.items() if key in name]
    memory = torch.cuda.get_device_properties(device).total_memory
    gpus = [hardware for key, hardware in HARDWARE.items() if key != "cpu"]
    return known[0] if known else min(gpus, key=lambda hardware: abs(hardware.memory_bytes - memory))
