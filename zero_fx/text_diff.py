"""Which lines of a graph's text a pass kept, moved, took away and added. Values that are only numbered anew are kept.

Graphs of models repeat their lines hundreds of times, which makes difflib quadratic. A line that is as often in one text
as in the other stands for itself, its first for the first and so on; of these the longest run in order is kept (Hunt and
Szymanski, CACM 1977) and the others were moved. difflib compares what is left between them.
"""

from __future__ import annotations

import bisect
import dataclasses
import difflib
import re

LARGEST = 300  # lines of a gap for difflib; a larger one counts as replaced


@dataclasses.dataclass(frozen=True)
class Diff:
    """Of two lists of lines. kept: (old, new) numbers of lines that stayed, in order. moved: the same of lines that are
    elsewhere in the order."""

    kept: tuple[tuple[int, int], ...]
    moved: tuple[tuple[int, int], ...]

    def blocks(self) -> list[tuple[int, int, int]]:
        """(old, new, count) of kept lines that follow one another in both."""
        found: list[list[int]] = []
        for i, j in self.kept:
            if found and found[-1][0] + found[-1][2] == i and found[-1][1] + found[-1][2] == j:
                found[-1][2] += 1
            else:
                found.append([i, j, 1])
        return [tuple(block) for block in found]


def compare(old: list[str], new: list[str]) -> Diff:
    keys, others = ([re.sub(r"%\d+", "%", line) for line in lines] for lines in (old, new))
    where, there = positions(keys), positions(others)
    pairs = sorted(
        (i, j) for key, found in where.items() if len(found) == len(there.get(key, ())) for i, j in zip(found, there[key])
    )
    anchors = longest_in_order(pairs)
    kept = list(anchors)
    for (i, j), (k, m) in zip([(-1, -1), *anchors], [*anchors, (len(old), len(new))]):
        kept += in_gap(keys, others, i + 1, k, j + 1, m)
    taken, given = ({pair[side] for pair in kept} for side in (0, 1))
    return Diff(tuple(sorted(kept)), tuple((i, j) for i, j in pairs if i not in taken and j not in given))


def positions(keys: list[str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for i, key in enumerate(keys):
        found.setdefault(key, []).append(i)
    return found


def longest_in_order(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Of pairs sorted by their first number, the most whose second numbers increase too."""
    ends: list[int] = []  # ends[n]: smallest second number that ends a run of n + 1
    last: list[int] = []  # its pair
    previous: list[int] = []
    for index, (_, j) in enumerate(pairs):
        at = bisect.bisect_left(ends, j)
        previous.append(last[at - 1] if at else -1)
        ends[at : at + 1], last[at : at + 1] = [j], [index]
    found, index = [], last[-1] if last else -1
    while index >= 0:
        found.append(pairs[index])
        index = previous[index]
    return found[::-1]


def in_gap(old: list[str], new: list[str], a: int, b: int, c: int, d: int) -> list[tuple[int, int]]:
    """Kept lines of old[a:b] and new[c:d]."""
    if a == b or c == d or max(b - a, d - c) > LARGEST:
        return []
    matcher = difflib.SequenceMatcher(None, old[a:b], new[c:d], autojunk=False)
    return [(a + i + n, c + j + n) for i, j, size in matcher.get_matching_blocks() for n in range(size)]


def diff(before: str, after: str, context: int = 1) -> str:
    """What changed, as lines with - and +, and `context` kept ones around; "..." where kept ones are left out."""
    old, new = before.splitlines(), after.splitlines()
    rows: list[str] = []
    i = j = 0
    for a, b in (*compare(old, new).kept, (len(old), len(new))):
        rows += [f"- {line}" for line in old[i:a]] + [f"+ {line}" for line in new[j:b]]
        rows += [f"  {line}" for line in new[b : b + 1]]
        i, j = a + 1, b + 1
    changed = [n for n, row in enumerate(rows) if row[0] != " "]
    near = sorted({m for n in changed for m in range(max(0, n - context), min(len(rows), n + context + 1))})
    shown = []
    for n, last in zip(near, [-1, *near]):
        shown += ["..."] if last >= 0 and n > last + 1 else []
        shown.append(rows[n])
    return "\n".join(shown)
