"""Embedding look-up in block-quantised tables."""

from __future__ import annotations

import numpy as np
import pytest

from genai.kernels.cpu.arrays.block_weights import block_rows
from genai.kernels.cpu.linear.packing import pack_matrix
from genai.kernels.cpu.program.thread_pool import Threads
from genai.kernels.reference.weights import dequantize_weight

TOKENS = np.array([0, 69, 33, 33, 5], np.int64)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block_size", [16, 32, 128])
@pytest.mark.parametrize("with_zero_points", [False, True])
def test_quantized(
    rng: np.random.Generator, bits: int, block_size: int, with_zero_points: bool, threads: Threads
) -> None:
    """A tied head and embedding share the packed table; bytes are laid out as MatMulNBits wants them."""
    columns = 3 * block_size
    data = rng.integers(0, 256, (70, columns * bits // 8), dtype=np.uint8)
    scales = rng.standard_normal((70, 3)).astype(np.float32)
    points = rng.integers(0, 256, (70, -(-3 * bits // 8)), dtype=np.uint8) if with_zero_points else None
    matrix = pack_matrix(data, scales, points, n=70, k=columns, bits=bits, block_size=block_size)
    expected = dequantize_weight(data, scales, points, n=70, k=columns, bits=bits, block_size=block_size)[TOKENS]
    np.testing.assert_allclose(block_rows(TOKENS, matrix, threads=threads), expected, rtol=1e-6)


def test_quantized_with_a_last_block_that_is_not_full(rng: np.random.Generator) -> None:
    data, scales = rng.integers(0, 256, (40, 2, 16), dtype=np.uint8), rng.standard_normal((40, 2)).astype(np.float32)
    whole = pack_matrix(data, scales, n=40, k=64, bits=4, block_size=32)
    cut = pack_matrix(data, scales, n=40, k=41, bits=4, block_size=32)
    tokens = np.arange(40)
    np.testing.assert_array_equal(block_rows(tokens, cut), block_rows(tokens, whole)[:, :41])


@pytest.mark.parametrize("token", [-1, 70])
def test_refuses_unknown_tokens(token: int) -> None:
    table = pack_matrix(np.zeros((70, 16), np.uint8), np.ones(70, np.float32), n=70, k=32, bits=4, block_size=32)
    with pytest.raises(IndexError, match=f"token {token} is outside the embedding table of 70 rows"):
        block_rows(np.array([3, token]), table)


@pytest.mark.parametrize("tokens", [np.zeros(2, np.int32), np.zeros((1, 2), np.int64)])
def test_refuses(tokens: np.ndarray) -> None:
    table = pack_matrix(np.zeros((4, 16), np.uint8), np.ones(4, np.float32), n=4, k=32, bits=4, block_size=32)
    with pytest.raises(ValueError, match="tokens is"):
        block_rows(tokens, table)
