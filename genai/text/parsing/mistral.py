"""Mistral: [TOOL_CALLS][{"name": …, "arguments": {…}}, …] or [TOOL_CALLS]name[CALL_ID]id[ARGS]{…}; [THINK] spans."""

from __future__ import annotations

import re
from functools import partial

from .calls import CallFormat
from .events import MalformedCallError, Marker, ToolCall, call_from_value, decode_arguments, decode_json
from .parser import Parser, read_spans, reasoning_span
from .source import PartialCall, Reader, Source, show_failed, starts_with, take_run

OPENING, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
THINK = ("[THINK]", "[/THINK]")
_STOPS = (OPENING, THINK[0])
_WORD = re.compile(r"[\w.:/-]*")


def _read_call(source: Source, opening: str) -> Reader[None]:
    part = PartialCall(source, opening)
    try:
        part.raw += yield from take_run(source)
        if (yield from starts_with(source, ("[",))):
            values = decode_json((yield from part.take_json()))
            if not values:
                raise MalformedCallError("the list of tool calls is empty")
            calls = [call_from_value(value, "" if index else part.raw) for index, value in enumerate(values)]
        else:
            calls = [(yield from _read_named(source, part))]
    except MalformedCallError as error:
        yield from show_failed(source, part.raw, str(error), _STOPS)
        return
    yield from calls
    if gap := (yield from take_run(source, "\n")):
        yield Marker(gap)


def _read_named(source: Source, part: PartialCall) -> Reader[ToolCall]:
    name = yield from _take_word(source, part)
    call_id = None
    following = yield from starts_with(source, (CALL_ID, ARGUMENTS))
    if following == CALL_ID:
        part.raw += source.take(len(CALL_ID))
        call_id = yield from _take_word(source, part)
        following = yield from starts_with(source, (ARGUMENTS,))
    if not name or following != ARGUMENTS:
        raise MalformedCallError(f"a tool name and {ARGUMENTS} are expected after {OPENING}")
    part.raw += source.take(len(ARGUMENTS))
    arguments = decode_arguments((yield from part.take_arguments(_STOPS)))
    return ToolCall(name, arguments, part.raw, call_id or None)


def _take_word(source: Source, part: PartialCall) -> Reader[str]:
    word = ""
    while True:
        match = _WORD.match(source.text)
        word += source.take(match.end() if match else 0)
        if source.text or source.ended:
            part.raw += word
            return word
        yield None


_LIST = CallFormat(OPENING, '{"name": "', '", "arguments": ', "}", ", ", start="[", end="]")
_NAMED = CallFormat(OPENING, "", ARGUMENTS, "", OPENING)

PARSER = Parser(
    "mistral",
    (OPENING, CALL_ID, ARGUMENTS, *THINK),
    lambda template: OPENING in template,
    partial(read_spans, spans={OPENING: _read_call, THINK[0]: reasoning_span(THINK)}),
    THINK,
    lambda template: _NAMED if ARGUMENTS in template else _LIST,
)
