"""Perplexity of a model on a text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .logprobs import Float64, target_logprobs
from .scored_text import Meter, ProgressCallback, ScoredText, prepare_text, rope_thresholds, scored_rows

if TYPE_CHECKING:
    from ..model import Model


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
        windows, window, stride: how the text was cut; see plan_windows.
        bos: whether every window began with BOS.
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


def perplexity(
    model: Model,
    text: str,
    *,
    window: int | None = None,
    stride: int | None = None,
    bos: bool | None = None,
    progress: ProgressCallback | None = None,
) -> Perplexity:
    """Perplexity with sliding windows; every token but the first is scored once, given what its window holds before it.

    Args:
        text: scored as it is; special tokens written in it are read as such.
        window: tokens of a window, 2 to the model's context_length; None = the context, at most 2048.
        stride: tokens from one window to the next, 1 to window - 1; None = half a window.
        bos: whether every window begins with BOS; None = if the model's tokenizer puts one before a text.
        progress: called after each piece.

    Raises:
        InputError: a text of fewer than 2 tokens (BOS counts).
        OptionError: window, stride or bos that do not fit the model.
        ModelOutputError: the model computed NaN or infinity.

    >>> from genai import Model
    >>> from genai.bundled import bundled_model
    >>> with Model(bundled_model()) as model:
    ...     result = perplexity(model, "What is 12 + 7? What is 7 + 12?")
    >>> result.tokens > 5 and 1 < result.perplexity < 1000
    True
    """
    prepared = prepare_text(model, text, window, stride, bos)
    meter = Meter(prepared.num_scored, progress)
    logprobs = []
    for rows in scored_rows(model.decoder, prepared, rope_thresholds(model.decoder)):
        logprobs.append(target_logprobs(rows.logits, rows.targets, model.decoder.team))
        meter.add(len(rows.targets), rows.computed)
    return _result(np.concatenate(logprobs), prepared, meter)


def _result(logprobs: Float64, text: ScoredText, meter: Meter) -> Perplexity:
    done = meter.progress()
    nats, error = mean_and_error(-logprobs)
    value = exp(nats)
    return Perplexity(
        perplexity=value,
        perplexity_error=value * error,
        nats_per_token=nats,
        nats_error=error,
        bits_per_byte=nats * len(logprobs) / math.log(2) / text.num_bytes if text.num_bytes else math.nan,
        tokens=len(logprobs),
        num_bytes=text.num_bytes,
        windows=len(text.windows),
        window=text.window,
        stride=text.stride,
        bos=text.bos is not None,
        seconds=done.seconds,
        tokens_per_second=done.tokens_per_second,
    )


def mean_and_error(values: Float64) -> tuple[float, float]:
    """Mean, and its standard error: sample standard deviation / sqrt(n); NaN for one value."""
    with np.errstate(invalid="ignore"):
        error = float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return float(values.mean()), error


def exp(value: float) -> float:
    """e ** value; infinity where a float cannot hold it."""
    return math.exp(value) if value < 709 else math.inf
