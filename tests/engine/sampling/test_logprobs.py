"""Log-probabilities against float64 NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from genai.devices import open_executor
from genai.engine.sampling.batch import BatchSampler, token_logprobs
from genai.engine.sampling.params import SamplingParams
from genai.engine.sampling.plan import RowSampler, plan_sampling
from genai.errors import SamplingError
from genai.kernels.device import Executor
from genai.kernels.reference.sampling import log_softmax

ALONE = open_executor(threads=1)


@pytest.mark.parametrize("size", [1, 3, 255, 1000, 4001])
def test_exact_to_float64(rng: np.random.Generator, size: int, executor: Executor) -> None:
    logits = rng.normal(0, 4, (7, size)).astype(np.float32)
    logits[2, : size // 2] = -np.inf
    targets = rng.integers(0, size, 7)
    top = min(size, 5)
    found = token_logprobs(logits, targets, top, sampler=executor.sampler(size))
    for row, target, one in zip(logits, targets, found, strict=True):
        expected = log_softmax(row.astype(np.float64))
        assert one.token == target
        np.testing.assert_allclose(one.logprob, expected[target], rtol=1e-14, atol=1e-14)
        best = [int(token) for token in np.argsort(-expected, kind="stable")[:top] if np.isfinite(expected[token])]
        assert [token for token, _ in one.top] == best
        np.testing.assert_allclose([logprob for _, logprob in one.top], expected[best], rtol=1e-14, atol=1e-14)


def test_far_apart_logits() -> None:
    logits = np.array([[3e38, -3e38, 0.0, -np.inf], [0.0, -800.0, -60.0, -1e-3]], np.float32)
    for row, one in zip(logits, token_logprobs(logits, [0, 2], 4), strict=True):
        expected = log_softmax(row.astype(np.float64))
        np.testing.assert_allclose(one.logprob, expected[one.token], rtol=1e-14)
        assert len(one.top) == np.isfinite(expected).sum()


def test_large_numbers_of_alternatives(rng: np.random.Generator) -> None:
    logits = rng.permutation(5000).astype(np.float32)[None]
    (one,) = token_logprobs(logits, [0], 5000)
    assert [token for token, _ in one.top] == np.argsort(-logits[0]).tolist()


def test_of_the_model_not_of_the_sampler(rng: np.random.Generator) -> None:
    """Log-probabilities are reported for the rows that request them, with the requested number of alternatives, before
    all other options.
    """
    size = 3000
    logits = rng.normal(0, 3, (4, size)).astype(np.float32)
    requests: list[dict[str, Any]] = [
        {"logprobs": 2, "temperature": 0.3, "logit_bias": {5: 4.0}},
        {},
        {"logprobs": 0, "top_k": 1},
        {"logprobs": 4, "repetition_penalty": 2.0},
    ]
    rows: list[RowSampler | None] = [
        RowSampler(plan_sampling(SamplingParams(**options), vocab_size=size), [7], seed=1) for options in requests
    ]
    result = BatchSampler(size, ALONE).sample(logits, rows)
    assert result.logprobs[1] is None
    for index in (0, 2, 3):
        one = result.logprobs[index]
        assert one is not None and one.token == result.tokens[index]
        assert len(one.top) == requests[index]["logprobs"]
        expected = log_softmax(logits[index].astype(np.float64))
        np.testing.assert_allclose(one.logprob, expected[one.token], rtol=1e-14)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_bad_rows_raise(value: float) -> None:
    logits = np.zeros((2, 100), np.float32)
    logits[1] = value
    with pytest.raises(SamplingError, match="the log-probabilities of row 1 cannot be computed"):
        token_logprobs(logits, [0, 0])
