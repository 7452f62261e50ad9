"""Sampling steps as they were published: one row of logits in float64, sorted in full, removed tokens set to -inf.

Ties are broken as everywhere here: the larger logit first, among equals the lower id.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float64]


def softmax(logits: Row) -> Row:
    """Probabilities of a row."""
    weights: Row = np.exp(logits - np.max(logits))
    result: Row = weights / weights.sum()
    return result


def log_softmax(logits: Row) -> Row:
    """Logarithms of the probabilities of a row."""
    shifted: Row = logits - np.max(logits)
    result: Row = shifted - np.log(np.sum(np.exp(shifted)))
    return result


def temperature(logits: Row, value: float) -> Row:
    """Divide by the temperature."""
    return logits / value


def top_k(logits: Row, k: int) -> Row:
    """The k most likely tokens (Fan et al. 2018)."""
    return _keep(logits, _by_likelihood(logits)[:k])


def top_p(logits: Row, p: float) -> Row:
    """The smallest set of most likely tokens whose probability reaches p (Holtzman et al. 2019)."""
    return _keep_until(logits, _by_likelihood(logits), p)


def min_p(logits: Row, p: float) -> Row:
    """Tokens with at least p times the largest probability (Nguyen et al. 2024)."""
    probabilities = softmax(logits)
    return np.where(probabilities >= p * probabilities.max(), logits, -np.inf)


def typical_p(logits: Row, p: float) -> Row:
    """The smallest set that reaches p of tokens whose surprise is closest to the entropy (Meister et al. 2022)."""
    present = np.isfinite(logits)
    surprise = -log_softmax(logits)
    entropy = np.sum(softmax(logits)[present] * surprise[present])
    deviation = np.where(present, np.abs(surprise - entropy), np.inf)
    return _keep_until(logits, np.argsort(deviation, kind="stable"), p)


def top_n_sigma(logits: Row, n: float) -> Row:
    """Tokens within n standard deviations of the largest logit (Tang et al. 2024); removed tokens do not count."""
    return np.where(logits >= logits.max() - n * np.std(logits[np.isfinite(logits)]), logits, -np.inf)


def xtc(logits: Row, threshold: float) -> Row:
    """Of the tokens with at least this probability only the least likely stays (p-e-w, text-generation-webui #6335)."""
    order = _by_likelihood(logits)
    likely = order[softmax(logits)[order] >= threshold]
    result = logits.copy()
    result[likely[:-1]] = -np.inf
    return result


def mirostat(logits: Row, limit: float) -> Row:
    """Tokens whose surprise is at most `limit` bits, at least the most likely one (Basu et al. 2020, Mirostat 2.0)."""
    kept = -log_softmax(logits) / np.log(2) <= limit
    return np.where(kept, logits, -np.inf) if kept.any() else top_k(logits, 1)


def next_mirostat_limit(limit: float, probability: float, tau: float, eta: float) -> float:
    """The limit after a token of this probability (among those kept): its surprise is steered towards tau bits."""
    return float(limit - eta * (-np.log2(probability) - tau))


def repetition_penalty(logits: Row, tokens: Sequence[int], penalty: float) -> Row:
    """Tokens that occurred: positive logits are divided by the penalty, others multiplied (Keskar et al. 2019)."""
    result = logits.copy()
    for token in set(tokens):
        result[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    return result


def presence_and_frequency_penalty(logits: Row, output: Sequence[int], presence: float, frequency: float) -> Row:
    """Subtract, from tokens that were generated, presence once and frequency per occurrence (OpenAI API reference)."""
    result = logits.copy()
    for token in set(output):
        result[token] -= presence + frequency * list(output).count(token)
    return result


def dry(
    logits: Row,
    tokens: Sequence[int],
    multiplier: float,
    base: float,
    allowed_length: int,
    breakers: Sequence[Sequence[int]] = (),
) -> Row:
    """Penalise tokens that would continue a repetition (p-e-w, text-generation-webui #5677).

    For each earlier place whose preceding m tokens are the last m tokens, the token there loses
    multiplier * base ** (m - allowed_length), m at least allowed_length and the largest counting. Repetitions do not
    reach back over a sequence breaker.
    """
    tokens = list(tokens)
    longest: dict[int, int] = {}
    for place in range(1, len(tokens)):
        length = 0
        while length < place and tokens[place - 1 - length] == tokens[len(tokens) - 1 - length]:
            if _breaker_ends_at(tokens, len(tokens) - length, breakers):
                break
            length += 1
        if length >= allowed_length:
            longest[tokens[place]] = max(length, longest.get(tokens[place], 0))
    result = logits.copy()
    for token, length in longest.items():
        result[token] -= multiplier * base ** (length - allowed_length)
    return result


def _breaker_ends_at(tokens: list[int], end: int, breakers: Sequence[Sequence[int]]) -> bool:
    return any(end >= len(breaker) and tokens[end - len(breaker) : end] == list(breaker) for breaker in breakers)


def no_repeat_ngram(logits: Row, tokens: Sequence[int], size: int) -> Row:
    """Remove tokens that would complete an n-gram that already occurred (Paulus et al. 2017)."""
    tokens = list(tokens)
    result = logits.copy()
    for end in range(size, len(tokens) + 1):
        ngram = tokens[end - size : end]
        if ngram[:-1] == tokens[len(tokens) - size + 1 :]:
            result[ngram[-1]] = -np.inf
    return result


def uniforms(seed: int, row: int, position: int) -> tuple[float, float]:
    """Two numbers in [0, 1) from Philox (Salmon et al. 2011), as NumPy has it."""
    bits = np.random.Philox(key=np.array([seed, row], np.uint64), counter=[position, 0, 0, 0])
    first, second = np.random.Generator(bits).random(2)
    return float(first), float(second)


def draw(logits: Row, uniform: float) -> int:
    """The first token, in order of ids, at which the probabilities add up to more than `uniform`."""
    return int(np.searchsorted(np.cumsum(softmax(logits)), uniform, side="right"))


def _by_likelihood(logits: Row) -> NDArray[np.intp]:
    return np.argsort(-logits, kind="stable")


def _keep(logits: Row, kept: NDArray[np.intp]) -> Row:
    result = np.full_like(logits, -np.inf)
    result[kept] = logits[kept]
    return result


def _keep_until(logits: Row, order: NDArray[np.intp], p: float) -> Row:
    """The first tokens of an order until their probability reaches p."""
    probabilities = softmax(logits)[order]
    before = np.cumsum(probabilities) - probabilities
    return _keep(logits, order[before < p])
