"""DRY's sequence breakers as tokens, and where they end in a history."""

from __future__ import annotations

import pytest

from genai.engine.sampling.params import SamplingParams
from genai.engine.sampling.plan import RowSampler, breaker_tokens, plan_sampling
from genai.errors import OptionError

VOCABULARY = ["a", "b", "\n", "x\n", "us", "er:", "user", ":", "\nu", "s"]


def encode(text: str) -> list[int]:
    return [VOCABULARY.index(character) for character in text]


def test_tokens_that_hold_the_breaker() -> None:
    assert breaker_tokens(["\n"], VOCABULARY, encode) == ((2,), (3,), (8,))


def test_breakers_of_several_tokens() -> None:
    """A token that ends with a prefix of the breaker, and the tokens of the rest."""
    assert breaker_tokens(["s:"], VOCABULARY, encode) == ((4, 7), (9, 7))


def test_a_breaker_that_cannot_occur() -> None:
    with pytest.raises(OptionError, match="dry_sequence_breakers contains 'q'"):
        breaker_tokens(["\n", "q"], VOCABULARY, encode)


def test_a_row_follows_its_list() -> None:
    tokens, params = [1, 2, 3], SamplingParams(dry_multiplier=1.0)
    row = RowSampler(plan_sampling(params, vocab_size=10, breakers=[[2], [3, 4]]), tokens, seed=0)

    def seen() -> tuple[list[int], int]:
        return row.window()[0].tolist(), row.since_breaker

    assert seen() == ([1, 2, 3], 1)
    tokens += [4, 5, 6] * 50
    assert seen() == (tokens, 149)
    del tokens[3:]
    row.rewind(3)
    tokens += [4]
    assert seen() == ([1, 2, 3, 4], 0)
    del tokens[1:]  # a shorter list is noticed by itself
    assert seen() == ([1], 1)
    last = plan_sampling(params.replace(dry_last_n=2), vocab_size=10)
    assert RowSampler(last, [1, 2, 3], seed=0).window()[0].tolist() == [2, 3]
