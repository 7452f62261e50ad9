"""DRY's sequence breakers as tokens, and where they end in a history."""

from __future__ import annotations

import pytest

from genai.engine.sampling.breakers import breaker_tokens
from genai.engine.sampling.history import TokenHistory
from genai.errors import OptionError

VOCABULARY = ["a", "b", "\n", "x\n", "us", "er:", "user", ":", "\nu", "s"]


def encode(text: str) -> list[int]:
    return [VOCABULARY.index(character) for character in text]


def test_tokens_that_hold_the_breaker() -> None:
    assert breaker_tokens(["\n"], VOCABULARY, encode) == ((2,), (3,), (8,))


def test_breakers_of_several_tokens() -> None:
    """A token that ends with a beginning of the breaker, and the tokens of the rest."""
    assert breaker_tokens(["s:"], VOCABULARY, encode) == ((4, 7), (9, 7))


def test_a_breaker_that_cannot_occur() -> None:
    with pytest.raises(OptionError, match="dry_sequence_breakers holds 'q'"):
        breaker_tokens(["\n", "q"], VOCABULARY, encode)


def test_history_follows_its_list() -> None:
    tokens = [1, 2, 3]
    history = TokenHistory(tokens, 10, [[2], [3, 4]])
    history.sync()
    assert (history.last(2).tolist(), history.since_breaker) == ([2, 3], 1)
    tokens += [4, 5, 6] * 50
    history.sync()
    assert history.last(float("inf")).tolist() == tokens
    assert history.since_breaker == 149
    del tokens[3:]
    history.rewind(3)
    tokens += [4]
    history.sync()
    assert (history.last(9).tolist(), history.since_breaker) == ([1, 2, 3, 4], 0)
    del tokens[1:]  # a shorter list is noticed by itself
    history.sync()
    assert (history.last(9).tolist(), history.since_breaker) == ([1], 1)
