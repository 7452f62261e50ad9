"""Threads of BLAS while the toolkit divides work among its own threads."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from genai.common.blas import one_blas_thread
from genai.quant import grids


def blas_threads() -> set[int]:
    return {library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"}


def test_overlapping_callers_restore_the_number() -> None:
    with threadpool_limits(3, user_api="blas"):
        before = blas_threads()
        first, second = one_blas_thread(), one_blas_thread()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert blas_threads() == {1}
        second.__exit__(None, None, None)
        assert blas_threads() == before
        with pytest.raises(ValueError), one_blas_thread():
            raise ValueError
        assert blas_threads() == before


def test_divided_work_uses_one_blas_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grids, "allowed_processors", lambda: [0, 1])
    seen, threads = [], set()

    def work(part: int) -> int:
        seen.append(blas_threads())
        threads.add(threading.get_ident())
        return part

    with threadpool_limits(2, user_api="blas"):
        before = blas_threads()
        assert list(grids.in_parallel(work, [1, 2, 3])) == [1, 2, 3]
        assert seen == [{1}] * 3 and threading.get_ident() not in threads
        assert blas_threads() == before
        # A single part has all threads of BLAS.
        assert list(grids.in_parallel(work, [4])) == [4] and seen[-1] == before
        # A caller that stops early also restores the number.
        results = grids.in_parallel(lambda part: np.eye(part), [1, 2])
        next(results)
        results.close()  # type: ignore[attr-defined]  # a generator
        assert blas_threads() == before
