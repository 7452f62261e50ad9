"""Log-probabilities and divergences against their definitions in exact arithmetic."""

from __future__ import annotations

import math

import numpy as np
import pytest

from genai.devices import open_executor
from genai.errors import ModelOutputError
from genai.evaluate.prediction import kl_rows, log_softmax, normalizers, row_blocks, target_logprobs


def test_against_a_sum_without_rounding() -> None:
    rng = np.random.default_rng(0)
    logits = (rng.standard_normal((7, 50)) * 20).astype(np.float32)
    targets = rng.integers(0, 50, 7)
    expected = [
        float(row[target])
        - max(row.tolist())
        - math.log(math.fsum(math.exp(x - max(row.tolist())) for x in row.tolist()))
        for row, target in zip(logits, targets, strict=True)
    ]
    np.testing.assert_allclose(target_logprobs(logits, targets), expected, rtol=1e-13)


def test_large_logits_and_excluded_tokens() -> None:
    logits = np.array([[3e38, -3e38, -np.inf], [-1e4, -1e4, -1e4]], np.float32)
    result = log_softmax(logits, normalizers(logits))
    assert result[0, 0] == 0 and result[0, 2] == -np.inf
    np.testing.assert_allclose(result[1], -math.log(3), rtol=1e-11)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_no_distribution_is_refused(bad: float) -> None:
    logits = np.zeros((3, 4), np.float32)
    logits[1, 2] = bad
    with pytest.raises(ModelOutputError, match="row 1"):
        normalizers(logits)
    with pytest.raises(ModelOutputError, match="row 0"):
        target_logprobs(np.full((1, 4), -np.inf, np.float32), np.array([0]))


def test_threads_change_nothing() -> None:
    logits = np.random.default_rng(2).standard_normal((40, 30_000)).astype(np.float32)
    np.testing.assert_array_equal(normalizers(logits, open_executor(threads=2)), normalizers(logits))


def test_divergence_by_hand() -> None:
    base = np.log([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]])
    other = np.log([[0.25, 0.25, 0.5], [0.1, 0.2, 0.7]])
    expected = [0.5 * math.log(2) + 0.25 * math.log(0.5), 0.0]
    np.testing.assert_allclose(kl_rows(base, other), expected, rtol=1e-14, atol=0)


def test_divergence_with_excluded_tokens() -> None:
    with np.errstate(divide="ignore"):
        half, sure = np.log([[0.5, 0.5]]), np.log([[1.0, 0.0]])
    np.testing.assert_allclose(kl_rows(sure, half), [math.log(2)])
    assert kl_rows(half, sure) == [math.inf]
    assert kl_rows(sure, sure) == [0.0]


def test_blocks_cover_every_row_once_and_stay_small() -> None:
    for rows, vocab in ((0, 10), (1, 1 << 22), (513, 150_000), (5, 3)):
        blocks = list(row_blocks(rows, vocab))
        assert [i for block in blocks for i in range(block.start, block.stop)] == list(range(rows))
        assert all(block.stop - block.start <= max(1, (1 << 20) // vocab) for block in blocks)
