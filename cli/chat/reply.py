"""The display of a reply in `genai chat`: plain text, or rendered Markdown."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..repetition import RepetitionWatch
from ..terminal import TextWriter, Voice, emit, generating
from ..wrapping import harmless

if TYPE_CHECKING:
    from genai.common.progress import Task
    from genai.llm.chat import ChatSession
    from genai.text.parsing import Event


def say_problem(session: ChatSession, voice: Voice) -> None:
    """Print the reason if the KV cache that was saved with a loaded conversation cannot be used."""
    if session.state_problem is not None:
        problem = session.state_problem
        voice.say(f"(the prompt must be processed again: {problem.what}; {problem.why})")


def answer(
    session: ChatSession, events: Iterator[Event], voice: Voice, *, markdown: bool, is_loop: bool = False
) -> None:
    """Print the next reply of a session; show the progress of its prefill first.

    Args:
        is_loop: True if the user can type commands after the reply.
    """
    with generating(quiet=voice.quiet, streamed=not markdown) as line:
        session.on_prompt = line.show
        params = session.params
        ends_itself = params.max_tokens is None and not params.ignore_eos
        advice = "type /set repeat-penalty 1.1" if is_loop else "use --repeat-penalty 1.1"
        watch = RepetitionWatch(voice, session.cancel if ends_itself else None, advice)
        show_reply(_watched(watch, _without(line, events)), voice, markdown=markdown)


def _watched(watch: RepetitionWatch, events: Iterator[Event]) -> Iterator[Event]:
    """Yield the events; the texts pass through the watch."""
    for event in events:
        yield event
        watch.feed(event.raw)


def _without(line: Task, events: Iterator[Event]) -> Iterator[Event]:
    """Yield the events; the first event ends the task of the prompt."""
    for event in events:
        line.close()
        yield event


def show_reply(events: Iterator[Event], voice: Voice, *, markdown: bool) -> None:
    """Print the events of a reply. After the first event, stdout ends with a newline even if an error follows."""
    from genai.text.parsing import End, Reasoning, Text, ToolCall

    writer = _MarkdownWriter() if markdown else TextWriter()
    thinking = answering = False
    try:
        for event in events:
            answering = True
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
        if answering:
            writer.end()


class _MarkdownWriter:
    """A writer that renders Markdown block by block; a block ends at an empty line outside a code fence."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(soft_wrap=False)
        self._held = ""

    def write(self, text: str) -> None:
        self._held += harmless(text, sys.stdout)
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
    """Return the end of the first block of a text; None if the block may continue."""
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
