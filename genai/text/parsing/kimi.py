"""Kimi K2: a section of calls, each <|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>{…}."""

from __future__ import annotations

from functools import partial

from .blocks import block_span
from .calls import CallFormat
from .events import MalformedCallError, ToolCall, decode_arguments
from .parser import THINK, Parser, read_spans, reasoning_span
from .source import PartialCall, Reader, Source

OPENING, CLOSING = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_FUNCTIONS = "functions."


def _read_call(source: Source, part: PartialCall) -> Reader[ToolCall]:
    call_id, marker = yield from part.take_text((ARGUMENTS, CALL_END, CLOSING))
    name = call_id.strip().removeprefix(_FUNCTIONS).partition(":")[0].strip()
    if marker != ARGUMENTS or not name:
        raise MalformedCallError(f"a tool name and {ARGUMENTS} are expected after {CALL}")
    text = yield from part.take_arguments((CALL_END, CLOSING))
    if (yield from part.take_end((CALL_END, CALL, CLOSING))) == CALL_END:
        part.raw += source.take(len(CALL_END))
    return ToolCall(name, decode_arguments(text), part.raw, call_id.strip())


PARSER = Parser(
    "kimi",
    (OPENING, CLOSING, CALL, ARGUMENTS, CALL_END, *THINK),
    lambda template: OPENING in template and ARGUMENTS in template,
    partial(
        read_spans,
        spans={
            OPENING: block_span(CALL, CLOSING, (OPENING, THINK[0]), _read_call),
            THINK[0]: reasoning_span(THINK),
        },
    ),
    THINK,
    lambda template: CallFormat(
        opening=OPENING,
        before_name=CALL + _FUNCTIONS,
        before_number=":",
        before_arguments=ARGUMENTS,
        after=CALL_END,
        between="",
        end=CLOSING,
        thought=THINK if THINK[0] in template else None,
    ),
)
