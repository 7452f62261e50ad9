"""Fixtures of the matmuls: weights in the model's format, and a program that multiplies rows with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from genai.kernels.cpu.linear.activations import input_bytes, input_call, inputs_at
from genai.kernels.cpu.linear.calls import Affine, decode_call
from genai.kernels.cpu.linear.dense import Matrix
from genai.kernels.cpu.linear.packing import pack_matrix
from genai.kernels.cpu.program.calls import Rows, program_of
from genai.kernels.cpu.program.step_table import ContextTable, StepField
from genai.kernels.cpu.program.thread_pool import Threads
from genai.kernels.weight_layout import BlockMatrix


@pytest.fixture
def stored(rng: np.random.Generator) -> Callable[..., dict[str, Any]]:
    """stored(n, k, bits, block_size, zero_points, scale_type): arguments of pack_matrix."""

    def make(
        n: int, k: int, bits: int = 4, block_size: int = 32, zero_points: str = "none", scale_type: Any = np.float16
    ) -> dict[str, Any]:
        blocks = -(-k // block_size)
        points: Any = {
            "none": lambda: None,
            "packed": lambda: rng.integers(0, 256, (n, -(-blocks * bits // 8)), dtype=np.uint8),
            "whole": lambda: rng.integers(0, 1 << bits, (n, blocks)).astype(np.float32),
            "fractions": lambda: rng.random((n, blocks)).astype(np.float16),
        }[zero_points]()
        weight = rng.integers(0, 256, (n, blocks, block_size * bits // 8), dtype=np.uint8)
        scales = rng.standard_normal((n, blocks)).astype(scale_type)
        return {"weight": weight, "scales": scales, "zero_points": points, "n": n, "k": k, "bits": bits,
                "block_size": block_size}  # fmt: skip

    return make


@pytest.fixture
def block_matrix(stored: Callable[..., dict[str, Any]]) -> Callable[..., BlockMatrix]:
    """block_matrix(n, k, ...): a packed matrix; see `stored`."""
    return lambda *arguments, **options: pack_matrix(**stored(*arguments, **options))


# Numbers of threads that must agree, and nanoseconds of work that they share.
THREADS, SHARED = (1, 2, 3), 1e6


@pytest.fixture
def multiply() -> Callable[..., np.ndarray]:
    """multiply(x, matrix, quantized=..., bias=..., addend=..., **options of decode_call); all THREADS agree bitwise."""

    def run(
        x: np.ndarray, matrix: Matrix, *, quantized: bool, bias: Any = None, addend: Any = None, **options: Any
    ) -> np.ndarray:
        results = []
        for count in THREADS:
            wide = np.zeros((len(x), matrix.padded_columns), np.float32)
            wide[:, : x.shape[1]] = x
            out = np.full((len(x), matrix.rows), np.nan, np.float32)
            source: Any = Rows.of(wide)
            phases = []
            if quantized:
                assert isinstance(matrix, BlockMatrix)
                memory = np.zeros(input_bytes(matrix, len(x), exact=False), np.uint8)
                source = inputs_at(memory.ctypes.data, matrix, StepField.TOKENS, memory, exact=False)
                phases = [[input_call(Rows.of(np.ascontiguousarray(x, np.float32)), source)]]
            phases.append([decode_call(source, Affine(matrix, bias, addend), Rows.of(out), **options)])
            context = ContextTable()
            context.count(StepField.TOKENS, len(x))
            Threads(count).run(program_of(phases), context, nanoseconds=SHARED)
            results.append(out)
        for other in results[1:]:
            np.testing.assert_array_equal(results[0].view(np.uint32), other.view(np.uint32))
        return results[0]

    return run
