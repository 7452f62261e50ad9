"""Finds where a JSON object or array ends while it is still arriving (RFC 8259: strings, escapes, nesting)."""

from __future__ import annotations

_CLOSING = {"{": "}", "[": "]"}
# What may stand outside strings: white space, punctuation, numbers, and the letters of true, false and null.
_OUTSIDE = frozenset(" \t\r\n,:+-.0123456789eEtrufalsn")


class JsonScanner:
    """Looks at each character once. It checks the structure only; decoding the text checks the rest.

    Attributes:
        complete: the value has ended.
        problem: why no value can come of this text any more; "" while it can.
    """

    def __init__(self) -> None:
        self.complete = False
        self.problem = ""
        self._expected_closings: list[str] = []
        self._in_string = False
        self._escaped = False

    def feed(self, text: str) -> int:
        """Take the next text; give how many of its characters belong to the value (all while it is unfinished)."""
        for position, character in enumerate(text):
            if self.complete:
                return position
            if self._in_string:
                self._feed_string(character)
            else:
                self._feed_outside(character)
            if self.problem:
                return position
        return len(text)

    def _feed_string(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False

    def _feed_outside(self, character: str) -> None:
        if character in _CLOSING:
            self._expected_closings.append(_CLOSING[character])
        elif not self._expected_closings:
            self.problem = f"a JSON object or array is expected, not {character!r}"
        elif character == self._expected_closings[-1]:
            self._expected_closings.pop()
            self.complete = not self._expected_closings
        elif character == '"':
            self._in_string = True
        elif character not in _OUTSIDE:
            self.problem = f"{character!r} is out of place in the JSON of a tool call"
