"""Float products by NumPy's BLAS, shared out by our own team.

OpenBLAS splits a product evenly and spins until the slowest thread is done, so that one core taken by something else
costs a multiple of its share. Where it can be told to use one thread, a `Team` hands out smaller parts instead.
"""

from __future__ import annotations

import ctypes
import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .team import Team

_FLOPS_PER_NANOSECOND = 40.0
# Below this a product is not worth handing out.
_MIN_FLOPS = 4_000_000
_NAMES = ("scipy_openblas_{}_num_threads64_", "openblas_{}_num_threads64_", "openblas_{}_num_threads")


class BlasThreads:
    """How many threads NumPy's OpenBLAS uses; without effect where there is no OpenBLAS to be found."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before = 0
        self._functions: tuple[Any, Any] | None = None
        self._searched = False

    @property
    def is_single(self) -> bool:
        """Whether products run on the calling thread only, so that a team may share them out."""
        return self._users > 0 and self._functions is not None

    def single(self) -> BlasThreads:
        """`with single():` one thread per product inside; what was set before comes back when the last user leaves."""
        return self

    def __enter__(self) -> None:
        with self._lock:
            if not self._searched:
                self._functions, self._searched = _openblas(), True
            self._users += 1
            if self._users == 1 and self._functions is not None:
                get, put = self._functions
                self._before = get()
                put(1)

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._functions is not None:
                self._functions[1](self._before)


BLAS_THREADS = BlasThreads()


def _openblas() -> tuple[Any, Any] | None:
    """OpenBLAS's get and set functions in the library that NumPy's wheel brings, or None."""
    folders = (Path(np.__file__).parent.parent / "numpy.libs", Path(np.__file__).parent / ".dylibs")
    for path in (item for folder in folders if folder.is_dir() for item in folder.iterdir()):
        if "openblas" not in path.name:
            continue
        try:
            library = ctypes.CDLL(str(path))
        except OSError:
            continue
        for name in _NAMES:
            if hasattr(library, name.format("set")) and hasattr(library, name.format("get")):
                return getattr(library, name.format("get")), getattr(library, name.format("set"))
    return None


def matmul(a: NDArray[Any], b: NDArray[Any], team: Team | None = None) -> NDArray[Any]:
    """a @ b, shared out by rows, by columns or by matrices where it is large and `BLAS_THREADS.single` holds."""
    flops = 2.0 * a.size * (b.shape[-1] if b.ndim > 1 else 1)
    if (
        team is None
        or team.threads == 1
        or flops < _MIN_FLOPS
        or not BLAS_THREADS.is_single
        or a.ndim < 2
        or b.ndim < 2
        or a.dtype != b.dtype
        or a.shape[-1] != b.shape[-2]
    ):
        result: NDArray[Any] = np.matmul(a, b)
        return result
    work = flops / _FLOPS_PER_NANOSECOND
    if b.ndim == 2:
        rows = a.reshape(-1, a.shape[-1])
        return _shared(rows, b, team, work).reshape(*a.shape[:-1], b.shape[1])
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    out = np.empty((*batch, a.shape[-2], b.shape[-1]), a.dtype)
    left = np.broadcast_to(a, (*batch, *a.shape[-2:])).reshape(-1, *a.shape[-2:])
    right = np.broadcast_to(b, (*batch, *b.shape[-2:])).reshape(-1, *b.shape[-2:])
    flat = out.reshape(-1, *out.shape[-2:])
    if math.prod(batch) >= team.threads:
        team.run(_matrices, (left, right, flat), len(flat), work=work)
    else:
        for x, y, z in zip(left, right, flat, strict=True):
            _shared(x, y, team, work / len(flat), z)
    return out


def _shared(a: NDArray[Any], b: NDArray[Any], team: Team, work: float, out: NDArray[Any] | None = None) -> NDArray[Any]:
    """A product of two matrices by rows of the first, or by columns of the second where those are more."""
    if out is None:
        out = np.empty((len(a), b.shape[1]), a.dtype)
    if len(a) >= b.shape[1]:
        team.run(_rows, (a, b, out), len(a), work=work, grain=16)
    else:
        team.run(_columns, (a, b, out), b.shape[1], work=work, grain=64)
    return out


def _rows(a: Any, b: Any, out: Any, begin: int, end: int) -> None:
    np.matmul(a[begin:end], b, out=out[begin:end])


def _columns(a: Any, b: Any, out: Any, begin: int, end: int) -> None:
    np.matmul(a, b[:, begin:end], out=out[:, begin:end])


def _matrices(a: Any, b: Any, out: Any, begin: int, end: int) -> None:
    np.matmul(a[begin:end], b[begin:end], out=out[begin:end])
