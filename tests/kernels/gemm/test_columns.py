"""What windows see, laid out for BLAS, against slices of the image."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from genai.kernels.cpu.arrays.gemm.windows import Windows, window_columns

# Images, channels, extents, kernel, strides, dilations.
CASES = [
    (1, 1, (1,), (1,), (1,), (1,)),
    (2, 3, (9, 41), (3, 3), (1, 1), (1, 1)),
    (1, 7, (13, 57), (3, 2), (2, 3), (1, 2)),
    (1, 2, (6, 7, 8), (2, 3, 2), (1, 2, 1), (1, 1, 2)),
    (0, 2, (5, 5), (2, 2), (1, 1), (1, 1)),
]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("images", "channels", "extents", "kernel", "strides", "dilations"), CASES)
def test_equals_slices(everywhere, normal, images, channels, extents, kernel, strides, dilations, dtype):
    x = normal(images, channels, *extents).astype(dtype)
    counts = tuple(
        (size - d * (k - 1) - 1) // s + 1 for size, k, s, d in zip(extents, kernel, strides, dilations, strict=True)
    )
    taps = []
    for tap in itertools.product(*map(range, kernel)):
        inner = [
            slice(t * d, t * d + (count - 1) * s + 1, s)
            for t, d, s, count in zip(tap, dilations, strides, counts, strict=True)
        ]
        taps.append(x[(slice(None), slice(None), *inner)])
    windows = Windows(kernel, strides, dilations, counts)
    found = everywhere(lambda threads: window_columns(x, windows, threads))
    np.testing.assert_array_equal(found, np.stack(taps, axis=2))


def test_other_types():
    with pytest.raises(ValueError, match="x is float16"):
        window_columns(np.zeros((1, 1, 3), np.float16), Windows((1,), (1,), (1,), (3,)))
