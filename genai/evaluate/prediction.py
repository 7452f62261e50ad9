"""Perplexity of a model on a text, and log-probabilities of tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from genai.kernels.device import Executor

from ..common.html_parts import figures
from ..devices import open_executor
from ..errors import ModelOutputError
from .scored_text import Meter, ProgressCallback, prepare_text, rope_thresholds, scored_rows, windows_text
from .streamed_text import streamed_rows, streamed_text

if TYPE_CHECKING:
    from ..models.model import Model


@dataclass(frozen=True)
class Perplexity:
    """The result of scoring a text with a model.

    Attributes:
        perplexity: exp(nats_per_token).
        perplexity_error: standard error of perplexity, perplexity * nats_error (first order).
        nats_per_token: mean of -ln p(token) over the scored tokens.
        nats_error: standard error of that mean; NaN for one token. Tokens are treated as independent, as in llama.cpp.
        bits_per_byte: total nats / ln 2 / UTF-8 bytes of the scored text; comparable between tokenizers.
        tokens: number of scored tokens.
        num_bytes: UTF-8 bytes of the scored tokens.
        windows: number of windows that the text was cut into; see plan_windows. With ctx_shift it is 1.
        window: tokens per window.
        stride: tokens from one window to the next; with ctx_shift, the number of tokens that each shift drops.
        bos: True if every window began with BOS.
        seconds: elapsed time.
        tokens_per_second: tokens computed per second, including context.
        ctx_shift: number of first tokens that were kept, if the context was shifted; None if windows were used.
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

    def rows(self) -> list[tuple[str, str]]:
        """Return the figures as pairs of name and value."""
        passes = f"one pass, context {self.window} tokens; when it is full, {self.stride} tokens are dropped, "
        windows = windows_text(self.windows, self.window, self.stride, self.bos)
        return [
            ("perplexity", f"{self.perplexity:.4f} ± {self.perplexity_error:.4f}"),
            ("nats per token", f"{self.nats_per_token:.5f} ± {self.nats_error:.5f}"),
            ("bits per byte", f"{self.bits_per_byte:.5f}"),
            ("scored", f"{self.tokens} tokens, {self.num_bytes} bytes"),
            ("windows", windows if self.ctx_shift is None else f"{passes}but never the first {self.ctx_shift}"),
        ]

    def _repr_html_(self) -> str:
        """Return the figures for a notebook."""
        return figures(self.rows())


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
    """Compute the perplexity with sliding windows. Each token with context is scored once, in its window's context.

    With `ctx_shift`, the text is computed once, like a reply that continues in a full context; see docs/how-to/llm.md.

    Args:
        text: the text, which is scored unchanged; special tokens that are spelled out in it count as special tokens.
        window: tokens per window, 2 to the model's context_length; None = the context, at most 2048.
        stride: tokens from one window to the next, 1 to window; None = half a window. If it equals the window, the
            windows do not overlap, and the first token of each window is not scored.
        bos: True to begin every window with BOS; None = the default of the model's tokenizer.
        ctx_shift: number of first tokens to keep, rounded up to whole blocks. When a window is full, half of the tokens
            after them are dropped and the keys of the rest are rotated to their new positions. None = separate windows.
        progress: called after each piece.

    Raises:
        InputError: the text has fewer than 2 tokens (BOS counts).
        OptionError: window, stride, bos or ctx_shift do not fit the model.
        UnsupportedModelError: ctx_shift is set, but the model's keys cannot be rotated.
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
    """Return the mean and its standard error (sample standard deviation / sqrt(n), or NaN for one value)."""
    with np.errstate(invalid="ignore"):
        error = float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return float(values.mean()), error


def exp(value: float) -> float:
    """Return e ** value, or infinity if the result exceeds the range of a float."""
    return math.exp(value) if value < 709 else math.inf


Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

# Maximum number of logits that are copied to float64 at a time.
_BLOCK_LOGITS = 1 << 20


def row_blocks(num_rows: int, vocab_size: int) -> Iterator[slice]:
    """Return slices of rows whose float64 copies are small; the slicing does not change any result."""
    step = max(1, _BLOCK_LOGITS // vocab_size)
    return (slice(first, min(first + step, num_rows)) for first in range(0, num_rows, step))


def normalizers(logits: Float32, executor: Executor | None = None) -> Float64:
    """Return ln(sum(exp(logits))) of each row, float64 [rows].

    Args:
        logits: float32 [rows, vocab]. -inf excludes a token.

    Raises:
        ModelOutputError: a row contains NaN or infinity, or only -inf.
    """
    sampler = (executor or open_executor(threads=1)).sampler(logits.shape[1])
    logits = np.ascontiguousarray(logits) if isinstance(logits, np.ndarray) else logits
    result, _ = sampler.log_normalizers(logits, np.arange(len(logits)), 0)
    if np.isnan(result).any():
        row = int(np.flatnonzero(np.isnan(result))[0])
        raise ModelOutputError(
            f"row {row} of the logits is not a distribution: the maximum is {np.asarray(logits[row]).max()}",
            "the row contains NaN or infinity, or only -inf",
            "to find the faulty operator, run `genai eval diff MODEL --against onnxruntime`",
        )
    return result


def log_softmax(logits: Float32, of_rows: Float64) -> Float64:
    """Return the ln softmax of each row, float64 [rows, vocab]; `of_rows` holds the rows' normalizers."""
    result: Float64 = logits.astype(np.float64) - of_rows[:, None]
    return result


def target_logprobs(logits: Float32, targets: NDArray[np.int64], executor: Executor | None = None) -> Float64:
    """Return the natural log-probability of one token per row, float64 [rows]; raises as `normalizers` does."""
    result: Float64 = logits[np.arange(len(targets)), targets].astype(np.float64) - normalizers(logits, executor)
    return result


def kl_rows(base: Float64, other: Float64) -> Float64:
    """Return KL(base || other) in nats per row of log-probabilities: sum of p_base (ln p_base - ln p_other).

    Tokens that `base` excludes add nothing. A token that only `other` excludes makes the row's divergence infinite.
    """
    possible = base > -np.inf
    with np.errstate(invalid="ignore"):
        terms = np.where(possible, np.exp(base) * (base - other), 0.0)
    result: Float64 = np.maximum(terms.sum(axis=1), 0.0)
    return result
