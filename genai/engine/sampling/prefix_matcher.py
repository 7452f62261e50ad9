"""Finds a text in a stream of characters, and says at any time how much of it may have begun."""

from __future__ import annotations


class PrefixMatcher:
    """The automaton of Knuth, Morris and Pratt (1977) for one text.

    Args:
        text: to be found; not empty.
    """

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
