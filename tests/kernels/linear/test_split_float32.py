"""Float32 matmuls in bfloat16 parts: as accurate as multiply-adds, and independent of the other rows."""

from __future__ import annotations

from collections.abc import Callable
from math import erf
from typing import Any

import numpy as np
import pytest

from genai.kernels.cpu.jit.isa import isa
from genai.kernels.cpu.linear.bfloat_tiles import (
    PARTS,
    DenseWeights,
    RowTiles,
    SplitWeights,
    row_tiles_call,
    row_tiles_in,
    row_tiles_size,
)
from genai.kernels.cpu.linear.calls import (
    Affine,
    can_split,
    can_split_results,
    decode_call,
    halves_of,
    has_prefill,
    prefill_call,
)
from genai.kernels.cpu.linear.dense import pack_dense
from genai.kernels.cpu.linear.prefill import prefill_op
from genai.kernels.cpu.program.calls import Rows, program_of
from genai.kernels.cpu.program.step_table import ContextTable, StepField
from genai.kernels.cpu.program.thread_pool import Threads

pytestmark = pytest.mark.skipif(isa() != "amx", reason="this machine has no tiles, or is asked not to use them")

Normal = Callable[..., np.ndarray]
THREADS = Threads(2)
# The unit of float32.
EPSILON = 2.0**-24


def run(x: np.ndarray, phases: Any) -> None:
    context = ContextTable()
    for field, count in ((StepField.TOKENS, len(x)), (StepField.DECODE_ROWS, 0), (StepField.PREFILL_ROWS, len(x))):
        context.count(field, count)
    THREADS.run(program_of(phases), context, nanoseconds=1e6)


def tiles_of(columns: int, rows: int) -> RowTiles:
    """Memory for row tiles, filled with numbers that no kernel may use."""
    size = row_tiles_size(columns, rows, PARTS)
    memory = np.full(size + 64, 0x7F, np.uint8)
    return row_tiles_in(memory[-memory.ctypes.data % 64 :][:size], columns, PARTS)


def split(x: np.ndarray, weight: np.ndarray, bias: Any = None, addend: Any = None, **options: Any) -> np.ndarray:
    """x @ weight.T in bfloat16 parts."""
    matrix = pack_dense(weight, transposed=True)
    assert can_split(matrix)
    out = np.full((len(x), matrix.rows + 3), np.nan, np.float32)
    rows, results = Rows.of(np.ascontiguousarray(x, np.float32)), Rows.of(out).columns(0, matrix.rows)
    tiles = tiles_of(matrix.padded_columns, len(x))
    product = prefill_call(tiles, Affine(matrix, bias, addend), results, **options)
    run(x, [[row_tiles_call(rows, tiles)], [product]])
    assert np.isnan(out[:, matrix.rows :]).all()  # nothing is written beside the results
    return out[:, : matrix.rows]


