"""Simple plots as SVG text: bars by name, and points on two axes, of which the y axis is logarithmic."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH = 860
_COLOURS = ("#c0392b", "#2c6fad", "#7f8c8d", "#27864f", "#8e5ba6")


@dataclass(frozen=True)
class Bars:
    """A chart of values by name, with one bar below another; a line marks the value `mark`."""

    title: str
    values: Sequence[tuple[str, float]]
    mark: float | None = None

    def svg(self) -> str:
        """Return the plot as SVG."""
        step, left, right = 18, 340, 90
        height = 30 + step * len(self.values)
        most = max([value for _, value in self.values if math.isfinite(value)], default=0) or 1.0
        most = max(most, self.mark or 0.0)
        lines = [_text(0, 16, self.title, bold=True)]
        for index, (name, value) in enumerate(self.values):
            top = 26 + index * step
            width = (_WIDTH - left - right) * max(value, 0) / most if math.isfinite(value) else 0
            lines.append(_text(left - 6, top + 13, name, anchor="end"))
            lines.append(
                f'<rect x="{left}" y="{top + 2}" width="{width:.1f}" height="{step - 5}" fill="{_COLOURS[1]}"/>'
            )
            lines.append(_text(left + width + 5, top + 13, f"{value:.4g}"))
        if self.mark is not None:
            x = left + (_WIDTH - left - right) * self.mark / most
            lines.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="24" y2="{height}" stroke="#222" stroke-dasharray="3"/>')
        return _framed(height, lines)


# Assumed width of a label's character, and the radius of a point, in pixels.
_CHARACTER, _MARK = 7, 4
# The left edge of the plots' area.
_LEFT = 80


@dataclass(frozen=True)
class Series:
    """Points (x, y, label) of one colour; "" = no label. If `line`, a line joins the points, without labels."""

    label: str
    points: Sequence[tuple[float, float, str]]
    line: bool = False


@dataclass(frozen=True)
class Scatter:
    """A plot of points with a logarithmic y axis. Points whose y is 0 or negative are skipped."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]

    def svg(self) -> str:
        """Return the plot as SVG."""
        height, left, bottom, top, right = 420, _LEFT, 370, 48, 200
        every = [(x, y) for series in self.series for x, y, _ in series.points if y > 0 and math.isfinite(y)]
        lines = [_text(0, 16, self.title, bold=True)]
        if not every:
            return _framed(40, [*lines, _text(0, 34, "no values above 0")])
        x_low, x_high = min(x for x, _ in every), max(x for x, _ in every)
        pad = (x_high - x_low) * 0.05 or 0.5
        x_low, x_high = x_low - pad, x_high + pad
        y_low = math.floor(math.log10(min(y for _, y in every)))
        y_high = math.ceil(math.log10(max(y for _, y in every)) + 1e-9)

        def to_pixels(x: float, y: float) -> tuple[float, float]:
            across = left + (x - x_low) / (x_high - x_low) * (_WIDTH - left - right)
            return across, bottom - (math.log10(y) - y_low) / max(y_high - y_low, 1) * (bottom - top)

        for power in range(y_low, y_high + 1):
            _, y = to_pixels(x_low, 10.0**power)
            lines.append(f'<line x1="{left}" x2="{_WIDTH - right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
            lines.append(_text(left - 8, y + 4, f"{10.0**power:g}", anchor="end"))
        for tick in range(math.ceil(x_low * 2), math.floor(x_high * 2) + 1):
            x, _ = to_pixels(tick / 2, 10.0**y_low)
            lines.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 5}" stroke="#222"/>')
            lines.append(_text(x, bottom + 18, f"{tick / 2:g}", anchor="middle"))
        lines.append(_text((left + _WIDTH - right) / 2, height - 12, self.x_label, anchor="middle"))
        lines.append(_text(0, top - 10, self.y_label))
        taken = [(px - _MARK, py - _MARK, px + _MARK, py + _MARK) for px, py in (to_pixels(x, y) for x, y in every)]
        for index, series in enumerate(self.series):
            colour, at = _COLOURS[index % len(_COLOURS)], top + 18 * index
            lines += _drawn(series, colour, to_pixels, taken)
            lines.append(_mark(_WIDTH - right + 22, at, colour, line=series.line))
            lines.append(_text(_WIDTH - right + 40, at + 4, series.label))
        return _framed(height, lines)


# A rectangle: left, top, right, bottom.
Box = tuple[float, float, float, float]


def _mark(x: float, y: float, colour: str, *, line: bool) -> str:
    """Return the mark of a series in the legend."""
    if line:
        return f'<line x1="{x - 12}" x2="{x + 12}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="1.5"/>'
    return f'<circle cx="{x}" cy="{y}" r="{_MARK}" fill="{colour}"/>'


def _drawn(
    series: Series, colour: str, to_pixels: Callable[[float, float], tuple[float, float]], taken: list[Box]
) -> list[str]:
    """Draw one series. `taken` holds the boxes of all points and labels; this function appends its own labels."""
    points = [(*to_pixels(x, y), label) for x, y, label in series.points if y > 0 and math.isfinite(y)]
    if series.line:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
        return [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>']
    lines = []
    for x, y, label in points:
        lines.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{_MARK}" fill="{colour}"><title>{escape(label)}</title></circle>'
        )
        if label:
            lines += _labelled(x, y, label, taken)
    return lines


def _labelled(x: float, y: float, label: str, taken: list[Box]) -> list[str]:
    """Return a label at the nearest free place beside its point; a line connects a distant label with its point."""
    width = _CHARACTER * len(label)
    # Pairs of the label's left edge and middle line: beside, below and above the point, and then farther away.
    adjacent = [(x + 8, y), (x - 8 - width, y), (x - width / 2, y - 13), (x - width / 2, y + 13)]
    distant = [
        (x + side, y + sign * step) for step in range(16, 200, 13) for side in (16, -16 - width) for sign in (1, -1)
    ]
    for left, middle in (*adjacent, *distant):
        box = left, middle - 6, left + width, middle + 6
        if box[0] >= _LEFT and box[2] <= _WIDTH and not any(_overlap(box, other) for other in taken):
            break
    else:
        left, middle = adjacent[0]
        box = left, middle - 6, left + width, middle + 6
    taken.append(box)
    # The real width of the text is not known, so the text is anchored at the side of its point.
    anchors = {adjacent[2]: "middle", adjacent[3]: "middle"}
    anchor = anchors.get((left, middle), "start" if left > x else "end")
    at = {"start": left, "middle": x, "end": left + width}[anchor]
    text = _text(at, middle + 4, label, anchor=anchor, halo=True)
    if (left, middle) in adjacent:
        return [text]
    end = at - 2 if anchor == "start" else at + 2
    return [f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{end:.1f}" y2="{middle:.1f}" stroke="#999"/>', text]


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _text(x: float, y: float, text: str, *, anchor: str = "start", bold: bool = False, halo: bool = False) -> str:
    """Return a text; with `halo`, it has a white outline, so that lines that cross it do not hide it."""
    place, shown = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"', escape(text)
    if halo:
        return f'<text {place} fill="#222" stroke="#fff" stroke-width="3" paint-order="stroke">{shown}</text>'
    weight = 600 if bold else 400
    return f'<text {place} fill="#222" font-weight="{weight}">{shown}</text>'


def _framed(height: int, lines: Sequence[str]) -> str:
    inside = "\n".join(lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="12">\n{inside}\n</svg>'
    )
