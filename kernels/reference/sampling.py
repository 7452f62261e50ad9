"""The sampler of the reference device, which applies the published sampling steps to one row after another.

A row of logits is float64 and is sorted in full; removed tokens are set to -inf. Tokens are ordered as everywhere in
this package: by descending logit, and among equal logits by ascending id.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..checks import check
from ..device import TokenChoice
from ..sampling import ALL_MASKED, FINE, HAS_INFINITY, HAS_NAN, SamplingBatch, Setting, Span, Step, check_rows

Row = NDArray[np.float64]
_LARGEST_PENALTY = 1e38


def softmax(logits: Row) -> Row:
    """Return the probabilities of a row."""
    weights: Row = np.exp(logits - np.max(logits))
    result: Row = weights / weights.sum()
    return result


def log_softmax(logits: Row) -> Row:
    """Return the log-probabilities of a row."""
    shifted: Row = logits - np.max(logits)
    result: Row = shifted - np.log(np.sum(np.exp(shifted)))
    return result


def temperature(logits: Row, value: float) -> Row:
    """Divide by the temperature."""
    return logits / value


def top_k(logits: Row, k: float) -> Row:
    """Keep the k likeliest tokens (Fan et al. 2018)."""
    return _keep(logits, _by_likelihood(logits)[: int(k)])


def top_p(logits: Row, p: float) -> Row:
    """Keep the smallest set of likeliest tokens with a total probability of at least p (Holtzman et al. 2019)."""
    return _keep_until(logits, _by_likelihood(logits), p)


def min_p(logits: Row, p: float) -> Row:
    """Keep tokens with at least p times the largest probability (Nguyen et al. 2024)."""
    probabilities = softmax(logits)
    return np.where(probabilities >= p * probabilities.max(), logits, -np.inf)


def typical_p(logits: Row, p: float) -> Row:
    """Keep the fewest tokens with a surprise closest to the entropy whose total reaches p (Meister et al. 2022)."""
    present = np.isfinite(logits)
    surprise = -log_softmax(logits)
    entropy = np.sum(softmax(logits)[present] * surprise[present])
    deviation = np.where(present, np.abs(surprise - entropy), np.inf)
    return _keep_until(logits, np.argsort(deviation, kind="stable"), p)


def top_n_sigma(logits: Row, n: float) -> Row:
    """Keep tokens within n standard deviations (of the remaining logits) of the largest logit (Tang et al. 2024)."""
    return np.where(logits >= logits.max() - n * np.std(logits[np.isfinite(logits)]), logits, -np.inf)


def xtc(logits: Row, threshold: float) -> Row:
    """Remove tokens with at least this probability except the least likely (p-e-w, text-generation-webui #6335)."""
    order = _by_likelihood(logits)
    likely = order[softmax(logits)[order] >= threshold]
    result = logits.copy()
    result[likely[:-1]] = -np.inf
    return result


def mirostat(logits: Row, limit: float) -> Row:
    """Keep tokens with a surprise of at most `limit` bits, or just the likeliest (Basu et al. 2020, Mirostat 2.0)."""
    kept = -log_softmax(logits) / np.log(2) <= limit
    return np.where(kept, logits, -np.inf) if kept.any() else top_k(logits, 1)


def repetition_penalty(logits: Row, tokens: Sequence[int], penalty: float) -> Row:
    """Divide positive logits of tokens in the history by the penalty, and multiply others by it (Keskar et al.
    2019)."""
    result = logits.copy()
    for token in set(tokens):
        result[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    return result


def presence_and_frequency_penalty(logits: Row, output: Sequence[int], presence: float, frequency: float) -> Row:
    """Subtract presence once and frequency per occurrence from tokens that were generated (OpenAI API reference)."""
    result = logits.copy()
    for token in set(output):
        result[token] -= presence + frequency * list(output).count(token)
    return result


def dry(logits: Row, tokens: Sequence[int], multiplier: float, base: float, allowed_length: int, limit: int) -> Row:
    """Penalise tokens that would continue a repetition (p-e-w, text-generation-webui #5677).

    If the m tokens before an earlier position equal the last m tokens, the token at that position loses
    multiplier * base ** (m - allowed_length). If there are several such positions, the largest m counts. m must be at
    least allowed_length, and is capped at `limit`, the number of tokens after the last sequence breaker. Penalties are
    capped so that they fit in a float32.
    """
    tokens = list(tokens)
    longest: dict[int, int] = {}
    for position in range(1, len(tokens)):
        length = 0
        while length < min(position, limit) and tokens[position - 1 - length] == tokens[len(tokens) - 1 - length]:
            length += 1
        if length >= allowed_length:
            longest[tokens[position]] = max(length, longest.get(tokens[position], 0))
    result = logits.copy()
    for token, length in longest.items():
        result[token] -= min(multiplier * np.float64(base) ** (length - allowed_length), _LARGEST_PENALTY)
    return result


def no_repeat_ngram(logits: Row, tokens: Sequence[int], size: int) -> Row:
    """Remove tokens that would complete an n-gram that has already occurred (Paulus et al. 2017)."""
    tokens = list(tokens)
    result = logits.copy()
    for end in range(size, len(tokens) + 1):
        ngram = tokens[end - size : end]
        if ngram[:-1] == tokens[len(tokens) - size + 1 :]:
            result[ngram[-1]] = -np.inf
    return result


def uniforms(seed: int, row: int, position: int) -> tuple[float, float]:
    """Return two numbers in [0, 1) from Philox (Salmon et al. 2011), in NumPy's implementation."""
    bits = np.random.Philox(key=np.array([seed, row], np.uint64), counter=[position, 0, 0, 0])
    first, second = np.random.Generator(bits).random(2)
    return float(first), float(second)


def draw(logits: Row, uniform: float) -> int:
    """Return the first token, by id, at which the cumulative probability exceeds `uniform`, or else the last token."""
    probabilities = softmax(logits)
    found = np.searchsorted(np.cumsum(probabilities), uniform, side="right")
    return int(min(found, np.flatnonzero(probabilities)[-1]))


def _by_likelihood(logits: Row) -> NDArray[np.intp]:
    return np.argsort(-logits, kind="stable")


def _keep(logits: Row, kept: NDArray[np.intp]) -> Row:
    result = np.full_like(logits, -np.inf)
    result[kept] = logits[kept]
    return result


def _keep_until(logits: Row, order: NDArray[np.intp], p: float) -> Row:
    """Keep the first tokens of an order until their total probability reaches p."""
    probabilities = softmax(logits)[order]
    before = np.cumsum(probabilities) - probabilities
    return _keep(logits, order[before < p])


Int64 = NDArray[np.int64]
# This temperature already separates all float32 logits that a smaller temperature would separate.
_LOWEST_TEMPERATURE = 1e-30


class ReferenceSampler:
    """See `genai.kernels.device.Sampler`."""

    most_begun = 0

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def sample(
        self, logits: NDArray[np.float32], batch: SamplingBatch, distributions: NDArray[np.float64] | None = None
    ) -> tuple[Int64, NDArray[np.float64], Int64]:
        check("logits", logits, (None, self._vocab_size))
        batch.check(len(logits), self._vocab_size)
        count = len(batch.rows)
        if distributions is not None:
            check("distributions", distributions, (count, self._vocab_size), np.dtype(np.float64))
        tokens, probabilities = np.full(count, -1), np.ones(count)
        status = np.empty(count, np.int64)
        for i in range(count):
            seed, number, position = batch.rows["counter"][i].tolist()
            uniform, coin = uniforms(seed, number, position)
            with np.errstate(all="ignore"):
                row, status[i] = _kept(batch, i, logits, coin)
            if status[i] != FINE:
                continue
            if batch.rows["settings"][i, Setting.TEMPERATURE] == 0:
                row = top_k(row, 1)
            distribution = softmax(row)
            tokens[i] = draw(row, uniform)
            probabilities[i] = distribution[tokens[i]]
            if distributions is not None:
                distributions[i] = distribution
        return tokens, probabilities, status

    def begin(self, logits: NDArray[np.float32], batch: SamplingBatch) -> TokenChoice:
        raise NotImplementedError("most_begun is 0, expected at least 1")

    def log_normalizers(self, logits: NDArray[np.float32], rows: Int64, top: int) -> tuple[NDArray[np.float64], Int64]:
        """See `Sampler.log_normalizers`: NaN for a row that cannot be sampled, -1 if too few tokens are possible."""
        check_rows(logits, rows, top, self._vocab_size)
        normalizers, likely = np.full(len(rows), np.nan), np.full((len(rows), top), -1)
        for i, row in enumerate(logits[rows].astype(np.float64)):
            if _status(row) == FINE:
                normalizers[i] = row.max() + np.log(np.sum(np.exp(row - row.max())))
                best = np.argsort(-row, kind="stable")[:top]
                likely[i] = np.where(np.isneginf(row[best]), -1, best)
        return normalizers, likely


def _status(row: Row) -> int:
    """Return FINE, or the reason that a row cannot be sampled."""
    if np.isnan(row).any():
        return HAS_NAN
    if np.isposinf(row).any():
        return HAS_INFINITY
    return ALL_MASKED if np.isneginf(row).all() else FINE


def _kept(batch: SamplingBatch, i: int, logits: NDArray[np.float32], coin: float) -> tuple[Row, int]:
    """Return the logits of a row after its steps (-inf for removed tokens), and its status."""
    settings, span = batch.rows["settings"][i], batch.rows["span"][i]
    source = int(span[Span.SOURCE])
    row: Row = (logits[source] if source >= 0 else batch.replaced[-1 - source]).astype(np.float64)
    edits = slice(span[Span.FIRST_EDIT], span[Span.END_EDIT])
    for token, value in zip(batch.edit_ids[edits], batch.edit_values[edits], strict=True):
        row[token] = value if np.isneginf(value) else row[token] + value
    if span[Span.MASK] > 0:
        allowed = np.unpackbits(batch.masks[span[Span.MASK] - 1].astype("<u4").view(np.uint8), bitorder="little")
        row[allowed[: len(row)] == 0] = -np.inf
    history = batch.tokens[span[Span.FIRST_TOKEN] : span[Span.END_TOKEN]].tolist()
    if settings[Setting.NO_REPEAT_NGRAM_SIZE] > 0:
        row = no_repeat_ngram(row, history, int(settings[Setting.NO_REPEAT_NGRAM_SIZE]))
    status = _status(row)
    for step in batch.rows["steps"][i].tolist():
        if step == Step.END or status != FINE:
            break
        row = _step(Step(step), row, settings, span, history, coin)
        status = _status(row)
    return row, status


# Steps with one parameter.
_TRUNCATIONS = {
    Step.TOP_N_SIGMA: top_n_sigma,
    Step.TOP_K: top_k,
    Step.TYPICAL_P: typical_p,
    Step.TOP_P: top_p,
    Step.MIN_P: min_p,
}


def _step(step: Step, row: Row, settings: NDArray[np.float64], span: Int64, history: list[int], coin: float) -> Row:
    """Return the logits after one step."""
    if step in _TRUNCATIONS:
        return _TRUNCATIONS[step](row, float(settings[Setting[step.name]]))
    match step:
        case Step.PENALTIES:
            first = _first_of_last(history, settings[Setting.PENALTY_LAST_N])
            row = repetition_penalty(row, history[first:], settings[Setting.REPETITION_PENALTY])
            output = history[max(first, int(span[Span.FIRST_OUTPUT])) :]
            amounts = settings[Setting.PRESENCE_PENALTY], settings[Setting.FREQUENCY_PENALTY]
            return presence_and_frequency_penalty(row, output, *amounts)
        case Step.DRY:
            window = history[_first_of_last(history, settings[Setting.DRY_LAST_N]) :]
            multiplier, base = settings[Setting.DRY_MULTIPLIER], settings[Setting.DRY_BASE]
            allowed, limit = int(settings[Setting.DRY_ALLOWED_LENGTH]), int(span[Span.DRY_LIMIT])
            return dry(row, window, multiplier, base, allowed, limit)
        case Step.XTC:
            taken = coin < settings[Setting.XTC_PROBABILITY]
            return xtc(row, settings[Setting.XTC_THRESHOLD]) if taken else row
        case Step.MIROSTAT:
            return mirostat(row, settings[Setting.MIROSTAT_LIMIT])
    return temperature(row, max(float(settings[Setting.TEMPERATURE]), _LOWEST_TEMPERATURE))


def _first_of_last(history: list[int], count: float) -> int:
    """Return the index of the first of the last `count` tokens; `count` may be infinite."""
    return int(max(0.0, len(history) - count))