def multiply_adds(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """x @ weight.T with float32 multiply-adds in the order of columns."""
    out = np.zeros((len(x), len(weight)), np.float32)
    run(x, [[decode_call(Rows.of(x), Affine(pack_dense(weight, transposed=True)), Rows.of(out))]])
    return out


def narrowed(values: np.ndarray) -> np.ndarray:
    """Round to bfloat16 numbers, towards zero."""
    return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def exact(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return np.asarray(x.astype(np.float64) @ weight.astype(np.float64).T)


@pytest.mark.parametrize("rows, columns", [(1, 64), (33, 448), (70, 1088), (20, 8192)])
def test_as_accurate_as_multiply_adds(normal: Normal, rows: int, columns: int) -> None:
    x, weight = normal(133, columns), normal(rows, columns)
    x[:, ::41] *= 30
    expected, whole = exact(x, weight), split(x, weight)
    worst = np.abs(multiply_adds(x, weight) - expected).max()
    assert np.abs(whole - expected).max() <= worst
    for count in (1, 16, 17, 33, 65, 129):  # every number of tiles, alone or with other rows
        np.testing.assert_array_equal(split(x[-count:], weight), whole[-count:])


@pytest.mark.parametrize("rows, columns", [(1, 64), (33, 448), (70, 1088), (20, 8192)])
def test_weights_that_are_bfloat16_numbers(normal: Normal, rows: int, columns: int) -> None:
    """They are stored in half the bytes, and multiplied as accurately, with the bits of any other number of rows."""
    x, weight = normal(133, columns), narrowed(normal(rows, columns))
    x[:, ::41] *= 30
    matrix = pack_dense(weight, transposed=True)
    assert (matrix.type, matrix.narrowed, matrix.largest) == ("bfloat16", True, np.abs(weight).max())
    assert not has_prefill(matrix)  # unless all rows belong to whole sequences, activations are not rounded
    expected, whole = exact(x, weight), split(x, weight)
    worst = np.abs(multiply_adds(x, weight) - expected).max()
    assert np.abs(whole - expected).max() <= worst
    for count in (1, 16, 17, 33, 65, 129):
        np.testing.assert_array_equal(split(x[-count:], weight), whole[-count:])
    weight[0, -1] = 1 + 2.0**-20
    assert not pack_dense(weight, transposed=True).narrowed


def test_multiply_adds_of_bfloat16_numbers(normal: Normal) -> None:
    """The results are the same to the bit as with float32 weights."""
    x, weight = normal(7, 64), narrowed(normal(33, 64))
    wide = np.concatenate([weight, np.full((1, 64), 1 / 3, np.float32)])
    assert not pack_dense(wide, transposed=True).narrowed
    np.testing.assert_array_equal(multiply_adds(x, weight), multiply_adds(x, wide)[:, :-1])


def test_no_bias_of_the_products_that_are_left_out(normal: Normal) -> None:
    """Products of positive numbers with all bits set, whose truncation errors would add up."""
    x = np.full((32, 4096), 2.0 - 2.0**-23, np.float32) * (1 + np.abs(normal(32, 4096)) / 8)
    weight = np.full((32, 4096), 2.0 - 2.0**-23, np.float32)
    expected = exact(x, weight)
    worst = np.abs(multiply_adds(x, weight) / expected - 1).max()
    assert np.abs(split(x, weight) / expected - 1).max() <= worst


@pytest.mark.parametrize("spread", [20, 60])
def test_exponents_of_any_size(normal: Normal, spread: int) -> None:
    """Columns of very different sizes, and rows from the smallest to the largest numbers."""
    powers = np.exp2(np.linspace(-spread, spread, 256)).astype(np.float32)
    x, weight = normal(40, 256) * powers, normal(32, 256) / powers[::-1] * np.float32(2.0**-spread)
    x *= np.exp2(np.linspace(-120 + spread, 120 - 2 * spread, 40)).astype(np.float32)[:, None]
    expected, size = exact(x, weight), exact(np.abs(x), np.abs(weight))
    assert (np.abs(split(x, weight) - expected) <= 8 * EPSILON * size + 2.0**-149).all()


def test_cancellation(normal: Normal) -> None:
    """Sums that are much smaller than their terms."""
    x, weight = normal(20, 512), normal(32, 512)
    x = np.concatenate([x, -x * np.float32(1 + 2.0**-20)], axis=1)
    weight = np.concatenate([weight, weight], axis=1)
    expected, size = exact(x, weight), exact(np.abs(x), np.abs(weight))
    assert (np.abs(split(x, weight) - expected) <= 8 * EPSILON * size).all()


def test_denormal_numbers(normal: Normal) -> None:
    """Rows of denormal numbers are scaled. Weights below 2 ** -109 lose bits, by at most 2 ** -125 of a product."""
    x, weight = normal(20, 64), normal(32, 64)
    x[3] *= np.float32(2.0**-135)
    weight[5, ::2] *= np.float32(2.0**-130)
    expected, size = exact(x, weight), exact(np.abs(x), np.abs(weight))
    error = np.abs(split(x, weight) - expected)
    assert (error <= 8 * EPSILON * size + 2.0**-125 * np.abs(x).sum(1, keepdims=True) + 2.0**-149).all()


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_rows_that_are_no_numbers(normal: Normal, value: float) -> None:
    """Such a row is NaN, and changes no other row."""
    x, weight = normal(40, 64), normal(32, 64)
    before = split(x, weight)
    x[7, 5] = value
    after = split(x, weight)
    assert np.isnan(after[7]).all()
    np.testing.assert_array_equal(np.delete(after, 7, 0), np.delete(before, 7, 0))


def test_results_that_overflow(normal: Normal) -> None:
    x, weight = np.full((20, 64), 2.0**126, np.float32), np.ones((32, 64), np.float32)
    weight[3] = -1
    weight[4, ::2] = -1
    found = split(x, weight)
    assert np.isposinf(found[:, 0]).all() and np.isneginf(found[:, 3]).all()
    np.testing.assert_array_equal(found[:, 4], 0)
    largest = np.full((20, 64), np.finfo(np.float32).max)  # rounded to bfloat16, it would be infinite
    np.testing.assert_allclose(split(largest, weight[3:5] / 64)[:, 0], -largest[:, 0], rtol=4 * EPSILON)


@pytest.mark.parametrize("value", [np.inf, np.nan, 2.0**60])
def test_weights_that_are_not_split(normal: Normal, value: float) -> None:
    weight = normal(32, 64)
    assert can_split(pack_dense(weight, transposed=True))
    weight[4, 9] = value
    assert not can_split(pack_dense(weight, transposed=True))


def test_other_weights_that_are_not_split(normal: Normal) -> None:
    weight = normal(32, 64)
    for other in (weight[:, :60], weight.astype(np.float16), weight * np.float32(2.0**-60), weight * 0):
        assert not can_split(pack_dense(other, transposed=True))


def test_bias_addend_and_gate(normal: Normal) -> None:
    x, gate, up = normal(70, 128) / 8, normal(50, 128), normal(50, 128)
    bias, addend = normal(50), normal(70, 60)
    rows = Rows.of(addend).columns(7, 50)
    plain = split(x, gate)
    np.testing.assert_array_equal(split(x, gate, bias, rows), (plain + bias) + addend[:, 7:57])
    inner = (plain + bias) + addend[:, 7:57]
    found = split(x, gate, bias, rows, gate="gelu", gated=Affine(pack_dense(up, transposed=True), addend=rows))
    outer = split(x, up) + addend[:, 7:57]
    expected = inner * (1 + np.vectorize(erf)(inner / np.sqrt(2))) / 2 * outer
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_halves(normal: Normal) -> None:
    """The halves of a matrix are a gate and what it multiplies, without a copy."""
    x, weight, bias = normal(20, 64) / 8, normal(96, 64), normal(96)
    both = Affine(pack_dense(weight, transposed=True), bias)
    first, second = halves_of(both)
    assert np.shares_memory(first.matrix.data, both.matrix.data)  # type: ignore[union-attr]
    for one, expected in ((first, weight[:48]), (second, weight[48:])):
        start = 0 if one is first else 48
        out = np.zeros((20, 48), np.float32)
        tiles = tiles_of(64, 20)
        run(x, [[row_tiles_call(Rows.of(x), tiles)], [prefill_call(tiles, one, Rows.of(out))]])
        np.testing.assert_array_equal(out, split(x, expected, bias[start : start + 48]))
    with pytest.raises(ValueError, match="whole tiles"):
        halves_of(Affine(pack_dense(weight[:80], transposed=True)))


def test_activation(normal: Normal) -> None:
    x, weight, bias = normal(20, 64) / 8, normal(50, 64), normal(50)
    inner = split(x, weight) + bias
    expected = inner * (1 + np.vectorize(erf)(inner / np.sqrt(2))) / 2
    np.testing.assert_allclose(split(x, weight, bias, activation="gelu"), expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="no activation"):
        prefill_op(DenseWeights(), "", "gelu")
    with pytest.raises(ValueError, match="no activation"):
        prefill_op(SplitWeights(), "silu", "gelu")


def through_tiles(x: np.ndarray, first: Affine, second: np.ndarray) -> np.ndarray:
    """gelu(first(x)) @ second.T, whose activations exist only as row tiles."""
    assert can_split_results(first, "gelu")
    inner, outer = tiles_of(first.matrix.padded_columns, len(x)), tiles_of(first.matrix.rows, len(x))
    out = np.full((len(x), len(second)), np.nan, np.float32)
    last = Affine(pack_dense(second, transposed=True))
    phases = [
        [row_tiles_call(Rows.of(np.ascontiguousarray(x, np.float32)), inner)],
        [prefill_call(inner, first, outer, activation="gelu")],
        [prefill_call(outer, last, Rows.of(out))],
    ]
    run(x, phases)
    return out


def test_activations_as_row_tiles(normal: Normal) -> None:
    """Results are the same to the bit as with float32 activations between the matmuls."""
    x, weight, second, bias = normal(150, 64), normal(128, 64) / 8, normal(40, 128), normal(128)
    x[3] *= np.float32(2.0**-60)
    x[4] *= np.float32(2.0**100)
    first = Affine(pack_dense(weight, transposed=True), bias)
    expected = split(split(x, weight, bias, activation="gelu"), second)
    np.testing.assert_array_equal(through_tiles(x, first, second), expected)
    np.testing.assert_array_equal(through_tiles(x[4:37], first, second), expected[4:37])
    small = first.matrix, np.zeros(128, np.float32)  # rows whose results are far smaller than the bias
    x[:3] *= np.array([[0.0], [2.0**-120], [2.0**-149]], np.float32)
    expected = split(split(x[:4], weight, small[1], activation="gelu"), second)
    np.testing.assert_array_equal(through_tiles(x[:4], Affine(*small), second), expected)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 3e38])
