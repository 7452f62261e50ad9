"""The next larger float32."""

from __future__ import annotations

import numpy as np
import pytest

from genai.kernels.cpu.sampling.passes import next_above

NUMBERS = [0.0, -0.0, 1e-45, -1e-45, 1.0, -1.0, 3.4028235e38, -3.4028235e38, np.inf, -np.inf, np.nan, 1.1754944e-38]


@pytest.mark.parametrize("number", [*NUMBERS, *np.random.default_rng(0).standard_normal(20)])
def test_next_above(number: float) -> None:
    x = np.float32(number)
    with np.errstate(over="ignore"):
        assert np.array_equal(next_above(x), np.nextafter(x, np.float32(np.inf)), equal_nan=True)
