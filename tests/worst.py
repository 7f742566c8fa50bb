"""The worst gradient error of a test session: the largest difference from the unsharded model's gradient, relative to that
gradient's largest element."""

from __future__ import annotations

FOUND: dict[str, tuple[float, str]] = {}  # by what was compared


def note(kind: str, where: str, errors: list[float]) -> None:
    """Errors that all ranks of a test returned."""
    FOUND[kind] = max(FOUND.get(kind, (-1.0, "")), (max(errors), where))


def lines() -> list[str]:
    return [f"worst gradient error, {kind}: {error:.2e} ({where})" for kind, (error, where) in sorted(FOUND.items())]
