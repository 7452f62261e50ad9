"""Picks the next token of each sequence from its logits.

Order, as in onnxruntime-genai: minimum length, repetition penalty, then greedy, or top-k on the raw logits, softmax at
the temperature, top-p inside, and one draw. Draws are counter-based: the random number of a token depends only on the
request's seed, its row and the token's position, so the same seed gives the same tokens whatever else is running.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .decoder import Logits

_MASKED = np.float32(-np.inf)


@dataclass(frozen=True)
class Sampling:
    """How to pick tokens.

    Attributes:
        do_sample: False = the most likely token (the lowest id among equals).
        temperature: divides the logits; 0 = greedy.
        top_k: keep the k most likely tokens; 0 = all.
        top_p: keep the smallest set of most likely tokens whose probability reaches top_p; 0 or 1 = all.
        repetition_penalty: > 1 makes tokens that already occur less likely (Keskar et al. 2019).
        min_length: total length below which EOS is not chosen.
        seed: of the request's random numbers.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 0.0
    repetition_penalty: float = 1.0
    min_length: int = 0
    seed: int = 0

    @property
    def greedy(self) -> bool:
        """Whether no draw is needed."""
        return not self.do_sample or self.top_k == 1 or self.temperature == 0


def sample(
    logits: Logits, histories: Sequence[Sequence[int]], rows: Sequence[int], sampling: Sampling, eos: Sequence[int]
) -> NDArray[np.int64]:
    """The next token per row.

    Args:
        logits: float32 [B, vocab_size]; not modified.
        histories: each row's tokens so far, prompt and output.
        rows: each row's number inside its request (for the random numbers).
        sampling: how to pick.
        eos: end-of-sequence ids.

    Returns:
        int64 [B].
    """
    lengths = [len(history) for history in histories]
    scores = _with_penalties(logits, histories, lengths, sampling, eos)
    if sampling.greedy:
        best: NDArray[np.int64] = np.argmax(scores, axis=1)
        return best
    draws = np.asarray([_uniform(sampling.seed, row, length) for row, length in zip(rows, lengths, strict=True)])
    return _draw(scores, draws, sampling)


def _with_penalties(
    logits: Logits, histories: Sequence[Sequence[int]], lengths: Sequence[int], sampling: Sampling, eos: Sequence[int]
) -> Logits:
    short = [i for i, length in enumerate(lengths) if length < sampling.min_length]
    if not short and sampling.repetition_penalty == 1.0:
        return logits
    scores = logits.copy()
    if short and eos:
        scores[np.ix_(short, list(eos))] = _MASKED
    if sampling.repetition_penalty != 1.0:
        for row, history in zip(scores, histories, strict=True):
            seen = np.unique(np.asarray(history, np.int64))
            row[seen] = np.where(
                row[seen] < 0, row[seen] * sampling.repetition_penalty, row[seen] / sampling.repetition_penalty
            )
    return scores


def _draw(scores: Logits, draws: NDArray[np.float64], sampling: Sampling) -> NDArray[np.int64]:
    """Inverse-transform sampling over the tokens kept, most likely first."""
    vocab_size = scores.shape[1]
    count = min(sampling.top_k or vocab_size, vocab_size)
    if count < vocab_size:
        kept = np.argpartition(-scores, count - 1, axis=1)[:, :count]
    else:
        kept = np.broadcast_to(np.arange(vocab_size), scores.shape)
    kept_scores = np.take_along_axis(scores, kept, axis=1)
    order = np.lexsort((kept, -kept_scores), axis=1)
    tokens = np.take_along_axis(kept, order, axis=1)
    scaled = np.take_along_axis(kept_scores, order, axis=1).astype(np.float64) / sampling.temperature
    weights = np.exp(scaled - scaled[:, :1])
    if 0 < sampling.top_p < 1:
        before = np.cumsum(weights, axis=1) - weights
        weights[before >= sampling.top_p * weights.sum(axis=1, keepdims=True)] = 0
    cumulative = np.cumsum(weights, axis=1)
    picks = np.sum(cumulative <= draws[:, None] * cumulative[:, -1:], axis=1)
    # A draw so close to 1 that rounding carries it past the end takes the last token that has any weight.
    picks = np.minimum(picks, np.sum(weights > 0, axis=1) - 1)
    chosen: NDArray[np.int64] = np.take_along_axis(tokens, picks[:, None], axis=1)[:, 0]
    return chosen


def _uniform(seed: int, row: int, position: int) -> float:
    """One number in [0, 1) from the Philox counter generator (Salmon et al. 2011)."""
    bits = np.random.Philox(key=np.array([seed & 0xFFFFFFFFFFFFFFFF, row], np.uint64), counter=[position, 0, 0, 0])
    return float(np.random.Generator(bits).random())