def test_row_tiles_of_results_that_are_no_numbers(normal: Normal, value: float) -> None:
    x, weight, second = normal(40, 64), normal(64, 64), normal(32, 64)
    first = Affine(pack_dense(weight, transposed=True))
    before = through_tiles(x, first, second)
    x[7] = value
    after, expected = through_tiles(x, first, second), split(split(x, weight, activation="gelu"), second)
    np.testing.assert_array_equal(np.isfinite(after), np.isfinite(expected))
    np.testing.assert_array_equal(np.delete(after, 7, 0), np.delete(before, 7, 0))


def test_results_that_are_not_row_tiles(normal: Normal) -> None:
    matrix = pack_dense(normal(64, 64), transposed=True)
    wide, narrow = (
        pack_dense(normal(64, 64) * np.float32(2.0**30), transposed=True),
        pack_dense(normal(32, 64), transposed=True),
    )
    addend = Affine(matrix, addend=Rows.of(np.zeros((1, 64), np.float32)))
    large = Affine(matrix, np.full(64, 2.0**31, np.float32))
    for affine in (Affine(wide), Affine(narrow), addend, large):
        assert not can_split_results(affine, "gelu")
    assert not can_split_results(Affine(matrix), "tanh") and not can_split_results(Affine(matrix), "")
    with pytest.raises(ValueError, match="do not fit the tiles"):
        prefill_call(tiles_of(64, 1), Affine(matrix), tiles_of(64, 1))
    with pytest.raises(ValueError, match="do not fit the tiles"):
        prefill_call(tiles_of(64, 1), Affine(matrix), tiles_of(128, 1), activation="gelu")


def test_tiles_of_another_kind(normal: Normal) -> None:
    matrix, out = pack_dense(normal(32, 64), transposed=True), Rows.of(np.zeros((1, 32), np.float32))
    tiles = row_tiles_in(np.zeros(row_tiles_size(64, 1), np.uint8), 64)
    with pytest.raises(ValueError, match="64 columns in 1 parts"):
        prefill_call(tiles, Affine(matrix), out)
