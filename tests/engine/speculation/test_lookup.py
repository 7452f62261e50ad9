"""Prompt lookup against a naive search."""

from __future__ import annotations

import numpy as np
import pytest

from genai.engine.speculation.lookup import LEAST_MATCH, MOST_MATCH, LookupText, match_history, match_ngram


def array(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


def plainly(text: list[int], history: list[int], places: range, least: int) -> tuple[int, int] | None:
    """The position with the longest match of at most MOST_MATCH tokens; of several, the last."""
    found = None
    for place in places:
        length = 0
        while length < min(MOST_MATCH, place + 1, len(history)) and text[place - length] == history[-1 - length]:
            length += 1
        if length >= least and (found is None or length >= found[1]):
            found = place, length
    return found


@pytest.mark.parametrize("seed", range(60))
def test_history_equals_the_plain_search(seed: int) -> None:
    rng = np.random.default_rng(seed)
    history = rng.integers(0, 2 + seed % 6, rng.integers(1, 60)).tolist()
    found = match_history(array(history), 5)
    expected = plainly(history, history, range(1, len(history) - 1), LEAST_MATCH)
    if expected is None:
        assert found is None
        return
    assert found is not None
    place, length = expected
    assert found.length == length
    period = len(history) - 1 - place
    assert found.tokens.tolist() == [history[place + 1 + i % period] for i in range(5)]


@pytest.mark.parametrize("seed", range(40))
def test_a_text_equals_the_plain_search(seed: int) -> None:
    rng = np.random.default_rng(seed)
    text = rng.integers(0, 5, 60).tolist()
    history = rng.integers(0, 5, rng.integers(1, 30)).tolist()
    found = LookupText(text).match(array(history), 4)
    expected = plainly(text, history, range(2, len(text) - 1), 3) if len(history) >= 3 else None
    if expected is None:
        assert found is None
        return
    assert found is not None and found.length == expected[1]
    assert found.tokens.tolist() == text[expected[0] + 1 : expected[0] + 5]


def test_nothing_to_find() -> None:
    assert match_history(array([]), 3) is None
    assert match_history(array([1, 2]), 3) is None
    assert match_history(array([1, 2, 3, 4]), 3) is None
    for text in ([], [1], [1, 2, 3]):
        assert LookupText(text).match(array([1, 2, 3]), 3) is None
    assert LookupText([7, 8]).match(array([]), 3) is None


def test_a_run_that_repeats_goes_round() -> None:
    found = match_history(array([9, 1, 2, 1, 2, 1, 2]), 6)
    assert found is not None and found.tokens.tolist() == [1, 2, 1, 2, 1, 2]
    found = match_history(array([5, 5, 5]), 4)
    assert found is not None and found.tokens.tolist() == [5, 5, 5, 5]


# --- n-grams ---------------------------------------------------------------------------------------------------------


def ngram_plainly(history: list[int], size: int, most: int, chained: bool) -> list[int]:
    """By comparing all slices."""
    key, found = history[len(history) - size + 1 :], []
    if len(key) < size - 1:
        return []
    while len(found) < most:
        starts = [i for i in range(len(history) - size + 1) if history[i : i + size - 1] == key]
        if not starts:
            break
        follows = history[starts[-1] + size - 1 :]
        if not chained:
            return follows[:most]
        found.append(follows[0])
        key = [*key[1:], follows[0]]
    return found


@pytest.mark.parametrize("seed", range(60))
def test_ngrams_equal_the_plain_search(seed: int) -> None:
    rng = np.random.default_rng(seed)
    history = rng.integers(0, 2 + seed % 5, rng.integers(0, 50)).tolist()
    for size in (2, 3, 5, 16):
        for most in (1, 3, 16):
            for chained in (False, True):
                found = match_ngram(array(history), size, most, chained=chained)
                assert found == ngram_plainly(history, size, most, chained)


def test_ngrams_by_hand() -> None:
    """The last occurrence of 1 2 with a continuation is followed by 8 1 2; chained, 2 8 and 8 1 are looked up next."""
    history = array([1, 2, 3, 4, 1, 2, 8, 1, 2])
    assert match_ngram(history, 3, 2) == [8, 1]
    assert match_ngram(history, 3, 9) == [8, 1, 2]
    assert match_ngram(history, 3, 9, chained=True) == [8, 1, 2, 8, 1, 2, 8, 1, 2]
    assert match_ngram(history, 5, 9) == []
    assert match_ngram(array([1, 1]), 2, 4) == [1]
    assert match_ngram(array([7]), 2, 4) == match_ngram(array([]), 2, 4) == []
