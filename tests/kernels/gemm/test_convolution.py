"""Packed convolutions of float32 and of bytes against sums over windows."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest

from genai.kernels.cpu.arrays.gemm.convolution import Convolution, IntegerConvolution
from genai.kernels.cpu.arrays.gemm.packing import pack_integer_kernels, pack_kernels
from genai.kernels.cpu.arrays.gemm.windows import Windows

# Images, channels, extents, outputs, kernel, strides, dilations, pads.
CASES = [
    (1, 1, (1,), 1, (1,), (1,), (1,), 0),
    (2, 3, (9, 11), 5, (3, 3), (1, 1), (1, 1), 1),
    (1, 7, (13, 17), 20, (3, 2), (2, 3), (1, 1), 1),
    (1, 33, (16, 16), 40, (1, 1), (1, 1), (1, 1), 0),
    (1, 5, (23, 40), 3, (5, 1), (1, 1), (2, 1), 2),
    (1, 2, (6, 7, 8), 4, (2, 3, 2), (1, 2, 1), (1, 1, 1), 1),
    (3, 4, (50,), 17, (7,), (2,), (3,), 0),
    (2, 6, (5, 7), 4, (1, 1), (1, 1), (1, 1), 0),
]


def window_sums(x, kernels, windows):
    """The definition, in x's type."""
    total = np.zeros((len(x), len(kernels), *windows.counts), x.dtype)
    for tap in itertools.product(*map(range, windows.kernel)):
        inner = tuple(
            slice(t * d, t * d + (count - 1) * s + 1, s)
            for t, d, s, count in zip(tap, windows.dilations, windows.strides, windows.counts, strict=True)
        )
        total += np.einsum("nc...,mc->nm...", x[(slice(None), slice(None), *inner)], kernels[(..., *tap)])
    return total


def windows_of(extents, kernel, strides, dilations):
    counts = tuple(
        (size - d * (k - 1) - 1) // s + 1 for size, k, s, d in zip(extents, kernel, strides, dilations, strict=True)
    )
    return Windows(kernel, strides, dilations, counts)


@pytest.mark.parametrize(("images", "channels", "extents", "outputs", "kernel", "strides", "dilations", "pad"), CASES)
def test_float32(everywhere, normal, images, channels, extents, outputs, kernel, strides, dilations, pad):
    x = np.pad(normal(images, channels, *extents), [(0, 0), (0, 0), *[(pad, pad)] * len(extents)])
    kernels, bias = normal(outputs, channels, *kernel), normal(outputs)
    windows = windows_of(x.shape[2:], kernel, strides, dilations)
    addend = normal(images, outputs, *windows.counts)
    found = everywhere(lambda threads: Convolution(threads, pack_kernels(kernels), bias, "relu")(x, windows, addend))
    sums = window_sums(x.astype(np.float64), kernels.astype(np.float64), windows)
    expected = np.maximum(sums + bias.reshape(-1, *[1] * len(extents)) + addend, 0)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("x_type", [np.int8, np.uint8])
@pytest.mark.parametrize(
    ("weight_type", "w_zero"),
    [(np.int8, 0), (np.int8, -128), (np.uint8, 128), (np.uint8, 113), (np.uint8, "each"), (np.int8, "each")],
)
@pytest.mark.parametrize(("images", "channels", "extents", "outputs", "kernel", "strides", "dilations", "pad"), CASES)
def test_bytes(
    everywhere, integers, rng, images, channels, extents, outputs, kernel, strides, dilations, pad, x_type, weight_type,
    w_zero,
):  # fmt: skip
    x, kernels = integers(x_type, images, channels, *extents), integers(weight_type, outputs, channels, *kernel)
    x_zero = int(integers(x_type, 1)[0])
    points = integers(weight_type, outputs) if w_zero == "each" else np.asarray(w_zero, weight_type)
    bias = rng.integers(-10_000, 10_000, outputs).astype(np.int32)
    pads = [(pad, pad)] * len(extents)
    padded = np.pad(x.astype(np.int64) - x_zero, [(0, 0), (0, 0), *pads])
    windows = windows_of(padded.shape[2:], kernel, strides, dilations)
    moved = kernels.astype(np.int64) - points.astype(np.int64).reshape(-1, *[1] * (kernels.ndim - 1))
    expected = window_sums(padded, moved, windows) + bias.reshape(-1, *[1] * len(extents))
    packed = pack_integer_kernels(kernels)
    sums = everywhere(lambda threads: IntegerConvolution(threads, packed, bias, points).sums(x, pads, windows, x_zero))
    np.testing.assert_array_equal(sums, expected)
    factors = (rng.random(outputs) * 1e-2).astype(np.float32)
    found = everywhere(
        lambda threads: IntegerConvolution(threads, packed, bias, points).rounded(
            x, pads, windows, x_zero, factors, -3, np.dtype(np.int8)
        )
    )
    scaled = expected.astype(np.float32) * factors.reshape(-1, *[1] * len(extents))
    np.testing.assert_array_equal(found, np.clip(np.rint(scaled) - 3, -128, 127).astype(np.int8))


