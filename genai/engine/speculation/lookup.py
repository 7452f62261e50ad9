"""Prompt lookup: what followed the last tokens when they came before, in the prompt, the reply, or a text beside them.

After A. Saxena, "Prompt Lookup Decoding" (2023); with the longest match in place of a fixed length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]

# Fewer equal tokens are no reason to expect the same again; of more, so many are compared.
LEAST_MATCH, MOST_MATCH = 2, 16
# Of so many positions in a text beside the prompt, the last ones, the longest match is taken.
_MOST_POSITIONS = 64
# Three ids in one number.
_KEY_TOKENS, _KEY_BITS = 3, 21


class Match(NamedTuple):
    """What may come next.

    Attributes:
        tokens: int32, at least one.
        length: how many tokens before it agree.
    """

    tokens: Tokens
    length: int


def match_history(history: Tokens, most: int) -> Match | None:
    """What followed the longest of the earlier runs of tokens that the history ends with; of equal ones the last.

    A run that reaches the end repeats itself: its continuation goes round.

    Args:
        history: int32 [n]. most: tokens wanted, at least 1.

    Returns:
        None if the last two tokens did not come before.
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
    """Of positions in a text where the history's last two tokens end, the last one with the longest match, and that."""
    last, length = len(history) - 1, LEAST_MATCH
    while length < min(MOST_MATCH, last):
        longer = positions[positions >= length]
        longer = longer[text[longer - length] == history[last - length]]
        if not len(longer):
            break
        positions, length = longer, length + 1
    return int(positions[-1]), length


class LookupText:
    """A text beside the prompts in which continuations are looked up, such as the files of a project.

    Args:
        tokens: int32 [n], of a vocabulary of at most 2 ** 21.
    """

    def __init__(self, tokens: Sequence[int] | Tokens) -> None:
        self._tokens = np.asarray(tokens, np.int32)
        keys = _keys(self._tokens)
        order = np.argsort(keys, kind="stable")
        self._keys, self._ends = keys[order], (order + _KEY_TOKENS - 1).astype(np.int32)

    def __len__(self) -> int:
        return len(self._tokens)

    def match(self, history: Tokens, most: int) -> Match | None:
        """As match_history, in this text; at least three tokens agree."""
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
    """One number for each three neighbours."""
    if len(tokens) < _KEY_TOKENS:
        return np.empty(0, np.int64)
    wide = tokens.astype(np.int64)
    return (wide[:-2] << 2 * _KEY_BITS) | (wide[1:-1] << _KEY_BITS) | wide[2:]
