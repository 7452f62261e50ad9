"""Rounding to 8 bits and back, ranges, and pads of bytes, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from genai.kernels.cpu.arrays.bytes import dequantized_bytes, quantized_bytes, quantized_to_range
from genai.kernels.cpu.arrays.gemm.convolution import padding_call
from genai.kernels.cpu.program.bound_program import NodeProgram
from genai.kernels.cpu.program.thread_pool import Threads


@pytest.fixture(params=[1, 2])
def threads(request):
    return Threads(request.param)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 4095, 4097, 50_000])
def test_rounding(threads, rng, dtype, size):
    x = rng.standard_normal(size).astype(np.float32) * 10
    x[: size // 3] = np.rint(x[: size // 3]) * np.float32(0.05)  # halves of steps
    x[size // 2 : size // 2 + 1], x[size // 2 + 1 : size // 2 + 2] = np.inf, -np.inf
    info, scale, point = np.iinfo(dtype), np.float32(0.1), 3
    expected = np.clip(np.rint(x / scale) + point, info.min, info.max).astype(dtype)
    np.testing.assert_array_equal(quantized_bytes(threads, x, float(scale), point, dtype), expected)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
@pytest.mark.parametrize("shape", [(0,), (1,), (3, 5), (4099,), (70, 900)])
def test_back(threads, rng, dtype, shape):
    info = np.iinfo(dtype)
    x = rng.integers(info.min, info.max + 1, shape).astype(dtype)
    found = dequantized_bytes(threads, x, 0.3, 7)
    np.testing.assert_array_equal(found, (x.astype(np.float32) - 7) * np.float32(0.3))


@pytest.mark.parametrize("size", [1, 17, 4096, 4097, 50_000])
@pytest.mark.parametrize("low", [-3.0, 0.5])
def test_rounding_to_the_range(threads, rng, size, low):
    x = rng.uniform(low, 2.0, size).astype(np.float32)
    values, scale, point = quantized_to_range(threads, x)
    least, most = np.float32(min(x.min(), 0)), np.float32(max(x.max(), 0))
    assert scale == (most - least) / np.float32(255)
    assert point == np.clip(np.rint(-least / scale), 0, 255)
    np.testing.assert_array_equal(values, np.clip(np.rint(x / scale) + point, 0, 255).astype(np.uint8))


@pytest.mark.parametrize("size", [2, 5, 16, 33 * 401])
@pytest.mark.parametrize(
    ("odd", "expected"),
    [
        ((0.0,), 1.0),
        ((1e-45,), 1.0),
        ((np.nan,), np.nan),
        ((np.inf,), np.inf),
        ((-np.inf,), np.inf),
        ((3e38, -3e38), np.inf),
        ((np.nan, np.inf), np.nan),
    ],
)
def test_no_range(threads, size, odd, expected):
    x = np.zeros(size, np.float32)
    x[-len(odd) :] = odd
    values, scale, point = quantized_to_range(threads, x)
    assert not values.any()
    np.testing.assert_array_equal(scale, np.float32(expected))
    assert (point.dtype, point.item()) == (np.uint8, 0)


def test_other_types(threads):
    with pytest.raises(ValueError, match="cannot convert float64 to"):
        quantized_bytes(threads, np.zeros(3), 1.0, 0, np.int8)
    with pytest.raises(ValueError, match="x is int32"):
        dequantized_bytes(threads, np.zeros(3, np.int32), 1.0, 0)
    assert quantized_to_range(threads, np.ones((), np.float32))[0].shape == ()
    with pytest.raises(ValueError, match="x is float32"):
        quantized_to_range(threads, np.zeros(0, np.float32))


@pytest.mark.parametrize("extents", [(7,), (130,), (3, 5), (9, 67), (1, 1), (2, 3, 70), (4, 5, 6)], ids=str)
def test_padded_images(extents, threads, rng):
    """Nothing outside the image is written."""
    pads = [tuple(map(int, rng.integers(0, 3, 2))) for _ in extents]
    x = rng.integers(0, 256, (5, *extents), np.uint8)
    for fill in (0, 128, 255):
        expected = np.pad(x, [(0, 0), *pads], constant_values=fill)
        memory = np.full(expected.size + 64, 77, np.uint8)
        call = padding_call(x.shape, expected.shape, pads, fill)
        NodeProgram([[call]], 1e9).run(threads, x=x, image=memory[32:])
        np.testing.assert_array_equal(memory[32:-32].reshape(expected.shape), expected)
        assert (memory[:32] == 77).all() and (memory[-32:] == 77).all()
