"""What ranks do each for themselves, and then know of each other whether it worked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable

# An error that all the ranks raise is of the first failed rank's kind, where that is one of these.
KINDS = {kind.__name__: kind for kind in (ValueError, TypeError, FileNotFoundError, FileExistsError, PermissionError, OSError)}


def together(group: dist.ProcessGroup, what: str, action: Callable[[], object]):
    """This rank's action(). Collective: if it raised on any rank, all raise an error that says on which, and why."""
    result = failure = None
    try:
        result = action()
    except Exception as error:
        failure = error
    failures = [None] * dist.get_world_size(group)
    dist.all_gather_object(failures, described(failure), group=group)
    raise_failures(what, {rank: found for rank, found in enumerate(failures) if found}, failure)
    return result


def described(error: BaseException | None) -> tuple[str, str] | None:
    """(kind, text), which every rank can unpickle."""
    if error is None:
        return None
    kind = next((kind.__name__ for kind in type(error).__mro__ if kind.__name__ in KINDS), "RuntimeError")
    return kind, str(error) or type(error).__name__


def raise_failures(what: str, failures: dict[int, tuple[str, str]], cause: BaseException | None) -> None:
    """Raise for {rank: (kind, text)}, if there are any; ranks that say the same are named together."""
    if not failures:
        return
    by_text: dict[str, list[int]] = {}
    for rank, (_, text) in failures.items():
        by_text.setdefault(text, []).append(rank)
    lines = [f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {text}" for text, ranks in by_text.items()]
    kind = KINDS.get(next(iter(failures.values()))[0], RuntimeError)
    raise kind(f"zero_fx: {what} failed on " + "\n  and on ".join(lines)) from cause


def from_rank_0(group: dist.ProcessGroup, what: str, action: Callable[[], object]):
    """action() of rank 0, on every rank; an error of it too."""
    found: list = [None, None]
    failure = None
    if dist.get_rank(group) == 0:
        try:
            found = [action(), None]
        except Exception as error:
            failure, found = error, [None, described(error)]
    dist.broadcast_object_list(found, group_src=0, group=group)
    raise_failures(what, {0: found[1]} if found[1] else {}, failure)
    return found[0]
