"""The sampler over the published definitions against the CPU's: the same tokens from the same random numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from genai.devices import open_executor
from genai.engine.sampling.batch import BatchSampler
from genai.engine.sampling.breakers import Breakers
from genai.engine.sampling.params import SamplingParams
from genai.engine.sampling.plan import RowSampler, plan_sampling
from genai.kernels.reference.sampling import ReferenceSampler
from genai.kernels.sampling import ALL_MASKED, FINE, HAS_INFINITY, HAS_NAN

CPU, REFERENCE = open_executor(threads=1), open_executor("reference")
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0},
    {},
    {"top_k": 30},
    {"top_p": 0.9, "temperature": 0.8},
    {"min_p": 0.05, "presence_penalty": 0.5},
    {"typical_p": 0.8},
    {"xtc_probability": 0.5, "xtc_threshold": 0.05},
    {"mirostat": 2},
    {"dry_multiplier": 1.0, "dry_last_n": 20, "repetition_penalty": 1.2, "penalty_last_n": 7},
    {"dry_multiplier": 2.0, "dry_base": 3.0, "frequency_penalty": 0.3, "temperature": 1e-6},
    {"dry_multiplier": 1.0, "breakers": [[3], [4, 5]]},
    {"top_n_sigma": 1.5, "logit_bias": {3: -np.inf, 4: 2.5}},
    {"no_repeat_ngram_size": 2},
    {"sequence_bias": {(i, j): -np.inf if i == j else 2.0 * i for i in range(9) for j in range(9)}},
    {"begin_suppress_tokens": range(0, 300, 2), "sequence_bias": {(1, 2, 3): 4.0, (5,): -1.0}, "temperature": 0},
    {"logits_processors": [lambda tokens, logits: logits * 0.5]},
    {"samplers": ["temperature", "penalties", "top_p", "top_k"], "temperature": 1.7, "repetition_penalty": 1.4,
     "top_p": 0.9, "top_k": 50},
]  # fmt: skip


def rows(options: dict[str, Any], size: int, count: int, rng: np.random.Generator) -> list[RowSampler]:
    """Rows with histories of repetitions, half of them generated."""
    options = dict(options)
    breakers = options.pop("breakers", ())
    plan = plan_sampling(SamplingParams(**options), vocab_size=size, breakers=Breakers.of(breakers))
    histories = [rng.integers(0, 9, rng.integers(1, 40)).tolist() for _ in range(count)]
    return [
        RowSampler(plan, tokens, seed=i, row=i % 3, prompt_length=len(tokens) // 2)
        for i, tokens in enumerate(histories)
    ]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options) or "none")
@pytest.mark.parametrize("size", [300, 1500])
def test_tokens_and_distributions(rng: np.random.Generator, options: dict[str, Any], size: int) -> None:
    asked = rows(options, size, 24, rng)
    logits = rng.normal(0, 2.5, (24, size)).astype(np.float32)
    ours, theirs = (BatchSampler(size, executor) for executor in (REFERENCE, CPU))
    np.testing.assert_allclose(
        ours.distributions(logits, asked), theirs.distributions(logits, asked), rtol=1e-4, atol=1e-7
    )
    assert ours.sample(logits, asked).tokens.tolist() == theirs.sample(logits, asked).tokens.tolist()


@pytest.mark.parametrize("greedy", [0, 1])
def test_rows_without_a_token(rng: np.random.Generator, greedy: int) -> None:
    logits = rng.normal(0, 1, (5, 64)).astype(np.float32)
    logits[0, 5], logits[1, 5], logits[2] = np.nan, np.inf, -np.inf
    asked = rows({"temperature": 0} if greedy else {}, 64, 5, rng)
    sampler = BatchSampler(64, REFERENCE)
    batch = sampler._batches.make(logits, dict(enumerate(asked)))
    tokens, probabilities, status = ReferenceSampler(64).sample(logits, batch)
    assert status.tolist() == [HAS_NAN, HAS_INFINITY, ALL_MASKED, FINE, FINE]
    assert tokens[:3].tolist() == [-1] * 3 and (tokens[3:] >= 0).all()
    assert (probabilities[3:] == 1).all() == bool(greedy)


def test_log_normalizers(rng: np.random.Generator) -> None:
    """Masked tokens are no alternatives; rows that cannot be sampled have none."""
    logits = rng.normal(0, 4, (6, 100)).astype(np.float32)
    logits[1, 3:], logits[2], logits[3, 4], logits[4, 4] = -np.inf, -np.inf, np.nan, np.inf
    logits[5] = np.round(logits[5])
    order = np.array([5, 4, 3, 2, 1, 0, 0])
    ours, theirs = (executor.sampler(100).log_normalizers(logits, order, 5) for executor in (REFERENCE, CPU))
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-13)
    np.testing.assert_array_equal(ours[1], theirs[1])


def test_refusals() -> None:
    sampler, logits = ReferenceSampler(100), np.zeros((2, 100), np.float32)
    with pytest.raises(ValueError, match="rows range from 0 to 2"):
        sampler.log_normalizers(logits, np.array([0, 2]), 0)
    with pytest.raises(ValueError, match="top is 101"):
        sampler.log_normalizers(logits, np.array([0]), 101)
    batch = BatchSampler(100, REFERENCE)._batches.make(logits, {})
    with pytest.raises(ValueError, match="logits is float32"):
        sampler.sample(logits[:, :50], batch)
    with pytest.raises(ValueError, match="distributions is float32"):
        sampler.sample(logits, batch, logits)  # type: ignore[arg-type]
