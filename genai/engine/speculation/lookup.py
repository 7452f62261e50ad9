"""Prompt lookup: propose the tokens that followed the last tokens at an earlier position.

The position is in the prompt, in the reply or in an additional text. Based on A. Saxena, "Prompt Lookup Decoding"
(2023), but with the longest match instead of a match of fixed length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]

# The minimum length of a match, because shorter matches predict nothing, and the maximum number of tokens to compare.
LEAST_MATCH, MOST_MATCH = 2, 16
# The number of last positions in an additional text among which the longest match is chosen.
_MOST_POSITIONS = 64
# Three token ids are packed into one number.
_KEY_TOKENS, _KEY_BITS = 3, 21


class Match(NamedTuple):
    """A possible continuation.

    Attributes:
        tokens: int32, at least one.
        length: number of matching tokens before the continuation.
    """

    tokens: Tokens
    length: int


def match_history(history: Tokens, most: int) -> Match | None:
    """Return the continuation of the longest earlier occurrence of the history's last tokens.

    Of several equally long occurrences, the last one counts.

    A continuation that reaches the end of the history repeats periodically.

    Args:
        history: int32 [n].
        most: number of tokens to return, at least 1.

    Returns:
        The match; None if the last two tokens did not occur earlier.
    """
    last = len(history) - 1
    if last < LEAST_MATCH:
        return None
    positions = np.flatnonzero(history[1:last] == history[last]) + 1
    positions = positions[history[positions - 1] == history[last - 1]]
    if not len(positions):
        return None
    position, length = _longest(history, positions, history)
    period = last - position
    follows = history[position + 1 : position + 1 + most]
    return Match(follows if most <= period else np.resize(follows, most), length)


def _longest(text: Tokens, positions: NDArray[np.int64], history: Tokens) -> tuple[int, int]:
    """Return the position with the longest match (of several, the last) and the match's length.

    Args:
        text: the text.
        positions: positions in the text at which the history's last two tokens end.
        history: the history.
    """
    last, length = len(history) - 1, LEAST_MATCH
    while length < min(MOST_MATCH, last):
        longer = positions[positions >= length]
        longer = longer[text[longer - length] == history[last - length]]
        if not len(longer):
            break
        positions, length = longer, length + 1
    return int(positions[-1]), length


def match_ngram(history: Tokens, size: int, most: int, *, chained: bool = False) -> list[int]:
    """Return the tokens that followed the last earlier occurrence of the history's last `size` - 1 tokens.

    This is onnxruntime-genai's n-gram lookup: the length of a match is fixed, and a continuation ends with the history.

    Args:
        history: int32 [n].
        size: number of tokens of an n-gram, at least 2: the tokens that match, and the token that follows.
        most: maximum number of tokens to return, at least 1.
        chained: True to look up each token separately, so that each may follow another occurrence. The tokens found so
            far extend the text to match, but not the text to search.

    Returns:
        The tokens; empty if these last tokens did not occur earlier.
    """
    context = history[max(len(history) - size + 1, 0) :].tolist()
    follows = _after_last(history, context) if len(history) >= size else None
    if not chained:
        return [] if follows is None else history[follows : follows + most].tolist()
    found: list[int] = []
    while follows is not None and len(found) < most:
        found.append(int(history[follows]))
        context = [*context[1:], found[-1]]
        follows = _after_last(history, context) if len(found) < most else None
    return found


def _after_last(history: Tokens, context: Sequence[int]) -> int | None:
    """Return the index of the token after the last occurrence of some tokens, except at the end of the history."""
    last = len(context) - 1
    ends = np.flatnonzero(history[last:-1] == context[last]) + last
    for back in range(1, len(context)):
        ends = ends[history[ends - back] == context[last - back]]
    return int(ends[-1]) + 1 if len(ends) else None


class LookupText:
    """An additional text to look up continuations in, such as the files of a project.

    Args:
        tokens: int32 [n], from a vocabulary of at most 2 ** 21 tokens.
    """

    def __init__(self, tokens: Sequence[int] | Tokens) -> None:
        self._tokens = np.asarray(tokens, np.int32)
        keys = _keys(self._tokens)
        order = np.argsort(keys, kind="stable")
        self._keys, self._ends = keys[order], (order + _KEY_TOKENS - 1).astype(np.int32)

    def __len__(self) -> int:
        return len(self._tokens)

    def match(self, history: Tokens, most: int) -> Match | None:
        """Return a match in this text, in the same form as match_history; at least three tokens match."""
        if len(history) < _KEY_TOKENS or not len(self._keys):
            return None
        (key,) = _keys(history[-_KEY_TOKENS:])
        begin, end = np.searchsorted(self._keys, key, "left"), np.searchsorted(self._keys, key, "right")
        positions = self._ends[max(begin, end - _MOST_POSITIONS) : end].astype(np.int64)
        positions = positions[positions + 1 < len(self._tokens)]
        if not len(positions):
            return None
        position, length = _longest(self._tokens, positions, history)
        return Match(self._tokens[position + 1 : position + 1 + most], max(length, _KEY_TOKENS))


def _keys(tokens: Tokens) -> NDArray[np.int64]:
    """Pack every three consecutive tokens into one number."""
    if len(tokens) < _KEY_TOKENS:
        return np.empty(0, np.int64)
    wide = tokens.astype(np.int64)
    return (wide[:-2] << 2 * _KEY_BITS) | (wide[1:-1] << _KEY_BITS) | wide[2:]
