"""Packed block matrices: unpacking gives the same numbers, and arrays that do not fit are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from genai.kernels.checks import FormatError
from genai.kernels.cpu.arrays.block_weights import block_rows
from genai.kernels.cpu.linear.dense import pack_dense
from genai.kernels.cpu.linear.packing import pack_matrix
from genai.kernels.cpu.program.thread_pool import Threads
from genai.kernels.reference.weights import dequantize_weight
from genai.kernels.weight_layout import BlockMatrix, RecordLayout


def dequantized(matrix: BlockMatrix) -> np.ndarray:
    """The matrix as floats."""
    return block_rows(np.arange(matrix.rows), matrix)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("block_size", [16, 32, 48, 64, 128, 256])
@pytest.mark.parametrize("n", [1, 16, 63, 130])
@pytest.mark.parametrize("zero_points", ["none", "packed", "whole", "fractions"])
def test_dequantize_undoes_pack(
    stored: Callable[..., dict[str, Any]], bits: int, block_size: int, n: int, zero_points: str
) -> None:
    arguments = stored(n, 3 * block_size - 5, bits, block_size, zero_points)
    weight, scales, points, sizes = _split(arguments)
    expected = dequantize_weight(weight, scales, points, **sizes)
    matrix = pack_matrix(**arguments)
    np.testing.assert_allclose(dequantized(matrix), expected, rtol=1e-6, atol=1e-6)


def _split(arguments: dict[str, Any]) -> tuple[Any, Any, Any, dict[str, int]]:
    rest = {key: arguments[key] for key in ("n", "k", "bits", "block_size")}
    return arguments["weight"], arguments["scales"], arguments["zero_points"], rest


def test_layout_of_a_record(rng: np.random.Generator) -> None:
    """Block 1 of row 5: column 6 lies in group 1, byte 2; column 22 in the high nibble of the same byte."""
    elements = rng.integers(0, 16, (40, 2, 32)).astype(np.uint8)
    weight = elements[:, :, 0::2] | elements[:, :, 1::2] << 4
    scales = np.arange(80, dtype=np.float32).reshape(40, 2)
    matrix = pack_matrix(weight, scales, n=40, k=64, bits=4, block_size=32)
    assert matrix.data.shape == (4, 1, 576)  # four tiles are a kernel's portion
    byte = matrix.data[0, 0, 256 + 64 + 4 * 5 + 2]
    assert (byte & 15, byte >> 4) == (elements[5, 1, 6], elements[5, 1, 22])
    np.testing.assert_array_equal(matrix.data[2, 0, 512:576].view(np.float16)[16:24], scales[32:, 1])
    values = (elements - np.float32(8)) * scales[:, :, None]
    np.testing.assert_array_equal(block_rows(np.arange(40), matrix), values.reshape(40, 64))
    assert matrix.data.ctypes.data % 64 == 0


@pytest.mark.parametrize(("scale_type", "wide"), [(np.float16, False), (np.float32, True), (ml_dtypes.bfloat16, False)])
def test_scales_keep_their_values(stored: Callable[..., dict[str, Any]], scale_type: Any, wide: bool) -> None:
    arguments = stored(20, 64, scale_type=scale_type)
    matrix = pack_matrix(**arguments)
    assert matrix.layout.wide == wide
    weight, scales, points, sizes = _split(arguments)
    np.testing.assert_allclose(dequantized(matrix), dequantize_weight(weight, scales, points, **sizes), rtol=1e-6)


def test_threads_pack_the_same(stored: Callable[..., dict[str, Any]], threads: Threads) -> None:
    arguments = stored(700, 96, 8, 32, "whole")
    np.testing.assert_array_equal(pack_matrix(**arguments).data, pack_matrix(**arguments, threads=threads).data)


def test_default_zero_points_are_dropped(stored: Callable[..., dict[str, Any]]) -> None:
    arguments = stored(4, 64)
    arguments["zero_points"] = np.full((4, 1), 0x88, np.uint8)
    assert not pack_matrix(**arguments).layout.zero_points


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 7}, "bits is 7"),
        ({"block_size": 24, "weight": np.zeros((4, 3, 12), np.uint8), "scales": np.ones(12)}, "block_size is 24"),
        ({"block_size": 512, "weight": np.zeros((4, 1, 256), np.uint8), "scales": np.ones(4)}, "block_size is 512"),
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
        "n": 4, "k": 64, "bits": 4, "block_size": 32, **change,
    }  # fmt: skip
    with pytest.raises(FormatError, match=message):
        pack_matrix(**arguments)


def test_matrix_refuses_memory_of_another_shape() -> None:
    layout = RecordLayout(4, 32)
    with pytest.raises(FormatError, match=r"expected contiguous uint8 \[4, 1, 576\]"):
        BlockMatrix(40, 64, layout, np.zeros((4, 1, 512), np.uint8))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (16, 4), (70, 33), (2000, 5)])
@pytest.mark.parametrize("transposed", [False, True])
def test_dense_layout(rng: np.random.Generator, dtype: Any, rows: int, columns: int, transposed: bool) -> None:
    weight = rng.standard_normal((rows, columns)).astype(dtype)
    matrix = pack_dense(weight if transposed else np.ascontiguousarray(weight.T), transposed=transposed)
    unpacked = matrix.data.view(dtype).transpose(0, 2, 1).reshape(-1, matrix.padded_columns)
    np.testing.assert_array_equal(unpacked[:rows, :columns], weight)
    assert not unpacked[rows:].astype(np.float32).any() and not unpacked[:, columns:].astype(np.float32).any()


def test_dense_refuses() -> None:
    with pytest.raises(FormatError, match="weight is int8"):
        pack_dense(np.zeros((2, 2), np.int8))
