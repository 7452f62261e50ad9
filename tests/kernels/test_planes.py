"""Reductions of rows, scaled planes and broadcast operands against float64 NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from genai.kernels.cpu.arrays.functions import activation, combined
from genai.kernels.cpu.arrays.planes import REDUCTIONS, reduced, running_sums, scaled
from genai.kernels.cpu.program.thread_pool import Threads

EXACT = {
    "sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min, "norm": np.linalg.norm,
    "squares": lambda x, axis: np.square(x).sum(axis),
}  # fmt: skip
SHAPES = [(5, 1), (3, 7), (4, 17), (2, 64), (3, 100), (2, 4096), (2, 9001), (1, 100_003)]


@pytest.mark.parametrize("kind", REDUCTIONS)
def test_reductions(kind, rng, threads):
    for shape in SHAPES:
        x = (rng.standard_normal(shape) + 1).astype(np.float32)
        found = reduced(kind, x, threads=threads)
        np.testing.assert_allclose(found, EXACT[kind](x.astype(np.float64), axis=1), rtol=2e-6)
        np.testing.assert_array_equal(found, reduced(kind, x))


@pytest.mark.parametrize("size", [3, 16, 70])
@pytest.mark.parametrize("kind", REDUCTIONS)
def test_nan_reaches_its_own_result(kind, size):
    x = np.ones((3, size), np.float32)
    x[1, size // 2] = np.nan
    assert np.isnan(reduced(kind, x)).tolist() == [False, True, False]


@pytest.mark.parametrize("epsilon", [None, 1e-5])
def test_scaled_planes(epsilon, rng, threads):
    for planes, size in SHAPES:
        x = (rng.standard_normal((2 * planes, size)) + 1).astype(np.float32)
        factors, shifts = rng.standard_normal((2, planes)).astype(np.float32)
        wide = x.astype(np.float64)
        if epsilon is not None:
            wide = (wide - wide.mean(1, keepdims=True)) / np.sqrt(wide.var(1, keepdims=True) + epsilon)
        expected = wide * np.tile(factors, 2)[:, None] + np.tile(shifts, 2)[:, None]
        found = scaled(x, factors, shifts, epsilon=epsilon, threads=threads)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=3e-5)
        np.testing.assert_array_equal(found, scaled(x, factors, shifts, epsilon=epsilon))


def test_planes_without_elements_and_of_other_types():
    assert reduced("sum", np.zeros((0, 4), np.float32)).shape == (0,)
    ones = np.ones(2, np.float32)
    assert scaled(np.zeros((2, 0), np.float32), ones, ones).shape == (2, 0)
    with pytest.raises(ValueError, match="x is float64"):
        reduced("sum", np.zeros((2, 2)))
    with pytest.raises(ValueError, match=r"shifts is float32 \[1\], expected C-contiguous float32 \[2\]"):
        scaled(np.zeros((2, 2), np.float32), ones, ones[:1])


@pytest.mark.parametrize(
    "first, second",
    [((1, 6, 5, 40), (1, 6, 1, 1)), ((1, 7, 33), (33,)), ((4, 1), (1, 19)), ((3, 5), ()), ((1, 9), (4, 1, 9)),
     ((3, 6, 5, 7), (1, 6, 1, 1)), ((2, 3, 4, 5), (2, 1, 4, 1)), ((3, 1, 2, 1, 9), (1, 4, 1, 5, 1))],
)  # fmt: skip
@pytest.mark.parametrize("function, exact", [("add", np.add), ("divide", np.divide), ("subtract", np.subtract)])
def test_broadcast_operands(first, second, function, exact, rng, threads):
    for shapes in ((first, second), (second, first)):
        a, b = (np.array(rng.standard_normal(shape) + 3, np.float32) for shape in shapes)
        np.testing.assert_array_equal(combined(function, a, b, threads=threads), exact(a, b))


def test_operands_that_are_not_combined(rng):
    """A caller computes them in another way: many parts, views with gaps, no elements, and no common shape."""
    x = rng.standard_normal((4, 6, 8)).astype(np.float32)
    many = rng.standard_normal((65, 1, 2)).astype(np.float32)
    assert combined("add", many, many[:1, :, :1].repeat(2, 1)) is None
    for other in (x[:, :1, :].swapaxes(0, 2), x[:, :, :0], x[:3]):
        assert combined("add", x, other) is None


def test_elu_is_accurate_near_zero():
    x = -np.logspace(-30, 2.5, 1000).astype(np.float32)
    np.testing.assert_allclose(activation("elu", x, 1.0), np.expm1(x.astype(np.float64)), rtol=3e-7)


def test_scalars_that_numpy_returns_for_arrays_without_axes(rng):
    x = rng.standard_normal((3, 5)).astype(np.float32)
    np.testing.assert_array_equal(combined("add", x, np.float32(2)), x + np.float32(2))
    assert activation("relu", np.float32(2)) == 2


@pytest.mark.parametrize("threads", [None, Threads(2)])
def test_running_sums_are_added_in_order(threads, rng):
    for rows, width in ((1, 1), (3, 50), (4, 7), (70, 129), (5, 0), (0, 4)):
        x = rng.standard_normal((rows, width)).astype(np.float32)
        if rows > 2 and width > 2:
            x[1, 2], x[2, 1] = np.nan, np.inf
        np.testing.assert_array_equal(running_sums(x, threads=threads), np.cumsum(x, axis=1, dtype=np.float32))
