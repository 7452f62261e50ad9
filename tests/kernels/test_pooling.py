"""The max and the mean of windows against NumPy's sliding windows, for strides, pads and NaNs."""

from __future__ import annotations

import numpy as np
import pytest

from genai.kernels.cpu.arrays.pooling import pooled
from genai.kernels.cpu.program.thread_pool import Threads

CASES = [
    # rows and columns of the image, kernel, strides, pads above and to the left
    ((9, 20), (3, 3), (2, 2), (1, 1)), ((7, 40), (2, 2), (2, 2), (0, 0)), ((6, 33), (5, 5), (1, 1), (2, 2)),
    ((5, 50), (3, 4), (1, 3), (0, 1)), ((1, 70), (1, 7), (1, 2), (0, 3)), ((4, 4), (4, 4), (4, 4), (0, 0)),
    ((11, 3), (2, 1), (1, 2), (1, 0)), ((8, 65), (3, 2), (2, 2), (0, 1)), ((40, 33), (3, 3), (2, 2), (1, 1)),
    ((30, 17), (5, 5), (1, 1), (2, 2)), ((64, 100), (3, 3), (3, 3), (1, 1)), ((20, 48), (6, 2), (1, 2), (5, 1)),
]  # fmt: skip


@pytest.mark.parametrize("threads", [None, Threads(2)])
@pytest.mark.parametrize(("extents", "kernel", "strides", "pads"), CASES)
def test_windows(threads, extents, kernel, strides, pads, rng):
    x = rng.standard_normal((5, *extents)).astype(np.float32)
    x[0, 0, 0], x[1, -1, -1], x[2, 0, 0] = np.nan, np.inf, -np.inf
    x[3][rng.random(extents) < 0.02] = np.nan
    x[4] -= 9  # pads must not be larger
    ends = [(before, size) for before, size in zip(pads, kernel, strict=True)]
    sizes = tuple((n + p + s - 1) // t + 1 - s // t for n, p, s, t in zip(extents, pads, kernel, strides, strict=True))
    for kind, fill in (("max", -np.inf), ("mean", 0.0)):
        padded = np.pad(x, [(0, 0), *ends], constant_values=fill)
        views = np.lib.stride_tricks.sliding_window_view(padded, kernel, (1, 2))
        views = views[:, :: strides[0], :: strides[1]][:, : sizes[0], : sizes[1]]
        counts = None if kind == "max" else np.full(sizes, kernel[0] * kernel[1], np.float32)
        expected = views.max((-1, -2)) if kind == "max" else views.mean((-1, -2))
        found = pooled(x, kernel, sizes, strides=strides, pads=pads, counts=counts, threads=threads)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_arguments_that_do_not_fit():
    with pytest.raises(ValueError, match="out of range"):
        pooled(np.zeros((1, 3, 3), np.float32), (0, 1), (3, 3), strides=(1, 1), pads=(0, 0))
