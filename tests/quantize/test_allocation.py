"""The knapsack against every combination."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given, settings, strategies as st

from genai.quantize.allocation import Candidate, cheapest, smallest, total_bytes, total_loss


def candidates(seed: int, count: int) -> dict[str, list[Candidate]]:
    rng = np.random.default_rng(seed)
    table = {}
    for name in range(count):
        sizes = np.sort(rng.integers(10, 200, 4))
        losses = np.sort(rng.random(4))[::-1] * rng.random()
        table[str(name)] = [
            Candidate(str(i), int(size), float(loss)) for i, (size, loss) in enumerate(zip(sizes, losses, strict=True))
        ]
    return table


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(20, 900))
def test_no_combination_is_better(seed: int, count: int, most: int) -> None:
    table = candidates(seed, count)
    every = [dict(zip(table, chosen, strict=True)) for chosen in product(*table.values())]
    within = [one for one in every if total_bytes(one) <= most]
    found = cheapest(table, most)
    if not within:
        assert found is None
        return
    assert found is not None and list(found) == list(table) and total_bytes(found) <= most
    assert abs(total_loss(found) - min(map(total_loss, within))) < 1e-9


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.floats(0.01, 3))
def test_no_smaller_combination_keeps_the_loss(seed: int, count: int, most: float) -> None:
    table = candidates(seed, count)
    every = [dict(zip(table, chosen, strict=True)) for chosen in product(*table.values())]
    within = [one for one in every if total_loss(one) <= most]
    found = smallest(table, most)
    if not within:
        assert found is None
        return
    assert found is not None and total_loss(found) <= most
    assert total_bytes(found) <= min(map(total_bytes, within)) + 1


def test_large_sizes_are_counted_in_cells() -> None:
    """A billion bytes in a table of twenty thousand cells: within the limit, and close to it."""
    rng = np.random.default_rng(0)
    table = {
        str(n): [
            Candidate(str(b), int(rng.integers(10**7, 2 * 10**7)) * b, float(rng.random() / 4**b)) for b in (2, 3, 4, 8)
        ]
        for n in range(100)
    }
    low, high = (sum(pick(one.nbytes for one in some) for some in table.values()) for pick in (min, max))
    limit = (low + high) // 2
    found = cheapest(table, limit)
    assert found is not None and 0.99 * limit < total_bytes(found) <= limit
