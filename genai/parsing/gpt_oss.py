"""gpt-oss (harmony): messages of a header, <|message|> and a body; the header's channel and recipient say what it is.

`analysis` is reasoning, `final` and `commentary` are text, and a body addressed `to=functions.NAME` is a tool call.
Other recipients are the model's own tools (python, browser), whose arguments may be plain text.
"""

from __future__ import annotations

import re

from .calls import MalformedCallError, decode_arguments
from .events import Marker, Text, ToolCall
from .parser import Parser
from .source import Reader, Source, show_failed, show_until, starts_with, take_json, take_run, take_until
from .think import show_reasoning

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
_STOPS = (START, *ENDS)
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_FUNCTIONS = "functions."


def _read_message(source: Source, opening: str) -> Reader[None]:
    text, marker = yield from take_until(source, (MESSAGE, *_STOPS))
    header = opening + text
    if marker != MESSAGE:
        yield from show_failed(source, header, f"a header without {MESSAGE}", _STOPS)
        return
    header += source.take(len(MESSAGE))
    channel = _CHANNEL_NAME.search(header)
    recipient = _RECIPIENT.search(header)
    if recipient:
        yield from _read_call(source, header, recipient[1])
        return
    yield Marker(header)
    if channel and channel[1] == "analysis":
        yield from _end_message(source, (yield from show_reasoning(source, _STOPS)))
    else:
        yield from _end_message(source, (yield from show_until(source, _STOPS, Text)))


def _end_message(source: Source, stop: str | None) -> Reader[None]:
    if stop is not None and stop.endswith(START):
        source.give_back(stop)
    elif stop is not None:
        yield Marker(stop)


def _read_call(source: Source, header: str, recipient: str) -> Reader[None]:
    if not recipient.startswith(_FUNCTIONS):
        text, _ = yield from take_until(source, _STOPS)
        yield ToolCall(recipient, _arguments_or_text(text), header + text)
        return
    raw = header + (yield from take_run(source))
    text, problem = yield from take_json(source)
    raw += text
    try:
        if problem:
            raise MalformedCallError(problem)
        raw += yield from take_run(source)
        if (yield from starts_with(source, _STOPS)) is None and source.text:
            raise MalformedCallError("other text follows the JSON of the tool call")
        if recipient == _FUNCTIONS:
            raise MalformedCallError("the tool call has no name")
        yield ToolCall(recipient.removeprefix(_FUNCTIONS), decode_arguments(text), raw)
    except MalformedCallError as error:
        yield from show_failed(source, raw, str(error), _STOPS)


def _arguments_or_text(text: str) -> dict[str, object] | str:
    try:
        return decode_arguments(text)
    except MalformedCallError:
        return text


def _fits(template: str) -> bool:
    return CHANNEL in template and MESSAGE in template


def _read(source: Source) -> Reader[None]:
    # The prompt ends in "<|start|>assistant", so the reply may begin inside a header.
    lead = yield from take_run(source)
    if (yield from starts_with(source, ("to=",))):
        yield from _read_message(source, lead)
    else:
        source.give_back(lead)
    while (opening := (yield from show_until(source, (START, CHANNEL, *ENDS), Text))) is not None:
        if opening.endswith(ENDS):
            yield Marker(opening)
        else:
            yield from _read_message(source, opening)


PARSER = Parser("gpt_oss", (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS), _fits, _read)
