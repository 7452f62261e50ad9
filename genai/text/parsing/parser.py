"""What a format of replies is, and reasoning between two markers, which most formats have."""

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
        name: its name in the registry.
        markers: the strings it looks for. Where the tokenizer calls one a special token, the caller must stream with
            that token shown (skip_special_tokens=False, or kept), or the parser never sees it.
        fits: whether a chat template teaches this format.
        read: reads a reply to its end.
        reasoning: opening and closing marker of a reasoning span that the prompt may already open, or None.
        calls: how calls of tools are written, by the chat template; None where there are none.
    """

    name: str
    markers: tuple[str, ...]
    fits: Callable[[str], bool]
    read: Callable[[Source], Reader[None]]
    reasoning: tuple[str, str] | None = None
    calls: Callable[[str], CallFormat] | None = None

    def starts_in_reasoning(self, prompt: str) -> bool:
        """Whether the rendered prompt ends in an opened reasoning span, which the reply then continues."""
        return self.reasoning is not None and prompt.rstrip().endswith(self.reasoning[0])


def read_spans(source: Source, spans: Mapping[str, SpanReader]) -> Reader[None]:
    """Read a reply in which each opening marker hands over to the reader of its span; all else is text."""
    while (opening := (yield from show_until(source, tuple(spans), Text))) is not None:
        yield from spans[opening.lstrip("\n")](source, opening)


def hide_marker(source: Source, opening: str) -> Reader[None]:
    """The span of a marker that stands alone."""
    yield Marker(opening)


THINK = ("<think>", "</think>")


def reasoning_span(markers: tuple[str, str]) -> SpanReader:
    """The reader for reasoning between an opening and a closing marker."""
    return partial(_read_span, closing=markers[1])


def read_started_reasoning(source: Source, markers: tuple[str, str]) -> Reader[None]:
    """Read reasoning whose opening marker ended the prompt. A model that repeats the marker is forgiven."""
    opening, closing = markers
    lead = yield from take_run(source)
    if (yield from starts_with(source, (opening,))):
        lead += source.take(len(opening))
    yield from _read_span(source, lead, closing=closing)


def show_reasoning(source: Source, stops: Sequence[str]) -> Reader[str | None]:
    """Yield reasoning up to one of `stops`, which is read and returned; None when the reply ends before."""
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
