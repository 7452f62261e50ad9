"""DeepSeek V3, R1 and V3.1: a block of calls, each with a name and JSON; <think> spans.

V3.1 writes the name before the separator and the arguments after it. V3 and R1 write the type of the tool before the
separator, and the arguments in a Markdown block.
"""

from __future__ import annotations

from functools import partial

from .blocks import block_span
from .calls import CallFormat
from .events import MalformedCallError, ToolCall, decode_arguments
from .parser import THINK, Parser, read_spans, reasoning_span
from .source import PartialCall, Reader, Source, starts_with, take_run

OPENING, CLOSING = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCE, _FENCE_END = "```json", "```"


def _read_call(source: Source, part: PartialCall) -> Reader[ToolCall]:
    name, marker = yield from part.take_text((SEPARATOR, CALL_END, CLOSING))
    if marker == SEPARATOR:
        part.raw += yield from take_run(source)
        if (yield from starts_with(source, ("{", "[", CALL_END))) is None:
            name, marker = yield from part.take_text(("\n", CALL_END, CLOSING))
            part.raw += yield from take_run(source)
            if (yield from starts_with(source, (_FENCE,))):
                part.raw += source.take(len(_FENCE))
    name = name.strip()
    if marker not in (SEPARATOR, "\n") or not name:
        raise MalformedCallError(f"a tool name and {SEPARATOR} are expected after {CALL}")
    text = yield from part.take_arguments((CALL_END, CLOSING, _FENCE_END))
    if (yield from part.take_end((_FENCE_END, CALL_END, CALL, CLOSING))) == _FENCE_END:
        part.raw += source.take(len(_FENCE_END))
    if (yield from part.take_end((CALL_END, CALL, CLOSING))) == CALL_END:
        part.raw += source.take(len(CALL_END))
    return ToolCall(name, decode_arguments(text), part.raw)


_SPANS = {OPENING: block_span(CALL, CLOSING, (OPENING, THINK[0]), _read_call), THINK[0]: reasoning_span(THINK)}


def _format(template: str) -> CallFormat:
    thought = THINK if THINK[0] in template else None
    if _FENCE in template:
        return CallFormat(
            opening=OPENING,
            before_name=f"{CALL}function{SEPARATOR}",
            before_arguments=f"\n{_FENCE}\n",
            after=f"\n{_FENCE_END}{CALL_END}",
            between="\n",
            end=CLOSING,
            thought=thought,
        )
    return CallFormat(OPENING, CALL, SEPARATOR, CALL_END, "", end=CLOSING, thought=thought)


PARSER = Parser(
    "deepseek",
    (OPENING, CLOSING, CALL, SEPARATOR, CALL_END, *THINK),
    lambda template: OPENING in template,
    partial(read_spans, spans=_SPANS),
    THINK,
    _format,
)
