"""Llama 3.1 and later: {"name": …, "parameters": {…}}, several separated by ";".

Calls follow <|python_tag|>, or are the whole reply. A reply that starts with "{" is therefore held back until its first
object is complete. Calls in Python syntax (`brave_search.call(…)`) are returned as flagged text.
"""

from __future__ import annotations

from .calls import CallFormat
from .events import MalformedCallError, Marker, Text, ToolCall, call_from_json, decode_json
from .parser import Parser, hide_marker, read_spans
from .source import PartialCall, Reader, Source, show_failed, starts_with, take_run

TAG = "<|python_tag|>"
TERMINATORS = ("<|eom_id|>", "<|eot_id|>")
_STOPS = (TAG, *TERMINATORS)


def _read_calls(source: Source, opening: str, *, is_bare: bool = False) -> Reader[None]:
    calls: list[ToolCall] = []
    part = PartialCall(source, opening)
    more = True
    try:
        while more:
            text = yield from part.take_json()
            calls.append(_call(text, part.raw, is_reply=is_bare and not calls))
            part.raw = ""
            # If prose follows an object without a separator, the object is not a call.
            more = (yield from part.take_end((";", *_STOPS))) == ";"
            if more:
                part.raw += source.take(1) + (yield from take_run(source))
                more = (yield from starts_with(source, _STOPS)) is None and bool(source.text)
    except MalformedCallError as error:
        whole = "".join(call.raw for call in calls) + part.raw
        # The text is either a malformed call or an ordinary reply in JSON.
        resembles_call = '"name"' in whole and ('"parameters"' in whole or '"arguments"' in whole)
        if is_bare and not calls and not resembles_call:
            yield Text(whole)
        else:
            yield from show_failed(source, whole, str(error), _STOPS)
        return
    yield from calls
    if part.raw:
        yield Marker(part.raw)


def _call(text: str, raw: str, *, is_reply: bool) -> ToolCall:
    """Return a call. An object that is the whole reply is only a call if it names its arguments."""
    call = call_from_json(text, raw)
    if is_reply and not decode_json(text).keys() & {"arguments", "parameters"}:
        raise MalformedCallError("the tool call has no arguments")
    return call


def _read(source: Source) -> Reader[None]:
    lead = yield from take_run(source)
    if (yield from starts_with(source, ("{",))):
        yield from _read_calls(source, lead, is_bare=True)
    else:
        source.give_back(lead)
    yield from read_spans(source, {TAG: _read_calls, **dict.fromkeys(TERMINATORS, hide_marker)})


PARSER = Parser(
    "llama3",
    _STOPS,
    lambda template: TAG in template or ("<|start_header_id|>" in template and '"parameters"' in template),
    _read,
    calls=lambda template: CallFormat(
        opening="{",
        before_name='"name": "',
        before_arguments='", "parameters": ',
        after="}",
        between="; {",
        is_alone=True,
    ),
)
