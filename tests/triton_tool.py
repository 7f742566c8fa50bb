"""Lower what zero_fx makes of a 2-block GPT to Triton, and compile every kernel to a cubin for sm_90, without a GPU.

    python tests/triton_tool.py [--stages 3 1] [--fp32] [--bucket-bytes 140000] [--json FILE]

A check, never a way to train. Printed: each kernel, and in which kernels the pads, unpads, packs and unpacks that our
passes insert have ended, and the casts (autocast's) of what is gathered or reduced. How it is done: triton_lowering.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from tests.lowered_graphs import delayed, starts
from tests.triton_lowering import BUCKET_BYTES, Half, run


def show(half: Half) -> None:
    print(f"\nstage {half.stage}, {half.label}: {len(half.kernels)} kernels")
    print(f"{'kernel':70} starts  operations  cubin bytes  nodes of the model")
    for kernel in half.kernels:
        numbers = f"{kernel.launches:6} {kernel.operations:11} {kernel.cubin_bytes:12} {kernel.model:19}"
        print(f"{kernel.name[:70]:70} {numbers}")
        for node in half.inserted:
            if kernel.name in node.kernels:
                print(f"    {node.kind} {node.name}{' (the padding only)' * (node.how == 'in place')}")
    for how, meaning in (("view", "read in place, in no kernel"), ("extern", "calls of their own")):
        nodes = [f"{node.kind} {node.name}" for node in half.inserted if node.how == how]
        print(f"{meaning}: {'; '.join(dict.fromkeys(nodes)) or 'none'}")
    print(f"copies made for a collective: {', '.join(half.copies) or 'none'}")
    print(f"collectives start in the order of the graph: {starts(half.in_graph) == starts(half.in_code)}")
    late = delayed(half.in_graph, half.in_code)
    print(f"start behind more matrix products than in the graph: {', '.join(late) or 'none'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--stages", type=int, nargs="+", default=[3])
    parser.add_argument("--fp32", action="store_true", help="without autocast")
    parser.add_argument("--bucket-bytes", type=int, default=BUCKET_BYTES)
    parser.add_argument("--json", help="a file for what was found")
    options = parser.parse_args()
    # With caches of its own, since from those of another run nothing would be compiled.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ["TRITON_CACHE_DIR"] = os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        halves = run(options.stages, not options.fp32, options.bucket_bytes)
    for half in halves:
        show(half)
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps([dataclasses.asdict(half) for half in halves]))


if __name__ == "__main__":
    main()
