"""Tests of kernels again, with the other instruction sets that this machine has: in each run one of them, drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from genai.kernels.cpu.jit.isa import available, isa, processor

OTHERS = [name for name in available(processor().feature_set) if name != isa()]


def other_instructions(test: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: test(name, …) for other instruction sets; the fixture `with_instructions` obeys the name."""
    for mark in (pytest.mark.parametrize("name", OTHERS), pytest.mark.drawn(len(OTHERS) or 1), pytest.mark.slow):
        test = mark(test)
    return test
