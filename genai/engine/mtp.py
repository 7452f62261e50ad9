"""The decoder of an MTP head, which reads a model's hidden states in addition to tokens.

Row i of a head's sequence reads the model's hidden state of token i and the token i + 1, and returns logits for the
token i + 2. The tokens of the sequence are therefore the model's tokens from the second one, or, if the first hidden
states are not available, from a later one: the positions in a head's attention matter only relative to each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from genai.kvcache.sequence_cache import SequenceCache

from .hidden_rows import HiddenRows
from .paged import PagedDecoder
from .paged_sequence import PagedSequence
from .scheduler import StepPlan
from .sequence import Logits


class HeadDecoder(PagedDecoder):
    """The decoder of an MTP head. The program's `given` is the name of the input with hidden states."""

    def open(self) -> HeadSequence:
        return HeadSequence(self, SequenceCache(self.pool, self.block_size, self.groups, self.state_pool))

    def given(self, sequences: Sequence[PagedSequence], step: StepPlan) -> Mapping[str, Logits]:
        parts = []
        for chunk in step:
            sequence = sequences[chunk.sequence]
            assert isinstance(sequence, HeadSequence)
            end = sequence.computed_end()
            parts.append(sequence.inputs.take(end - chunk.num_tokens, end))
        return {self.program.given[0]: np.concatenate(parts)}


class HeadSequence(PagedSequence):
    """A sequence of an MTP head.

    Attributes:
        inputs: the hidden states that the pending tokens are computed with.
        hidden: the hidden states that the head computed.
        is_whole: True if the first row belongs to the first token of the model's sequence. Other sequences with the
            same tokens and `cache_salt` may then reuse keys and values, because the tokens determine the hidden states.
    """

    is_whole = False

    def __init__(self, decoder: PagedDecoder, cache: SequenceCache) -> None:
        super().__init__(decoder, cache)
        self.inputs, self.hidden = HiddenRows(), HiddenRows(most=1)

    def feed(self, tokens: Sequence[int], rows: Logits) -> None:
        """Append tokens, and the hidden states [tokens, columns] that they are computed with."""
        self.inputs.drop(self.num_computed)
        self.inputs.put(len(self.tokens), rows)
        self.append(tokens)

    def feed_first(self, tokens: Sequence[int], rows: HiddenRows) -> bool:
        """Fill an empty sequence with tokens, of which the first ones are in the prefix cache.

        Args:
            tokens: the model's tokens from the second one to the last one that has hidden states.
            rows: the hidden states, also of the tokens before, or only of the last ones.

        Returns:
            False if the cache has too few tokens for the available hidden states; the sequence is then empty.
        """
        self.append(tokens)
        reused = self.reuse()
        if reused < rows.first:
            self.cut(0)
            return False
        self.inputs.put(reused, rows.take(reused, len(tokens)))
        return True

    def cut(self, length: int) -> None:
        """Drop all tokens from index `length`, without recomputing an earlier token."""
        if length < len(self.tokens):
            del self.tokens[length:], self._prefill[length:]
            self._settled = min(self._settled, length)
            self.truncate(length)

    @property
    def _is_public(self) -> bool:
        return self.is_whole and super()._is_public
