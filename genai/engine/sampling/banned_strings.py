"""Keeps strings out of the output: when one appears, generation goes back to where it began and goes another way.

The idea is exllamav2's. This is the policy alone: it sees tokens and their text, and says what to take back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .prefix_matcher import PrefixMatcher


@dataclass(frozen=True)
class Rewind:
    """Take tokens back and forbid the one that began the banned string.

    Attributes:
        position: number of output tokens to keep.
        num_tokens: how many to take back, the one just fed included.
        forbidden: ids that may not be chosen at that position: this one, and those found there before.
        banned: the string that appeared.
    """

    position: int
    num_tokens: int
    forbidden: frozenset[int]
    banned: str


@dataclass(frozen=True)
class Verdict:
    """What to do after a token: show `text`, which is certain now, or rewind."""

    text: str
    rewind: Rewind | None = None


class BannedStrings:
    """Watches one output.

    After a Rewind the caller drops the last `num_tokens` tokens (and the text they gave), forbids `forbidden` at that
    place, and feeds what is chosen instead. The text of tokens that may still be taken back is held back, so what was
    shown stays. A place at which every token leads to a banned string runs out of tokens, and the sampler says so.

    Tokens whose text becomes certain only later (the bytes of a character) belong to the text that follows them.

    Args:
        banned: the strings; none is empty. Characters are compared as they are.
    """

    def __init__(self, banned: Sequence[str]) -> None:
        # The longest first: where several end, it goes back the farthest.
        self._matchers = [PrefixMatcher(text) for text in sorted(banned, key=len, reverse=True)]
        self._tokens: list[_Token] = []  # those that may still be taken back
        self._position = 0  # output tokens before them
        self._forbidden: dict[int, frozenset[int]] = {}

    def feed(self, token: int, piece: str) -> Verdict:
        """Take a token and the text that became certain with it (which may be empty)."""
        self._tokens.append(_Token(token, piece, self._position))
        for i, character in enumerate(piece):
            found = [matcher.text for matcher in self._matchers if matcher.feed(character)]
            if found:
                return self._rewind(found[0], len(piece) - i - 1)
        first_held = self._beginning(max((matcher.matched for matcher in self._matchers), default=0))
        # A rewind to a token also brings back what was held when it came.
        keep_from = self._tokens[first_held].held_from if first_held < len(self._tokens) else self._end
        return Verdict(self._release(keep_from))

    @property
    def held(self) -> str:
        """The text that may still be taken back."""
        return "".join(token.piece for token in self._tokens)

    @property
    def num_held(self) -> int:
        """How many tokens may still be taken back."""
        return len(self._tokens)

    def flush(self) -> str:
        """The output is over: what was held back may be shown."""
        for matcher in self._matchers:
            matcher.reset()
        return self._release(self._end)

    @property
    def _end(self) -> int:
        return self._position + len(self._tokens)

    def _beginning(self, num_behind: int) -> int:
        """Index of the token that begins the character `num_behind` before the end of the text."""
        index = len(self._tokens)
        while num_behind > 0:
            index -= 1
            num_behind -= len(self._tokens[index].piece)
        while index > 0 and not self._tokens[index - 1].piece:
            index -= 1
        return index

    def _release(self, position: int) -> str:
        """Pass on the text of the tokens before this position."""
        count = position - self._position
        text = "".join(token.piece for token in self._tokens[:count])
        del self._tokens[:count]
        self._position = position
        self._forbidden = {place: ids for place, ids in self._forbidden.items() if place >= position}
        return text

    def _rewind(self, banned: str, num_behind: int) -> Verdict:
        """Go back to the token with the first character of the string, whose last is `num_behind` before the end."""
        first = self._beginning(num_behind + len(banned))
        position, dropped = self._position + first, self._tokens[first:]
        del self._tokens[first:]
        self._forbidden = {place: ids for place, ids in self._forbidden.items() if place <= position}
        self._forbidden[position] = self._forbidden.get(position, frozenset()) | {dropped[0].id}
        for matcher in self._matchers:
            matcher.reset()
            for token in self._tokens:
                for character in token.piece:
                    matcher.feed(character)
        return Verdict("", Rewind(position, len(dropped), self._forbidden[position], banned))


@dataclass(frozen=True)
class _Token:
    """A token, its text, and the position of the first token that could be taken back when it came."""

    id: int
    piece: str
    held_from: int
