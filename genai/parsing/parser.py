"""What a format is: its markers, how to recognise its chat template, and a reader for a whole reply."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from .events import Marker, Text
from .source import Reader, Source, show_until

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
    """

    name: str
    markers: tuple[str, ...]
    fits: Callable[[str], bool]
    read: Callable[[Source], Reader[None]]
    reasoning: tuple[str, str] | None = None

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
