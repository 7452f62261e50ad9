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
    """A chart of values by name, with one bar below another."""

    title: str
    values: Sequence[tuple[str, float]]

    def svg(self) -> str:
        """Return the plot as SVG."""
        step, left, right = 18, 340, 90
        height = 30 + step * len(self.values)
        most = max([value for _, value in self.values if math.isfinite(value)], default=0) or 1.0
        lines = [_text(0, 16, self.title, bold=True)]
        for index, (name, value) in enumerate(self.values):
            top = 26 + index * step
            width = (_WIDTH - left - right) * max(value, 0) / most if math.isfinite(value) else 0
            lines.append(_text(left - 6, top + 13, name, anchor="end"))
            lines.append(
                f'<rect x="{left}" y="{top + 2}" width="{width:.1f}" height="{step - 5}" fill="{_COLOURS[1]}"/>'
            )
            lines.append(_text(left + width + 5, top + 13, f"{value:.4g}"))
        return _framed(height, lines)


# Assumed width of a label's character, in pixels.
_CHARACTER = 7


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
        height, left, bottom, top, right = 420, 80, 370, 48, 200
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
            lines.append(_text(left - 8, y + 4, f"1e{power}", anchor="end"))
        for tick in range(math.ceil(x_low * 2), math.floor(x_high * 2) + 1):
            x, _ = to_pixels(tick / 2, 10.0**y_low)
            lines.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 5}" stroke="#222"/>')
            lines.append(_text(x, bottom + 18, f"{tick / 2:g}", anchor="middle"))
        lines.append(_text((left + _WIDTH - right) / 2, height - 12, self.x_label, anchor="middle"))
        lines.append(_text(0, top - 10, self.y_label))
        used: list[tuple[float, float, float]] = []
        for index, series in enumerate(self.series):
            lines += self._drawn(series, _COLOURS[index % len(_COLOURS)], to_pixels, used)
            lines.append(
                _text(_WIDTH - right + 12, top + 16 * index + 4, series.label, colour=_COLOURS[index % len(_COLOURS)])
            )
        return _framed(height, lines)

    def _drawn(
        self, series: Series, colour: str, to_pixels: Callable[[float, float], tuple[float, float]],
        used: list[tuple[float, float, float]],
    ) -> list[str]:  # fmt: skip
        """Draw one series. `used` holds the positions of labels (left, right, y); this method appends its own."""
        points = [(*to_pixels(x, y), label) for x, y, label in series.points if y > 0 and math.isfinite(y)]
        if series.line:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
            return [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>']
        lines = []
        for x, y, label in points:
            lines.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"><title>{escape(label)}</title></circle>'
            )
            if not label:
                continue
            right = x + 7 + _CHARACTER * len(label)
            offsets = (-5.0, 14.0, -18.0, 27.0, -31.0)
            free = [
                y + dy for dy in offsets if not any(a < right and x < b and abs(y + dy - c) < 12 for a, b, c in used)
            ]
            height = free[0] if free else y + offsets[0]
            used.append((x + 7, right, height))
            lines.append(_text(x + 7, height, label))
        return lines


def _text(x: float, y: float, text: str, *, anchor: str = "start", bold: bool = False, colour: str = "#222") -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"{weight}>{escape(text)}</text>'


def _framed(height: int, lines: Sequence[str]) -> str:
    inside = "\n".join(lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="12">\n{inside}\n</svg>'
    )
