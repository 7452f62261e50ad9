"""Biases of token sequences: numbers added to a token's logit after the other tokens of a sequence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Edits: TypeAlias = tuple[NDArray[np.int32], NDArray[np.float32]]
"""Token ids, and the numbers to add to their logits."""

_NO_EDITS: Edits = np.empty(0, np.int32), np.empty(0, np.float32)


class SequenceBiases:
    """The biases of sequences of two or more tokens, as in transformers' SequenceBiasLogitsProcessor.

    The time per step depends on the number of sequences that contain the last token in the second-to-last place, and
    not on the total number of sequences.

    Args:
        biases: sequences of token ids, each with the number to add to the logit of its last token.
    """

    def __init__(self, biases: Iterable[tuple[Sequence[int], float]]) -> None:
        # The sequences by their second-to-last token: the tokens before the last token, the last token, and the bias.
        self._known: dict[int, list[tuple[list[int], int, float]]] = {}
        for (*prefix, last), bias in biases:
            self._known.setdefault(prefix[-1], []).append((prefix, last, bias))

    def within(self, vocab_size: int) -> SequenceBiases:
        """Return the biases of the sequences whose tokens are below `vocab_size`."""
        known = (([*prefix, last], bias) for one in self._known.values() for prefix, last, bias in one)
        return SequenceBiases((ids, bias) for ids, bias in known if max(ids) < vocab_size)

    def after(self, tokens: Sequence[int]) -> Edits:
        """Return the edits of the logits that follow these tokens. If sequences have the same last token, all apply."""
        known = self._known.get(tokens[-1]) if tokens else None
        if not known:
            return _NO_EDITS
        found = [(last, bias) for prefix, last, bias in known if [*tokens[-len(prefix) :]] == prefix]
        return np.array([last for last, _ in found], np.int32), np.array([bias for _, bias in found], np.float32)
