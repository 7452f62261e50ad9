"""How reports for people are laid out: aligned, without colours, and readable in any locale."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def printable(text: str, encoding: str | None = None) -> str:
    """Text that stdout can write: what its encoding lacks is shown as an escape, and control characters too."""
    visible = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    encoding = encoding or sys.stdout.encoding or "ascii"
    return visible.encode(encoding, "backslashreplace").decode(encoding)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as lines; every column but the last is as wide as its widest cell."""
    widths = [max(len(row[column]) for row in rows) for column in range(min(map(len, rows)) - 1)]
    return "\n".join(
        "  ".join([cell.ljust(width) for cell, width in zip(row, widths, strict=False)] + list(row[len(widths) :]))
        for row in rows
    )
