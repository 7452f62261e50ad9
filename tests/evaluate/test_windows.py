"""Windows: every token with context is scored once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from genai.errors import OptionError
from genai.evaluate.scored_text import checked_window, chunks, plan_windows


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, int, int]:
    window = draw(st.integers(2, 40))
    return draw(st.integers(2, 200)), window, draw(st.integers(1, window))


@given(cases())
def test_every_token_with_context_is_scored_once(case: tuple[int, int, int]) -> None:
    num_tokens, window, stride = case
    windows = plan_windows(num_tokens, window, stride)
    scored = [i + 1 for w in windows for i in range(w.scored_from, w.end)]
    assert scored == [i for i in range(1, num_tokens) if stride < window or i % window]
    for index, w in enumerate(windows):
        assert w.begin == index * stride
        assert w.begin <= w.scored_from < w.end <= w.begin + window - 1
        # In every window but the first, the first scored token has window - stride tokens before it, but at least one.
        assert index == 0 or w.scored_from + 1 - w.begin == max(window - stride, 1)


@given(cases())
def test_as_the_published_loop_does_it(case: tuple[int, int, int]) -> None:
    """The loop on transformers' perplexity page: the tokens that keep their labels in each window."""
    seq_len, max_length, stride = case
    expected, prev_end = [], 0
    for begin in range(0, seq_len, stride):
        end = min(begin + max_length, seq_len)
        labelled = range(end - (end - prev_end), end)
        # The label shift drops a window's first token.
        expected.append((begin, [i for i in labelled if i > begin]))
        prev_end = end
        if end == seq_len:
            break
    ours = [(w.begin, [i + 1 for i in range(w.scored_from, w.end)]) for w in plan_windows(*case)]
    assert ours == [item for item in expected if item[1]]


@given(st.integers(0, 50), st.integers(1, 80), st.integers(1, 30), st.sets(st.integers(0, 120), max_size=3))
def test_chunks_cover_the_range_and_set_thresholds_apart(
    begin: int, count: int, most: int, thresholds: set[int]
) -> None:
    pieces = list(chunks(begin, begin + count, most, thresholds))
    assert [i for first, last in pieces for i in range(first, last)] == list(range(begin, begin + count))
    assert all(last - first <= most for first, last in pieces)
    for length in thresholds:
        if begin < length < begin + count:
            assert (length, length + 1) in pieces


def test_defaults() -> None:
    assert checked_window(None, None, 1024) == (1024, 512)
    assert checked_window(None, None, 131072) == (2048, 1024)
    assert checked_window(2, None, 1024) == (2, 1)
    assert checked_window(4096, 4095, 131072) == (4096, 4095)
    assert checked_window(64, 64, 1024) == (64, 64)


@pytest.mark.parametrize(
    ("window", "stride", "what"),
    [
        (1025, None, "window = 1025"),
        (1, None, "window = 1"),
        (0, None, "window = 0"),
        (64, 65, "stride = 65"),
        (64, 0, "stride = 0"),
        (64, -3, "stride = -3"),
        (True, None, "window = True"),
        (64.0, None, "window = 64.0"),
        (64, 2.5, "stride = 2.5"),
        ("64", None, "window = '64'"),
    ],
)
def test_out_of_range(window: Any, stride: Any, what: str) -> None:
    with pytest.raises(OptionError) as caught:
        checked_window(window, stride, 1024)
    assert caught.value.what == what
    assert caught.value.fix.startswith("use ")
