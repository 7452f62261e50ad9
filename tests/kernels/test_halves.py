"""Conversion of halves against NumPy, for every half and for ties, overflow and denormal results."""

from __future__ import annotations

import numpy as np
import pytest

from genai.kernels.cpu.arrays.halves import from_halves, to_halves
from genai.kernels.cpu.program.bound_program import first_element
from genai.kernels.cpu.program.thread_pool import Threads

HALVES = np.arange(1 << 16).astype(np.uint16).view(np.float16)


@pytest.mark.parametrize("threads", [None, Threads(2)])
def test_every_half(threads):
    np.testing.assert_array_equal(from_halves(HALVES, threads), HALVES.astype(np.float32))
    numbers = HALVES.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        steps = np.concatenate([numbers, np.nextafter(numbers, np.float32(np.inf)), (numbers[:-1] + numbers[1:]) / 2])
        expected = steps.astype(np.float16)
    np.testing.assert_array_equal(to_halves(steps, threads), expected)


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (5, 7), (3, 16), (4097,)])
def test_shapes_and_layouts(shape):
    x = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(np.float16).T
    found = from_halves(x)
    assert found.shape == x.shape and to_halves(found).dtype == np.float16
    np.testing.assert_array_equal(to_halves(found), x)


def test_given_array():
    out = np.full(HALVES.shape, 7, np.float32)
    assert from_halves(HALVES, out=out) is out
    np.testing.assert_array_equal(out, HALVES.astype(np.float32))
    for wrong in (out[1:], out.astype(np.float64), np.zeros((1 << 16, 2), np.float32)[:, 0]):
        with pytest.raises(ValueError, match=r"expected contiguous float32\[65536\]"):
            from_halves(HALVES, out=wrong)


def test_other_types():
    with pytest.raises(ValueError, match="x is float64, expected float16"):
        from_halves(np.zeros(3))


@pytest.mark.parametrize(
    "x", [np.zeros(5), np.zeros((4, 6))[1:, ::2], np.zeros(8, np.int8)[3:], np.zeros(0), np.float32(3)]
)
def test_addresses(x):
    array = np.asarray(x)
    assert first_element(array) == array.ctypes.data or not array.size
