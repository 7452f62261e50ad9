"""Text wrapped at the width of a terminal, without breaking words. Output to other streams is unchanged."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Sequence
from typing import TextIO

from genai.errors import whole_number

# Replacements for characters that some encodings lack.
_PLAIN = str.maketrans({"·": "-", "…": "...", "±": "+-", "×": "x", "–": "-", "“": '"', "”": '"'})
# Between words and spaces, after a line's end, and around characters written without spaces, such as Chinese.
_BOUNDARY = re.compile(r"(?<=\s)(?=\S)|(?<=\S)(?=\s)|(?<=\n)|(?<=[\u2e80-\uffef])|(?=[\u2e80-\uffef])")
_LONGEST_WORD = 60
# Control characters except tabs and newlines, and marks that change the direction of the text that follows.
_STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def width_of(stream: TextIO | None) -> int | None:
    """Return the width of a terminal in columns; None if the stream is not a terminal."""
    try:
        if stream is None or not stream.isatty():
            return None
        columns = whole_number(os.environ.get("COLUMNS", ""))
        return columns or os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):  # closed, or without a file descriptor
        return None


def is_plain(stream: TextIO) -> bool:
    """Return True if colours and dimmed text must not be used."""
    return not stream.isatty() or bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"


def wrapped(text: str, width: int | None, hanging: int = 0) -> str:
    """Wrap every line at word boundaries. Continuation lines are indented like the line, plus `hanging` columns.

    A word longer than a line is not broken.
    """
    if width is None:
        return text
    lines = []
    for line in text.splitlines():
        indent = re.match(r"\s*", line)[0]  # type: ignore[index]  # the pattern always matches
        later = indent + " " * hanging
        if len(later) > width - 20:
            later = indent
        lines += textwrap.wrap(
            line,
            max(width - 1, 10),
            subsequent_indent=later,
            break_long_words=False,
            break_on_hyphens=False,
            drop_whitespace=True,
        ) or [""]
    return "\n".join(lines)


def table(rows: Sequence[tuple[str, str]], width: int | None) -> str:
    """Format names and values in two columns, or each value below its name if the window is too narrow."""
    first = max(len(name) for name, _ in rows)
    return "\n".join(_row(name, text, first, width) for name, text in rows)


def _row(name: str, text: str, first: int, width: int | None) -> str:
    longest = max(map(len, text.split()), default=0)
    if width is not None and max(first + 2 + longest, 2 * first) >= width:
        return f"{name}\n{wrapped(f'    {text}', width)}"
    below = "\n" + " " * (first + 2)
    return f"{name:<{first}}  {wrapped(text, width and width - first - 2).replace(chr(10), below)}"


def harmless(text: str, stream: TextIO) -> str:
    """Escape control sequences in text from a model, a file or a function before the text reaches a terminal.

    The text may be untrusted, and a terminal would execute its sequences, which can clear the screen, change the title
    or reverse lines. Text for any other stream is unchanged.
    """
    return _STEERING.sub(lambda found: ascii(found[0])[1:-1], text) if width_of(stream) is not None else text


def shown_on(text: str, stream: TextIO) -> str:
    """Return text in a form that a stream can encode; characters that its encoding lacks get plain replacements."""
    text = harmless(text, stream)
    encoding = getattr(stream, "encoding", None) or "ascii"
    try:
        text.encode(encoding)
        return text
    except UnicodeEncodeError:
        return text.translate(_PLAIN)


def printable(text: str, encoding: str | None = None) -> str:
    """Return text that stdout can encode. Control characters and characters that the encoding lacks are escaped."""
    visible = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    encoding = encoding or sys.stdout.encoding or "ascii"
    return visible.encode(encoding, "backslashreplace").decode(encoding)


def shortened(text: str, most: int = 60) -> str:
    """Return the beginning of a string on one line."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"


class WordWrap:
    """Streamed text for a terminal: a word that does not fit moves to the next line as a whole.

    Args:
        stream: the terminal. Its width may change during the stream.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._column, self._held = 0, ""

    def feed(self, text: str) -> str:
        """Add text, and return the text that can be written now; the beginning of an unfinished word is held back."""
        self._held += text
        *whole, self._held = _BOUNDARY.split(self._held)
        return "".join(map(self._placed, whole)) + (self.flush() if len(self._held) > _LONGEST_WORD else "")

    def flush(self) -> str:
        """Return the text that is still held back."""
        held, self._held = self._held, ""
        return self._placed(held)

    def _placed(self, part: str) -> str:
        """Place a word, or the space between two words, after the text written so far."""
        from prompt_toolkit.utils import get_cwidth

        if "\n" in part:
            self._column = get_cwidth(part.rsplit("\n", 1)[1])
            return part
        width = width_of(self._stream)
        width_of_part = get_cwidth(part.expandtabs())
        if width is None or not self._column or self._column + width_of_part < width:
            self._column = (self._column + width_of_part) % (width or sys.maxsize)
            return part
        if part.isspace():
            self._column = width  # the next word begins a line and replaces the space
            return ""
        self._column = width_of_part % width
        return f"\n{part}"
