"""Randomly drawn tokens: their distribution, and the inputs that they may depend on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from genai.devices import open_executor
from genai.engine.sampling.batch import BatchSampler
from genai.engine.sampling.params import SamplingParams
from genai.engine.sampling.plan import RowSampler, SamplingPlan, plan_sampling
from genai.kernels.device import Executor
from genai.kernels.reference import sampling as reference

Distribution = Callable[..., np.ndarray]
ALONE = open_executor(threads=1)


def plan(size: int, **options: Any) -> SamplingPlan:
    return plan_sampling(SamplingParams(**options), vocab_size=size)


def draw_many(row: np.ndarray, count: int, seed: int, **options: Any) -> np.ndarray:
    """Tokens drawn from the same logits at `count` positions."""
    shared = plan(len(row), **options)
    rows = [RowSampler(shared, range(position), seed=seed) for position in range(count)]
    return BatchSampler(len(row), ALONE).sample(np.tile(np.asarray(row, np.float32), (count, 1)), rows).tokens


def chi_squared_limit(degrees: int) -> float:
    """The value that is exceeded by chance once in ten thousand times (Wilson & Hilferty 1931)."""
    part = 2 / (9 * degrees)
    return degrees * (1 - part + 3.719 * part**0.5) ** 3


def assert_follows(tokens: np.ndarray, expected: np.ndarray) -> None:
    """Pearson's chi-squared test; tokens with fewer than five expected occurrences are merged."""
    observed = np.bincount(tokens, minlength=len(expected)).astype(float)
    assert not observed[expected == 0].any()
    means = expected * len(tokens)
    rare = means < 5
    if rare.any():
        observed = np.append(observed[~rare], observed[rare].sum())
        means = np.append(means[~rare], means[rare].sum())
    observed, means = observed[means > 0], means[means > 0]
    if len(means) == 1:
        return
    assert np.sum((observed - means) ** 2 / means) < chi_squared_limit(len(means) - 1)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.8, "top_k": 12},
        {"top_p": 0.8},
        {"min_p": 0.1, "temperature": 1.4},
        {"typical_p": 0.7},
        {"top_n_sigma": 1.2},
        {"xtc_probability": 1.0, "xtc_threshold": 0.05},
        {"mirostat": 2, "mirostat_tau": 1.5},
    ],
    ids=str,
)
def test_short_rows(published: Distribution, options: dict[str, Any], seed: int) -> None:
    row = np.random.default_rng(seed).normal(0, 1.5, 40)
    assert_follows(draw_many(row, 8000, seed, **options), published(row, **options))


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"top_p": 0.9}, {"min_p": 0.3}], ids=str)
def test_long_rows(published: Distribution, options: dict[str, Any], seed: int) -> None:
    row = np.random.default_rng(seed).normal(0, 2.5, 3001)
    assert_follows(draw_many(row, 3000, seed, **options), published(row, **options))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_xtc_is_applied_with_its_probability(seed: int) -> None:
    row = np.log([0.6, 0.39, 0.01])
    tokens = draw_many(row, 8000, seed, xtc_probability=0.25, xtc_threshold=0.1)
    without = np.array([0, 0.39, 0.01]) / 0.4
    assert_follows(tokens, 0.75 * np.array([0.6, 0.39, 0.01]) + 0.25 * without)


@pytest.mark.parametrize("size", [512, 4096])
def test_random_numbers_are_philox(size: int) -> None:
    """With equal logits, the token is determined by the random number alone."""
    shared = plan(size)
    cases = [(seed, row, length) for seed in (0, 1, 2**64 - 1) for row in (0, 1, 2**31) for length in (0, 5, 100_000)]
    rows = [RowSampler(shared, range(length), seed=seed, row=row) for seed, row, length in cases]
    tokens = BatchSampler(size, ALONE).sample(np.zeros((len(rows), size), np.float32), rows).tokens
    assert tokens.tolist() == [int(reference.uniforms(*case)[0] * size) for case in cases]


