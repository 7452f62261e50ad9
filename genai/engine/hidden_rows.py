"""Hidden states of consecutive tokens of a sequence, which an MTP head reads."""

from __future__ import annotations

from typing import Self

import numpy as np

from .sequence import Logits

# The maximum number of rows that a sequence stores for its head. Rows of 4,096 numbers then take 32 MB.
MOST_ROWS = 2048


class HiddenRows:
    """The hidden states of the tokens `first` to `end` - 1 of a sequence, one row per token.

    Args:
        most: maximum number of rows; the first rows are dropped when there are more.

    Attributes:
        first, end: see above.
    """

    def __init__(self, most: int = MOST_ROWS) -> None:
        self._most = most
        self._parts: list[Logits] = []
        self.first = self.end = 0

    def put(self, index: int, rows: Logits) -> None:
        """Store the rows of the tokens from `index`, in place of all later rows. After a gap, drop all earlier rows."""
        if not self.first <= index <= self.end:
            self._parts, self.first, self.end = [], index, index
        self._cut(index)
        self._parts.append(np.array(rows, np.float32))
        self.end += len(rows)
        self.drop(self.end - self._most)

    def take(self, start: int, end: int) -> Logits:
        """Return the rows of the tokens from `start` to `end` - 1, which must be stored: float32 [rows, columns]."""
        found, index = [], self.first
        for part in self._parts:
            if index < end and start < index + len(part):
                found.append(part[max(start - index, 0) : end - index])
            index += len(part)
        return found[0] if len(found) == 1 else np.concatenate(found)

    def drop(self, start: int) -> None:
        """Drop the rows of the tokens before `start`."""
        while self._parts and self.first + len(self._parts[0]) <= start:
            self.first += len(self._parts.pop(0))
        if self._parts and self.first < start:
            self._parts[0] = self._parts[0][start - self.first :].copy()
            self.first = start

    def copy(self) -> Self:
        """Return a copy for a fork of the sequence. The two share the rows, which never change."""
        other = type(self)(self._most)
        other._parts, other.first, other.end = [*self._parts], self.first, self.end
        return other

    def _cut(self, end: int) -> None:
        """Drop the rows of the tokens from `end`."""
        while self._parts and self.end > end:
            start = self.end - len(self._parts[-1])
            last = self._parts.pop()[: max(end - start, 0)]
            if len(last):
                self._parts.append(last)
            self.end = start + len(last)
