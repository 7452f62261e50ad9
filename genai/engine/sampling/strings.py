"""Strings that end a text, and strings that are kept out of it, found while it comes in pieces.

No part of a stop string is ever shown. When a banned string appears, generation goes back to where it began and goes
another way; the idea is exllamav2's. This is the policy alone: it sees tokens and their text, and says what to take
back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class _Matcher:
    """Finds a text, which is not empty, in a stream of characters: the automaton of Knuth, Morris and Pratt (1977)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        # The longest proper beginning of the text that also ends its first i + 1 characters.
        self._fallback = [0] * len(text)
        length = 0
        for i in range(1, len(text)):
            while length and text[i] != text[length]:
                length = self._fallback[length - 1]
            length += text[i] == text[length]
            self._fallback[i] = length

    def feed(self, character: str) -> bool:
        """Whether the text ends with this character. `matched`: how many characters of it the stream now ends with."""
        if self.matched == len(self.text):
            self.matched = self._fallback[-1]
        while self.matched and character != self.text[self.matched]:
            self.matched = self._fallback[self.matched - 1]
        self.matched += character == self.text[self.matched]
        return self.matched == len(self.text)

    def reset(self) -> None:
        """Begin a new stream."""
        self.matched = 0


class StopStrings:
    """Reads a text in pieces and passes on what cannot be part of a stop string any more.

    The result does not depend on where the text is cut into pieces. Where several stop strings end at the same
    character, the longest counts. Characters are compared as they are, without normalisation.

    Args:
        stops: the stop strings; none is empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        # The longest first: it is the one that is found where several end.
        self._matchers = [_Matcher(stop) for stop in sorted(stops, key=len, reverse=True)]
        self._held = ""
        self.found: str | None = None

    def feed(self, piece: str) -> str:
        """The text that may be shown now; `found` is the stop string once there is one, and all later text is dropped.

        What is held back is the longest end of the text so far that could begin a stop string.
        """
        if self.found is not None:
            return ""
        text = self._held + piece
        for i, character in enumerate(piece, len(self._held) + 1):
            for matcher in self._matchers:
                if matcher.feed(character) and self.found is None:
                    self.found = matcher.text
            if self.found is not None:
                self._held = ""
                return text[: i - len(self.found)]
        keep = max((matcher.matched for matcher in self._matchers), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def would_end(self, text: str) -> bool:
        """Whether a stop string would be found if this text came next."""
        before = [matcher.matched for matcher in self._matchers]
        found = any(matcher.feed(character) for character in text for matcher in self._matchers)
        for matcher, matched in zip(self._matchers, before, strict=True):
            matcher.matched = matched
        return found

    def flush(self) -> str:
        """The text is over: what was held back is no stop string and may be shown."""
        held, self._held = self._held, ""
        for matcher in self._matchers:
            matcher.reset()
        return held


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


class BannedStrings:
    """Watches one output.

    After a Rewind the caller drops the last `num_tokens` tokens (and the text they gave), forbids `forbidden` at that
    place, and feeds what is chosen instead. The text of tokens that may still be taken back is held back, so what was
    shown stays. A place at which every token leads to a banned string runs out of tokens, and the sampler says so.

    Tokens whose text becomes certain only later (the bytes of a character) belong to the text that follows them.

    Args:
        banned: the strings; none is empty. Characters are compared as they are.
        position: output tokens that came before, and stay.
    """

    def __init__(self, banned: Sequence[str], position: int = 0) -> None:
        # The longest first: where several end, it goes back the farthest.
        self._matchers = [_Matcher(text) for text in sorted(banned, key=len, reverse=True)]
        self._tokens: list[_Token] = []  # those that may still be taken back
        self._position = position  # output tokens before them
        self._forbidden: dict[int, frozenset[int]] = {}

    def feed(self, token: int, piece: str) -> str | Rewind:
        """After a token, and the text that became certain with it (which may be empty): text to show, or a Rewind."""
        self._tokens.append(_Token(token, piece, self._position))
        for i, character in enumerate(piece):
            found = [matcher.text for matcher in self._matchers if matcher.feed(character)]
            if found:
                return self._rewind(found[0], len(piece) - i - 1)
        first_held = self._beginning(max((matcher.matched for matcher in self._matchers), default=0))
        # A rewind to a token also brings back what was held when it came.
        keep_from = self._tokens[first_held].held_from if first_held < len(self._tokens) else self._end
        return self._release(keep_from)

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
        self._forbidden = {index: ids for index, ids in self._forbidden.items() if index >= position}
        return text

    def _rewind(self, banned: str, num_behind: int) -> Rewind:
        """Go back to the token with the first character of the string, whose last is `num_behind` before the end."""
        first = self._beginning(num_behind + len(banned))
        position, dropped = self._position + first, self._tokens[first:]
        del self._tokens[first:]
        self._forbidden = {index: ids for index, ids in self._forbidden.items() if index <= position}
        self._forbidden[position] = self._forbidden.get(position, frozenset()) | {dropped[0].id}
        for matcher in self._matchers:
            matcher.reset()
            for token in self._tokens:
                for character in token.piece:
                    matcher.feed(character)
        return Rewind(position, len(dropped), self._forbidden[position], banned)


@dataclass(frozen=True)
class _Token:
    """A token, its text, and the position of the first token that could be taken back when it came."""

    id: int
    piece: str
    held_from: int
