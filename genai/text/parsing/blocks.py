"""Blocks of tool calls between two markers, and calls whose parameters are XML elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from .events import MalformedCallError, Marker, ToolCall
from .parser import SpanReader
from .source import ENDED, PartialCall, Reader, Source, show_failed, starts_with, take_run
from .xml_values import is_cut, properties_of, types_of, value_of

CallReader: TypeAlias = Callable[[Source, PartialCall], Reader[ToolCall]]


def block_span(start: str, closing: str, stops: Sequence[str], read_call: CallReader) -> SpanReader:
    """Return the reader for a block of calls.

    Args:
        start: the text with which each call starts; "" if a block is one call.
        closing: the marker at the end of the block. It can be missing.
        stops: markers of other spans.
        read_call: function that reads a call after `start`.
    """
    return partial(_read_block, start=start, closing=closing, stops=stops, read_call=read_call)


def _read_block(
    source: Source, opening: str, *, start: str, closing: str, stops: Sequence[str], read_call: CallReader
) -> Reader[None]:
    part, count = PartialCall(source, opening), 0
    is_open = not start or not opening.endswith(start)
    try:
        if not is_open:
            yield (yield from _call(source, part, read_call))
            count += 1
        while True:
            part.raw += yield from take_run(source)
            following = yield from starts_with(source, ((start or closing), closing, *stops))
            is_call = following == start if start else not count and following != closing
            if is_call and (start or source.text):
                part.raw += source.take(len(start))
                yield (yield from _call(source, part, read_call))
                count += 1
            elif count and (following is not None or not source.text or not is_open):
                break
            elif not source.text:
                raise MalformedCallError(ENDED)
            else:
                raise MalformedCallError("other text follows the tool call" if count else "a tool call is expected")
    except MalformedCallError as error:
        yield from show_failed(source, part.raw, str(error), stops, closing)
        return
    if following == closing:
        part.raw += source.take(len(closing)) + (yield from take_run(source, "\n"))
    if part.raw:
        yield Marker(part.raw)


def _call(source: Source, part: PartialCall, read_call: CallReader) -> Reader[ToolCall]:
    call = yield from read_call(source, part)
    part.raw = ""
    return call


@dataclass(frozen=True)
class XmlCall:
    """The elements of a call.

    Attributes:
        name_end: text after the name of the tool; "" if the name and the end are not elements of the call.
        end: the end of the call.
        key: text before the name of a parameter.
        key_end: text after the name of a parameter.
        value: text before the value, if it does not follow `key_end` directly.
        value_end: text after the value.
    """

    name_end: str
    end: str
    key: str
    key_end: str
    value_end: str
    value: str = ""

    def read(self, source: Source, part: PartialCall) -> Reader[ToolCall]:
        """Read a call from its name to its end. Raise MalformedCallError if it is malformed."""
        return (yield from self.read_parameters(source, part, (yield from self._name(part, self.name_end, "tool"))))

    def read_parameters(self, source: Source, part: PartialCall, name: str) -> Reader[ToolCall]:
        """Read a call after its name. Raise MalformedCallError if it is malformed."""
        schema = source.tools.get(name, {})
        known = properties_of(schema)
        arguments: dict[str, Any] = {}
        while True:
            following = yield from part.take_end((self.key, self.end))
            if following is None:
                raise MalformedCallError(ENDED)
            if following == self.end:
                part.raw += source.take(len(self.end)) if self.name_end else ""
                return ToolCall(name, arguments, part.raw)
            part.raw += source.take(len(self.key))
            key = yield from self._name(part, self.key_end, "parameter")
            if self.value:
                if (yield from part.take_end((self.value,))) is None:
                    raise MalformedCallError(ENDED)
                part.raw += source.take(len(self.value))
            types = types_of(known.get(key), schema)
            text, _ = yield from part.take_text((self.value_end,))
            while is_cut(text, types):
                more, _ = yield from part.take_text((self.value_end,))
                text += self.value_end + more
            arguments[key] = value_of(text.removeprefix("\n").removesuffix("\n"), types)

    def _name(self, part: PartialCall, end: str, what: str) -> Reader[str]:
        text, marker = yield from part.take_text((end, "\n") if end.startswith("<") else (end, "\n", "<"))
        name = text.strip().strip("\"'")
        if marker != end or not name or "<" in name:
            raise MalformedCallError(f"the name of a {what} is expected")
        return name
