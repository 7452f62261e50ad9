"""Round to nearest: the same integers as onnxruntime's default quantiser, and invalid arguments."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from genai.kernels.cpu.arrays.block_weights import block_rows
from genai.kernels.cpu.linear.formats import pack_weight
from genai.kernels.cpu.linear.packing import pack_matrix
from genai.kernels.reference.weights import dequantize_weight
from genai.kernels.weights import BLOCKS, QuantizationError, QuantizedWeight, uniform_format, unpack_bits
from genai.ops.weight_nodes import uniform_arrays
from genai.quant.methods.rtn import quantize_blocks

FORMATS = list(product((4, 8), BLOCKS, (True, False)))


def sample(rows: int, columns: int) -> NDArray[np.float32]:
    """Ordinary rows followed by zeros, one sign only, ties between magnitudes, halves, tiny and huge values."""
    weight = np.random.default_rng(rows * columns).standard_normal((rows + 6, columns)).astype(np.float32)
    weight[0, : columns // 2 + 1] = 0
    weight[1] = np.abs(weight[1])
    weight[2] = -np.abs(weight[2])
    weight[3] = np.where(weight[3] < 0, -1, 1)
    weight[4] = np.round(weight[4] * 2) / 2
    weight[5, ::3] *= 1e6
    return weight


@pytest.mark.oracle
@pytest.mark.parametrize(("bits", "block_size", "symmetric"), FORMATS)
@pytest.mark.parametrize(("rows", "columns"), [(27, 512), (10, 100), (1, 33)])
def test_same_integers_as_onnxruntime(bits: int, block_size: int, symmetric: bool, rows: int, columns: int) -> None:
    state = pytest.importorskip("onnxruntime.capi._pybind_state")
    quantize = state.quantize_matmul_4bits if bits == 4 else state.quantize_matmul_8bits
    weight = sample(rows, columns)
    ours = quantize_blocks(weight, bits=bits, block_size=block_size, symmetric=symmetric, half_scales=False)

    blocks, codes = ours.scales.shape[1], uniform_arrays(ours)["codes"]
    padded = np.pad(weight, ((0, 0), (0, blocks * block_size - columns)))
    data, scales = np.zeros_like(codes), np.zeros_like(ours.scales)
    points = np.zeros((len(weight), -(-blocks * bits // 8)), np.uint8)
    quantize(data, np.ascontiguousarray(padded.T), scales, points, block_size, len(weight), columns, symmetric)

    np.testing.assert_array_equal(ours.scales, scales)
    # Without padding: what it holds is each library's own affair.
    theirs = unpack_bits(data, bits, block_size).reshape(len(weight), -1)[:, :columns]
    np.testing.assert_array_equal(ours.codes, theirs)
    if not symmetric:
        np.testing.assert_array_equal(ours.offsets, unpack_bits(points, bits, blocks))


def values(weight: QuantizedWeight) -> NDArray[np.float32]:
    """The dequantised values, [rows, columns]."""
    arrays = uniform_arrays(weight)
    return dequantize_weight(
        arrays["codes"], arrays["scales"], arrays.get("zero_points"), n=weight.rows, k=weight.columns,
        bits=weight.format.bits, block_size=weight.format.block_size,
    ).astype(np.float32)  # fmt: skip


@pytest.mark.parametrize(("bits", "block_size", "symmetric"), FORMATS)
def test_error_is_at_most_half_a_step(bits: int, block_size: int, symmetric: bool) -> None:
    weight = sample(9, 2 * block_size + 5)
    blocks = quantize_blocks(weight, bits=bits, block_size=block_size, symmetric=symmetric)
    step = np.repeat(np.abs(blocks.scales), block_size, axis=1)[:, : weight.shape[1]]
    error = np.abs(values(blocks) - weight)
    # Symmetric integers reach one step less far on the side opposite to the largest value; a zero point is rounded too.
    assert np.all(error <= step * (1 + 1e-4) + 1e-30)
    ordinary = error[6:] / step[6:]
    assert np.quantile(ordinary, 0.75) <= 0.5


@pytest.mark.parametrize(("bits", "block_size", "symmetric"), FORMATS)
def test_kernels_read_the_same_values(bits: int, block_size: int, symmetric: bool) -> None:
    blocks = quantize_blocks(sample(40, 3 * block_size - 7), bits=bits, block_size=block_size, symmetric=symmetric)
    arrays = uniform_arrays(blocks)
    packed = pack_matrix(
        arrays["codes"], arrays["scales"], arrays.get("zero_points"), n=blocks.rows, k=blocks.columns, bits=bits,
        block_size=block_size,
    )  # fmt: skip
    np.testing.assert_array_equal(block_rows(np.arange(packed.rows), pack_weight(blocks)), values(blocks))
    np.testing.assert_array_equal(block_rows(np.arange(packed.rows), packed), values(blocks))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_padding_has_the_value_zero(bits: int, symmetric: bool) -> None:
    weight = sample(5, 40)
    blocks = quantize_blocks(weight, bits=bits, block_size=32, symmetric=symmetric)
    whole = replace(blocks, columns=64)
    assert not values(whole)[:, 40:].any()


def test_rows_do_not_depend_on_their_neighbours() -> None:
    """More rows than one chunk holds."""
    weight = np.random.default_rng(0).standard_normal((700, 1024)).astype(np.float32)
    whole = quantize_blocks(weight)
    for row in (0, 63, 64, 500, 699):
        alone = quantize_blocks(weight[row : row + 1])
        np.testing.assert_array_equal(whole.data[row], alone.data[0])
        np.testing.assert_array_equal(whole.scales[row], alone.scales[0])


@pytest.mark.parametrize("dtype", [np.float16, np.float64, ml_dtypes.bfloat16])
def test_other_float_types_and_strides(dtype: Any) -> None:
    weight = np.random.default_rng(1).standard_normal((64, 12)).astype(dtype).T
    expected = quantize_blocks(np.ascontiguousarray(weight.astype(np.float32)))
    actual = quantize_blocks(weight)
    np.testing.assert_array_equal(actual.data, expected.data)
    np.testing.assert_array_equal(actual.scales, expected.scales)


def test_values_too_small_for_a_scale_become_zero() -> None:
    weight = np.full((1, 32), 1e-45, np.float32)
    assert not values(quantize_blocks(weight)).any()
    assert weight[0, 0] > 0


def test_the_input_is_left_alone() -> None:
    weight = sample(2, 64)
    before = weight.copy()
    quantize_blocks(weight)
    np.testing.assert_array_equal(weight, before)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_values_that_are_not_finite(value: float, symmetric: bool, bits: int) -> None:
    weight = np.ones((300, 1024), np.float32)
    weight[257, 40] = value
    with pytest.raises(QuantizationError, match="row 257, block 1"):
        quantize_blocks(weight, bits=bits, symmetric=symmetric)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((4, 32), {"bits": 7}, "bits is 7"),
        ((4, 32), {"block_size": 48}, "block_size is 48"),
        ((4, 32), {"block_size": 512}, "block_size is 512"),
        ((32,), {}, r"shape \(32,\)"),
        ((0, 32), {}, r"shape \(0, 32\)"),
    ],
)
def test_refused(shape: tuple[int, ...], options: dict[str, int], message: str) -> None:
    with pytest.raises(QuantizationError, match=message):
        quantize_blocks(np.ones(shape, np.float32), **options)  # type: ignore[arg-type]


def test_arrays_that_do_not_fit_their_format() -> None:
    good = quantize_blocks(sample(2, 64))
    with pytest.raises(QuantizationError, match="scales is float32"):
        replace(good, scales=good.scales[:, :1])
    with pytest.raises(QuantizationError, match="data is uint8"):
        replace(good, format=uniform_format(8, 32))


def test_scales_are_numbers_of_float16_where_it_holds_them_well() -> None:
    weight = sample(20, 200)
    weight[10] *= 1e-7  # scales that float16 would hold with few bits, and
    weight[11] *= 1e9  # scales beyond it
    exact, blocks = (quantize_blocks(weight, half_scales=half).scales for half in (False, True))
    np.testing.assert_allclose(blocks, exact, rtol=2.0**-11)
    kept = np.delete(blocks, [5, 10, 11], axis=0)
    np.testing.assert_array_equal(kept, kept.astype(np.float16).astype(np.float32))
    np.testing.assert_array_equal(blocks[[10, 11]], exact[[10, 11]])
