"""Packed layouts: what goes in comes out, and what does not fit is refused."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from genai.kernels import formats
from genai.kernels.formats import (
    TILE_ROWS,
    BlockQuantizedMatrix,
    FormatError,
    PagedLayer,
    dequantize,
    pack_matmul_nbits,
)
from genai.kernels.reference.quantized import dequantize_weight


def raw(rng: np.random.Generator, n: int, k: int, bits: int, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    blocks = -(-k // block_size)
    weight = rng.integers(0, 256, (n, blocks, block_size * bits // 8), dtype=np.uint8)
    return weight, rng.standard_normal((n, blocks)).astype(np.float32)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block_size", [16, 32, 48, 128, 256])
@pytest.mark.parametrize("n", [1, 31, 32, 33, 100])
@pytest.mark.parametrize("zero_points", ["none", "packed", "whole floats", "fractions"])
def test_dequantize_undoes_pack(rng: np.random.Generator, bits: int, block_size: int, n: int, zero_points: str) -> None:
    k = 3 * block_size - 5
    weight, scales = raw(rng, n, k, bits, block_size)
    points: Any = {
        "none": None,
        "packed": rng.integers(0, 256, (n, -(-3 * bits // 8)), dtype=np.uint8),
        "whole floats": rng.integers(0, 1 << bits, (n, 3)).astype(np.float32),
        "fractions": rng.random((n, 3)).astype(np.float16),
    }[zero_points]
    sizes = {"n": n, "k": k, "bits": bits, "block_size": block_size}
    matrix = pack_matmul_nbits(weight, scales, points, **sizes)
    expected = dequantize_weight(weight, scales, points, **sizes)
    np.testing.assert_allclose(dequantize(matrix), expected, rtol=1e-6, atol=1e-6)


def test_int4_layout(rng: np.random.Generator) -> None:
    """Byte i of a block: element i in the low nibble, element i + block_size / 2 in the high one; rows side by side."""
    elements = rng.integers(0, 16, (40, 2, 32)).astype(np.uint8)
    weight = elements[:, :, 0::2] | elements[:, :, 1::2] << 4
    matrix = pack_matmul_nbits(weight, np.ones((40, 2), np.float32), n=40, k=64, bits=4, block_size=32)
    assert matrix.data.shape == (2, 2, 16, TILE_ROWS)
    for row, block, i in ((0, 0, 0), (5, 1, 15), (39, 0, 7)):
        byte = matrix.data[row // TILE_ROWS, block, i, row % TILE_ROWS]
        assert byte & 15 == elements[row, block, i]
        assert byte >> 4 == elements[row, block, i + 16]


def test_pack_works_in_pieces(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, scales = raw(rng, 200, 64, 4, 32)
    whole = pack_matmul_nbits(weight, scales, n=200, k=64, bits=4, block_size=32)
    monkeypatch.setattr(formats, "_PACK_CHUNK_BYTES", 1)
    pieces = pack_matmul_nbits(weight, scales, n=200, k=64, bits=4, block_size=32)
    np.testing.assert_array_equal(pieces.data, whole.data)


@pytest.mark.parametrize("dtype", [np.float16, np.float64, ml_dtypes.bfloat16])
def test_scales_of_any_float_type_and_flat(rng: np.random.Generator, dtype: Any) -> None:
    weight, scales = raw(rng, 3, 64, 8, 32)
    converted = scales.astype(dtype)
    matrix = pack_matmul_nbits(weight.reshape(3, -1), converted.reshape(-1), n=3, k=64, bits=8, block_size=32)
    expected = dequantize_weight(weight, converted, n=3, k=64, bits=8, block_size=32)
    np.testing.assert_allclose(dequantize(matrix), expected, rtol=1e-6)


def test_default_zero_points_are_dropped(rng: np.random.Generator) -> None:
    weight, scales = raw(rng, 4, 64, 4, 32)
    points = np.full((4, 1), 0x88, np.uint8)
    assert pack_matmul_nbits(weight, scales, points, n=4, k=64, bits=4, block_size=32).zero_points is None


def test_nbytes_counts_what_a_product_reads(rng: np.random.Generator) -> None:
    weight, scales = raw(rng, 32, 64, 4, 32)
    matrix = pack_matmul_nbits(weight, scales, n=32, k=64, bits=4, block_size=32)
    assert matrix.nbytes == 32 * 64 // 2 + 32 * 2 * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 2}, "bits is 2"),
        ({"block_size": 24}, "block_size is 24"),
        ({"block_size": 512}, "block_size is 512"),
        ({"block_size": 8}, "block_size is 8"),
        ({"n": 5}, "weight has 128 entries"),
        ({"k": 100}, "weight has 128 entries"),
        ({"scales": np.ones(3, np.float32)}, "scales has 3 entries"),
        ({"weight": np.zeros(128, np.int8)}, "weight has type int8"),
        ({"zero_points": np.zeros(3, np.uint8)}, "zero_points has 3 entries"),
        ({"zero_points": np.zeros(9, np.float32)}, "zero_points has 9 entries"),
    ],
)
def test_pack_refuses(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "weight": np.zeros(128, np.uint8), "scales": np.ones(8, np.float32), "zero_points": None,
        "n": 4, "k": 64, "bits": 4, "block_size": 32,
    }  # fmt: skip
    with pytest.raises(FormatError, match=message):
        pack_matmul_nbits(**{**arguments, **change})


def test_matrix_refuses_arrays_of_another_shape(rng: np.random.Generator) -> None:
    weight, scales = raw(rng, 4, 64, 4, 32)
    good = pack_matmul_nbits(weight, scales, n=4, k=64, bits=4, block_size=32)
    with pytest.raises(FormatError, match=r"data is uint8 \[1, 2, 16, 32\]"):
        BlockQuantizedMatrix(
            rows=4, columns=65, bits=4, block_size=32, data=good.data, scales=np.ones((1, 3, 32), np.float32)
        )
    with pytest.raises(FormatError, match="scales is float64"):
        BlockQuantizedMatrix(4, 64, 4, 32, good.data, good.scales.astype(np.float64))  # type: ignore[arg-type]
    with pytest.raises(FormatError, match="zero_points is uint8"):
        BlockQuantizedMatrix(4, 64, 4, 32, good.data, good.scales, np.zeros((1, 2, 32), np.uint8))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_paged_layer_names_its_axes(dtype: Any) -> None:
    layer = PagedLayer(np.zeros((5, 2, 8, 32), dtype), np.zeros((5, 2, 32, 4), dtype))
    assert (layer.num_blocks, layer.kv_heads) == (5, 2)
    assert (layer.head_size, layer.v_head_size) == (8, 4)


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        (np.zeros((5, 2, 8, 32)), np.zeros((5, 2, 32, 8))),
        (np.zeros((5, 2, 32), np.float32), np.zeros((5, 2, 32), np.float32)),
        (np.zeros((5, 2, 8, 32), np.float32), np.zeros((5, 1, 32, 8), np.float32)),
        (np.zeros((5, 2, 8, 32), np.float32), np.zeros((5, 2, 32, 8), np.float16)),
        (np.zeros((5, 2, 8, 16), np.float32), np.zeros((5, 2, 16, 8), np.float32)),
        (np.zeros((5, 2, 8, 32), np.float32), np.zeros((5, 2, 16, 8), np.float32)),
        (np.zeros((5, 2, 16, 32), np.float32)[:, :, ::2], np.zeros((5, 2, 32, 8), np.float32)),
    ],
)
def test_paged_layer_refuses(keys: np.ndarray, values: np.ndarray) -> None:
    with pytest.raises(FormatError):
        PagedLayer(keys, values)
