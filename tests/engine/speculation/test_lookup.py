"""Prompt lookup against a naive search."""

from __future__ import annotations

import numpy as np
import pytest

from genai.engine.speculation.lookup import LEAST_MATCH, MOST_MATCH, LookupText, match_history


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
