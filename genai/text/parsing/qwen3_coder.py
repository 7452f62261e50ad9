"""Qwen3-Coder: <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>, and <think> spans."""

from __future__ import annotations

from functools import partial

from .blocks import XmlCall, block_span
from .calls import CallFormat, ParameterFormat
from .parser import THINK, Parser, read_spans, reasoning_span

OPENING, CLOSING, FUNCTION = "<tool_call>", "</tool_call>", "<function="
_PARAMETER, _PARAMETER_END, _FUNCTION_END = "<parameter=", "</parameter>", "</function>"
_CALL = XmlCall(name_end=">", end=_FUNCTION_END, key=_PARAMETER, key_end=">", value_end=_PARAMETER_END)
_BLOCK = block_span(FUNCTION, CLOSING, (OPENING, THINK[0]), _CALL.read)

PARSER = Parser(
    "qwen3_coder",
    (OPENING, CLOSING, FUNCTION, _FUNCTION_END, _PARAMETER, _PARAMETER_END, *THINK),
    lambda template: FUNCTION in template and _PARAMETER in template,
    # Models leave out the first marker at times.
    partial(read_spans, spans={OPENING: _BLOCK, FUNCTION: _BLOCK, THINK[0]: reasoning_span(THINK)}),
    THINK,
    lambda template: CallFormat(
        opening=OPENING,
        before_name=f"\n{FUNCTION}",
        before_arguments=">\n",
        after=f"{_FUNCTION_END}\n{CLOSING}",
        between=f"\n{OPENING}",
        thought=THINK if THINK[0] in template else None,
        parameters=ParameterFormat(_PARAMETER, ">\n", f"\n{_PARAMETER_END}\n"),
    ),
)
