"""The number of threads of the BLAS library that NumPy calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

_lock = threading.Lock()
_callers = 0
_limits: Any = None


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Limit BLAS to the calling threads, for work that is already divided among threads.

    OpenBLAS computes one product at a time if products use several threads. Threads that wait for their turn, and
    OpenBLAS's own threads between products, occupy processors without computing. Callers can overlap; the limit ends
    with the last one.
    """
    global _callers, _limits
    with _lock:
        if not _callers:
            _limits = _controller().limit(limits=1, user_api="blas")
        _callers += 1
    try:
        yield
    finally:
        with _lock:
            _callers -= 1
            if not _callers:
                _limits.restore_original_limits()
                _limits = None


@cache
def _controller() -> Any:
    """Return the libraries of this process, which NumPy has loaded when it was imported."""
    import numpy as np  # noqa: F401
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()
