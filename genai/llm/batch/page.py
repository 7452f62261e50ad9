"""The report of a batch run as one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

from ...common.atomic_files import write_whole
from ...common.html_parts import escaped, figures
from ...errors import InputError
from ..mapping import MapFigures
from .run import BatchReport, answers_table

_WIDTH, _HEIGHT, _MARGIN = 640, 160, 24
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; margin: 1em 0; }
td, th { padding: .2em .8em; text-align: left; vertical-align: top; }
tr + tr { border-top: 1px solid #8884; }
svg { max-width: 100%; }
polyline { fill: none; stroke: #36c; stroke-width: 2; } rect { fill: #36c; } text { font-size: 11px; fill: #888; }
"""


def write_page(report: BatchReport, path: Path) -> None:
    """Write a report as an HTML page. Raise InputError if the file cannot be written."""
    try:
        write_whole(path, page(report).encode("utf-8", "replace"))
    except OSError as error:
        raise InputError(f"{path}: the report cannot be written", str(error), "choose another file") from error


def page(report: BatchReport) -> str:
    """Return the page as HTML. Text from lines and replies is escaped."""
    title = escaped(f"{report.input} with {report.model}")
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>",
        f"<h1>{title}</h1>",
        figures(report.summary()),
        "<h2>Generated tokens per second</h2>",
        _curve(report.moments, lambda moment: moment.generated_tokens),
        "<h2>Prompt tokens per second</h2>",
        _curve(report.moments, lambda moment: moment.prompt_tokens),
    ]
    if report.lengths:
        parts += ["<h2>Tokens per reply</h2>", _bars(report)]
    if report.errors:
        parts += ["<h2>Failed lines</h2>", figures(report.errors.most_common()), answers_table(report.failures)]
    if report.answers:
        parts += ["<h2>First replies</h2>", answers_table(report.answers)]
    return "\n".join(parts) + "\n"


def _curve(moments: Sequence[MapFigures], count: Callable[[MapFigures], int]) -> str:
    """Return a chart of the rate over time, computed between the moments."""
    rates = [
        (later.seconds, (count(later) - count(earlier)) / (later.seconds - earlier.seconds))
        for earlier, later in pairwise([MapFigures(), *moments])
        if later.seconds > earlier.seconds
    ]
    if len(rates) < 2:
        return "<p>The run was too short for a curve.</p>"
    end, most = rates[-1][0], max(max(rate for _, rate in rates), 1e-9)
    points = " ".join(
        f"{_MARGIN + (_WIDTH - 2 * _MARGIN) * seconds / end:.1f},{_HEIGHT - _MARGIN - _room(rate, most):.1f}"
        for seconds, rate in rates
    )
    return _svg(
        f'<polyline points="{points}"/><text x="{_MARGIN}" y="12">{most:,.0f}</text>'
        f'<text x="{_WIDTH - _MARGIN}" y="{_HEIGHT - 6}" text-anchor="end">{end:,.0f} s</text>'
    )


def _bars(report: BatchReport) -> str:
    """Return a histogram of the number of tokens per reply."""
    powers = range(max(report.lengths) + 1)
    most = max(report.lengths.values())
    width = (_WIDTH - 2 * _MARGIN) / len(powers)
    bars = []
    for power in powers:
        high, left = _room(report.lengths[power], most), _MARGIN + power * width
        label = "1" if power == 0 else f"{2 ** (power - 1) + 1:,}–{2**power:,}" if power > 1 else "2"
        bars.append(
            f'<rect x="{left:.1f}" y="{_HEIGHT - _MARGIN - high:.1f}" width="{width * 0.8:.1f}" height="{high:.1f}">'
            f"<title>{report.lengths[power]:,}</title></rect>"
            f'<text x="{left + width * 0.4:.1f}" y="{_HEIGHT - 6}" text-anchor="middle">{label}</text>'
        )
    return _svg("".join(bars) + f'<text x="{_MARGIN}" y="12">{most:,}</text>')


def _room(value: float, most: float) -> float:
    return (_HEIGHT - 2 * _MARGIN) * max(value, 0.0) / most


def _svg(inside: str) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" role="img">{inside}</svg>'
