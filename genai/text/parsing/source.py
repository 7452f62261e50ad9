"""The unread text of a growing reply, and the ways to read it.

A reader is a generator: it yields events, or None when it cannot go on before more text arrives, and returns what it
read. It decides only on text that later text cannot change, so the result does not depend on where pieces are cut.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TypeAlias, TypeVar

from .events import Event, MalformedCallError, Text

Result = TypeVar("Result")
Reader: TypeAlias = Generator[Event | None, None, Result]


class Source:
    """Text that has arrived and is not read yet.

    Attributes:
        text: the unread text.
        ended: nothing will be added any more.
        ended_in_reasoning: set by the reader that met the end inside reasoning.
    """

    def __init__(self) -> None:
        self.text = ""
        self.ended = False
        self.ended_in_reasoning = False

    def take(self, length: int) -> str:
        """Read `length` characters."""
        piece, self.text = self.text[:length], self.text[length:]
        return piece

    def give_back(self, text: str) -> None:
        """Undo a `take`."""
        self.text = text + self.text


def show_until(source: Source, markers: Sequence[str], show: Callable[[str], Event]) -> Reader[str | None]:
    """Yield text as soon as it is certain not to belong to a marker.

    Returns:
        The marker found, with the line breaks in front of it, read; None at the end of the reply.
    """
    while (marker_at := find_first(source.text, markers)) is None:
        held = 0 if source.ended else held_length(source.text, markers)
        if piece := source.take(len(source.text) - held):
            yield show(piece)
        if source.ended:
            return None
        yield None
    start, marker = marker_at
    end = start + len(marker)
    start = len(source.text[:start].rstrip("\n"))
    if start:
        yield show(source.take(start))
    return source.take(end - start)


def take_until(source: Source, markers: Sequence[str]) -> Reader[tuple[str, str | None]]:
    """Read up to a marker or the end, showing nothing; returns the text, and the marker behind it (unread) or None."""
    while (marker_at := find_first(source.text, markers)) is None:
        if source.ended:
            return source.take(len(source.text)), None
        yield None
    start, marker = marker_at
    return source.take(start), marker


def starts_with(source: Source, markers: Sequence[str]) -> Reader[str | None]:
    """Wait until it is certain whether one of `markers` comes next; it is not read."""
    while True:
        for marker in markers:
            if source.text.startswith(marker):
                return marker
        if source.ended or not any(marker.startswith(source.text) for marker in markers):
            return None
        yield None


def take_run(source: Source, characters: str = " \t\r\n") -> Reader[str]:
    """Read all of the given characters that come next."""
    parts = []
    while True:
        parts.append(source.take(len(source.text) - len(source.text.lstrip(characters))))
        if source.text or source.ended:
            return "".join(parts)
        yield None


class PartialCall:
    """What was read of a tool call so far, so that a failure can give all of it back: `raw`."""

    def __init__(self, source: Source, opening: str) -> None:
        self._source, self.raw = source, opening

    def take_json(self) -> Reader[str]:
        """Read one JSON object or array, and the white space before it; raise MalformedCallError if it is not whole."""
        self.raw += yield from take_run(self._source)
        parts, scanner = [], JsonScanner()
        while True:
            parts.append(self._source.take(scanner.feed(self._source.text)))
            if scanner.complete or scanner.problem or self._source.ended:
                break
            yield None
        text = "".join(parts)
        self.raw += text
        if not scanner.complete:
            raise MalformedCallError(scanner.problem or "the reply ended inside a tool call")
        return text

    def take_end(self, markers: Sequence[str]) -> Reader[str | None]:
        """Read white space; returns which marker follows (it is not read), or None at the end of the reply.

        Raises:
            MalformedCallError: something else follows.
        """
        self.raw += yield from take_run(self._source)
        following = yield from starts_with(self._source, markers)
        if following is None and self._source.text:
            raise MalformedCallError("other text follows the JSON of the tool call")
        return following


def show_failed(
    source: Source, text: str, problem: str, stops: Sequence[str], closing: str | None = None
) -> Reader[None]:
    """Give a malformed tool call back as flagged text, up to one of `stops` (not read) or through `closing`."""

    def flag(piece: str) -> Text:
        return Text(piece, problem)

    if text:
        yield flag(text)
    stop = yield from show_until(source, (*stops, *([closing] if closing else [])), flag)
    if stop is not None and closing and stop.endswith(closing):
        yield flag(stop)
    elif stop is not None:
        source.give_back(stop)


def find_first(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """Where the first marker in `text` starts, and which it is."""
    matches = [(start, marker) for marker in markers if (start := text.find(marker)) >= 0]
    return min(matches, default=None)


def held_length(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of `text` that may begin a marker, with the line breaks in front of it."""
    if not markers:
        return 0
    for length in range(min(len(text), max(map(len, markers)) - 1), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            break
    else:
        length = 0
    return len(text) - len(text[: len(text) - length].rstrip("\n"))


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
