"""Hermes and Qwen: any number of <tool_call>{"name": …, "arguments": {…}}</tool_call>, and <think> spans."""

from __future__ import annotations

from functools import partial

from .calls import CallFormat
from .events import MalformedCallError, Marker, call_from_json
from .parser import THINK, Parser, read_spans, reasoning_span
from .source import PartialCall, Reader, Source, show_failed, take_run

OPENING, CLOSING = "<tool_call>", "</tool_call>"
_STOPS = (OPENING, THINK[0])


def _read_call(source: Source, opening: str) -> Reader[None]:
    part = PartialCall(source, opening)
    try:
        text = yield from part.take_json()
        # A complete object is a call even if the closing marker is missing.
        following = yield from part.take_end((CLOSING, *_STOPS))
        closing = CLOSING if following == CLOSING else ""
        call = call_from_json(text, part.raw + closing)
    except MalformedCallError as error:
        yield from show_failed(source, part.raw, str(error), _STOPS, CLOSING)
        return
    source.take(len(closing))
    yield call
    if gap := (yield from take_run(source, "\n")):
        yield Marker(gap)


PARSER = Parser(
    "hermes",
    (OPENING, CLOSING, *THINK),
    # Qwen3-Coder and GLM write XML instead of JSON between the same markers.
    lambda template: OPENING in template and "<function=" not in template and "<arg_key>" not in template,
    partial(read_spans, spans={OPENING: _read_call, THINK[0]: reasoning_span(THINK)}),
    THINK,
    lambda template: CallFormat(
        opening=OPENING,
        before_name='\n{"name": "',
        before_arguments='", "arguments": ',
        after=f"}}\n{CLOSING}",
        between=f"\n{OPENING}",
        thought=THINK if THINK[0] in template else None,
    ),
)
