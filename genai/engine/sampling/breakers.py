"""DRY's sequence breakers as tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...errors import OptionError


def breaker_tokens(
    breakers: Sequence[str], vocabulary: Sequence[str], encode: Callable[[str], Sequence[int]]
) -> tuple[tuple[int, ...], ...]:
    """The sequences of tokens in which a sequence breaker may appear, as llama.cpp finds them.

    A token whose text holds the breaker is one by itself. A token that ends with a beginning of it is one together with
    the tokens of the rest.

    Args:
        breakers: texts, see SamplingParams.dry_sequence_breakers.
        vocabulary: the text of each token id, as it appears in the output.
        encode: tokens of a text, without special tokens.

    Raises:
        OptionError: a breaker that no token can begin, so that it would never take effect.
    """
    found: dict[tuple[int, ...], None] = {}
    for breaker in breakers:
        before = len(found)
        rests: dict[str, tuple[int, ...]] = {}
        for token, text in enumerate(vocabulary):
            if breaker in text:
                found[(token,)] = None
                continue
            for length in range(min(len(text), len(breaker) - 1), 0, -1):
                if text.endswith(breaker[:length]):
                    rest = breaker[length:]
                    if rest not in rests:
                        rests[rest] = tuple(encode(rest))
                    if rests[rest]:
                        found[(token, *rests[rest])] = None
        if len(found) == before and not any(breaker in text for text in vocabulary):
            raise OptionError(
                f"dry_sequence_breakers holds {breaker!r}", "no token of the vocabulary begins it", "leave it out"
            )
    return tuple(found)
