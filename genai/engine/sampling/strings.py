"""Detection of stop strings and banned strings in text that arrives in pieces.

No part of a stop string is ever shown. When a banned string appears, generation backtracks to the string's start and
takes another token; the idea is exllamav2's. This module is policy only: it receives tokens and their text, and returns
the tokens to take back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Symbols: TypeAlias = Sequence[str | int]
"""A part of an output: its characters, and the ids of its hidden tokens, which have no text. A str has only characters.
"""
Split: TypeAlias = Callable[[str], Symbols]
"""A function that returns the symbols of a string in which hidden tokens are spelled out."""


def visible(symbols: Symbols) -> str:
    """Return the characters of symbols."""
    return symbols if isinstance(symbols, str) else "".join(one for one in symbols if isinstance(one, str))


class _Matcher:
    """Finds a string in a stream of symbols with the automaton of Knuth, Morris and Pratt (1977).

    A pattern without hidden tokens is compared with the characters alone, because the reader sees no hidden token.

    Attributes:
        text: the string, for reports.
        matched: the number of symbols in the current partial match.
    """

    def __init__(self, text: str, pattern: Symbols) -> None:
        self.text, self._pattern = text, pattern
        self.matched = 0
        self._skips_hidden = isinstance(pattern, str)
        # The number of characters among the first i symbols.
        self._widths = [0]
        for symbol in pattern:
            self._widths.append(self._widths[-1] + isinstance(symbol, str))
        # The length of the longest proper prefix of the pattern that is also a suffix of its first i + 1 symbols.
        self._fallback = [0] * len(pattern)
        length = 0
        for i in range(1, len(pattern)):
            while length and pattern[i] != pattern[length]:
                length = self._fallback[length - 1]
            length += pattern[i] == pattern[length]
            self._fallback[i] = length

    @property
    def num_characters(self) -> int:
        """The number of characters in the current partial match."""
        return self._widths[self.matched]

    @property
    def length(self) -> int:
        """The number of symbols in the pattern."""
        return len(self._pattern)

    def counts(self, symbol: str | int) -> bool:
        """Return True if the pattern is compared with this kind of symbol."""
        return not self._skips_hidden or isinstance(symbol, str)

    def feed(self, symbol: str | int) -> bool:
        """Process a symbol; return True if the string ends with it."""
        if not self.counts(symbol):
            return False
        if self.matched == len(self._pattern):
            self.matched = self._fallback[-1]
        while self.matched and symbol != self._pattern[self.matched]:
            self.matched = self._fallback[self.matched - 1]
        self.matched += symbol == self._pattern[self.matched]
        return self.matched == len(self._pattern)

    def reset(self) -> None:
        """Start a new stream."""
        self.matched = 0


def _matchers(texts: Iterable[str], split: Split) -> list[_Matcher]:
    """Return the matchers of strings, the longest string first.

    A string that names hidden tokens has two matchers, because an output can contain the tokens or spell their text.
    """
    found = []
    for text in sorted(texts, key=len, reverse=True):
        found.append(_Matcher(text, text))
        if not isinstance(pattern := split(text), str):
            found.append(_Matcher(text, pattern))
    return found


def _finds(matchers: Sequence[_Matcher], symbols: Symbols) -> bool:
    """Return True if a string would be found if `symbols` came next."""
    before = [matcher.matched for matcher in matchers]
    found = any(matcher.feed(symbol) for symbol in symbols for matcher in matchers)
    for matcher, matched in zip(matchers, before, strict=True):
        matcher.matched = matched
    return found


class StopStrings:
    """Reads text in pieces and passes on the text that can no longer be part of a stop string.

    The result does not depend on how the text is split. If several stop strings end at the same character, the longest
    stop string counts. Characters are compared exactly, without normalisation.

    Args:
        stops: the stop strings; none is empty.
        split: returns the symbols of a stop string that names hidden tokens.
    """

    def __init__(self, stops: Sequence[str], split: Split = str) -> None:
        # The longest stop string comes first, because it counts if several end at the same character.
        self._matchers = _matchers(stops, split)
        self._held = ""
        self.found: str | None = None

    def feed(self, piece: Symbols) -> str:
        """Return the text that may be shown now, and set `found` if a stop string occurs; all later text is dropped.

        The longest suffix of the text that could start a stop string is held back.
        """
        if self.found is not None:
            return ""
        text = self._held + visible(piece)
        end = len(self._held)
        for symbol in piece:
            end += isinstance(symbol, str)
            for matcher in self._matchers:
                if matcher.feed(symbol) and self.found is None:
                    self.found = matcher.text
                    self._held, text = "", text[: end - matcher.num_characters]
            if self.found is not None:
                return text
        keep = max((matcher.num_characters for matcher in self._matchers), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def would_end(self, symbols: Symbols) -> bool:
        """Return True if a stop string would be found if `symbols` came next."""
        return _finds(self._matchers, symbols)

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
        split: returns the symbols of a string that names hidden tokens.
    """

    def __init__(self, banned: Sequence[str], position: int = 0, split: Split = str) -> None:
        # The longest string comes first, because it backtracks the farthest if several end at the same character.
        self._matchers = _matchers(banned, split)
        self._tokens: list[_Token] = []  # tokens that may still be taken back
        self._position = position  # number of output tokens before them
        self._forbidden: dict[int, frozenset[int]] = {}

    def feed(self, token: int, piece: Symbols) -> Symbols | Rewind:
        """Process a token and the text that became certain with it (may be empty). Return text to show, or a Rewind.

        Args:
            token: the id of the token.
            piece: the text; for a hidden token, the text that precedes it, and the id.
        """
        self._tokens.append(_Token(token, piece, self._position))
        for i, symbol in enumerate(piece):
            found = [matcher for matcher in self._matchers if matcher.feed(symbol)]
            if found:
                return self._rewind(found[0], piece[i + 1 :])
        first_held = min((self._beginning(one, one.matched) for one in self._matchers), default=len(self._tokens))
        # A rewind to a token also restores the tokens that were held back when that token arrived.
        keep_from = self._tokens[first_held].held_from if first_held < len(self._tokens) else self._end
        return self._release(keep_from)

    def would_rewind(self, symbols: Symbols) -> bool:
        """Return True if a banned string would be found if `symbols` came next."""
        return _finds(self._matchers, symbols)

    @property
    def held(self) -> Symbols:
        """The text that may still be taken back."""
        return _joined([token.piece for token in self._tokens])

    @property
    def num_held(self) -> int:
        """The number of tokens that may still be taken back."""
        return len(self._tokens)

    def flush(self) -> Symbols:
        """Return the text held back, because the output has ended."""
        for matcher in self._matchers:
            matcher.reset()
        return self._release(self._end)

    @property
    def _end(self) -> int:
        return self._position + len(self._tokens)

    def _beginning(self, matcher: _Matcher, num_behind: int) -> int:
        """Return the index of the token with the symbol that is `num_behind` before the end of the text.

        Of the symbols, those that the matcher compares count.
        """
        index = len(self._tokens)
        while num_behind > 0:
            index -= 1
            num_behind -= sum(map(matcher.counts, self._tokens[index].piece))
        while index > 0 and not self._tokens[index - 1].piece:
            index -= 1
        return index

    def _release(self, position: int) -> Symbols:
        """Return the text of the tokens before this position and drop them."""
        count = position - self._position
        text = _joined([token.piece for token in self._tokens[:count]])
        del self._tokens[:count]
        self._position = position
        self._forbidden = {index: ids for index, ids in self._forbidden.items() if index >= position}
        return text

    def _rewind(self, matcher: _Matcher, behind: Symbols) -> Rewind:
        """Backtrack to the token with the first symbol of the matcher's string, which is followed by `behind`."""
        banned = matcher.text
        first = self._beginning(matcher, matcher.length + sum(map(matcher.counts, behind)))
        position, dropped = self._position + first, self._tokens[first:]
        del self._tokens[first:]
        self._forbidden = {index: ids for index, ids in self._forbidden.items() if index <= position}
        self._forbidden[position] = self._forbidden.get(position, frozenset()) | {dropped[0].id}
        for matcher in self._matchers:
            matcher.reset()
            for token in self._tokens:
                for symbol in token.piece:
                    matcher.feed(symbol)
        return Rewind(position, len(dropped), self._forbidden[position], banned)


@dataclass(frozen=True)
class _Token:
    """A token, its text, and the position of the first token that could be taken back when this token arrived."""

    id: int
    piece: Symbols
    held_from: int


def _joined(pieces: Sequence[Symbols]) -> Symbols:
    """Return pieces as one; a str if all pieces are text."""
    if all(isinstance(piece, str) for piece in pieces):
        return "".join(map(visible, pieces))
    return [symbol for piece in pieces for symbol in piece]
