"""Which rows of a parameter a rank owns: dimension 0 cut as torch.chunk cuts it (DTensor's Shard(0)).

N = ranks. A parameter of `rows` rows has chunks of ceil(rows / N) rows; the last owners may have fewer, or none.
Collectives move whole chunks, so the tail is padded: the padded parameter has N * ceil(rows / N) rows, and the
true one is its first `rows` rows.
"""

from __future__ import annotations

import torch


def chunk_rows(rows: int, world: int) -> int:
    """Rows of one chunk, the padding included."""
    return -(-rows // world)


def owned_rows(rows: int, world: int, rank: int) -> tuple[int, int]:
    """(first row, number of rows) that `rank` owns, without padding; the number may be 0."""
    chunk = chunk_rows(rows, world)
    first = min(rank * chunk, rows)
    return first, min(chunk, rows - first)


def pad_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """`tensor` with zeros appended in dimension 0 until it has `rows` rows; itself if it has."""
    missing = rows - tensor.shape[0]
    if missing == 0:
        return tensor
    return torch.ops.aten.constant_pad_nd(tensor, [0] * (2 * tensor.dim() - 1) + [missing])


def part_of(full: torch.Tensor, is_whole: bool, world: int, rank: int) -> torch.Tensor:
    """A rank's part of a tensor of the full shape: a view of its rows, or all of it if it is kept whole."""
    return full if is_whole else full.narrow(0, *owned_rows(full.shape[0], world, rank))


def own_copy(rows: torch.Tensor) -> torch.Tensor:
    """A rank's own contiguous copy of its rows of a parameter, which are a view."""
    return rows.clone(memory_format=torch.contiguous_format)
