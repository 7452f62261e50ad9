"""Fixtures of the packed products: so many threads, and numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from genai.kernels.cpu.program import thread_pool
from genai.kernels.cpu.program.thread_pool import Threads

# Threads that wait for each other sleep almost at once: there may be more of them than cores.
_POOL = thread_pool._Pool(spins=10)


@pytest.fixture
def threads() -> Threads:
    """One, where their number is of no interest."""
    return Threads(1)


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Threads], Any]], Any]:
    """everywhere(f): f(threads) for one, two and three, small work shared out too; results must agree to the bit."""
    monkeypatch.setattr(thread_pool, "_MIN_SHARED_WORK", 0.0)
    monkeypatch.setattr(thread_pool, "_POOL", _POOL)

    def run(make: Callable[[Threads], Any]) -> Any:
        first, *others = [make(Threads(count)) for count in (1, 2, 3)]
        for other in others:
            np.testing.assert_array_equal(other, first)
        return first

    return run


@pytest.fixture
def normal(rng: np.random.Generator) -> Callable[..., np.ndarray]:
    return lambda *shape: rng.standard_normal(shape, dtype=np.float32)


@pytest.fixture
def integers(rng: np.random.Generator) -> Callable[..., np.ndarray]:
    """integers(dtype, *shape): all values of a type, its limits often."""

    def make(dtype: Any, *shape: int) -> np.ndarray:
        info = np.iinfo(dtype)
        values = rng.integers(info.min, info.max + 1, shape)
        extreme = rng.random(shape) < 0.3
        return np.where(extreme, rng.choice([info.min, info.max], shape), values).astype(dtype)

    return make
