"""Packed products of bytes against int64, and what becomes of their sums."""

from __future__ import annotations

import numpy as np
import pytest

from genai.kernels.cpu.arrays.gemm.linear import IntegerLinear, IntegerMatMul
from genai.kernels.cpu.arrays.gemm.packing import pack_integer_weight

SHAPES = [(1, 1, 1), (3, 5, 7), (29, 67, 45), (128, 130, 33), (17, 1029, 100), (0, 4, 4)]
TYPES = [np.int8, np.uint8]


def less(values, point):
    return values.astype(np.int64) - (0 if point is None else np.asarray(point).astype(np.int64))


@pytest.mark.parametrize("x_type", TYPES)
@pytest.mark.parametrize("weight_type", TYPES)
@pytest.mark.parametrize(("rows", "terms", "columns"), SHAPES)
def test_constant_matrices(everywhere, integers, normal, rows, terms, columns, x_type, weight_type):
    x, weight, x_zero = (
        integers(x_type, rows, terms),
        integers(weight_type, terms, columns),
        int(integers(x_type, 1)[0]),
    )
    scales, bias = normal(columns) * np.float32(1e-3), normal(columns)
    for w_zero in (None, integers(weight_type), integers(weight_type, columns)):
        expected = less(x, x_zero) @ less(weight, w_zero)

        def made(threads, w_zero=w_zero):
            return IntegerLinear(threads, pack_integer_weight(threads, weight), w_zero)

        np.testing.assert_array_equal(everywhere(lambda threads: made(threads).sums(x, x_zero)), expected)
        found = everywhere(lambda threads: made(threads).scaled(x, x_zero, scales, bias))
        np.testing.assert_allclose(found, expected * scales.astype(np.float64) + bias, rtol=1e-5, atol=1e-3)
        found = everywhere(lambda threads: made(threads).rounded(x, x_zero, scales, 100, np.dtype(np.uint8)))
        rounded = np.clip(np.rint(expected.astype(np.float32) * scales) + 100, 0, 255)
        np.testing.assert_array_equal(found, rounded.astype(np.uint8))


@pytest.mark.parametrize("value", [-128, 127])
def test_the_largest_sums_are_exact(threads, value):
    terms = 30_000
    x, weight = np.full((2, terms), 255, np.uint8), np.full((terms, 3), value, np.int8)
    found = IntegerLinear(threads, pack_integer_weight(threads, weight)).sums(x, 0)
    np.testing.assert_array_equal(found, np.full((2, 3), 255 * value * terms, np.int64))


@pytest.mark.parametrize("weight_type", TYPES)
@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (67, 45), (130, 33), (64, 128), (1029, 100)])
def test_weights_unpack(everywhere, integers, shape, weight_type):
    weight = integers(weight_type, *shape)
    found = everywhere(lambda threads: IntegerLinear(threads, pack_integer_weight(threads, weight)).unpacked())
    assert found.dtype == weight_type
    np.testing.assert_array_equal(found, weight)


def test_transposed_weights(threads, integers):
    x, stored = integers(np.uint8, 5, 33), integers(np.int8, 20, 33)
    found = IntegerLinear(threads, pack_integer_weight(threads, stored.T)).sums(x, 3)
    np.testing.assert_array_equal(found, less(x, 3) @ stored.T.astype(np.int64))


@pytest.mark.parametrize("a_type", TYPES)
@pytest.mark.parametrize("b_type", TYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 5, 7, 3), (3, 17, 33, 50), (4, 40, 64, 70), (2, 3, 4, 0)])
def test_computed_matrices(everywhere, integers, shape, a_type, b_type):
    batch, rows, terms, columns = shape
    a, b = integers(a_type, batch, rows, terms), integers(b_type, batch, terms, columns)
    a_zero, b_zero = int(integers(a_type, 1)[0]), int(integers(b_type, 1)[0])
    expected = less(a, a_zero) @ less(b, b_zero)
    found = everywhere(lambda threads: IntegerMatMul(threads).sums(a, a_zero, b, b_zero))
    np.testing.assert_array_equal(found, expected)
    found = everywhere(lambda threads: IntegerMatMul(threads).rounded(a, a_zero, b, b_zero, 1e-3, 7, np.int8))
    rounded = np.clip(np.rint(expected.astype(np.float32) * np.float32(1e-3)) + 7, -128, 127)
    np.testing.assert_array_equal(found, rounded.astype(np.int8))


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 2, 0), (2, 0, 1), (1, 0, 2)])
def test_views_of_any_order_are_computed_alike(threads, integers, order):
    """Axes lie in memory in this order, as those of the heads of attention do."""
    a, b = integers(np.uint8, 7, 40, 48)[:, ::2], integers(np.int8, 7, 48, 33)
    view = np.transpose(np.ascontiguousarray(np.transpose(b, order)), np.argsort(order))
    found = IntegerMatMul(threads).sums(a, 1, view, 2)
    np.testing.assert_array_equal(found, less(a, 1) @ less(b, 2))


def test_what_does_not_fit(threads, integers, normal):
    weight = pack_integer_weight(threads, integers(np.int8, 4, 5))
    with pytest.raises(ValueError, match="3 zero points, expected 1 or 5"):
        IntegerLinear(threads, weight, np.zeros(3, np.int8))
    linear = IntegerLinear(threads, weight)
    with pytest.raises(ValueError, match="the weight has 4 rows"):
        linear.sums(integers(np.int8, 2, 5), 0)
    with pytest.raises(ValueError, match="x is float32"):
        linear.sums(normal(2, 4), 0)
    with pytest.raises(ValueError, match=r"scales are float32 \[4\], expected float32 \[5\]"):
        linear.scaled(integers(np.int8, 2, 4), 0, normal(4))
    with pytest.raises(ValueError, match="do not match"):
        IntegerMatMul(threads).sums(integers(np.int8, 1, 2, 3), 0, integers(np.int8, 1, 2, 3), 0)
    with pytest.raises(ValueError, match="expected int8 or uint8"):
        IntegerMatMul(threads).sums(normal(1, 2, 3), 0, normal(1, 3, 3), 0)
