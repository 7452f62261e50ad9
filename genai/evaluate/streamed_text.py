"""Text that is processed once, in a sequence that drops tokens from its middle when the context is full."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from ..engine.sequence import ContextShift
from ..errors import OptionError
from .scored_text import ScoredRows, ScoredText, Window, pending_logits

if TYPE_CHECKING:
    from ..engine.decoder import Decoder


def streamed_text(decoder: Decoder, text: ScoredText, keep: int, stride: int | None) -> ScoredText:
    """Return the text as one window, in a context of `text.window` tokens.

    Raises:
        OptionError: a stride is set, `keep` is not a count, or the window has no space beyond the kept tokens.
        UnsupportedModelError: see Decoder.check_shift.
    """
    if stride is not None:
        raise OptionError(
            f"stride = {stride} with ctx_shift",
            "a context shift always drops half of the tokens that it does not keep",
            "omit stride",
        )
    if not isinstance(keep, int) or isinstance(keep, bool) or keep < 0:
        raise OptionError(
            f"ctx_shift = {keep!r:.40}", "the value must be the number of tokens to keep", "use a number such as 32"
        )
    decoder.check_shift(ContextShift(keep, text.window))
    size = decoder.block_size
    first_blocks = -(-keep // size)
    forgotten = max(1, (text.window // size - first_blocks) // 2) * size
    return replace(text, stride=forgotten, windows=(Window(0, len(text.tokens) - 1, 0),))


def streamed_rows(decoder: Decoder, text: ScoredText, keep: int) -> Iterator[ScoredRows]:
    """Yield the logits that predict tokens[1:], one block of tokens at a time."""
    fed = text.tokens[:-1].tolist()
    if text.bos is not None:
        fed[0] = text.bos
    with closing(decoder.open()) as sequence:
        sequence.shift = ContextShift(keep, text.window)
        for first in range(0, len(fed), decoder.block_size):
            some = fed[first : first + decoder.block_size]
            sequence.append(some, together=len(fed))
            while sequence.is_full:
                sequence.forget()
            logits = pending_logits(decoder, sequence, all_rows=len(some) > 1)
            yield ScoredRows(logits, text.tokens[first + 1 : first + len(some) + 1], len(some))
