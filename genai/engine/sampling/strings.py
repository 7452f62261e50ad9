"""Detection of stop strings and banned strings in a text that arrives in pieces.

No part of a stop string is ever shown. When a banned string appears, generation backtracks to the string's start and
takes another token; the idea is exllamav2's. This module is policy only: it receives tokens and their text, and returns
the tokens to take back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class _Matcher:
    """Finds a non-empty string in a stream of characters with the automaton of Knuth, Morris and Pratt (1977)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        # The length of the longest proper prefix of the text that is also a suffix of its first i + 1 characters.
        self._fallback = [0] * len(text)
        length = 0
        for i in range(1, len(text)):
            while length and text[i] != text[length]:
                length = self._fallback[length - 1]
            length += text[i] == text[length]
            self._fallback[i] = length

    def feed(self, character: str) -> bool:
        """Process a character; return True if the string ends with it. `matched` is the length of the partial match."""
        if self.matched == len(self.text):
            self.matched = self._fallback[-1]
        while self.matched and character != self.text[self.matched]:
            self.matched = self._fallback[self.matched - 1]
        self.matched += character == self.text[self.matched]
        return self.matched == len(self.text)

    def reset(self) -> None:
        """Start a new stream."""
        self.matched = 0


class StopStrings:
    """Reads a text in pieces and passes on the text that can no longer be part of a stop string.

    The result does not depend on how the text is split. If several stop strings end at the same character, the longest
    stop string counts. Characters are compared exactly, without normalisation.

    Args:
        stops: the stop strings; none is empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        # The longest stop string comes first, because it counts if several end at the same character.
        self._matchers = [_Matcher(stop) for stop in sorted(stops, key=len, reverse=True)]
        self._held = ""
        self.found: str | None = None

    def feed(self, piece: str) -> str:
        """Return the text that may be shown now, and set `found` if a stop string occurs; all later text is dropped.

        The longest suffix of the text that could start a stop string is held back.
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
        """Return True if a stop string would be found if `text` came next."""
        before = [matcher.matched for matcher in self._matchers]
        found = any(matcher.feed(character) for character in text for matcher in self._matchers)
        for matcher, matched in zip(self._matchers, before, strict=True):
            matcher.matched = matched
        return found

    def flush(self) -> str:
        """Return the text held back, because the text has ended and the held part is not a stop string."""
        held, self._held = self._held, ""
        for matcher in self._matchers:
            matcher.reset()
        return held


@dataclass(frozen=True)
class Rewind:
    """An instruction to take back tokens and forbid the token that began the banned string.

    Attributes:
        position: number of output tokens to keep.
        num_tokens: number of tokens to take back, including the token just fed.
        forbidden: ids that may not be chosen at that position: the id of that token, and ids forbidden there earlier.
        banned: the string that appeared.
    """

    position: int
    num_tokens: int
    forbidden: frozenset[int]
    banned: str


class BannedStrings:
    """Watches an output for banned strings.

    After a Rewind the caller drops the last `num_tokens` tokens with their text, forbids `forbidden` at that position,
    and feeds the token chosen instead. The text of tokens that may still be taken back is held back, so text that was
    shown never changes. If every token at a position leads to a banned string, no token remains, and the sampler raises
    an error.

    If a token's text becomes certain only later (the bytes of a character), it is part of the text of later tokens.

    Args:
        banned: the strings; none is empty. Characters are compared exactly.
        position: number of preceding output tokens, which are never taken back.
    """

    def __init__(self, banned: Sequence[str], position: int = 0) -> None:
        # The longest string comes first, because it backtracks the farthest if several end at the same character.
        self._matchers = [_Matcher(text) for text in sorted(banned, key=len, reverse=True)]
        self._tokens: list[_Token] = []  # tokens that may still be taken back
        self._position = position  # number of output tokens before them
        self._forbidden: dict[int, frozenset[int]] = {}

    def feed(self, token: int, piece: str) -> str | Rewind:
        """Process a token and the text that became certain with it (may be empty). Return text to show, or a Rewind."""
        self._tokens.append(_Token(token, piece, self._position))
        for i, character in enumerate(piece):
            found = [matcher.text for matcher in self._matchers if matcher.feed(character)]
            if found:
                return self._rewind(found[0], len(piece) - i - 1)
        first_held = self._beginning(max((matcher.matched for matcher in self._matchers), default=0))
        # A rewind to a token also restores the tokens that were held back when that token arrived.
        keep_from = self._tokens[first_held].held_from if first_held < len(self._tokens) else self._end
        return self._release(keep_from)

    @property
    def held(self) -> str:
        """The text that may still be taken back."""
        return "".join(token.piece for token in self._tokens)

    @property
    def num_held(self) -> int:
        """The number of tokens that may still be taken back."""
        return len(self._tokens)

    def flush(self) -> str:
        """Return the text held back, because the output has ended."""
        for matcher in self._matchers:
            matcher.reset()
        return self._release(self._end)

    @property
    def _end(self) -> int:
        return self._position + len(self._tokens)

    def _beginning(self, num_behind: int) -> int:
        """Return the index of the token with the character that is `num_behind` before the end of the text."""
        index = len(self._tokens)
        while num_behind > 0:
            index -= 1
            num_behind -= len(self._tokens[index].piece)
        while index > 0 and not self._tokens[index - 1].piece:
            index -= 1
        return index

    def _release(self, position: int) -> str:
        """Return the text of the tokens before this position and drop them."""
        count = position - self._position
        text = "".join(token.piece for token in self._tokens[:count])
        del self._tokens[:count]
        self._position = position
        self._forbidden = {index: ids for index, ids in self._forbidden.items() if index >= position}
        return text

    def _rewind(self, banned: str, num_behind: int) -> Rewind:
        """Backtrack to the token with the string's first character. The string ends `num_behind` before the end."""
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
    """A token, its text, and the position of the first token that could be taken back when this token arrived."""

    id: int
    piece: str
    held_from: int
