"""Fixtures of the products: weights as models store them, and a tape that multiplies rows with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from genai.kernels.block_matrix import BlockMatrix
from genai.kernels.cpu.products.activations import quantize_call, quantized_in, quantized_size
from genai.kernels.cpu.products.calls import Matrix, few_call
from genai.kernels.cpu.products.packing import pack_matrix
from genai.kernels.cpu.tape.context import ContextTable, Word
from genai.kernels.cpu.tape.program import Rows, TapeWriter
from genai.kernels.cpu.tape.walkers import Walkers


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
    """block_matrix(n, k, ...): packed, see `stored`."""
    return lambda *arguments, **options: pack_matrix(**stored(*arguments, **options))


@pytest.fixture(scope="session")
def walkers() -> Iterator[list[Walkers]]:
    teams = [Walkers(1), Walkers(2, spins=1), Walkers(3, spins=1)]
    yield teams
    for team in teams:
        team.close()


@pytest.fixture
def multiply(walkers: list[Walkers]) -> Callable[..., np.ndarray]:
    """multiply(x, matrix, quantized=..., **options of few_call): by 1, 2 and 3 threads, which must agree to the bit."""

    def run(x: np.ndarray, matrix: Matrix, *, quantized: bool, **options: Any) -> np.ndarray:
        results = []
        for team in walkers:
            tape = TapeWriter()
            wide = np.zeros((len(x), matrix.padded_columns), np.float32)
            wide[:, : x.shape[1]] = x
            out = np.full((len(x), matrix.rows), np.nan, np.float32)
            source: Any = Rows.of(wide)
            if quantized:
                assert isinstance(matrix, BlockMatrix)
                memory = np.zeros(quantized_size(matrix, len(x)), np.uint8)
                source = quantized_in(memory, matrix, Word.TOKENS)
                tape.add(quantize_call(Rows.of(np.ascontiguousarray(x, np.float32)), source))
                tape.meet()
            tape.add(few_call(source, matrix, Rows.of(out), **options))
            context = ContextTable()
            context.count(Word.TOKENS, len(x))
            team.walk(tape.finish(), context)
            results.append(out)
        for other in results[1:]:
            np.testing.assert_array_equal(results[0].view(np.uint32), other.view(np.uint32))
        return results[0]

    return run
