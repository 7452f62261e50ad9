"""Fixtures of the row-wise operators: a call run by one, two and three threads on copies of its arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from genai.kernels.cpu.program.calls import Call, program_of
from genai.kernels.cpu.program.step_table import ContextTable, StepField
from genai.kernels.cpu.program.thread_pool import Threads

THREADS = (1, 2, 3)
# Nanoseconds of work that several threads share.
SHARED = 1e6


@pytest.fixture
def execute() -> Callable[..., list[np.ndarray]]:
    """execute(build, *arrays, tokens=..., **fields): the arrays after build(*arrays) has run.

    build returns a call, or several of which each waits for the one before. Every number of threads works on copies of
    its own; all must agree to the last bit. tokens is the number of rows (those of the first array if absent); other
    fields of the context are counts or int64 arrays.
    """

    def run(
        build: Callable[..., Call | list[Call]], *arrays: np.ndarray, tokens: int | None = None, **fields: Any
    ) -> Any:
        results = []
        for threads in THREADS:
            copies = [array.copy() for array in arrays]
            calls = build(*copies)
            program = program_of([[call] for call in (calls if isinstance(calls, list) else [calls])])
            context = ContextTable()
            context.count(StepField.TOKENS, arrays[0].shape[0] if tokens is None else tokens)
            for name, value in fields.items():
                (context.array if isinstance(value, np.ndarray) else context.count)(StepField[name], value)
            Threads(threads).run(program, context, nanoseconds=SHARED)
            results.append(copies)
        for other in results[1:]:
            for ours, theirs in zip(results[0], other, strict=True):
                np.testing.assert_array_equal(ours.view(np.uint8), theirs.view(np.uint8))
        return results[0]

    return run


@pytest.fixture
def hard_numbers(rng: np.random.Generator) -> np.ndarray:
    """Zeros, denormals, infinities, NaN, numbers of all magnitudes, and many ordinary ones: float32 [1008]."""
    edges = [
        0.0,
        1e-45,
        1.1e-38,
        1e-20,
        1e-6,
        0.3,
        1.0,
        5.5,
        20.0,
        88.7,
        103.9,
        1e4,
        1e18,
        1e30,
        3.4e38,
        np.inf,
        np.nan,
    ]
    ordinary = rng.standard_normal(974) * np.exp(rng.uniform(-3, 2, 974))
    return np.concatenate([edges, np.negative(edges), ordinary]).astype(np.float32)
