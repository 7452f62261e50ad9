"""Bar charts of results, as text for terminals, and as SVG or PNG files drawn by matplotlib."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import InputError, OptionError
from .atomic_files import write_whole

SUFFIXES = (".svg", ".png")
_INCHES = (7.0, 4.0)


@dataclass(frozen=True)
class Chart:
    """A chart of one or more series of values by name.

    Attributes:
        title: title of the chart.
        axis: label of the names.
        names: the names, one per value of a series.
        series: values by label.
        unit: unit of the values; "%" shows shares.
        errors: half widths of the values' intervals, by label.
    """

    title: str
    axis: str
    names: Sequence[str]
    series: Mapping[str, Sequence[float]]
    unit: str = ""
    errors: Mapping[str, Sequence[float]] | None = None

    def text(self, width: int) -> str:
        """Return the chart as bars of "#", in lines of at most `width` characters."""
        first = max(map(len, self.names), default=0)
        lines = [f"{self.title}, by {self.axis}"]
        for label, values in self.series.items():
            lines += [label] if len(self.series) > 1 else []
            texts = [self._value(label, index) for index in range(len(values))]
            room = max(width - first - max(map(len, texts), default=0) - 5, 1)
            most = max([*values, 0.0]) or 1.0
            for name, value, text in zip(self.names, values, texts, strict=True):
                bar = "#" * round(room * max(value, 0.0) / most)
                lines.append(f"  {name:>{first}} {bar:<{room}} {text}"[:width].rstrip())
        return "\n".join(lines)

    def _value(self, label: str, index: int) -> str:
        value = self.series[label][index]
        number = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
        error = f" ± {self.errors[label][index]:.2g}" if self.errors else ""
        return f"{number}{error}{f' {self.unit}' if self.unit else ''}"

    def save(self, path: Path) -> None:
        """Draw the chart into a file.

        Raises:
            OptionError: if the file's name ends in neither .svg nor .png, or matplotlib is not installed.
            InputError: if the file cannot be written.
        """
        check_file(path)
        from matplotlib import rc_context
        from matplotlib.figure import Figure

        # With a fixed salt, equal charts become equal files.
        with rc_context({"svg.hashsalt": "genai", "svg.fonttype": "none"}):
            figure = Figure(figsize=_INCHES, layout="constrained")
            axes = figure.subplots()
            share = 0.8 / len(self.series)
            for position, (label, values) in enumerate(self.series.items()):
                left = [index + (position - (len(self.series) - 1) / 2) * share for index in range(len(values))]
                axes.bar(left, values, share, label=label, yerr=self.errors[label] if self.errors else None, capsize=3)
            axes.set_xticks(range(len(self.names)), self.names, rotation=30 if len(self.names) > 8 else 0)
            axes.set(title=self.title, xlabel=self.axis, ylabel=self.unit or None)
            if len(self.series) > 1:
                axes.legend()
            content = io.BytesIO()
            metadata = {"Date": None} if path.suffix == ".svg" else None
            figure.savefig(content, format=path.suffix[1:], metadata=metadata)
            try:
                write_whole(path, content.getbuffer())
            except OSError as error:
                raise InputError(f"{path}: the plot cannot be written", str(error), "choose another file") from error


def check_file(path: Path) -> None:
    """Raise OptionError if a chart cannot be drawn into a file. Call this before the long computation of the values."""
    if path.suffix not in SUFFIXES:
        raise OptionError(
            f"the plot file {path} has an unsupported extension",
            "plots are SVG or PNG files",
            "use a name that ends in .svg or .png",
        )
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise OptionError(
            f"the plot file {path} cannot be drawn",
            "plots need matplotlib, which is not installed",
            "run pip install matplotlib",
        ) from None
