"""Splits replies into events with the parser of their format, piece by piece or as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from types import MappingProxyType
from typing import Any

from ...errors import InputError, OptionError
from . import deepseek, glm, gpt_oss, hermes, kimi, llama3, minimax, mistral, qwen3_coder
from .events import End, Event, Marker, Reasoning, Text, ToolCall
from .parser import THINKING, Parser, read_spans, read_started_reasoning
from .source import Reader, Source
from .xml_values import parameters_of

_MOST_AT_ONCE = 4096
"""Maximum characters per step. Readers search all unread text, so a long piece would take quadratic time."""


class ReplySplitter:
    """Splits one reply while it is generated. The result does not depend on how the reply is cut into pieces.

    Args:
        parser: a parser or its name.
        starts_in_reasoning: True if the prompt already opened the reasoning span; see `Parser.starts_in_reasoning`.
        tools: the tools of the request. In XML, all values are texts, and the types of the tool's parameters determine
            the values.

    Raises:
        OptionError: the parser is unknown, or starts_in_reasoning is set for a format whose prompts cannot open
            reasoning.

    >>> splitter = ReplySplitter("think")
    >>> splitter.feed("<think>Easy.</thi")
    [Marker(raw='<think>'), Reasoning(text='Easy.')]
    >>> splitter.feed("nk>Yes") + splitter.finish()
    [Marker(raw='</think>'), Text(text='Yes', problem=''), End(in_reasoning=False)]
    """

    def __init__(
        self,
        parser: str | Parser,
        *,
        starts_in_reasoning: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        parser = get_parser(parser) if isinstance(parser, str) else parser
        if starts_in_reasoning and parser.reasoning is None:
            raise OptionError(
                f"starts_in_reasoning is set for the parser {parser.name!r}",
                "prompts of this format cannot open a reasoning span",
                "omit starts_in_reasoning, or set it to parser.starts_in_reasoning(prompt)",
            )
        self._source = Source(parameters_of(tools) if tools else None)
        self._reader = _read_reply(parser, self._source, starts_in_reasoning)
        self._call_count = 0

    def feed(self, piece: str) -> list[Event]:
        """Process the next piece, and return the events that later text cannot change.

        Raises:
            InputError: the piece is not a str, or the reply is finished.
        """
        if not isinstance(piece, str):
            raise InputError(
                f"the piece has the type {type(piece).__name__}",
                "a piece of a reply must be a string",
                "decode the tokens first",
            )
        if self._source.ended:
            raise InputError(
                "a piece was added after finish()", "finish() ends the reply", "create a new ReplySplitter"
            )
        events: list[Event] = []
        for start in range(0, len(piece), _MOST_AT_ONCE):
            self._source.text += piece[start : start + _MOST_AT_ONCE]
            events += self._run()
        return events

    def finish(self) -> list[Event]:
        """End the reply. Return the events that were held back, and `End`. Raise InputError on a second call."""
        if self._source.ended:
            raise InputError(
                "finish() was called twice", "the first call ended the reply", "create a new ReplySplitter"
            )
        self._source.ended = True
        return [*self._run(), End(self._source.ended_in_reasoning)]

    def _run(self) -> list[Event]:
        events: list[Event] = []
        for event in self._reader:
            if event is None:
                break
            if isinstance(event, ToolCall):
                event = replace(event, index=self._call_count)
                self._call_count += 1
            events.append(event)
        return events


def _read_reply(parser: Parser, source: Source, starts_in_reasoning: bool) -> Reader[None]:
    if starts_in_reasoning and parser.reasoning is not None:
        yield from read_started_reasoning(source, parser.reasoning)
    yield from parser.read(source)


_BETWEEN_SPANS = "\n\n"


@dataclass(frozen=True)
class Reply:
    """A reply in its parts.

    Attributes:
        text: the text; spans that are separated by other events are joined with a blank line.
        reasoning: the reasoning, joined in the same way.
        tool_calls: the calls in order.
        problems: reasons why flagged parts of the text are not tool calls; empty for a well-formed reply.
        ended_in_reasoning: True if the reply ended inside its reasoning.
    """

    text: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    problems: tuple[str, ...] = ()
    ended_in_reasoning: bool = False

    @classmethod
    def from_events(cls, events: Iterable[Event]) -> Reply:
        """Return the reply that a splitter's events describe."""
        events = merge_pieces(events)
        return cls(
            text=_join_spans(events, Text),
            reasoning=_join_spans(events, Reasoning),
            tool_calls=tuple(event for event in events if isinstance(event, ToolCall)),
            problems=tuple(event.problem for event in events if isinstance(event, Text) and event.problem),
            ended_in_reasoning=any(isinstance(event, End) and event.in_reasoning for event in events),
        )


def split_reply(
    text: str,
    parser: str | Parser,
    *,
    starts_in_reasoning: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> Reply:
    """Split a complete reply. The result is the same as that of `ReplySplitter` for any pieces of the reply.

    Raises:
        OptionError: see ReplySplitter.
        InputError: the text is not a str.

    >>> split_reply('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "hermes").tool_calls[0].arguments
    {'a': 1}
    """
    splitter = ReplySplitter(parser, starts_in_reasoning=starts_in_reasoning, tools=tools)
    return Reply.from_events([*splitter.feed(text), *splitter.finish()])


def merge_pieces(events: Iterable[Event]) -> list[Event]:
    """Join adjacent pieces of the same span of text, reasoning or markers."""
    merged: list[Event] = []
    for (kind, problem), group in groupby(events, key=lambda event: (type(event), getattr(event, "problem", ""))):
        pieces = list(group)
        raw = "".join(piece.raw for piece in pieces)
        if kind is Text:
            merged.append(Text(raw, problem))
        elif kind is Reasoning:
            merged.append(Reasoning(raw))
        elif kind is Marker:
            merged.append(Marker(raw))
        else:
            merged += pieces
    return merged


def _join_spans(events: list[Event], event_type: type[Event]) -> str:
    """Return the text of all runs of one event type. Flagged text belongs to the same run as adjacent text."""
    runs = ("".join(event.raw for event in run) for kind, run in groupby(events, key=type) if kind is event_type)
    return _BETWEEN_SPANS.join(run for run in runs if run)


NONE = Parser("none", (), lambda template: False, partial(read_spans, spans={}))

# The parsers in the order in which `detect` tries them: formats with tool calls before plain reasoning.
_ORDER = (
    gpt_oss.PARSER, mistral.PARSER, kimi.PARSER, deepseek.PARSER, minimax.PARSER, qwen3_coder.PARSER, glm.PARSER,
    hermes.PARSER, llama3.PARSER, THINKING, NONE,
)  # fmt: skip
PARSERS: Mapping[str, Parser] = MappingProxyType({parser.name: parser for parser in _ORDER})


def get_parser(name: str) -> Parser:
    """Return the parser with this name. Raise OptionError if there is none."""
    if name not in PARSERS:
        raise OptionError(
            f"parser = {name!r}", "no parser has this name", f"choose one of {', '.join(sorted(PARSERS))}"
        )
    return PARSERS[name]


def detect(chat_template: str) -> str:
    """Return the name of the parser whose markers a chat template (jinja source) contains; "none" if no parser fits."""
    return next((name for name, parser in PARSERS.items() if parser.fits(chat_template)), "none")
