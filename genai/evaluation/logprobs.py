"""Log-probabilities in float64, a few rows at a time: the only place where evaluations turn logits into them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from .errors import ModelOutputError

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

# float64 copies of more logits than this are not made at once: 150k tokens x 111 rows of float32 are 64 MiB.
_BLOCK_LOGITS = 1 << 20


def row_blocks(num_rows: int, vocab_size: int) -> Iterator[slice]:
    """Slices of rows whose float64 copies stay small; they do not change any result."""
    step = max(1, _BLOCK_LOGITS // vocab_size)
    return (slice(first, min(first + step, num_rows)) for first in range(0, num_rows, step))


def log_softmax(logits: Float32) -> Float64:
    """ln softmax of each row, float64 [rows, vocab]: logit - max - ln(sum(exp(logit - max))).

    Args:
        logits: float32 [rows, vocab]. -inf excludes a token.

    Raises:
        ModelOutputError: a row has NaN or infinity, or nothing but -inf.
    """
    highest = logits.max(axis=1, keepdims=True).astype(np.float64)
    if not np.isfinite(highest).all():
        row = int(np.flatnonzero(~np.isfinite(highest[:, 0]))[0])
        raise ModelOutputError(
            f"row {row} of the logits has the maximum {highest[row, 0]}",
            "NaN, infinity, or nothing but -inf is no distribution over tokens",
            "check the model: compare it with another engine by `genai eval diff MODEL --against onnxruntime`",
        )
    shifted = logits - highest
    result: Float64 = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


def target_logprobs(logits: Float32, targets: NDArray[np.int64]) -> Float64:
    """The natural log-probability of one token per row, float64 [rows].

    Raises:
        ModelOutputError: see log_softmax.
    """
    result = np.empty(len(targets))
    for block in row_blocks(*logits.shape):
        result[block] = log_softmax(logits[block])[np.arange(block.stop - block.start), targets[block]]
    return result


def kl_rows(base: Float64, other: Float64) -> Float64:
    """KL(base || other) in nats per row of log-probabilities: sum of p_base (ln p_base - ln p_other).

    Tokens that `base` excludes add nothing; one that only `other` excludes makes the row infinite.
    """
    possible = base > -np.inf
    with np.errstate(invalid="ignore"):
        terms = np.where(possible, np.exp(base) * (base - other), 0.0)
    result: Float64 = np.maximum(terms.sum(axis=1), 0.0)
    return result
