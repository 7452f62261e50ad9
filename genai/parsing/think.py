"""Reasoning between two markers: <think>…</think>, as DeepSeek-R1, Qwen3 and many others write it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from .events import Marker, Reasoning
from .parser import Parser, SpanReader, read_spans
from .source import Reader, Source, show_until, starts_with, take_run

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


def _fits(template: str) -> bool:
    return THINK[0] in template or THINK[1] in template


def _read(source: Source) -> Reader[None]:
    yield from read_spans(source, {THINK[0]: reasoning_span(THINK)})


PARSER = Parser("think", THINK, _fits, _read, THINK)
