"""Banned strings: never in the text, nothing shown is taken back, and every other text stays reachable."""

from __future__ import annotations

import random

from hypothesis import given, settings, strategies as st

from genai.engine.sampling.strings import BannedStrings, Rewind

PIECES = ["a", "b", "c", "ab", "bc", "abc", "", "ca"]


def generate(banned: list[str], seed: int, length: int = 40) -> str | None:
    """Drive the policy as an engine does, with random tokens; None if no token is left at a position.

    Checks along the way that the shown text is a prefix of the whole, and that it contains no banned string.
    """
    rng = random.Random(seed)
    policy, tokens, shown = BannedStrings(banned), [], ""
    forbidden: tuple[int, frozenset[int]] = (-1, frozenset())
    for _ in range(2000):
        choices = [t for t in range(len(PIECES)) if forbidden[0] != len(tokens) or t not in forbidden[1]]
        if not choices:
            return None
        tokens.append(rng.choice(choices))
        found = policy.feed(tokens[-1], PIECES[tokens[-1]])
        if isinstance(found, Rewind):
            assert found.position == len(tokens) - found.num_tokens
            assert found.banned in "".join(PIECES[t] for t in tokens)
            del tokens[found.position :]
            forbidden = (found.position, found.forbidden)
        else:
            shown += found
        text = "".join(PIECES[t] for t in tokens)
        assert text.startswith(shown)
        assert not any(string in text for string in banned)
        if len(tokens) == length:
            break
    assert shown + policy.flush() == "".join(PIECES[t] for t in tokens)
    return shown


@settings(deadline=None)
@given(st.lists(st.text("abc", min_size=1, max_size=5), max_size=4), st.integers(0, 2**32))
def test_random_generations(banned: list[str], seed: int) -> None:
    generate(banned, seed)


def test_free_text_passes_at_once() -> None:
    policy = BannedStrings(["bad"])
    assert policy.feed(1, "good ") == "good "
    assert policy.feed(2, "") == ""
    assert BannedStrings([]).feed(1, "bad") == "bad"


def test_goes_back_to_the_token_that_began_it() -> None:
    policy = BannedStrings(["as an AI"])
    assert policy.feed(10, "Well, ") == "Well, "
    for token, piece in ((11, "as"), (12, " an")):
        assert policy.feed(token, piece) == ""
    assert policy.feed(13, " AI model") == Rewind(1, 3, frozenset({11}), "as an AI")
    # Another way to the same string from the same place: both tokens are forbidden there.
    assert policy.feed(14, "as an") == ""
    assert policy.feed(13, " AI") == Rewind(1, 2, frozenset({11, 14}), "as an AI")
    assert policy.feed(15, "I think") == "I think"
    # That place is past; a later one starts afresh.
    assert policy.feed(11, "as") == ""
    assert policy.feed(12, " an AI") == Rewind(2, 2, frozenset({11}), "as an AI")


def test_a_token_is_shown_whole_or_not_at_all() -> None:
    policy = BannedStrings(["bad"])
    assert policy.feed(1, "not b") == ""
    assert policy.feed(2, "ad") == Rewind(0, 2, frozenset({1}), "bad")
    assert policy.feed(3, "not b") == ""
    assert policy.feed(4, "ut") == "not but"


def test_what_was_held_comes_back_with_a_rewind() -> None:
    """ "p" must remain allowed when "q" is forbidden: after a rewind it may still begin "pqr"."""
    policy = BannedStrings(["pqr", "q!!"])
    for token, piece in ((1, "p"), (2, "q"), (3, "!")):
        assert policy.feed(token, piece) == ""
    assert policy.feed(3, "!") == Rewind(1, 3, frozenset({2}), "q!!")
    assert policy.feed(4, "qr") == Rewind(0, 2, frozenset({1}), "pqr")


def test_the_end_shows_what_was_held() -> None:
    policy = BannedStrings(["bad"])
    policy.feed(1, "b")
    policy.feed(2, "a")
    assert policy.flush() == "ba"


def test_tokens_without_text_belong_to_what_follows() -> None:
    """The bytes of a character are tokens without text, until the next token makes it certain."""
    policy = BannedStrings(["é"])
    assert policy.feed(1, "caf") == "caf"
    for token in (2, 3):
        assert policy.feed(token, "") == ""
    assert (policy.held, policy.num_held) == ("", 2)
    assert policy.feed(4, "é!") == Rewind(1, 3, frozenset({2}), "é")
    for token in (5, 6):
        assert policy.feed(token, "") == ""
    assert policy.feed(4, "e!") == "e!"
    assert policy.num_held == 0
