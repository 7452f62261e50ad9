"""Matmuls split across threads equal NumPy's, and BLAS's number of threads is restored."""

from __future__ import annotations

import numpy as np
import pytest

from genai.kernels.cpu.arrays import blas
from genai.kernels.cpu.arrays.blas import BLAS_THREADS, BlasThreads, matmul, matmul_apart
from genai.kernels.cpu.program import thread_pool
from genai.kernels.cpu.program.thread_pool import Threads

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
# Memory layouts of matrices of 5 to 90 rows and columns.
VIEWS = {
    "as it is": lambda x: x,
    "transposed": lambda x: np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2),
    "part of a wider one": lambda x: np.concatenate([x, x], axis=-1)[..., : x.shape[-1]],
    "every other row": lambda x: np.repeat(x, 2, axis=-2)[..., ::2, :],
    "every other column": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
    "backwards": lambda x: np.ascontiguousarray(x[..., ::-1, :])[..., ::-1, :],
    "one for all": lambda x: np.broadcast_to(x[:1], x.shape),
}


@pytest.fixture(autouse=True)
def share_everything(monkeypatch):
    monkeypatch.setattr(thread_pool, "_MIN_SHARED_WORK", 0.0)


@pytest.mark.parametrize(("left", "right"), SHAPES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_equals_numpy(left, right, dtype):
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal(left).astype(dtype), rng.standard_normal(right).astype(dtype)
    with BLAS_THREADS.single():
        shared = matmul(a, b, Threads(3))
    np.testing.assert_allclose(shared, a @ b, rtol=1e-3, atol=1e-4)
    assert shared.dtype == dtype


@pytest.mark.parametrize("single", [True, False])
def test_matrices_apart(single):
    """A stack's matrices, or a matrix's rows, have the bits that they have alone, for any number of threads."""
    rng, pools = np.random.default_rng(0), [Threads(1), Threads(3)]

    def multiply(a, b, threads):
        if not single:
            return matmul_apart(a, b, threads)
        with BLAS_THREADS.single():
            return matmul_apart(a, b, threads)

    for left, right in [*SHAPES, ((6, 33, 47), (6, 47, 21)), ((6, 33, 47), (47, 21)), ((6, 1, 40), (6, 40, 1))]:
        a, b = rng.standard_normal(left).astype(np.float32), rng.standard_normal(right).astype(np.float32)
        found = [multiply(a, b, threads) for threads in (None, *pools)]
        np.testing.assert_allclose(found[0], a @ b, rtol=1e-3, atol=1e-4)
        np.testing.assert_array_equal(found[1], found[2])
        if len(left) == 3:
            alone = [multiply(a[i : i + 1], b[i : i + 1] if b.ndim == 3 else b, pools[1]) for i in range(len(a))]
            np.testing.assert_array_equal(found[1], np.concatenate(alone))
        elif len(left) == len(right) == 2 and len(a):
            np.testing.assert_array_equal(found[1][7:9], multiply(a[7:9], b, pools[1]))


@pytest.mark.parametrize("left", VIEWS)
@pytest.mark.parametrize("right", VIEWS)
@pytest.mark.parametrize(
    ("batch", "rows", "terms", "columns"),
    [(5, 40, 60, 90), (2, 90, 30, 40), (4, 1, 50, 60), (1, 60, 20, 1), (3, 1, 5, 1)],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_matrices_that_lie_otherwise(monkeypatch, left, right, batch, rows, terms, columns, dtype):
    monkeypatch.setattr(blas, "_MIN_FLOPS", 0)
    rng = np.random.default_rng(1)
    a = VIEWS[left](rng.standard_normal((batch, rows, terms)).astype(dtype))
    b = VIEWS[right](rng.standard_normal((batch, terms, columns)).astype(dtype))
    with BLAS_THREADS.single():
        shared = matmul(a, b, Threads(3))
    np.testing.assert_allclose(shared, np.matmul(a, b), rtol=1e-3, atol=1e-4)


def test_the_library_of_numpys_wheels_is_found():
    if "openblas" not in np.show_config(mode="dicts")["Build Dependencies"]["blas"]["name"]:
        pytest.skip("this NumPy has another BLAS")
    assert BLAS_THREADS.library is None
    with BLAS_THREADS.single():
        assert BLAS_THREADS.library is not None
        assert set(BLAS_THREADS.library.functions) == {"s", "d"}


def test_threads_come_back():
    threads = BlasThreads()
    with threads.single(), threads.single():
        library = threads.library
        inside = library.get_threads() if library else 1
    assert inside == 1
    assert threads.library is None
    if library:
        assert library.get_threads() == threads._before


def test_wrong_shapes_raise():
    with pytest.raises(ValueError, match="mismatch"):
        matmul(np.ones((300, 400)), np.ones((300, 400)), Threads(2))
