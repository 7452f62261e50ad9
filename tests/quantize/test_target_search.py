"""The search for the smallest model within a divergence, where the divergence is a known function of the losses."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from genai.quantize.allocation import Candidate, smallest, total_bytes, total_loss
from genai.quantize.target_search import TargetSearch

ROUNDS = 8


def matrices(seed: int, count: int) -> dict[str, list[Candidate]]:
    rng = np.random.default_rng(seed)
    bits = (2, 2.5, 3, 4.125, 4.25, 4.5, 8.25)
    return {
        str(number): [Candidate(str(one), round(size * one / 8), sensitivity * 4.0**-one) for one in bits]
        for number, (size, sensitivity) in enumerate(
            zip(rng.integers(80, 800, count), rng.lognormal(-3, 1.5, count), strict=True)
        )
    }


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.3, 3), st.floats(0.8, 1.25), st.floats(0.01, 0.3))
def test_the_smallest_model_within_the_target_is_found(seed: int, factor: float, power: float, part: float) -> None:
    """The divergence is `factor * loss ** power`, so the sum of losses that meets the target is known."""
    table = matrices(seed, 30)
    losses = [[candidate.loss for candidate in alternatives] for alternatives in table.values()]
    low, high = sum(map(min, losses)), sum(map(max, losses))
    most = low ** (1 - part) * high**part * 1.05
    target = factor * most**power
    best = smallest(table, most)
    assert best is not None
    search, chosen, met = TargetSearch(table, target), smallest(table, min(max(target, low * 1.001), high)), []
    for _ in range(ROUNDS):
        assert chosen is not None
        divergence = factor * total_loss(chosen) ** power
        met += [total_bytes(chosen)] if divergence <= target else []
        search.add(chosen, divergence)
        if (chosen := search.next()) is None:
            break
    assert min(met) <= 1.005 * total_bytes(best)


def test_a_target_that_every_model_meets_ends_at_the_smallest() -> None:
    table = matrices(0, 5)
    search = TargetSearch(table, 1e9)
    first = search.next()
    assert first is not None
    search.add(first, 1.0)
    assert {candidate.label for candidate in first.values()} == {"2"}
    assert search.next() is None


@pytest.mark.parametrize("divergence", [0.0, math.inf])
def test_extreme_divergences(divergence: float) -> None:
    table = matrices(1, 20)
    search = TargetSearch(table, 1e-3)
    for _ in range(ROUNDS):
        if (chosen := search.next()) is None:
            break
        search.add(chosen, divergence)
    assert chosen is None
