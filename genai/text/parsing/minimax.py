"""MiniMax: <minimax:tool_call> with <invoke name="…"><parameter name="…">VALUE</parameter></invoke>; <think> spans."""

from __future__ import annotations

from functools import partial

from .blocks import XmlCall, block_span
from .calls import CallFormat, ParameterFormat
from .parser import THINK, Parser, read_spans, reasoning_span

OPENING, CLOSING, INVOKE = "<minimax:tool_call>", "</minimax:tool_call>", "<invoke name="
_PARAMETER, _PARAMETER_END, _INVOKE_END = "<parameter name=", "</parameter>", "</invoke>"
_CALL = XmlCall(name_end=">", end=_INVOKE_END, key=_PARAMETER, key_end=">", value_end=_PARAMETER_END)

PARSER = Parser(
    "minimax",
    (OPENING, CLOSING, INVOKE, _INVOKE_END, _PARAMETER, _PARAMETER_END, *THINK),
    lambda template: OPENING in template,
    partial(
        read_spans,
        spans={
            OPENING: block_span(INVOKE, CLOSING, (OPENING, THINK[0]), _CALL.read),
            THINK[0]: reasoning_span(THINK),
        },
    ),
    THINK,
    lambda template: CallFormat(
        opening=OPENING,
        start="\n",
        before_name=f'{INVOKE}"',
        before_arguments='">\n',
        after=f"{_INVOKE_END}\n",
        between="",
        end=CLOSING,
        thought=THINK if THINK[0] in template else None,
        parameters=ParameterFormat(f'{_PARAMETER}"', '">', f"{_PARAMETER_END}\n"),
    ),
)
