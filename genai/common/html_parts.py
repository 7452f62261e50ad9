"""Parts of HTML pages and of results in notebooks. All texts are escaped, because replies are untrusted."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

# Control characters except tabs and newlines, and marks that change the direction of the text that follows.
_STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
# Text that a model wrote keeps its spaces and line ends, and its direction does not affect what is around it.
_TEXT = "white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:isolate"
_CELL = f"text-align:left;vertical-align:top;{_TEXT}"


def escaped(text: object) -> str:
    """Return a text as HTML; control characters become visible."""
    return escape(_STEERING.sub(lambda found: ascii(found[0])[1:-1], str(text)))


def passage(text: str) -> str:
    """Return a text that a model or a user wrote, with its line ends."""
    return f'<div style="{_TEXT}">{escaped(text)}</div>'


def folded(summary: str, inside: str) -> str:
    """Return HTML `inside` that a click on the summary shows."""
    return f"<details><summary>{escaped(summary)}</summary>{inside}</details>"


def note(parts: Iterable[str]) -> str:
    """Return a line of small text with several parts."""
    return f"<div><small>{escaped(' · '.join(parts))}</small></div>"


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table with a heading."""
    lines = [f"<tr>{''.join(_cell('th', head) for head in heads)}</tr>"]
    lines += [f"<tr>{''.join(_cell('td', value) for value in row)}</tr>" for row in rows]
    return "<table>" + "\n".join(lines) + "</table>"


def figures(rows: Iterable[tuple[object, object]]) -> str:
    """Return a table of names and values."""
    lines = (f"<tr>{_cell('th', name)}{_cell('td', value)}</tr>" for name, value in rows)
    return "<table>" + "\n".join(lines) + "</table>"


def _cell(tag: str, value: object) -> str:
    return f'<{tag} style="{_CELL}">{escaped(value)}</{tag}>'
