"""DRY's sequence breakers as tokens, and where they end in a history."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import genai
from genai.engine.sampling.breakers import _MOST_CACHED, BreakerFinder, Breakers
from genai.engine.sampling.params import SamplingParams
from genai.engine.sampling.plan import RowSampler, plan_sampling
from genai.errors import OptionError

VOCABULARY = ["a", "b", "\n", "x\n", "us", "er:", "user", ":", "\nu", "s"]


def encode(texts: Sequence[str]) -> list[list[int]]:
    return [[VOCABULARY.index(character) for character in text] for text in texts]


def finder(vocabulary: Sequence[str] = VOCABULARY) -> BreakerFinder:
    return BreakerFinder(lambda: vocabulary, encode)


def sequences(breakers: Breakers) -> set[tuple[int, ...]]:
    """Return all token sequences of breakers."""
    longer = {
        (first, *np.frombuffer(others, np.int32).tolist())
        for others, firsts in breakers.firsts.items()
        for first in firsts.tolist()
    }
    return {(token,) for token in np.flatnonzero(breakers.whole).tolist()} | longer


def as_llama_cpp(breakers: Sequence[str], vocabulary: Sequence[str]) -> set[tuple[int, ...]]:
    """Return the sequences that llama.cpp's get_overlapping_token_sequences finds, one token at a time."""
    found: set[tuple[int, ...]] = set()
    for breaker in breakers:
        for token, text in enumerate(vocabulary):
            if breaker in text:
                found.add((token,))
                continue
            for length in range(1, min(len(text), len(breaker) - 1) + 1):
                if text.endswith(breaker[:length]):
                    found.add((token, *encode([breaker[length:]])[0]))
    return found


def test_tokens_that_hold_the_breaker() -> None:
    assert sequences(finder().find(["\n"])) == {(2,), (3,), (8,)}


def test_breakers_of_several_tokens() -> None:
    """A token that ends with a prefix of the breaker, and the tokens of the rest."""
    assert sequences(finder().find(["s:"])) == {(4, 7), (9, 7)}


def test_a_breaker_that_cannot_occur() -> None:
    for unknown in ("q", "q:", "\ud800", "\0"):
        with pytest.raises(OptionError, match="dry_sequence_breakers contains") as caught:
            finder().find(["\n", unknown])
        assert caught.value.why and caught.value.fix
    with pytest.raises(OptionError):
        finder([]).find(["a"])
    only_in_us = ["z" if text == "\nu" else text for text in VOCABULARY]
    assert sequences(finder(only_in_us).find(["s:", "us:"])) == {(4, 7), (9, 7)}, "the second adds nothing, but occurs"


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text("ab:s\n", max_size=4), max_size=30),
    st.lists(st.text("ab:s\n", min_size=1, max_size=5), min_size=1, max_size=5),
    st.integers(0, 2**32),
)
def test_the_same_sequences_as_llama_cpp(more: list[str], breakers: list[str], seed: int) -> None:
    vocabulary = [*VOCABULARY, *more]
    found, expected = finder(vocabulary).find(breakers), as_llama_cpp(breakers, vocabulary)
    assert sequences(found) == expected
    tokens = random.Random(seed).choices(range(len(vocabulary) + 3), k=60)  # also ids that the tokenizer lacks
    ends = [end for end in range(1, 61) if any(tuple(tokens[:end])[-len(one) :] == one for one in expected)]
    for begin in (0, 17):
        assert found.ends(np.asarray(tokens, np.int32), begin) == [end for end in ends if end > begin]


def test_sets_of_breakers_are_not_cached_without_a_limit() -> None:
    """And the vocabulary is read once."""
    reads = 0

    def vocabulary() -> list[str]:
        nonlocal reads
        reads += 1
        return VOCABULARY

    breakers = BreakerFinder(vocabulary, encode)
    for count in range(1, 200):
        breakers.find(["a" * count])
    assert reads == 1 and len(breakers._known) == _MOST_CACHED
    assert breakers.find(["a" * 199]) is breakers.find(["a" * 199])
    before = list(breakers._known)
    breakers.find(["a" * 5000])
    assert list(breakers._known) == before, "a long set is not cached"


def test_thousands_of_breakers(bundled: genai.Model) -> None:
    """One plan for 4,000 breakers, each of which ends matches in a text."""
    words = [f"{first}{second}{third}" for first in "aehiorst" for second in "aehinorstu" for third in "abcdefghij"] * 5
    breakers = list(dict.fromkeys(f"{word}{number}" for number, word in enumerate(words)))
    with genai.LLM(bundled) as llm:
        plan = llm._requests._plan(llm.params(dry_multiplier=0.5, dry_sequence_breakers=breakers))
        for breaker in breakers[::97]:
            tokens = np.asarray(llm.encode(f"x {breaker}"), np.int32)
            assert plan.breakers.ends(tokens, 0)[-1:] == [len(tokens)], breaker


def test_a_row_follows_its_list() -> None:
    tokens, params = [1, 2, 3], SamplingParams(dry_multiplier=1.0)
    row = RowSampler(plan_sampling(params, vocab_size=10, breakers=Breakers.of([[2], [3, 4]])), tokens, seed=0)

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
