"""Log-probabilities of whole rows and of a text's tokens, in float64, with the normalizers that samplers use too."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from genai.kernels.cpu.logprobs import log_normalizers
from genai.kernels.cpu.sampling_steps.batch import Workspace
from genai.kernels.cpu.team import Team

from .errors import ModelOutputError

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

# float64 copies of more logits than this are not made at once.
_BLOCK_LOGITS = 1 << 20


def row_blocks(num_rows: int, vocab_size: int) -> Iterator[slice]:
    """Slices of rows whose float64 copies stay small; they do not change any result."""
    step = max(1, _BLOCK_LOGITS // vocab_size)
    return (slice(first, min(first + step, num_rows)) for first in range(0, num_rows, step))


def normalizers(logits: Float32, team: Team | None = None) -> Float64:
    """ln(sum(exp(logits))) of each row, float64 [rows].

    Args:
        logits: float32 [rows, vocab]. -inf excludes a token.

    Raises:
        ModelOutputError: a row has NaN or infinity, or nothing but -inf.
    """
    workspace = Workspace.allocate(2 * (team.threads if team else 1), logits.shape[1])
    result, _ = log_normalizers(np.ascontiguousarray(logits), np.arange(len(logits)), 0, workspace, team=team)
    if np.isnan(result).any():
        row = int(np.flatnonzero(np.isnan(result))[0])
        raise ModelOutputError(
            f"row {row} of the logits is no distribution; its maximum is {logits[row].max()}",
            "it holds NaN or infinity, or nothing but -inf",
            "look for the operator: `genai eval diff MODEL --against onnxruntime`",
        )
    return result


def log_softmax(logits: Float32, of_rows: Float64) -> Float64:
    """ln softmax of each row, float64 [rows, vocab]; of_rows: their normalizers."""
    result: Float64 = logits.astype(np.float64) - of_rows[:, None]
    return result


def target_logprobs(logits: Float32, targets: NDArray[np.int64], team: Team | None = None) -> Float64:
    """The natural log-probability of one token per row, float64 [rows].

    Raises:
        ModelOutputError: see normalizers.
    """
    result: Float64 = logits[np.arange(len(targets)), targets].astype(np.float64) - normalizers(logits, team)
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
