"""The rewritten graphs of a 2-block GPT lower to Triton and compile for sm_90; see triton_tool.py. Nothing is run."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
SEEN = ("2.13", "2.14")
# Its rows, 384 over 7 ranks, need padding; its collectives travel alone.
PARAMETER = "blocks.0.mlp.up.weight"

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]


def missing() -> str:
    """Why this cannot work here; empty if it can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: PyTorch's builds for CPUs come without it (pip install triton)"
    if not torch.__version__.startswith(SEEN):
        seen = ", ".join(SEEN)
        return f"the tool stands on private parts of Inductor as in PyTorch {seen}; this is {torch.__version__}"
    return ""


@pytest.fixture(scope="module")
def halves(tmp_path_factory) -> dict:
    """{(stage, "forward"): what the tool found}. In a process of its own, since it makes PyTorch believe in a GPU."""
    if reason := missing():
        pytest.skip(reason)
    found = lowered(tmp_path_factory, "--stages", "3", "1")
    return {(half["stage"], half["label"]): half for half in found}


def lowered(tmp_path_factory, *options: str) -> list[dict]:
    file = tmp_path_factory.mktemp("triton") / "found.json"
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, ROOT / "tests" / "triton_tool.py", *options, "--json", file]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(file.read_text())


each_half = pytest.mark.parametrize("half", [(stage, label) for stage in (3, 1) for label in ("forward", "backward")])


def found(half: dict, kind: str, name: str) -> list[dict]:
    return [node for node in half["inserted"] if (node["kind"], node["name"]) == (kind, name)]


@each_half
def test_every_kernel_compiles(halves, half):
    kernels = halves[half]["kernels"]
    assert len(kernels) > 10
    for kernel in kernels:
        assert kernel["cubin_bytes"] > 1000 and kernel["operations"] > 0 and kernel["launches"] > 0, kernel


@each_half
def test_collectives_start_in_the_order_of_the_graph(halves, half):
    check_order(halves[half])


def check_order(half: dict) -> None:
    from tests.lowered_graphs import starts

    in_graph, in_code = half["in_graph"], half["in_code"]
    assert starts(in_graph) and starts(in_code) == starts(in_graph)
    assert sorted(in_code) == sorted(in_graph)  # waits and products too; fusion may shift those


def test_fusion_does_not_pull_collectives_along(tmp_path_factory):
    """Every gradient by itself and in fp32: Inductor once fused two of them, and what the second needed came early."""
    from tests.lowered_graphs import delayed

    if reason := missing():
        pytest.skip(reason)
    for half in lowered(tmp_path_factory, "--stages", "3", "--fp32", "--bucket-bytes", "0"):
        check_order(half)
        # With bf16 under autocast one reduction still starts late: its cast is fused with that of a later gradient.
        assert delayed(half["in_graph"], half["in_code"]) == []


@each_half
def test_what_passes_insert_is_in_kernels_or_free(halves, half):
    for node in halves[half]["inserted"]:
        free = node["how"] == "view" and node["kind"] in ("unpad", "unpack")
        assert free or node["how"] in ("kernel", "in place"), node
    assert halves[half]["copies"] == []


def test_a_gathered_parameter_is_unpadded_and_cast_in_one_kernel(halves):
    for half in (halves[3, "forward"], halves[3, "backward"], halves[1, "forward"], halves[1, "backward"]):
        casts = found(half, "cast", PARAMETER)
        unpads = [node for node in found(half, "unpad", PARAMETER) if node["how"] == "kernel"]
        assert len(unpads) == 1 and unpads[0]["kernels"] == casts[0]["kernels"] and len(casts[0]["kernels"]) == 1


def test_a_gradient_is_cast_and_padded_in_one_kernel(halves):
    for half in (halves[3, "backward"], halves[1, "backward"]):
        cast, pad = found(half, "cast", PARAMETER)[-1], found(half, "pad", PARAMETER)[-1]
        assert pad["kernels"] == cast["kernels"] and len(pad["kernels"]) == 1
        assert [node["how"] for node in found(half, "unpad", PARAMETER)] == ["kernel", "view"]


def test_an_embedding_reads_the_padded_parameter(halves):
    """Its unpad is no kernel's own work: the kernel that looks rows up has it, with the norm behind."""
    half = halves[3, "forward"]
    model = {kernel["name"]: kernel["model"] for kernel in half["kernels"]}
    kernels = found(half, "unpad", "embed.weight")[0]["kernels"]
    assert any("embedding" in name and model[name] > 5 for name in kernels)
