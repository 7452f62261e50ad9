"""gpt-oss (harmony): a message is a header, <|message|> and a body. The header's channel and recipient define its type.

`analysis` is reasoning, `final` and `commentary` are text, and a body addressed `to=functions.NAME` is a tool call.
Other recipients are the model's built-in tools (python, browser), with arguments that may be plain text.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

from .calls import CallFormat
from .events import MalformedCallError, Marker, Text, ToolCall, decode_arguments
from .parser import Parser, show_reasoning
from .source import PartialCall, Reader, Source, show_failed, show_until, starts_with, take_run, take_until

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
        yield from show_failed(source, header, f"the header has no {MESSAGE}", _STOPS)
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
        arguments: dict[str, Any] | str = text
        with suppress(MalformedCallError):
            arguments = decode_arguments(text)
        yield ToolCall(recipient, arguments, header + text)
        return
    part = PartialCall(source, header)
    try:
        text = yield from part.take_arguments(_STOPS)
        yield from part.take_end(_STOPS)
        if recipient == _FUNCTIONS:
            raise MalformedCallError("the tool call has no name")
        yield ToolCall(recipient.removeprefix(_FUNCTIONS), decode_arguments(text), part.raw)
    except MalformedCallError as error:
        yield from show_failed(source, part.raw, str(error), _STOPS)


def _read(source: Source) -> Reader[None]:
    # The prompt ends in "<|start|>assistant", so the reply may start inside a header.
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


PARSER = Parser(
    "gpt_oss",
    (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS),
    lambda template: CHANNEL in template and MESSAGE in template,
    _read,
    calls=lambda template: CallFormat(
        opening=f"{CHANNEL}commentary to={_FUNCTIONS}",
        before_name="",
        before_arguments=f" {CONSTRAIN}json{MESSAGE}",
        after="",
        between=f"<|call|>{START}assistant{CHANNEL}commentary to={_FUNCTIONS}",
        thought=(f"{CHANNEL}analysis{MESSAGE}", f"<|end|>{START}assistant"),
        is_free=False,
    ),
)
