"""A whole reply at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from .events import End, Event, Marker, Reasoning, Text, ToolCall
from .parser import Parser
from .splitter import ReplySplitter

_BETWEEN_SPANS = "\n\n"


@dataclass(frozen=True)
class Reply:
    """A reply in its parts.

    Attributes:
        text: the answer; spans of it with something else between them are joined by a blank line.
        reasoning: what came before it, joined likewise.
        tool_calls: the calls in order.
        problems: why flagged parts of the text are no tool calls; empty for a clean reply.
        ended_in_reasoning: the reply ended before its reasoning did.
    """

    text: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    problems: tuple[str, ...] = ()
    ended_in_reasoning: bool = False

    @classmethod
    def from_events(cls, events: Iterable[Event]) -> Reply:
        """The reply that a splitter's events make up."""
        events = merge_pieces(events)
        return cls(
            text=_join_spans(events, Text),
            reasoning=_join_spans(events, Reasoning),
            tool_calls=tuple(event for event in events if isinstance(event, ToolCall)),
            problems=tuple(event.problem for event in events if isinstance(event, Text) and event.problem),
            ended_in_reasoning=any(isinstance(event, End) and event.in_reasoning for event in events),
        )


def split_reply(text: str, parser: str | Parser, *, starts_in_reasoning: bool = False) -> Reply:
    """Split a complete reply. Streaming it through `ReplySplitter` in any pieces gives the same.

    Raises:
        OptionError: see ReplySplitter.
        InputError: the text is not a string.

    >>> split_reply('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "hermes").tool_calls[0].arguments
    {'a': 1}
    """
    splitter = ReplySplitter(parser, starts_in_reasoning=starts_in_reasoning)
    return Reply.from_events([*splitter.feed(text), *splitter.finish()])


def merge_pieces(events: Iterable[Event]) -> list[Event]:
    """Join neighbouring pieces of the same text, reasoning or marker."""
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


def _join_spans(events: list[Event], wanted: type[Event]) -> str:
    """The text of all runs of one kind of event; flagged text continues the text beside it."""
    runs = ("".join(event.raw for event in run) for kind, run in groupby(events, key=type) if kind is wanted)
    return _BETWEEN_SPANS.join(run for run in runs if run)
