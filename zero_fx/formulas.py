"""What ZeRO promises, as arithmetic: bytes of model states, and elements sent (arXiv 1910.02054, sections 3 and 7).

Ψ = elements of all parameters = sharded + whole: a parameter too small to be worth partitioning is kept whole on
each rank. N = world = ranks. k = micro_batches = forward and backward passes of one optimizer step. Padding of
parameters whose rows N does not divide is left out.
"""

from __future__ import annotations

FP32_BYTES = 4  # of a parameter and of its gradient, per element
ADAM_BYTES = 8  # of the two moments of Adam, per element, fp32


def model_state_bytes(
    stage: int, sharded: int, whole: int, world: int, micro_batches: int = 1, gathered_bytes: int = FP32_BYTES
) -> float:
    """Peak bytes of parameters, gradients and Adam's moments on one rank; fp32, but for the gathered parameters.

    sharded, whole: elements of the parameters that are partitioned over `world` ranks, and that are not.
    gathered_bytes: of an element of the copy that stages 1 and 2 hold through a step; 2 in mixed precision. One rank holds none.
    The paper's table 1 (section 3) for mixed precision has 16 bytes an element as well: 2 + 2 + 12. At stage 1 the
    full gradient only exists where it must wait for the other micro-batches; with one it is reduced as it is made.
    """
    full, part = FP32_BYTES * sharded, FP32_BYTES * sharded / world
    gathered = 0 if world == 1 else gathered_bytes * sharded
    moments = ADAM_BYTES * sharded
    is_local = stage == 1 and micro_batches > 1
    partitioned = {
        0: 2 * full + moments,
        1: gathered + part + (full if is_local else part) + moments / world,  # gathered + own rows + gradient + moments
        2: gathered + part + part + moments / world,
        3: part + part + moments / world,
    }
    return partitioned[stage] + (2 * FP32_BYTES + ADAM_BYTES) * whole


def elements_sent(stage: int, sharded: int, whole: int, world: int, micro_batches: int = 1) -> float:
    """Elements that one rank sends in one optimizer step, by ring algorithms (section 7 of the paper).

    A ring all-gather or reduce-scatter of a full size n sends n(N-1)/N from each rank, an all-reduce both. Stage 0
    and 1 communicate once a step; stage 2 gathers once and reduces in every micro-batch; stage 3 gathers before
    forward and before backward and reduces, in every micro-batch.
    """
    rounds = {0: 2, 1: 2, 2: 1 + micro_batches, 3: 3 * micro_batches}[stage]
    return (rounds * sharded + 2 * whole) * (world - 1) / world
