"""Fixtures of the experts: weights in the model's format, and a mixture run by one, two and three threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from genai.common.host_memory import huge_array
from genai.kernels.cpu.moe.mixture import Mixture, mixture_phases, mixture_size
from genai.kernels.cpu.program.calls import Rows, program_of
from genai.kernels.cpu.program.step_table import ContextTable, StepField
from genai.kernels.cpu.program.thread_pool import Threads
from genai.kernels.reference.weights import dequantize_weight

# Nanoseconds of work that several threads share.
SHARED = 1e6


@dataclass(frozen=True)
class Layer:
    """Experts in the model's format, and their values in float64 [experts, rows, columns]."""

    constants: dict[str, Any]
    values: np.ndarray
    bias: np.ndarray | None = None


@pytest.fixture
def layer(rng: np.random.Generator) -> Callable[..., Layer]:
    """layer(experts, rows, columns, bits=..., block_size=..., points=..., scale_type=..., bias=...)."""

    def make(
        experts: int, rows: int, columns: int, *, bits: int = 4, block_size: int = 32, points: str = "none",
        scale_type: Any = np.float16, bias: bool = False,
    ) -> Layer:  # fmt: skip
        blocks = -(-columns // block_size)
        weight = rng.integers(0, 256, (experts, rows, blocks * block_size * bits // 8), dtype=np.uint8)
        scales = (rng.standard_normal((experts, rows, blocks)) / (1 << bits)).astype(scale_type)
        zeros: Any = {
            "none": lambda: None,
            "packed": lambda: rng.integers(0, 256, (experts, rows, -(-blocks * bits // 8)), dtype=np.uint8),
            "fractions": lambda: (rng.random((experts, rows, blocks)) * (1 << bits)).astype(np.float16),
        }[points]()
        constants = {"weight": weight, "scales": scales, "zero_points": zeros, "columns": columns, "bits": bits,
                     "block_size": block_size}  # fmt: skip
        values = np.stack(
            [
                dequantize_weight(weight[e], scales[e], None if zeros is None else zeros[e], n=rows, k=columns,
                                  bits=bits, block_size=block_size)
                for e in range(experts)
            ]
        )  # fmt: skip
        offsets = rng.standard_normal((experts, rows)).astype(np.float32) if bias else None
        return Layer(constants, values.astype(np.float64), offsets)

    return make


@pytest.fixture
def run() -> Callable[..., np.ndarray]:
    """run(mixture, x, scores, capacity=...): by 1, 2 and 3 threads, which must agree to the bit."""

    def run(mixture: Mixture, x: np.ndarray, scores: np.ndarray, capacity: int | None = None) -> np.ndarray:
        results = []
        for threads in (1, 2, 3):
            capacity = len(x) if capacity is None else capacity
            size = mixture_size(mixture, capacity)
            memory = huge_array((size + 64,), np.uint8)
            memory[:] = 255  # NaN, and other values that no kernel may use
            out = np.full((len(x), mixture.second.matrices.rows), np.nan, np.float32)
            phases = mixture_phases(
                mixture, Rows.of(x), Rows.of(scores), Rows.of(out), memory.ctypes.data, capacity=capacity, held=memory
            )
            context = ContextTable()
            context.count(StepField.TOKENS, len(x))
            Threads(threads).run(program_of(phases), context, nanoseconds=SHARED)
            assert (memory[size:] == 255).all()
            results.append(out)
        for other in results[1:]:
            np.testing.assert_array_equal(results[0].view(np.uint32), other.view(np.uint32))
        return results[0]

    return run
