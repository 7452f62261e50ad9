"""Steps that read the history: penalties, DRY, and n-grams that must not repeat.

The steps change only tokens that occurred. These are first marked, then the marks are read token by token and cleared.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..jit.dsl import helper
from .row import COUNT, MARKS, MASKED, OPEN, TEMPERATURE, TOKENS, VALUES, Row, writable

# The maximum penalty, so that logits remain finite.
_LARGEST_PENALTY = 1e38


def _changer(changed: Any) -> Any:
    """Return a helper that applies `changed` to the logits of marked tokens of a history, and clears the marks.

    The helper's last argument holds the numbers that `changed` receives in addition to the logit and the mark.
    """

    @helper
    def change(row: Row, tokens: Any, numbers: Any) -> None:
        marks = row.ids[MARKS]
        if row.flags[OPEN]:
            logits = writable(row)
            for token in tokens:
                if marks[token]:
                    logits[token] = changed(logits[token], marks[token], numbers)
                    marks[token] = 0
        else:
            values, candidates = row.numbers[VALUES], row.ids[TOKENS]
            for i in range(row.flags[COUNT]):
                mark = marks[candidates[i]]
                if mark:
                    values[i] = changed(values[i], mark, numbers)
            for token in tokens:
                marks[token] = 0

    return change


@helper
def _penalised(logit: float, mark: int, numbers: Any) -> Any:
    repetition, presence, frequency = numbers
    value = np.float64(logit)
    value = value / repetition if value > 0 else value * repetition
    return value - (presence + frequency * (mark - 1)) if mark > 1 else value


@helper
def _less_repeated(logit: float, mark: int, numbers: Any) -> Any:
    multiplier, base, allowed_length, temperature = numbers
    penalty = min(multiplier * base ** float(mark - allowed_length), _LARGEST_PENALTY)
    return logit - penalty * temperature


_penalise, _subtract = _changer(_penalised), _changer(_less_repeated)


@helper
def penalties(row: Row, tokens: Any, first_output: int, repetition: float, presence: float, frequency: float) -> None:
    """Apply the repetition penalty (Keskar et al. 2019) to all tokens, and the other penalties to the output.

    A logit is divided by the repetition penalty if positive, otherwise multiplied (as in the authors' code). Then
    presence, and frequency times the number of occurrences, are subtracted (as documented for the OpenAI API).

    Args:
        tokens: int32 [L], the part of the history that is considered.
        first_output: index in `tokens` of the first token that was generated.
    """
    # A mark is one more than the number of occurrences in the output.
    marks = row.ids[MARKS]
    for i in range(tokens.shape[0]):
        token = tokens[i]
        if marks[token] == 0:
            marks[token] = 1
        if i >= first_output:
            marks[token] += 1
    # The temperature is only recorded, not applied to the logits, so the penalties are multiplied by it.
    temperature = row.state[TEMPERATURE]
    _penalise(row, tokens, (repetition, presence * temperature, frequency * temperature))


@helper
def dry(row: Row, tokens: Any, limit: int, multiplier: float, base: float, allowed_length: int, same: Any) -> None:
    """Penalise tokens that would continue a repetition, and longer repetitions more: "Don't repeat yourself".

    If the last m tokens occurred before, multiplier * base ** (m - allowed_length) is subtracted from the logit of the
    token that followed them there, for the largest such m, if m is at least allowed_length. Published by p-e-w as
    text-generation-webui pull request 5677 (2024).

    Args:
        tokens: int32 [L], the part of the history that is considered.
        limit: number of tokens at the end that may be part of a repetition: those after the last sequence breaker.
        same: int32 [>= L], scratch memory.
    """
    if limit < allowed_length:
        return
    _mark_continuations(row.ids[MARKS], tokens, limit, allowed_length, same)
    _subtract(row, tokens, (multiplier, base, allowed_length, row.state[TEMPERATURE]))


@helper
def _mark_continuations(marks: Any, tokens: Any, limit: int, allowed_length: int, same: Any) -> None:
    """Mark each token with the length of the longest repetition that it would continue.

    same[i] is the number of equal tokens when the history is compared backwards from its end and from i tokens before
    its end. The numbers are computed by the Z-algorithm on the reversed history, in linear time.
    """
    size = tokens.shape[0]
    begin = end = 0
    for i in range(1, size):
        length = min(end - i, same[i - begin]) if i < end else 0
        while i + length < size and tokens[size - 1 - length] == tokens[size - 1 - i - length]:
            length += 1
        same[i] = length
        if i + length > end:
            begin, end = i, i + length
        if min(length, limit) >= allowed_length:
            token = tokens[size - i]
            marks[token] = max(marks[token], min(length, limit))


@helper
def forbid_repeated_ngrams(row: Row, tokens: Any, size: int) -> None:
    """Mask tokens that would complete an n-gram of this size that occurred before (Paulus et al. 2017); 0 = off."""
    if size == 0:
        return
    length = tokens.shape[0]
    for i in range(size - 1, length):
        same = True
        for j in range(1, size):
            if tokens[i - j] != tokens[length - j]:
                same = False
                break
        if same:
            writable(row)[tokens[i]] = MASKED


@helper
def edit(row: Row, ids: Any, values: Any) -> None:
    """Add a value to the logit of each of these tokens. Minus infinity masks the token."""
    if ids.shape[0] == 0:
        return
    logits = writable(row)
    for i in range(ids.shape[0]):
        logits[ids[i]] = MASKED if values[i] == -math.inf else logits[ids[i]] + values[i]
