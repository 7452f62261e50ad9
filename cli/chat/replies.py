"""Shows a reply while it is generated: the answer on stdout, what the model thinks on stderr."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..terminal import Voice, emit

if TYPE_CHECKING:
    from genai.parsing import Event


def show_reply(events: Iterator[Event], voice: Voice, *, markdown: bool) -> None:
    """Print the events of a reply; stdout ends with a newline whatever happens."""
    from genai.parsing import End, Reasoning, Text, ToolCall

    writer = _MarkdownWriter() if markdown else _PlainWriter()
    thinking = False
    try:
        for event in events:
            if isinstance(event, Reasoning):
                voice.aside(event.text)
                thinking = True
                continue
            if thinking and isinstance(event, Text | ToolCall | End):
                voice.aside("\n")
                thinking = False
            if isinstance(event, Text):
                writer.write(event.text)
            elif isinstance(event, ToolCall):
                writer.write(f"[calls {event.name}({event.arguments_text})]\n")
    finally:
        writer.end()


class _PlainWriter:
    """Pieces as they come."""

    def write(self, text: str) -> None:
        emit(text)

    def end(self) -> None:
        emit("\n")


class _MarkdownWriter:
    """Markdown, rendered block by block: a block ends at an empty line outside of a code fence."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(soft_wrap=False)
        self._held = ""

    def write(self, text: str) -> None:
        self._held += text
        while (end := _block_end(self._held)) is not None:
            self._render(self._held[:end])
            self._held = self._held[end:]

    def end(self) -> None:
        self._render(self._held)
        self._held = ""

    def _render(self, block: str) -> None:
        from rich.markdown import Markdown

        if block.strip():
            with self._console.capture() as capture:
                self._console.print(Markdown(block.strip("\n")))
            emit(capture.get() + "\n")


def _block_end(text: str) -> int | None:
    """Where the first block of a text ends; None while it may go on."""
    inside_code = False
    position = 0
    for line in text.splitlines(keepends=True):
        if not line.endswith("\n"):
            return None
        position += len(line)
        if line.lstrip().startswith(("```", "~~~")):
            inside_code = not inside_code
            if not inside_code:
                return position
        elif not line.strip() and not inside_code and text[:position].strip():
            return position
    return None