# The bytes of an image end where memory that cannot be read begins.
_GUARDED = """
import ctypes, mmap
import numpy as np
from genai.kernels.cpu.arrays.gemm.convolution import IntegerConvolution
from genai.kernels.cpu.arrays.gemm.packing import pack_integer_kernels
from genai.kernels.cpu.arrays.gemm.windows import Windows
from genai.kernels.cpu.program.thread_pool import Threads

page = mmap.PAGESIZE
memory = np.frombuffer(mmap.mmap(-1, 2 * page), np.uint8)
assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(memory.ctypes.data + page), page, 0) == 0
kernels = pack_integer_kernels(np.ones((4, 5, 1), np.int8))
for positions in (1, 2, 3, 16, 19, 33, 70):
    x = memory[page - 5 * positions : page].reshape(1, 5, positions)
    x[...] = 3
    windows = Windows((1,), (1,), (1,), (positions,))
    assert (IntegerConvolution(Threads(1), kernels).sums(x, [(0, 0)], windows, 1) == 10).all()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mprotect of Linux")
def test_no_byte_after_an_image_is_read():
    subprocess.run([sys.executable, "-c", _GUARDED], check=True, timeout=120)


def test_infinities_reach_their_windows_only(threads, normal):
    x, kernels = normal(1, 3, 12, 40), normal(4, 3, 3, 3)
    x[0, 1, 5, 20] = np.inf
    found = Convolution(threads, pack_kernels(kernels))(x, windows_of((12, 40), (3, 3), (1, 1), (1, 1)))
    spoiled = np.zeros((10, 38), bool)
    spoiled[3:6, 18:21] = True
    assert (np.isfinite(found) != spoiled).all()


def test_what_does_not_fit(threads, normal, integers):
    kernels, windows = pack_kernels(normal(4, 3, 1, 1)), windows_of((5, 5), (1, 1), (1, 1), (1, 1))
    with pytest.raises(ValueError, match=r"bias is float32 \[3\], expected float32 \[4\]"):
        Convolution(threads, kernels, normal(3))
    with pytest.raises(ValueError, match="each kernel has 3 elements"):
        Convolution(threads, kernels)(normal(1, 2, 5, 5), windows)
    with pytest.raises(ValueError, match="addend is"):
        Convolution(threads, kernels)(normal(1, 3, 5, 5), windows, normal(1, 4, 5, 4))
    packed = pack_integer_kernels(integers(np.int8, 4, 3, 1, 1))
    with pytest.raises(ValueError, match="bias is"):
        IntegerConvolution(threads, packed, np.zeros(3, np.int32))
    with pytest.raises(ValueError, match="3 zero points, expected 1 or 4"):
        IntegerConvolution(threads, packed, w_zero=np.zeros(3, np.int8))
    with pytest.raises(ValueError, match="x is float32"):
        IntegerConvolution(threads, packed).sums(normal(1, 3, 5, 5), [(0, 0)] * 2, windows, 0)
    with pytest.raises(ValueError, match="factors are"):
        x = integers(np.int8, 1, 3, 5, 5)
        IntegerConvolution(threads, packed).rounded(x, [(0, 0)] * 2, windows, 0, normal(3), 0, np.dtype(np.int8))
