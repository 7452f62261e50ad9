"""Samplers that depend on the tokens so far, against their definitions and by example."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

Distribution = Callable[..., np.ndarray]

OPTIONS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.5, "penalty_last_n": 7},
    {"presence_penalty": 0.8},
    {"frequency_penalty": 0.4, "penalty_last_n": 30},
    {"frequency_penalty": -0.4, "presence_penalty": 1.5, "repetition_penalty": 1.1},
    {"dry_multiplier": 0.8},
    {"dry_multiplier": 0.8, "dry_allowed_length": 1, "dry_base": 1.2},
    {"dry_multiplier": 2.0, "dry_last_n": 15},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 4},
    {"logit_bias": {0: 2.5, 3: -4.0, 5: -np.inf}},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("size", [50, 5000])
@pytest.mark.parametrize("length", [0, 1, 5, 80])
def test_equals_definition(
    ours: Distribution,
    published: Distribution,
    rng: np.random.Generator,
    options: dict[str, Any],
    size: int,
    length: int,
) -> None:
    for alphabet in (1, 3, 20):
        tokens = rng.integers(0, alphabet, length).tolist()
        row = rng.normal(0, 3, size)
        found, expected = (side(row, tokens, length // 3, [[7], [2, 1]], **options) for side in (ours, published))
        assert np.abs(found - expected).sum() < 1e-6


def test_presence_and_frequency_count_the_output_only(ours: Distribution) -> None:
    row = np.zeros(4)
    prompt, output = [0, 0, 1], [2, 2]
    found = ours(row, prompt + output, len(prompt), presence_penalty=1.0, frequency_penalty=0.5)
    np.testing.assert_allclose(np.log(found / found[0]), [0, 0, -2.0, 0], atol=1e-12)


def test_dry_grows_with_the_repetition(ours: Distribution) -> None:
    """After 1 2 3 4 ... 1 2 3 the token 4 continues a repetition of three tokens."""
    tokens = [1, 2, 3, 4, 9, 1, 2, 3]
    found = ours(np.zeros(10), tokens, dry_multiplier=0.5, dry_base=2.0, dry_allowed_length=2)
    assert np.isclose(np.log(found[4] / found[0]), -0.5 * 2.0 ** (3 - 2))


def test_dry_does_not_reach_across_a_breaker(ours: Distribution) -> None:
    tokens = [1, 2, 3, 4, 9, 1, 2, 3]
    options: dict[str, Any] = {"dry_multiplier": 0.5, "dry_base": 2.0, "dry_allowed_length": 2}
    assert np.isclose(np.log(ours(np.zeros(10), tokens, breakers=[[1]], **options)[4] / 0.1), -0.5, atol=0.06)
    for breaker in ([2], [3], [2, 3]):
        np.testing.assert_array_equal(ours(np.zeros(10), tokens, breakers=[breaker], **options), 0.1)


def test_dry_penalties_stay_finite(ours: Distribution) -> None:
    found = ours(np.zeros(3), [1] * 3000, dry_multiplier=5.0, dry_base=4.0)
    np.testing.assert_array_equal(found, [0.5, 0, 0.5])


def test_subtracted_penalties_mean_the_same_after_the_temperature(ours: Distribution) -> None:
    """If penalties come after the temperature, they are subtracted from the divided logits."""
    row, tokens = np.array([2.0, 1.0, 0.0]), [0, 0]
    for size in (3, 3000):
        logits = np.concatenate([row, np.full(size - 3, -50.0)])
        order = ["temperature", "penalties", "dry"]
        found = ours(logits, tokens, temperature=2.0, presence_penalty=1.5, samplers=order)
        expected = np.exp(np.array([1.0 - 1.5, 0.5, 0.0]))
        np.testing.assert_allclose(found[:3], expected / expected.sum(), rtol=1e-6)


def test_an_ngram_size_of_one_forbids_all_that_occurred(ours: Distribution) -> None:
    assert np.flatnonzero(ours(np.zeros(6), [1, 3, 3, 5], no_repeat_ngram_size=1)).tolist() == [0, 2, 4]


def test_greedy_obeys_penalties(ours: Distribution) -> None:
    for size in (5, 5000):
        row = np.full(size, -9.0)
        row[[1, 2]] = [3.0, 2.0]
        assert np.argmax(ours(row, [1], temperature=0, repetition_penalty=2.0)) == 2
        assert np.argmax(ours(row, [1], temperature=0, logit_bias={1: -np.inf})) == 2
