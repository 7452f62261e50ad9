"""Fixtures of the packed products: crews of several sizes, and numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from genai.kernels.cpu.tape import replay
from genai.kernels.cpu.tape.replay import Crew


@pytest.fixture(scope="session")
def crews() -> Iterator[list[Crew]]:
    made = [Crew(1), Crew(2), Crew(3)]
    yield made
    for crew in made:
        crew.close()


@pytest.fixture
def everywhere(crews: list[Crew], monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Crew], Any]], Any]:
    """everywhere(f): f(crew) for every crew, small work shared out too; results must agree to the bit."""
    monkeypatch.setattr(replay, "_MIN_SHARED_WORK", 0.0)

    def run(make: Callable[[Crew], Any]) -> Any:
        first, *others = [make(crew) for crew in crews]
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
