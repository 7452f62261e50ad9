"""Mistral: [TOOL_CALLS][{"name": …, "arguments": {…}}, …] or [TOOL_CALLS]name[CALL_ID]id[ARGS]{…}; [THINK] spans."""

from __future__ import annotations

import re

from .calls import MalformedCallError, call_from_value, decode_arguments, decode_json
from .events import Marker, ToolCall
from .parser import Parser, read_spans
from .source import Reader, Source, show_failed, starts_with, take_json, take_run
from .think import reasoning_span

OPENING, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
THINK = ("[THINK]", "[/THINK]")
_STOPS = (OPENING, THINK[0])
_WORD = re.compile(r"[\w.:/-]*")


class _Call:
    """What was read of a call, so that a failure can give all of it back."""

    def __init__(self, raw: str) -> None:
        self.raw = raw


def _read_call(source: Source, opening: str) -> Reader[None]:
    call = _Call(opening + (yield from take_run(source)))
    try:
        if (yield from starts_with(source, ("[",))):
            calls = yield from _read_array(source, call)
        else:
            calls = [(yield from _read_named(source, call))]
    except MalformedCallError as error:
        yield from show_failed(source, call.raw, str(error), _STOPS)
        return
    yield from calls
    if gap := (yield from take_run(source, "\n")):
        yield Marker(gap)


def _read_array(source: Source, call: _Call) -> Reader[list[ToolCall]]:
    values = decode_json((yield from _take_json(source, call)))
    if not values:
        raise MalformedCallError("the list of tool calls is empty")
    return [call_from_value(value, "" if index else call.raw) for index, value in enumerate(values)]


def _read_named(source: Source, call: _Call) -> Reader[ToolCall]:
    name = yield from _take_word(source, call)
    call_id = None
    following = yield from starts_with(source, (CALL_ID, ARGUMENTS))
    if following == CALL_ID:
        call.raw += source.take(len(CALL_ID))
        call_id = yield from _take_word(source, call)
        following = yield from starts_with(source, (ARGUMENTS,))
    if not name or following != ARGUMENTS:
        raise MalformedCallError(f"a tool name and {ARGUMENTS} are expected after {OPENING}")
    call.raw += source.take(len(ARGUMENTS)) + (yield from take_run(source))
    arguments = decode_arguments((yield from _take_json(source, call)))
    return ToolCall(name, arguments, call.raw, call_id or None)


def _take_word(source: Source, call: _Call) -> Reader[str]:
    word = ""
    while True:
        found = _WORD.match(source.text)
        word += source.take(found.end() if found else 0)
        if source.text or source.ended:
            call.raw += word
            return word
        yield None


def _take_json(source: Source, call: _Call) -> Reader[str]:
    text, problem = yield from take_json(source)
    call.raw += text
    if problem:
        raise MalformedCallError(problem)
    return text


def _fits(template: str) -> bool:
    return OPENING in template


def _read(source: Source) -> Reader[None]:
    yield from read_spans(source, {OPENING: _read_call, THINK[0]: reasoning_span(THINK)})


PARSER = Parser("mistral", (OPENING, CALL_ID, ARGUMENTS, *THINK), _fits, _read, THINK)
