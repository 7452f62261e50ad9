"""Packed float32 products against float64 NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from genai.kernels.cpu.arrays.gemm.linear import DenseLinear
from genai.kernels.cpu.arrays.gemm.micro import TILINGS, first_row, grid
from genai.kernels.cpu.arrays.gemm.packing import pack_weight

SHAPES = [(1, 1, 1), (1, 7, 33), (2, 300, 1), (13, 64, 100), (15, 257, 31), (29, 513, 64), (130, 96, 70), (0, 5, 6)]


@pytest.mark.parametrize(("rows", "terms", "columns"), SHAPES)
@pytest.mark.parametrize("with_terms", [False, True])
def test_equals_the_definition(everywhere, normal, rows, terms, columns, with_terms):
    x, weight = normal(rows, terms), normal(terms, columns)
    bias, addend = (normal(columns), normal(rows, columns)) if with_terms else (None, None)
    found = everywhere(lambda threads: DenseLinear(threads, pack_weight(threads, weight), bias)(x, addend))
    expected = x.astype(np.float64) @ weight
    if with_terms:
        expected = expected + bias + addend
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-5 * max(1, terms) ** 0.5)


def test_a_row_does_not_depend_on_its_neighbours(threads, normal):
    linear = DenseLinear(threads, pack_weight(threads, normal(300, 50)))
    x = normal(40, 300)
    whole = linear(x)
    for rows in (1, 2, 13, 14, 15, 39):
        np.testing.assert_array_equal(linear(x[:rows]), whole[:rows])


def test_weights_and_rows_of_any_strides(threads, normal):
    stored = normal(45, 2 * 37)
    weight = stored[:, ::2].T
    x = normal(20, 3 * 37)[:, 37:74]
    found = DenseLinear(threads, pack_weight(threads, weight))(x)
    np.testing.assert_allclose(found, x.astype(np.float64) @ weight, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("function", "parameters", "reference"),
    [("relu", (), lambda v: np.maximum(v, 0)), ("clip", (-1.0, 2.0), lambda v: np.clip(v, -1, 2))],
)
def test_functions(threads, normal, function, parameters, reference):
    x, weight, bias = normal(17, 20), normal(20, 40), normal(40)
    linear = DenseLinear(threads, pack_weight(threads, weight), bias, function, parameters)
    np.testing.assert_allclose(linear(x), reference(x.astype(np.float64) @ weight + bias), rtol=1e-4, atol=1e-4)


def test_what_is_no_number_reaches_its_row_only(threads, normal):
    weight = normal(50, 37)
    linear = DenseLinear(threads, pack_weight(threads, weight))
    x = normal(30, 50)
    plain = linear(x)
    x[3, 7], x[20, 0] = np.nan, np.inf
    found = linear(x)
    assert np.isnan(found[3]).all()
    np.testing.assert_array_equal(found[20], np.sign(weight[0]) * np.inf)
    others = np.setdiff1d(np.arange(30), [3, 20])
    np.testing.assert_array_equal(found[others], plain[others])


def test_a_column_of_the_weight_spoils_its_column_only(threads, normal):
    weight = normal(50, 37)
    weight[4, 36] = np.nan
    found = DenseLinear(threads, pack_weight(threads, weight))(normal(5, 50))
    assert np.isnan(found[:, 36]).all()
    assert np.isfinite(found[:, :36]).all()


def test_zeros_denormals_and_huge_numbers(threads):
    weight = np.array([[0, 1e-40, 1e38], [1, -1e-40, 1e38]], np.float32)
    x = np.array([[0, 0], [1, 1], [2, 2]], np.float32)
    found = DenseLinear(threads, pack_weight(threads, weight))(x)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(found, x @ weight)


def test_panels_are_as_equal_as_they_can_be():
    starts = [first_row(panel, 15, 197) for panel in range(16)]
    assert (starts[0], starts[-1]) == (0, 197)
    assert set(np.diff(starts)) == {13, 14}


@pytest.mark.parametrize("threads", [1, 2, 16])
@pytest.mark.parametrize("rows", [1, 14, 15, 3000])
def test_grids_cover_everything(threads, rows):
    cut = grid(TILINGS["vnni"], rows, 96, threads)
    assert cut.left_panels == -(-rows // 14)
    assert cut.items >= min(cut.left_panels * 96, threads)
    assert cut.scratch_bytes(TILINGS["vnni"]) <= 1 << 19


def test_what_does_not_fit(threads, normal):
    weight = pack_weight(threads, normal(4, 5))
    with pytest.raises(ValueError, match=r"bias is float32 \[4\], expected float32 \[5\]"):
        DenseLinear(threads, weight, normal(4))
    with pytest.raises(ValueError, match="clip takes"):
        DenseLinear(threads, weight, None, "clip", (1.0,))
    linear = DenseLinear(threads, weight)
    with pytest.raises(ValueError, match=r"x is float32 \[2, 3\], but the weight has 4 rows"):
        linear(normal(2, 3))
    with pytest.raises(ValueError, match="x is float64"):
        linear(np.zeros((2, 4)))
    with pytest.raises(ValueError, match=r"addend is float32 \[2, 4\]"):
        linear(normal(2, 4), normal(2, 4))
    with pytest.raises(ValueError, match="cannot be packed"):
        pack_weight(threads, normal(4, 5)[::-1])
