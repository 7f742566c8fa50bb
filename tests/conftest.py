"""Shared by all tests: a checkout works uninstalled, and the ranks of `ranks.py` end with the session."""

from __future__ import annotations

import pathlib
import sys

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
for path in (ROOT, ROOT / "tests"):
    if str(path) not in sys.path:
        sys.path.insert(0, str(path))

import ranks  # noqa: E402
import worst  # noqa: E402


def pytest_collection_modifyitems(items):
    """What only the full run has is slow, too: `pytest -m "not slow"` is the daily run."""
    for item in items:
        if item.get_closest_marker("full"):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    """Dynamo remembers by lines of code which sizes changed, and captures the next model with symbols for them."""
    yield
    torch._dynamo.reset()


def pytest_terminal_summary(terminalreporter):
    for line in worst.lines():
        terminalreporter.write_line(line)


def pytest_sessionfinish(session, exitstatus):
    ranks.close()
