"""GLM: <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…</tool_call>, and <think> spans."""

from __future__ import annotations

from functools import partial

from .blocks import XmlCall, block_span
from .calls import CallFormat, ParameterFormat
from .events import MalformedCallError, ToolCall
from .parser import THINK, Parser, read_spans, reasoning_span
from .source import ENDED, PartialCall, Reader, Source, take_until

OPENING, CLOSING = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_CALL = XmlCall(name_end="", end=CLOSING, key=KEY, key_end=KEY_END, value=VALUE, value_end=VALUE_END)


def _read_call(source: Source, part: PartialCall) -> Reader[ToolCall]:
    text, following = yield from take_until(source, ("\n", KEY, CLOSING))
    part.raw += text
    if following is None:
        raise MalformedCallError(ENDED)
    if not text.strip() or "<" in text:
        raise MalformedCallError("the name of a tool is expected")
    return (yield from _CALL.read_parameters(source, part, text.strip()))


PARSER = Parser(
    "glm",
    (OPENING, CLOSING, KEY, KEY_END, VALUE, VALUE_END, *THINK),
    lambda template: OPENING in template and KEY in template,
    partial(
        read_spans,
        spans={
            OPENING: block_span("", CLOSING, (OPENING, THINK[0]), _read_call),
            THINK[0]: reasoning_span(THINK),
        },
    ),
    THINK,
    lambda template: CallFormat(
        opening=OPENING,
        before_name="",
        before_arguments="" if KEY_END + VALUE in template else "\n",
        after=CLOSING,
        between=OPENING if KEY_END + VALUE in template else f"\n{OPENING}",
        thought=THINK if THINK[0] in template else None,
        parameters=(
            ParameterFormat(KEY, KEY_END + VALUE, VALUE_END)
            if KEY_END + VALUE in template
            else ParameterFormat(KEY, f"{KEY_END}\n{VALUE}", f"{VALUE_END}\n")
        ),
    ),
)
