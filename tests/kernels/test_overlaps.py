"""Sums of overlapping windows against loops over taps, for strides, dilations, omitted results and NaNs."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from genai.kernels.cpu.arrays.gemm.windows import Windows
from genai.kernels.cpu.arrays.overlaps import overlapped
from genai.kernels.cpu.program.thread_pool import Threads


def expected(parts: Any, windows: Windows, begins: Any, sizes: Any, bias: Any) -> Any:
    axes = list(
        zip(windows.kernel, windows.strides, windows.dilations, windows.counts, begins, sizes, strict=True)
    )  # fmt: skip
    room = [max((n - 1) * s + (k - 1) * d + 1, begin + size) for k, s, d, n, begin, size in axes]
    result = np.zeros((*parts.shape[:2], *room), np.float32)
    for index, tap in enumerate(product(*map(range, windows.kernel))):
        spans = (slice(t * d, t * d + (n - 1) * s + 1, s) for t, (_, s, d, n, *_) in zip(tap, axes, strict=True))
        result[(slice(None), slice(None), *spans)] += parts[:, :, index]
    kept = (slice(begin, begin + size) for begin, size in zip(begins, sizes, strict=True))
    result = result[(slice(None), slice(None), *kept)]
    return result if bias is None else result + bias.reshape(1, -1, *[1] * len(sizes))


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_random_windows(rank, rng):
    for number in range(60):
        kernel, strides, dilations = (
            tuple(int(v) for v in rng.integers(1, most, rank)) for most in (5, 5, 3)
        )  # fmt: skip
        counts = tuple(int(v) for v in (*rng.integers(1, 6, rank - 1), rng.integers(1, 50)))
        windows = Windows(kernel, strides, dilations, counts)
        full = [(n - 1) * s + (k - 1) * d + 1 for k, s, d, n in zip(kernel, strides, dilations, counts, strict=True)]
        begins = tuple(int(rng.integers(0, min(size, 4))) for size in full)
        sizes = tuple(max(1, size - b + int(rng.integers(-2, 4))) for size, b in zip(full, begins, strict=True))
        parts = rng.standard_normal((2, 3, int(np.prod(kernel)), *counts)).astype(np.float32)
        parts.reshape(-1)[rng.integers(parts.size)] = np.nan
        bias = rng.standard_normal(3).astype(np.float32) if number % 2 else None
        found = overlapped(parts, windows, begins, sizes, bias, Threads(1))
        np.testing.assert_allclose(
            found, expected(parts, windows, begins, sizes, bias), rtol=1e-5, atol=1e-5, err_msg=f"{windows} {begins}"
        )
        assert overlapped(parts, windows, begins, sizes, bias, Threads(2)).tobytes() == found.tobytes()
        apart = np.moveaxis(np.moveaxis(parts, 0, 2).copy(), 2, 0)  # the images are adjacent in memory
        assert overlapped(apart, windows, begins, sizes, bias).tobytes() == found.tobytes()


def test_arrays_that_do_not_fit_are_refused():
    windows = Windows((2,), (1,), (1,), (4,))
    parts = np.zeros((1, 3, 2, 4), np.float32)
    with pytest.raises(ValueError, match="parts"):
        overlapped(parts[:, :, :1], windows, (0,), (5,))
    with pytest.raises(ValueError, match="strides"):
        overlapped(parts[..., ::-1], windows, (0,), (5,))
    with pytest.raises(ValueError, match="bias"):
        overlapped(parts, windows, (0,), (5,), np.zeros(2, np.float32))
    with pytest.raises(ValueError, match="out"):
        overlapped(parts, windows, (0,), (5,), out=np.zeros((1, 3, 4), np.float32))
