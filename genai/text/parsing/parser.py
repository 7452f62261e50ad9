"""The definition of a reply format, and the reasoning spans that most formats share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from .calls import CallFormat
from .events import Marker, Reasoning, Text
from .source import Reader, Source, show_until, starts_with, take_run

SpanReader: TypeAlias = Callable[[Source, str], Reader[None]]


@dataclass(frozen=True)
class Parser:
    """One format of replies.

    Attributes:
        name: name in the registry.
        markers: the strings that the parser looks for. If a marker is a special token, the caller must stream with that
            token visible (skip_special_tokens=False, or kept); otherwise, the parser never receives the marker.
        fits: function that returns True if a chat template uses this format.
        read: function that reads a reply to its end.
        reasoning: opening and closing marker of a reasoning span that the prompt may already open, or None.
        calls: function that returns the format of tool calls for a chat template; None if the format has no tool calls.
    """

    name: str
    markers: tuple[str, ...]
    fits: Callable[[str], bool]
    read: Callable[[Source], Reader[None]]
    reasoning: tuple[str, str] | None = None
    calls: Callable[[str], CallFormat] | None = None

    def starts_in_reasoning(self, prompt: str) -> bool:
        """Return True if the rendered prompt ends in an open reasoning span, which the reply then continues."""
        return self.reasoning is not None and prompt.rstrip().endswith(self.reasoning[0])


def read_spans(source: Source, spans: Mapping[str, SpanReader]) -> Reader[None]:
    """Read a reply that consists of text and spans. Each opening marker selects the reader of its span."""
    while (opening := (yield from show_until(source, tuple(spans), Text))) is not None:
        yield from spans[opening.lstrip("\n")](source, opening)


def hide_marker(source: Source, opening: str) -> Reader[None]:
    """Read the span of a marker that stands alone."""
    yield Marker(opening)


THINK = ("<think>", "</think>")


def reasoning_span(markers: tuple[str, str]) -> SpanReader:
    """Return the reader for reasoning between an opening and a closing marker."""
    return partial(_read_span, closing=markers[1])


def read_started_reasoning(source: Source, markers: tuple[str, str]) -> Reader[None]:
    """Read reasoning whose opening marker ended the prompt. A repeated opening marker is accepted."""
    opening, closing = markers
    lead = yield from take_run(source)
    if (yield from starts_with(source, (opening,))):
        lead += source.take(len(opening))
    yield from _read_span(source, lead, closing=closing)


def show_reasoning(source: Source, stops: Sequence[str]) -> Reader[str | None]:
    """Yield reasoning up to one of `stops`. Consume and return that marker, or return None if the reply ends first."""
    stop = yield from show_until(source, stops, Reasoning)
    source.ended_in_reasoning = stop is None
    return stop


def _read_span(source: Source, opening: str, *, closing: str) -> Reader[None]:
    opening += yield from take_run(source, "\n")
    if opening:
        yield Marker(opening)
    stop = yield from show_reasoning(source, (closing,))
    if stop is not None:
        yield Marker(stop + (yield from take_run(source, "\n")))


THINKING = Parser(
    "think",
    THINK,
    lambda template: THINK[0] in template or THINK[1] in template,
    partial(read_spans, spans={THINK[0]: reasoning_span(THINK)}),
    THINK,
)
