"""Shared-out products equal NumPy's, and BLAS gets its threads back."""

from __future__ import annotations

import numpy as np
import pytest

from genai.kernels.cpu.blas import BLAS_THREADS, BlasThreads, matmul
from genai.kernels.cpu.team import Team

SHAPES = [
    ((300, 400), (400, 200)),
    ((20, 800), (800, 900)),
    ((2, 150, 300), (300, 200)),
    ((1, 200, 300), (1, 300, 200)),
    ((8, 100, 100), (8, 100, 100)),
    ((2, 1, 200, 100), (3, 100, 200)),
    ((4,), (4,)),
    ((0, 4), (4, 3)),
]


@pytest.mark.parametrize(("left", "right"), SHAPES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_equals_numpy(left, right, dtype):
    rng, team = np.random.default_rng(0), Team(3, min_work_per_part=1)
    a, b = rng.standard_normal(left).astype(dtype), rng.standard_normal(right).astype(dtype)
    with BLAS_THREADS.single():
        shared = matmul(a, b, team)
    np.testing.assert_allclose(shared, a @ b, rtol=1e-3, atol=1e-4)
    assert shared.dtype == dtype
    team.close()


def test_threads_come_back():
    threads = BlasThreads()
    with threads.single(), threads.single():
        inside = threads._functions[0]() if threads._functions else 1
    assert inside == 1
    assert not threads.is_single
    if threads._functions:
        assert threads._functions[0]() == threads._before


def test_wrong_shapes_raise():
    with pytest.raises(ValueError, match="mismatch"):
        matmul(np.ones((300, 400)), np.ones((300, 400)), Team(2))