def test_the_second_random_number_decides_xtc() -> None:
    coins = np.array([reference.uniforms(9, 0, position)[1] for position in range(500)])
    tokens = draw_many(np.log([0.5, 0.5]), 500, 9, xtc_probability=0.5, xtc_threshold=0.4)
    assert set(tokens[coins < 0.5].tolist()) == {1}
    assert set(tokens[coins >= 0.5].tolist()) == {0, 1}


MIXED: list[dict[str, Any]] = [
    {"temperature": 0},
    {},
    {"top_k": 30},
    {"top_p": 0.9, "temperature": 0.8},
    {"min_p": 0.05, "presence_penalty": 0.5},
    {"typical_p": 0.8},
    {"xtc_probability": 0.5},
    {"mirostat": 2},
    {"dry_multiplier": 1.0, "repetition_penalty": 1.2},
    {"top_n_sigma": 1.5, "logit_bias": {3: -np.inf}},
]


@pytest.mark.parametrize("size", [300, 4001])
def test_a_row_depends_on_itself_only(rng: np.random.Generator, size: int, executor: Executor) -> None:
    """It does not depend on other rows, their order, or the number of threads."""
    count = 40
    logits = rng.normal(0, 2, (count, size)).astype(np.float32)
    histories = [rng.integers(0, 9, rng.integers(1, 30)).tolist() for _ in range(count)]
    plans = [plan(size, **MIXED[i % len(MIXED)]) for i in range(count)]

    def row(i: int) -> RowSampler:
        return RowSampler(plans[i], histories[i], seed=i * 7, row=i % 3)

    alone = [int(BatchSampler(size, ALONE).sample(logits[i : i + 1], [row(i)]).tokens[0]) for i in range(count)]
    order = rng.permutation(count)
    together = BatchSampler(size, executor).sample(np.ascontiguousarray(logits[order]), [row(i) for i in order]).tokens
    assert together.tolist() == [alone[i] for i in order]


def test_seeds_and_rows_differ() -> None:
    row = np.zeros(5000, np.float32)
    shared = plan(5000)
    rows = [RowSampler(shared, [1, 2], seed=seed, row=number) for seed in (1, 2) for number in (0, 1)]
    tokens = BatchSampler(5000, ALONE).sample(np.tile(row, (4, 1)), rows).tokens
    assert len(set(tokens.tolist())) == 4


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_mirostat_keeps_the_surprise_near_tau(seed: int) -> None:
    """The surprise of a token is computed among those kept, as in the authors' code."""
    row = np.random.default_rng(seed).normal(0, 3, 2000).astype(np.float32)
    tokens: list[int] = []
    sampler = RowSampler(plan(2000, mirostat=2, mirostat_tau=3.0), tokens, seed=seed)
    batch = BatchSampler(2000, ALONE)
    limit, surprises = 6.0, []
    for _ in range(400):
        assert np.isclose(sampler.surprise_limit, limit)
        token = int(batch.sample(row[None], [sampler]).tokens[0])
        kept = reference.mirostat(row.astype(np.float64), limit)
        probability = reference.softmax(kept)[token]
        limit -= 0.1 * (-np.log2(probability) - 3.0)
        surprises.append(-np.log2(probability))
        tokens.append(token)
    assert abs(np.mean(surprises[50:]) - 3.0) < 0.3


def test_mirostat_goes_back_with_the_sequence(rng: np.random.Generator) -> None:
    logits = rng.normal(0, 2, (30, 500)).astype(np.float32)
    tokens: list[int] = []
    sampler = RowSampler(plan(500, mirostat=2), tokens, seed=4)
    batch = BatchSampler(500, ALONE)

    def generate() -> None:
        while len(tokens) < len(logits):
            tokens.extend(batch.sample(logits[len(tokens)][None], [sampler]).tokens.tolist())

    generate()
    first = list(tokens)
    del tokens[10:]
    sampler.rewind(10)
    generate()
    assert tokens == first
