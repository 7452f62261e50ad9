"""The unread text of a growing reply, and functions to read it.

A reader is a generator. A reader yields events, or None when it needs more text, and returns its result. Its decisions
are never changed by later text, so the result does not depend on how the reply is cut into pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from .events import Event, MalformedCallError, Text

Result = TypeVar("Result")
Reader: TypeAlias = Generator[Event | None, None, Result]


class Source:
    """Text that has arrived and is not consumed yet.

    Attributes:
        text: the unread text.
        ended: True if no more text follows.
        ended_in_reasoning: set by a reader if the reply ended inside reasoning.
        tools: schemas of the parameters of the tools that may be called, by name.
    """

    def __init__(self, tools: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self.tools = tools or {}
        self.text = ""
        self.ended = False
        self.ended_in_reasoning = False

    def take(self, length: int) -> str:
        """Consume and return `length` characters."""
        piece, self.text = self.text[:length], self.text[length:]
        return piece

    def give_back(self, text: str) -> None:
        """Undo a `take`."""
        self.text = text + self.text


def show_until(source: Source, markers: Sequence[str], show: Callable[[str], Event]) -> Reader[str | None]:
    """Yield text as soon as the text certainly does not belong to a marker.

    Returns:
        The marker, which is consumed, with the line breaks before it; None at the end of the reply.
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
    """Consume text up to a marker or the end, without events. Return the text, and the unread marker or None."""
    while (marker_at := find_first(source.text, markers)) is None:
        if source.ended:
            return source.take(len(source.text)), None
        yield None
    start, marker = marker_at
    return source.take(start), marker


def starts_with(source: Source, markers: Sequence[str]) -> Reader[str | None]:
    """Wait until it is certain which of `markers` comes next. Return this marker, unread, or None."""
    while True:
        for marker in markers:
            if source.text.startswith(marker):
                return marker
        if source.ended or not any(marker.startswith(source.text) for marker in markers):
            return None
        yield None


def take_run(source: Source, characters: str = " \t\r\n") -> Reader[str]:
    """Consume and return all of the given characters that come next."""
    parts = []
    while True:
        parts.append(source.take(len(source.text) - len(source.text.lstrip(characters))))
        if source.text or source.ended:
            return "".join(parts)
        yield None


_NULL = "null"
ENDED = "the reply ended inside a tool call"


class PartialCall:
    """The text of a tool call so far (`raw`), so that the whole text can be returned after a failure."""

    def __init__(self, source: Source, opening: str) -> None:
        self._source, self.raw = source, opening

    def take_json(self) -> Reader[str]:
        """Consume white space and one JSON object or array. Raise MalformedCallError if it is incomplete."""
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
            raise MalformedCallError(scanner.problem or ENDED)
        return text

    def take_arguments(self, stops: Sequence[str]) -> Reader[str]:
        """Consume the JSON object of a call's arguments, or null. Return "" if one of `stops` comes first, unread."""
        self.raw += yield from take_run(self._source)
        following = yield from starts_with(self._source, (*stops, _NULL))
        if following == _NULL:
            self.raw += self._source.take(len(_NULL))
        elif following is None:
            return (yield from self.take_json())
        return ""

    def take_text(self, markers: Sequence[str]) -> Reader[tuple[str, str]]:
        """Consume text up to and including a marker. Return the text and the marker.

        Raises:
            MalformedCallError: the reply ends before the marker.
        """
        text, marker = yield from take_until(self._source, markers)
        self.raw += text
        if marker is None:
            raise MalformedCallError(ENDED)
        self.raw += self._source.take(len(marker))
        return text, marker

    def take_end(self, markers: Sequence[str]) -> Reader[str | None]:
        """Consume white space. Return the marker that follows, unread, or None at the end of the reply.

        Raises:
            MalformedCallError: other text follows.
        """
        self.raw += yield from take_run(self._source)
        following = yield from starts_with(self._source, markers)
        if following is None and self._source.text:
            raise MalformedCallError("other text follows the JSON of the tool call")
        return following


def show_failed(
    source: Source, text: str, problem: str, stops: Sequence[str], closing: str | None = None
) -> Reader[None]:
    """Yield a malformed tool call as flagged text, up to one of `stops` (unread), or up to and including `closing`."""

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
    """Return the position of the first marker in `text`, and the marker."""
    matches = [(start, marker) for marker in markers if (start := text.find(marker)) >= 0]
    return min(matches, default=None)


def held_length(text: str, markers: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that may start a marker, with the preceding line breaks."""
    if not markers:
        return 0
    for length in range(min(len(text), max(map(len, markers)) - 1), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            break
    else:
        length = 0
    return len(text) - len(text[: len(text) - length].rstrip("\n"))


_CLOSING = {"{": "}", "[": "]"}
# Characters outside strings: white space, punctuation, numbers, and the letters of true, false and null.
_OUTSIDE = frozenset(" \t\r\n,:+-.0123456789eEtrufalsn")


class JsonScanner:
    """Finds the end of a JSON value in one pass over the characters. The scanner checks only the structure; decoding
    checks the rest.

    Attributes:
        complete: True if the value has ended.
        problem: reason why the text cannot become a value; "" while it still can.
    """

    def __init__(self) -> None:
        self.complete = False
        self.problem = ""
        self._expected_closings: list[str] = []
        self._in_string = False
        self._escaped = False

    @property
    def is_in_string(self) -> bool:
        """True if the text so far ends inside a string."""
        return self._in_string

    def feed(self, text: str) -> int:
        """Process more text, and return the number of its characters that belong to the value."""
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
            self.problem = f"{character!r} is unexpected in the JSON of a tool call"
