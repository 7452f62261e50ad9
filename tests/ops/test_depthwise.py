"""The compiled depthwise convolution, and the bias and limits of convolutions, compared with NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from genai.kernels.cpu.arrays.depthwise import depthwise, depthwise_bytes, finish_channels
from genai.kernels.cpu.program import thread_pool
from genai.kernels.cpu.program.thread_pool import Threads


@pytest.mark.parametrize("strides", [(1, 1), (2, 2), (1, 3), (3, 2)])
@pytest.mark.parametrize("kernel", [(3, 3), (1, 1), (5, 2)])
@pytest.mark.parametrize(("batch", "pads"), [(1, (0, 0)), (2, (1, 2)), (1, (4, 0))])
@pytest.mark.parametrize("shape", [(11, 13), (70, 90)])
def test_equals_the_sum_of_taps(strides, kernel, batch, pads, shape):
    rng, channels = np.random.default_rng(5), 5
    x = rng.standard_normal((batch * channels, *shape)).astype(np.float32)
    weight = rng.standard_normal((channels, *kernel)).astype(np.float32)
    bias = rng.standard_normal(channels).astype(np.float32)
    threads = Threads(3)
    padded = np.pad(x, [(0, 0), (pads[0], 2), (pads[1], 3)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, kernel, axis=(1, 2))[:, :: strides[0], :: strides[1]]
    per_plane = np.tile(weight.astype(np.float64), (batch, 1, 1))
    expected = np.einsum("prcij,pij->prc", windows, per_plane) + np.tile(bias, batch)[:, None, None]
    sizes = windows.shape[1:3]
    found = depthwise(x, weight, bias, sizes, strides=strides, pads=pads, threads=threads)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    limited = depthwise(x, weight, bias, sizes, strides=strides, pads=pads, limits=(-0.5, 0.25), threads=threads)
    np.testing.assert_allclose(limited, np.clip(expected, -0.5, 0.25), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strides", [(1, 1), (2, 2), (1, 3)])
@pytest.mark.parametrize("kernel", [(3, 3), (5, 2)])
@pytest.mark.parametrize(("x_type", "out_type"), [("uint8", "uint8"), ("int8", "int8"), ("uint8", "int8")])
def test_bytes_equal_the_rounded_sums(strides, kernel, x_type, out_type, rng, monkeypatch):
    monkeypatch.setattr(thread_pool, "_MIN_SHARED_WORK", 0.0)
    channels, pads, range_, given = 3, (1, 2), np.iinfo(out_type), np.iinfo(x_type)
    x = rng.integers(given.min, given.max + 1, (2 * channels, 11, 37)).astype(x_type)
    weight = rng.integers(-255, 256, (channels, *kernel)).astype(np.float32)
    bias, factors = rng.integers(-9999, 9999, channels).astype(np.float32), rng.uniform(0, 0.01, channels)
    x_zero, out_zero = int(x[0, 0, 0]), range_.min + 77
    padded = np.pad(x.astype(np.int64) - x_zero, [(0, 0), (pads[0], 2), (pads[1], 3)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, kernel, axis=(1, 2))[:, :: strides[0], :: strides[1]]
    sums = np.einsum("prcij,pij->prc", windows, np.tile(weight.astype(np.int64), (2, 1, 1)))
    sums = (sums + np.tile(bias.astype(np.int64), 2)[:, None, None]).astype(np.float32)
    scaled = sums * np.tile(factors.astype(np.float32), 2)[:, None, None]
    expected = np.clip(np.rint(scaled) + out_zero, range_.min, range_.max)
    for threads in (None, Threads(3)):
        found = depthwise_bytes(
            x, weight, bias, windows.shape[1:3], x_zero=x_zero, factors=factors.astype(np.float32), out_zero=out_zero,
            dtype=np.dtype(out_type), strides=strides, pads=pads, threads=threads,
        )  # fmt: skip
        assert found.dtype == out_type
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("x_type", "dtype", "factors", "message"),
    [
        ("float32", "int8", 2, "x is float32, expected int8 or uint8"),
        ("int8", "int32", 2, "the result is int32, expected int8 or uint8"),
        ("int8", "int8", 3, "factors"),
    ],
)
def test_bytes_that_do_not_fit(x_type, dtype, factors, message):
    with pytest.raises(ValueError, match=message):
        depthwise_bytes(
            np.zeros((2, 5, 5), x_type), np.zeros((2, 3, 3), np.float32), np.zeros(2, np.float32), (3, 3), x_zero=0,
            factors=np.ones(factors, np.float32), out_zero=0, dtype=np.dtype(dtype),
        )  # fmt: skip


def test_not_a_number_reaches_the_output():
    x = np.array([[[1, np.nan, 3, 4]]], np.float32)
    found = depthwise(x, np.ones((1, 1, 1), np.float32), np.zeros(1, np.float32), (1, 4), limits=(0, 3))
    assert found.tolist()[0][0][0] == 1
    assert np.isnan(found[0, 0, 1])
    assert found[0, 0, 3] == 3


@pytest.mark.parametrize(
    ("planes", "kernels", "strides", "sizes", "pads"),
    [
        ((3, 5, 5), (2, 3, 3), (1, 1), (3, 3), (0, 0)),
        ((2, 5, 5), (2, 3, 3), (0, 1), (3, 3), (0, 0)),
        ((2, 5, 5), (2, 3, 3), (1, 1), (0, 3), (0, 0)),
        ((2, 5, 5), (2, 3, 3), (1, 1), (3, 3), (-1, 0)),
        ((2, 5, 5), (2, 0, 3), (1, 1), (3, 3), (0, 0)),
    ],
)
def test_what_does_not_fit(planes, kernels, strides, sizes, pads):
    bias = np.zeros(kernels[0], np.float32)
    with pytest.raises(ValueError, match=r"do not match|out of range"):
        depthwise(np.zeros(planes, np.float32), np.zeros(kernels, np.float32), bias, sizes, strides=strides, pads=pads)


@pytest.mark.parametrize("bias", [None, np.array([1, -2, 3], np.float32)])
def test_bias_and_limits_of_channels(monkeypatch, bias):
    monkeypatch.setattr(thread_pool, "_MIN_SHARED_WORK", 0.0)
    values = np.random.default_rng(0).standard_normal((6, 50)).astype(np.float32)
    values[0, 0] = np.nan
    addend = 0 if bias is None else np.tile(bias, 2)[:, None]
    expected = np.clip(values + addend, -1, 0.5)
    finish_channels(values, bias, (-1, 0.5), threads=Threads(2))
    np.testing.assert_array_equal(values, expected.astype(np.float32))


def test_channels_that_do_not_fit():
    with pytest.raises(ValueError, match="4 planes do not match 3 channels"):
        finish_channels(np.zeros((4, 2), np.float32), np.zeros(3, np.float32))
