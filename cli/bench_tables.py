"""The tables of `genai bench`, which are printed row by row."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from typing import Any

from .terminal import emit, emit_figures

# The minimum width of a column of floats, because later rows may contain longer values, such as 0.01234.
_NUMBER_WIDTH = 7


def report(result: Mapping[str, object], as_json: bool) -> None:
    """Print the names and values of a result, or its JSON."""
    rows = ((name.replace("_", " "), text_of(name, value)) for name, value in result.items())
    emit_figures(json.dumps(result) if as_json else rows)


def printed(rows: Iterable[Mapping[str, Any]], as_json: bool) -> Iterator[Mapping[str, Any]]:
    """Yield each row and print it in narrow columns. Heading words are stacked, and names appear above their rows."""
    widths: list[int] = []
    named = ""
    for row in rows:
        yield row
        if as_json:
            continue
        (first, value), *_ = row.items()
        name = value if isinstance(value, str) else ""
        cells = {key: text_of(key, value) for key, value in row.items() if not name or key != first}
        if not widths:
            heads = [key.split() for key in cells]
            for key, head in zip(cells, heads, strict=True):
                least = _NUMBER_WIDTH if isinstance(row[key], float) else 0
                widths.append(max(least, *map(len, [*head, cells[key]])))
            for words in reversed(list(zip_longest(*map(reversed, heads), fillvalue=""))):
                _emit_cells(words, widths)
        if name != named:
            emit(named := name, "\n")
        _emit_cells(cells.values(), widths)


def _emit_cells(cells: Iterable[str], widths: list[int]) -> None:
    emit("  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip(), "\n")


def text_of(name: str, value: object) -> str:
    """Return a value in the unit that its name implies."""
    if value is None:
        return "-"
    if isinstance(value, float):
        if name.endswith("share") or name.startswith("of "):
            return f"{100 * value:.1f} %"
        if name == "bandwidth":
            return f"{value / 1e9:.1f} GB/s"
        if name.endswith("operations"):
            return f"{value / 1e12:.2f} TOP/s"
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{4 if abs(value) >= 1e-3 else 2}g}"
    return str(value)
