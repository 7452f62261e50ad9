"""Every sampler against its published definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from genai.engine.sampling.params import SamplingParams

Distribution = Callable[..., np.ndarray]

# Probabilities are chosen so that equal tokens do not reach them exactly: there rounding would decide.
TRUNCATIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"temperature": 0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 100},
    {"top_k": 2500},
    {"top_k": 4990},
    {"top_p": 0.0113},
    {"top_p": 0.5007},
    {"top_p": 0.9513},
    {"top_p": 0.9999999999},
    {"min_p": 0.0001},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"typical_p": 0.2003},
    {"typical_p": 0.9003},
    {"top_n_sigma": 0.5},
    {"top_n_sigma": 3.0},
    {"xtc_probability": 1.0, "xtc_threshold": 0.02},
    {"xtc_probability": 1.0, "xtc_threshold": 0.3},
    {"mirostat": 2, "mirostat_tau": 0.5},
    {"mirostat": 2, "mirostat_tau": 3.0},
    {"mirostat": 2, "mirostat_tau": 6.5},
    {"top_k": 40, "top_p": 0.9003, "min_p": 0.02, "temperature": 0.7},
]
# Short rows are lists from the start (exact to float64), others have whole and incomplete blocks.
SIZES = [1, 2, 7, 500, 1025, 3000, 40_001]


def assert_same(found: np.ndarray, expected: np.ndarray) -> None:
    """Equal sets of tokens and equal probabilities; large rows without truncation are summed in float32."""
    assert np.abs(found - expected).sum() < (1e-12 if len(found) <= 1024 else 2e-6)


def peaked(rng: np.random.Generator, size: int) -> np.ndarray:
    """Like a model's logits: a broad body and a few likely tokens."""
    row = rng.normal(0, 2, size)
    row[rng.integers(0, size, 20)] += np.linspace(14, 6, 20)
    return row


@pytest.mark.parametrize("options", TRUNCATIONS, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_random_rows(
    ours: Distribution, published: Distribution, rng: np.random.Generator, options: dict[str, Any], size: int
) -> None:
    for row in (peaked(rng, size), rng.normal(0, 1, size)):
        assert_same(ours(row, **options), published(row, **options))


@pytest.mark.parametrize("options", TRUNCATIONS, ids=str)
@pytest.mark.parametrize("size", [300, 5000])
def test_ties(
    ours: Distribution, published: Distribution, rng: np.random.Generator, options: dict[str, Any], size: int
) -> None:
    for row in (np.zeros(size), np.repeat(3.0, size), rng.integers(-2, 3, size) * 2.0):
        assert_same(ours(row, **options), published(row, **options))


@pytest.mark.parametrize("options", TRUNCATIONS, ids=str)
@pytest.mark.parametrize("size", [300, 5000])
def test_masked_tokens(
    ours: Distribution, published: Distribution, rng: np.random.Generator, options: dict[str, Any], size: int
) -> None:
    """Half of the tokens, all but one, all but the last."""
    half = np.where(rng.random(size) < 0.5, -np.inf, rng.normal(0, 2, size))
    one, last = np.full((2, size), -np.inf)
    one[size // 3], last[-1] = -5.0, 2.0
    for row in (half, one, last):
        assert_same(ours(row, **options), published(row, **options))


@pytest.mark.parametrize("options", TRUNCATIONS, ids=str)
@pytest.mark.parametrize("size", [6, 5000])
def test_extreme_logits(ours: Distribution, published: Distribution, options: dict[str, Any], size: int) -> None:
    """Large and tiny differences, denormal numbers, the lowest float."""
    for special in ([1e30, -1e30, 0.0], [1e-45, 0.0, -1e-40], [-3.4e38, 0.0, 1.0], [88.0, -88.0, 1e4]):
        row = np.full(size, -20.0)
        row[[0, 2, size - 1]] = special
        found = ours(row, **options)
        assert np.isclose(found.sum(), 1.0)
        if "top_n_sigma" not in options:  # whose squares exceed float32, and then all are kept
            assert_same(found, published(row, **options))


@pytest.mark.parametrize("size", [10, 3000])
def test_extreme_temperatures(ours: Distribution, size: int) -> None:
    row = np.linspace(0, 1, size)
    for tiny in (1e-320, 1e-30):
        assert ours(row, temperature=tiny).tolist() == [0.0] * (size - 1) + [1.0]
    np.testing.assert_allclose(ours(row, temperature=1e30), np.full(size, 1 / size), rtol=1e-6)


def random_options(rng: np.random.Generator) -> dict[str, Any]:
    """Several samplers together in a random order."""
    names = list(SamplingParams().samplers)
    choices: dict[str, Any] = {
        "top_k": int(rng.integers(1, 400)),
        "top_p": float(rng.uniform(0.3, 0.99)),
        "min_p": float(rng.uniform(0.001, 0.3)),
        "typical_p": float(rng.uniform(0.3, 0.99)),
        "top_n_sigma": float(rng.uniform(0.5, 4)),
        "temperature": float(rng.uniform(0.3, 2)),
        "repetition_penalty": float(rng.uniform(0.8, 2)),
        "presence_penalty": float(rng.uniform(-1, 1)),
        "frequency_penalty": float(rng.uniform(-1, 1)),
        "dry_multiplier": float(rng.uniform(0.5, 2)),
        "xtc_probability": 1.0,
        "no_repeat_ngram_size": 3,
    }
    picked = {name: value for name, value in choices.items() if rng.random() < 0.4}
    return picked | {"samplers": [str(name) for name in rng.permutation(names)]}


@pytest.mark.parametrize("size", [30, 900, 4000])
@pytest.mark.parametrize("seed", range(25))
def test_any_order(ours: Distribution, published: Distribution, size: int, seed: int) -> None:
    rng = np.random.default_rng([seed, size])
    options = random_options(rng)
    tokens = rng.integers(0, min(size, 12), 60).tolist()
    row = peaked(rng, size) / rng.uniform(1, 4)
    found, expected = (side(row, tokens, 20, [[5], [3, 4]], **options) for side in (ours, published))
    assert np.abs(found - expected).sum() < (1e-6 if size <= 1024 else 1e-5), options
