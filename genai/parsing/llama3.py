"""Llama 3.1 and later: {"name": …, "parameters": {…}}, several separated by ";".

They stand behind <|python_tag|>, or bare as the whole reply. A reply that begins with "{" is therefore held back until
its first object shows what it is. Calls in Python syntax (`brave_search.call(…)`) come back as flagged text.
"""

from __future__ import annotations

from .calls import MalformedCallError, call_from_json
from .events import Marker, Text, ToolCall
from .parser import Parser, hide_marker, read_spans
from .source import Reader, Source, show_failed, starts_with, take_json, take_run

TAG = "<|python_tag|>"
TERMINATORS = ("<|eom_id|>", "<|eot_id|>")
_STOPS = (TAG, *TERMINATORS)


def _read_calls(source: Source, opening: str, *, is_bare: bool = False) -> Reader[None]:
    calls: list[ToolCall] = []
    raw = opening + (yield from take_run(source))
    is_over = False
    try:
        while not is_over:
            text, problem = yield from take_json(source)
            raw += text
            if problem:
                raise MalformedCallError(problem)
            calls.append(call_from_json(text, raw))
            raw = ""
            raw, is_over = yield from _read_separator(source)
    except MalformedCallError as error:
        yield from _show_failed(source, calls, raw, str(error), is_bare)
        return
    yield from calls
    if raw:
        yield Marker(raw)


def _read_separator(source: Source) -> Reader[tuple[str, bool]]:
    """Read what stands between two calls; also tells whether the last call was read."""
    raw = yield from take_run(source)
    following = yield from starts_with(source, (";", *_STOPS))
    if following == ";":
        raw += source.take(1) + (yield from take_run(source))
        following = yield from starts_with(source, _STOPS)
    elif following is None and source.text:
        # Without a separator, an object followed by prose is an answer.
        source.give_back(raw)
        raise MalformedCallError("other text follows the JSON of the tool call")
    return raw, following is not None or not source.text


def _show_failed(source: Source, calls: list[ToolCall], raw: str, problem: str, is_bare: bool) -> Reader[None]:
    whole = "".join(call.raw for call in calls) + raw
    if is_bare and not calls and not _resembles_call(raw):
        yield Text(whole)
    else:
        yield from show_failed(source, whole, problem, _STOPS)


def _resembles_call(text: str) -> bool:
    """Tells a spoiled call from an ordinary answer in JSON."""
    return '"name"' in text and ('"parameters"' in text or '"arguments"' in text)


def _fits(template: str) -> bool:
    return TAG in template or ("<|start_header_id|>" in template and '"parameters"' in template)


def _read(source: Source) -> Reader[None]:
    lead = yield from take_run(source)
    if (yield from starts_with(source, ("{",))):
        yield from _read_calls(source, lead, is_bare=True)
    else:
        source.give_back(lead)
    yield from read_spans(source, {TAG: _read_calls, **dict.fromkeys(TERMINATORS, hide_marker)})


PARSER = Parser("llama3", _STOPS, _fits, _read)
