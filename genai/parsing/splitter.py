"""The incremental splitter: pieces of text in, events out."""

from __future__ import annotations

from dataclasses import replace

from ..errors import InputError, OptionError
from .events import End, Event, ToolCall
from .parser import Parser
from .registry import get_parser
from .source import Reader, Source
from .think import read_started_reasoning

_MOST_AT_ONCE = 4096
"""Characters: readers search all unread text, so a long reply given as one piece would take quadratic time."""


class ReplySplitter:
    """Splits one reply while it is generated. Where the pieces are cut makes no difference to what comes out.

    Args:
        parser: a parser or its name.
        starts_in_reasoning: the prompt already opened the reasoning span; see `Parser.starts_in_reasoning`.

    Raises:
        OptionError: no such parser, or starts_in_reasoning for a format whose prompts cannot open reasoning.

    >>> splitter = ReplySplitter("think")
    >>> splitter.feed("<think>Easy.</thi")
    [Marker(raw='<think>'), Reasoning(text='Easy.')]
    >>> splitter.feed("nk>Yes") + splitter.finish()
    [Marker(raw='</think>'), Text(text='Yes', problem=''), End(in_reasoning=False)]
    """

    def __init__(self, parser: str | Parser, *, starts_in_reasoning: bool = False) -> None:
        parser = get_parser(parser) if isinstance(parser, str) else parser
        if starts_in_reasoning and parser.reasoning is None:
            raise OptionError(
                f"starts_in_reasoning with the parser {parser.name!r}",
                "prompts of this format cannot open a reasoning span",
                "leave it out, or use Parser.starts_in_reasoning(prompt)",
            )
        self._source = Source()
        self._reader = _read_reply(parser, self._source, starts_in_reasoning)
        self._call_count = 0

    def feed(self, piece: str) -> list[Event]:
        """Take the next piece; give all events that nothing later can change.

        Raises:
            InputError: the piece is not a string, or the reply is finished.
        """
        if not isinstance(piece, str):
            raise InputError(f"a piece of type {type(piece).__name__}", "replies are text", "decode the tokens first")
        if self._source.ended:
            raise InputError("a piece after the end", "finish() ended this reply", "make a new ReplySplitter")
        events: list[Event] = []
        for start in range(0, len(piece), _MOST_AT_ONCE):
            self._source.text += piece[start : start + _MOST_AT_ONCE]
            events += self._run()
        return events

    def finish(self) -> list[Event]:
        """End the reply; give what was held back, and `End`.

        Raises:
            InputError: the reply is finished already.
        """
        if self._source.ended:
            raise InputError("finish() called twice", "this reply has ended", "make a new ReplySplitter")
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
