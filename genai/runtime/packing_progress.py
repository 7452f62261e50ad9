"""A bar on stderr while weights are packed, where that takes longer than one wants to look at nothing."""

from __future__ import annotations

import sys
import time
from typing import TextIO

_QUIET_SECONDS = 1.0
_WIDTH = 24


class PackingProgress:
    """Counts bytes of weights; shows a bar on a terminal once a second has passed, and takes it away at the end.

    Args:
        total: bytes that will be packed.
        stream: where to; None = stderr. Nothing is written to what is no terminal.
    """

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self._total = max(total, 1)
        self._stream = sys.stderr if stream is None else stream
        self._shows = self._stream is not None and self._stream.isatty()
        self._begin = time.monotonic()
        self._packed = 0
        self._shown = -1

    def add(self, nbytes: int) -> None:
        """So many more bytes are packed."""
        self._packed += nbytes
        percent = min(100, 100 * self._packed // self._total)
        if self._shows and percent != self._shown and time.monotonic() - self._begin > _QUIET_SECONDS:
            bar = "█" * (_WIDTH * percent // 100)
            if (getattr(self._stream, "encoding", None) or "").lower().replace("-", "") != "utf8":
                bar = "#" * len(bar)
            print(f"\rPacking weights [{bar:<{_WIDTH}}] {percent:3d} %", end="", file=self._stream, flush=True)
            self._shown = percent

    def close(self) -> None:
        """Take the bar away."""
        if self._shown >= 0:
            print("\r\x1b[K", end="", file=self._stream, flush=True)
