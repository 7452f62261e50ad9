"""Kernel tests repeated with the machine's other instruction sets; each run draws one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from genai.kernels.cpu.jit.isa import available, isa, processor

OTHERS = [name for name in available(processor().feature_set) if name != isa()]


def other_instructions(test: Callable[..., Any]) -> Callable[..., Any]:
    """Return a decorator test(name, ...) for other instruction sets; `with_instructions` uses the set of this name."""
    for mark in (pytest.mark.parametrize("name", OTHERS), pytest.mark.drawn(len(OTHERS) or 1), pytest.mark.slow):
        test = mark(test)
    return test
