"""Stop strings are found however the text is split, and never shown in part."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings, strategies as st

from genai.engine.sampling.strings import StopStrings

TEXT = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), min_size=0, max_size=4)


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher = StopStrings(stops)
    shown = "".join(matcher.feed(piece) for piece in pieces) + matcher.flush()
    return shown, matcher.found


def expected(stops: list[str], text: str) -> tuple[str, str | None]:
    """The first position at which a stop string ends, and the longest one that ends there."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[begin:end] for begin, end in pairwise(edges)]


@settings(deadline=None)
@given(STOPS, TEXT, st.lists(st.integers(0, 100), max_size=8))
def test_any_cut(stops: list[str], text: str, places: list[int]) -> None:
    assert run(stops, cut(text, places)) == expected(stops, text)


@settings(deadline=None)
@given(STOPS, TEXT)
def test_holds_back_exactly_what_may_begin_a_stop_string(stops: list[str], text: str) -> None:
    matcher = StopStrings(stops)
    shown = ""
    for end, character in enumerate(text, 1):
        shown += matcher.feed(character)
        if matcher.found is not None:
            return
        tails = [text[begin:end] for begin in range(end) if any(stop.startswith(text[begin:end]) for stop in stops)]
        assert text[:end] == shown + max(tails, key=len, default="")


def test_examples() -> None:
    assert run(["</s>"], ["Hello <", "/", "s> and more"]) == ("Hello ", "</s>")
    assert run(["</s>"], ["a </", "b>"]) == ("a </b>", None)
    assert run(["END"], ["E", "EN", "D"]) == ("E", "END")
    assert run(["日本", "🙂"], ["こ日", "日", "本語"]) == ("こ日", "日本")
    assert run([], ["anything"]) == ("anything", None)


def test_nothing_comes_after_a_stop_string() -> None:
    matcher = StopStrings(["x"])
    assert matcher.feed("axb") == "a"
    assert (matcher.feed("c"), matcher.flush(), matcher.found) == ("", "", "x")


def test_a_long_stop_string_is_cheap() -> None:
    stop = "ab" * 5000 + "!"
    shown, found = run([stop], ["ab"] * 20000)
    assert (len(shown), found) == (40000, None)


def test_looking_ahead_changes_nothing() -> None:
    stops = StopStrings(["abc", "cd"])
    assert stops.feed("xab") == "x"
    assert stops.would_end("c") and stops.would_end("cd") and stops.would_end("ababc")
    assert not stops.would_end("") and not stops.would_end("d")
    assert stops.feed("d") == "abd" and stops.found is None
