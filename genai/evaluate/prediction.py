"""Perplexity of a model on a text, and the log-probabilities that it is made of."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from genai.kernels.device import Executor

from ..devices import open_executor
from ..errors import ModelOutputError
from .scored_text import Meter, ProgressCallback, prepare_text, rope_thresholds, scored_rows
from .streamed_text import streamed_rows, streamed_text

if TYPE_CHECKING:
    from ..models.model import Model


@dataclass(frozen=True)
class Perplexity:
    """How well a model predicts a text.

    Attributes:
        perplexity: exp(nats_per_token).
        perplexity_error: its standard error, perplexity * nats_error (first order).
        nats_per_token: mean of -ln p(token) over the scored tokens.
        nats_error: standard error of that mean, NaN for one token. Tokens count as independent, as in llama.cpp.
        bits_per_byte: all nats / ln 2 / UTF-8 bytes of the scored text; comparable between tokenizers.
        tokens: scored tokens.
        num_bytes: their UTF-8 bytes.
        windows, window, stride: how the text was cut; see plan_windows. With ctx_shift there is one window, and
            `stride` tokens are forgotten at a time.
        bos: whether every window began with BOS.
        ctx_shift: the first tokens that were kept, where the context was shifted in place of windows.
        seconds, tokens_per_second: time taken, and tokens computed per second, context included.
    """

    perplexity: float
    perplexity_error: float
    nats_per_token: float
    nats_error: float
    bits_per_byte: float
    tokens: int
    num_bytes: int
    windows: int
    window: int
    stride: int
    bos: bool
    seconds: float
    tokens_per_second: float
    ctx_shift: int | None = None


def perplexity(
    model: Model,
    text: str,
    *,
    window: int | None = None,
    stride: int | None = None,
    bos: bool | None = None,
    ctx_shift: int | None = None,
    progress: ProgressCallback | None = None,
) -> Perplexity:
    """Perplexity with sliding windows; every token but the first is scored once, given what its window holds before it.

    With `ctx_shift` the text is read once, as a reply that goes on where the context is full: see docs/llm.md.

    Args:
        text: scored as it is; special tokens written in it are read as such.
        window: tokens of a window, 2 to the model's context_length; None = the context, at most 2048.
        stride: tokens from one window to the next, 1 to window - 1; None = half a window.
        bos: whether every window begins with BOS; None = if the model's tokenizer puts one before a text.
        ctx_shift: keep so many first tokens, up to whole blocks; where a window is full, half of what lies behind them
            is forgotten, and the keys of the rest are rotated anew. None = windows, each read by itself.
        progress: called after each piece.

    Raises:
        InputError: a text of fewer than 2 tokens (BOS counts).
        OptionError: window, stride, bos or ctx_shift that do not fit the model. UnsupportedModelError: ctx_shift with a
            model whose keys cannot move.
        ModelOutputError: the model computed NaN or infinity.

    >>> from genai import Model
    >>> from genai.models.folders import bundled_model
    >>> with Model(bundled_model()) as model:
    ...     result = perplexity(model, "What is 12 + 7? What is 7 + 12?")
    >>> result.tokens > 5 and 1 < result.perplexity < 1000
    True
    """
    prepared = prepare_text(model, text, window, stride, bos)
    meter = Meter(prepared.num_scored, progress)
    logprobs = []
    if ctx_shift is None:
        scoring = scored_rows(model.decoder, prepared, rope_thresholds(model.decoder))
    else:
        prepared = streamed_text(model.decoder, prepared, ctx_shift, stride)
        scoring = streamed_rows(model.decoder, prepared, ctx_shift)
    for rows in scoring:
        logprobs.append(target_logprobs(rows.logits, rows.targets, model.decoder.executor))
        meter.add(len(rows.targets), rows.computed)
    scored = np.concatenate(logprobs)
    nats, error = mean_and_error(-scored)
    value = exp(nats)
    return Perplexity(
        perplexity=value,
        perplexity_error=value * error,
        nats_per_token=nats,
        nats_error=error,
        bits_per_byte=nats * len(scored) / math.log(2) / prepared.num_bytes if prepared.num_bytes else math.nan,
        tokens=len(scored),
        num_bytes=prepared.num_bytes,
        ctx_shift=ctx_shift,
        **prepared.computed(meter.progress()),
    )


def mean_and_error(values: Float64) -> tuple[float, float]:
    """Mean, and its standard error: sample standard deviation / sqrt(n); NaN for one value."""
    with np.errstate(invalid="ignore"):
        error = float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return float(values.mean()), error


def exp(value: float) -> float:
    """e ** value; infinity where a float cannot hold it."""
    return math.exp(value) if value < 709 else math.inf


Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

# float64 copies of more logits than this are not made at once.
_BLOCK_LOGITS = 1 << 20


def row_blocks(num_rows: int, vocab_size: int) -> Iterator[slice]:
    """Slices of rows whose float64 copies stay small; they do not change any result."""
    step = max(1, _BLOCK_LOGITS // vocab_size)
    return (slice(first, min(first + step, num_rows)) for first in range(0, num_rows, step))


def normalizers(logits: Float32, executor: Executor | None = None) -> Float64:
    """ln(sum(exp(logits))) of each row, float64 [rows].

    Args:
        logits: float32 [rows, vocab]. -inf excludes a token.

    Raises:
        ModelOutputError: a row has NaN or infinity, or nothing but -inf.
    """
    sampler = (executor or open_executor(threads=1)).sampler(logits.shape[1])
    logits = np.ascontiguousarray(logits) if isinstance(logits, np.ndarray) else logits
    result, _ = sampler.log_normalizers(logits, np.arange(len(logits)), 0)
    if np.isnan(result).any():
        row = int(np.flatnonzero(np.isnan(result))[0])
        raise ModelOutputError(
            f"row {row} of the logits is no distribution; its maximum is {np.asarray(logits[row]).max()}",
            "it holds NaN or infinity, or nothing but -inf",
            "look for the operator: `genai eval diff MODEL --against onnxruntime`",
        )
    return result


def log_softmax(logits: Float32, of_rows: Float64) -> Float64:
    """ln softmax of each row, float64 [rows, vocab]; of_rows: their normalizers."""
    result: Float64 = logits.astype(np.float64) - of_rows[:, None]
    return result


def target_logprobs(logits: Float32, targets: NDArray[np.int64], executor: Executor | None = None) -> Float64:
    """The natural log-probability of one token per row, float64 [rows]; raises as normalizers does."""
    result: Float64 = logits[np.arange(len(targets)), targets].astype(np.float64) - normalizers(logits, executor)
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
