"""Hermes and Qwen: <tool_call>{"name": …, "arguments": {…}}</tool_call>, any number of them, and <think> spans."""

from __future__ import annotations

from .calls import MalformedCallError, call_from_json
from .events import Marker
from .parser import Parser, read_spans
from .source import Reader, Source, show_failed, starts_with, take_json, take_run
from .think import THINK, reasoning_span

OPENING, CLOSING = "<tool_call>", "</tool_call>"
_STOPS = (OPENING, THINK[0])


def _read_call(source: Source, opening: str) -> Reader[None]:
    raw = opening + (yield from take_run(source))
    text, problem = yield from take_json(source)
    raw += text
    try:
        if problem:
            raise MalformedCallError(problem)
        raw += yield from take_run(source)
        # A complete object is a call also when the model forgets to close it.
        following = yield from starts_with(source, (CLOSING, *_STOPS))
        if following is None and source.text:
            raise MalformedCallError("other text follows the JSON of the tool call")
        closing = CLOSING if following == CLOSING else ""
        call = call_from_json(text, raw + closing)
    except MalformedCallError as error:
        yield from show_failed(source, raw, str(error), _STOPS, CLOSING)
        return
    source.take(len(closing))
    yield call
    if gap := (yield from take_run(source, "\n")):
        yield Marker(gap)


def _fits(template: str) -> bool:
    # Qwen3-Coder and GLM write XML, not JSON, between the same markers.
    return OPENING in template and "<function=" not in template and "<arg_key>" not in template


def _read(source: Source) -> Reader[None]:
    yield from read_spans(source, {OPENING: _read_call, THINK[0]: reasoning_span(THINK)})


PARSER = Parser("hermes", (OPENING, CLOSING, *THINK), _fits, _read, THINK)
