"""Detection of replies that only repeat themselves.

The last N characters of a text only repeat themselves if at most N / 16 of the parts of 48 characters that end at each
of them are different: on average, each part then occurs 16 times. A text with a period of at most N / 16 characters is
such a text, and so is a text that repeats a few phrases in changing order.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable

from .terminal import Voice
from .wrapping import harmless, shortened

# Characters that must repeat before a note is printed on a terminal, and before a reply in a pipe is stopped. Rulers of
# tables and rows of zeros in code are shorter.
NOTED, STOPPED = 2000, 4000
_LEAST_REPEATS = 16
# Shorter parts would also find tables with few different cells: of 48 characters, several cells are part.
_PART = 48


class RepetitionCounter:
    """Counts the different parts in the last characters of a text. The cost per character is constant.

    Args:
        size: number of characters that are compared.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._tail = ""
        self._parts: deque[str] = deque()
        self._counts: dict[str, int] = {}

    def feed(self, text: str) -> None:
        """Add text."""
        for character in text:
            self._tail = self._tail[1 - _PART :] + character
            self._parts.append(self._tail)
            self._counts[self._tail] = self._counts.get(self._tail, 0) + 1
            if len(self._parts) > self._size:
                oldest = self._parts.popleft()
                self._counts[oldest] -= 1
                if not self._counts[oldest]:
                    del self._counts[oldest]

    @property
    def repeats(self) -> bool:
        """True if the last characters only repeat themselves."""
        return len(self._parts) == self._size and len(self._counts) * _LEAST_REPEATS <= self._size


class RepetitionWatch:
    """Points out once that a reply only repeats itself, and stops it if nobody sees it on a terminal.

    Args:
        voice: writer of the note.
        stop: function that ends the reply; None = never stop it, because the user set its length.
        advice: the option that avoids repetitions, in the form that the user can type.
    """

    def __init__(self, voice: Voice, stop: Callable[[], object] | None, advice: str) -> None:
        self._voice, self._stop, self._advice = voice, stop, advice
        self._is_on_terminal = sys.stdout.isatty()
        self._limit = NOTED if stop is None or self._is_on_terminal else STOPPED
        self._counter = RepetitionCounter(self._limit)
        self._text = ""
        self._is_over = False

    def feed(self, text: str) -> None:
        """Add a piece of the reply."""
        if self._is_over:
            return
        self._counter.feed(text)
        self._text = (self._text + text)[-_PART:]
        if self._counter.repeats:
            self._is_over = True
            self._point_out(shortened(harmless(self._text, sys.stderr).strip() or "white space", _PART))

    def _point_out(self, part: str) -> None:
        if self._stop is not None and not self._is_on_terminal:
            self._stop()
            self._voice.say(
                f"(the reply was stopped, because its last {self._limit:,} characters only repeat text such as "
                f"{part!r}; to avoid this, {self._advice}; for the whole reply, set its length with --max-tokens)"
            )
            return
        line_end = "\n" if self._is_on_terminal else ""
        self._voice.say(
            f"{line_end}(the reply only repeats text such as {part!r}; to stop it, press Ctrl-C; to avoid this, "
            f"{self._advice})"
        )
