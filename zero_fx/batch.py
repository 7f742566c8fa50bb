"""The batch dimension of a forward's arguments: how many samples they hold, and the same arguments with another number."""

from __future__ import annotations

import torch

from .torch_compat import tree_leaves, tree_map


def samples_of(args: tuple, kwargs: dict) -> int | None:
    """Samples of one rank: the size of dimension 0 of the first tensor that has one and more than one element; None
    without such a tensor. (A keyword argument comes after the positional ones.)"""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    return next((tensor.shape[0] for tensor in tensors if tensor.ndim and tensor.numel() > 1), None)


def with_samples(args: tuple, kwargs: dict, samples: int) -> tuple[tuple, dict]:
    """The arguments with `samples` in place of their samples: the first ones, repeated where there are too few.

    Every tensor whose dimension 0 has the size of the first one's is changed; masks, positions and the like of another size
    stay. Raises ValueError where there is nothing to change.
    """
    now = samples_of(args, kwargs)
    if now is None:
        raise ValueError(f"samples={samples}: no argument of forward is a tensor with a batch dimension")
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
        raise ValueError(f"samples={samples!r}: expected a number of samples of one rank, 1 or more")

    def one(value):
        if not isinstance(value, torch.Tensor) or not value.ndim or value.shape[0] != now or samples == now:
            return value
        times = -(-samples // now)
        return value.detach().repeat(times, *[1] * (value.ndim - 1))[:samples].requires_grad_(value.requires_grad)

    return tree_map(one, (args, kwargs))
