"""Text at the width of a terminal: words stay whole. What goes anywhere else stays as it is."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Sequence
from typing import TextIO

from genai.errors import whole_number

# What a poor locale cannot show.
_PLAIN = str.maketrans({"·": "-", "…": "...", "±": "+-", "×": "x", "–": "-", "“": '"', "”": '"'})
# Between words and spaces, behind a line's end, and beside what needs no spaces, such as Chinese.
_BOUNDARY = re.compile(r"(?<=\s)(?=\S)|(?<=\S)(?=\s)|(?<=\n)|(?<=[\u2e80-\uffef])|(?=[\u2e80-\uffef])")
_LONGEST_WORD = 60
# Control characters but for tabs and line ends, and marks that turn the direction of what follows.
_STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def width_of(stream: TextIO | None) -> int | None:
    """Columns of a terminal; None for what is none."""
    try:
        if stream is None or not stream.isatty():
            return None
        columns = whole_number(os.environ.get("COLUMNS", ""))
        return columns or os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):  # closed, or nothing that the system knows
        return None


def is_plain(stream: TextIO) -> bool:
    """Whether colours and dimmed text are unwelcome."""
    return not stream.isatty() or bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"


def wrapped(text: str, width: int | None, hanging: int = 0) -> str:
    """Every line cut into lines of whole words, which begin where the first does, or `hanging` columns further.

    A word that is longer than a line stays in one piece.
    """
    if width is None:
        return text
    lines = []
    for line in text.splitlines():
        indent = re.match(r"\s*", line)[0]  # type: ignore[index]  # it matches always
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
    """Names and what is said of them, in two columns; below each other where that needs a wider window."""
    first = max(len(name) for name, _ in rows)
    return "\n".join(_row(name, text, first, width) for name, text in rows)


def _row(name: str, text: str, first: int, width: int | None) -> str:
    longest = max(map(len, text.split()), default=0)
    if width is not None and max(first + 2 + longest, 2 * first) >= width:
        return f"{name}\n{wrapped(f'    {text}', width)}"
    below = "\n" + " " * (first + 2)
    return f"{name:<{first}}  {wrapped(text, width and width - first - 2).replace(chr(10), below)}"


def harmless(text: str, stream: TextIO) -> str:
    """Text of a model, a file or a function, for a terminal: what would steer that is shown as an escape.

    Somebody else may have written it, and a terminal obeys: it clears the screen, changes its title, turns lines
    around. What goes anywhere else stays as it is.
    """
    return _STEERING.sub(lambda found: ascii(found[0])[1:-1], text) if width_of(stream) is not None else text


def shown_on(text: str, stream: TextIO) -> str:
    """Text as a stream can write it: signs that its encoding lacks in plain letters."""
    text = harmless(text, stream)
    encoding = getattr(stream, "encoding", None) or "ascii"
    try:
        text.encode(encoding)
        return text
    except UnicodeEncodeError:
        return text.translate(_PLAIN)


def printable(text: str, encoding: str | None = None) -> str:
    """Text that stdout can write: what its encoding lacks is shown as an escape, and control characters too."""
    visible = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    encoding = encoding or sys.stdout.encoding or "ascii"
    return visible.encode(encoding, "backslashreplace").decode(encoding)


def shortened(text: str, most: int = 60) -> str:
    """The beginning of a text, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"


class WordWrap:
    """Text that comes in pieces, for a terminal: a word that does not fit goes to the next line as a whole.

    Args:
        stream: its width may change meanwhile.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._column, self._held = 0, ""

    def feed(self, text: str) -> str:
        """What can be written now; the beginning of a word is held back."""
        self._held += text
        *whole, self._held = _BOUNDARY.split(self._held)
        return "".join(map(self._placed, whole)) + (self.flush() if len(self._held) > _LONGEST_WORD else "")

    def flush(self) -> str:
        """What is still held back."""
        held, self._held = self._held, ""
        return self._placed(held)

    def _placed(self, part: str) -> str:
        """A word, or the space between two, behind what was written."""
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
            self._column = width  # the next word begins a line, and takes the space's place
            return ""
        self._column = width_of_part % width
        return f"\n{part}"
