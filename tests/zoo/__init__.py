"""Tiny models of every kind that a user may bring, each with its data. `CASES` maps names to them."""

from . import adapters, attention, breaks, calls, conv, hf, inputs, plain, rnn, shapes, weights
from .common import Case

MODULES = (plain, weights, shapes, adapters, attention, rnn, conv, breaks, calls, inputs, hf)
CASES: dict[str, Case] = {case.name: case for module in MODULES for case in module.CASES}
assert len(CASES) == sum(len(module.CASES) for module in MODULES), "two cases have one name"
