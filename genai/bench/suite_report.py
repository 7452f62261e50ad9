"""The result of `genai bench session --suite` as JSON, tables and an HTML page, and beside a former result."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import __version__
from ..common import html_parts
from ..common.atomic_files import write_whole
from ..common.reading import json_object, read_text_file
from ..common.svg import Bars
from ..common.to_json import to_json
from ..doctor.processor import read_processor
from ..errors import InputError, OptionError
from ..quantize.report import html_page
from ..session.arrays import peer_module
from .suite import CLASSES

SUFFIXES = (".json", ".md", ".html")
RATIOS = {"run_ratio": "run", "create_ratio": "create", "memory_ratio": "memory"}
# A ratio that grew by more than this factor is a regression.
TOLERANCE = 1.05
_HEADS = (
    "model", "class", "threads", "run: toolkit, ms (spread)", "onnxruntime, ms (spread)", "run ratio",
    "create: toolkit, ms", "onnxruntime, ms", "create ratio", "first session: toolkit, ms", "onnxruntime, ms",
    "peak: toolkit, MB", "onnxruntime, MB", "memory ratio", "difference",
)  # fmt: skip


@dataclass(frozen=True)
class SuiteResult:
    """A comparison of models with onnxruntime.

    Attributes:
        cpu: True if the times are CPU times of one thread.
        rows: the rows that bench_suite yields.
        processor: name of the processor.
        version, onnxruntime: versions of the two runtimes.
        date: the time of the measurement in UTC.
        interrupted: True if models are missing because the measurement was interrupted.
    """

    cpu: bool
    rows: Sequence[Mapping[str, Any]]
    processor: str = field(default_factory=lambda: read_processor().name)
    version: str = __version__
    onnxruntime: str = field(default_factory=lambda: str(peer_module().__version__))
    date: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M", time.gmtime()))
    interrupted: bool = False

    @property
    def measured(self) -> list[Mapping[str, Any]]:
        """The rows without an error."""
        return [row for row in self.rows if "error" not in row]

    @property
    def failed(self) -> list[Mapping[str, Any]]:
        """The rows of models that could not be measured."""
        return [row for row in self.rows if "error" in row]

    def means(self) -> list[dict[str, Any]]:
        """Return the geometric means of the ratios, for each class and number of threads, and for all classes."""
        found = []
        for kind in (*CLASSES, "all"):
            for threads in sorted({row["threads"] for row in self.measured}):
                rows = [row for row in self.measured if row["threads"] == threads and kind in (row["class"], "all")]
                if rows:
                    means = {ratio: _mean([row[ratio] for row in rows]) for ratio in RATIOS}
                    found.append({"class": kind, "threads": threads, "models": len(rows), **means})
        return found

    def to_json(self) -> str:
        """Return the result as JSON, with the means."""
        return to_json(self, {"means": self.means()}, indent=1) + "\n"

    def markdown(self) -> str:
        """Return the result as Markdown tables."""
        tables = [_MEAN_HEADS, ["---"] * len(_MEAN_HEADS), *_mean_rows(self)]
        lines = [*self._figures(), "", *_lines(tables)]
        lines += ["", *_lines([_HEADS, ["---"] * len(_HEADS), *map(_cells, self.measured)])]
        lines += ["", *(f"- {_name(row)}: {row['error']}" for row in self.failed)] if self.failed else []
        return "\n".join(lines) + "\n"

    def page(self) -> str:
        """Return the result as an HTML page with plots, without scripts or external resources."""
        plots = [
            Bars(
                f"{title}, {_threads(threads)}: toolkit / onnxruntime",
                [(row["model"], row[ratio]) for row in self.measured if row["threads"] == threads and row[ratio]],
                mark=1.0,
            ).svg()
            for ratio, title in (("run_ratio", "Run"), ("create_ratio", "Create"), ("memory_ratio", "Peak memory"))
            for threads in sorted({row["threads"] for row in self.measured})
        ]
        failed = html_parts.figures((_name(row), row["error"]) for row in self.failed)
        body = [
            *(f"<p>{html_parts.escaped(line)}</p>" for line in self._figures()),
            html_parts.table(_MEAN_HEADS, _mean_rows(self)),
            *plots,
            *(_table_of(columns, self.measured) for columns in _PAGE_COLUMNS),
            *(["<h2>Models that could not be measured</h2>", failed] if self.failed else []),
        ]
        return html_page("Sessions beside onnxruntime", "\n".join(body))

    def _figures(self) -> list[str]:
        times = "CPU times of one thread; ratios of minima" if self.cpu else "elapsed times; ratios of medians"
        lines = [f"genai {self.version}, onnxruntime {self.onnxruntime}, {self.processor}, {self.date} UTC, {times}."]
        return lines + (["The measurement was interrupted."] if self.interrupted else [])

    def write(self, path: Path) -> None:
        """Write the result as the file's suffix says. Raises InputError if the file cannot be written."""
        text = {".json": self.to_json, ".md": self.markdown, ".html": self.page}[path.suffix]()
        try:
            write_whole(path, text.encode("utf-8", "replace"))
        except OSError as error:
            raise InputError(f"{path}: the result cannot be written", str(error), "choose another file") from error


_MEAN_HEADS = ("class", "threads", "models", "run ratio", "create ratio", "memory ratio")


def check_file(path: Path) -> None:
    """Raise OptionError if the suffix of a result's file is unknown."""
    if path.suffix not in SUFFIXES:
        raise OptionError(
            f"--output {path}: unknown ending {path.suffix!r}",
            "a result is written as JSON, Markdown or HTML",
            "choose a name that ends in .json, .md or .html",
        )


def read_result(path: Path) -> SuiteResult:
    """Read the JSON of a former result. Raises InputError if the file is not such a result."""
    found = json_object(read_text_file(path), path, InputError)
    rows = found.get("rows")
    fields = {"cpu": bool, "processor": str, "version": str, "onnxruntime": str, "date": str, "interrupted": bool}
    if not (
        all(isinstance(found.get(name), kind) for name, kind in fields.items())
        and isinstance(rows, list)
        and all(isinstance(row, dict) and isinstance(row.get("model"), str) for row in rows)
        and all(isinstance(row.get("threads"), int) for row in rows)
        and all(isinstance(row.get(ratio), float | int | None) for row in rows for ratio in RATIOS)
    ):
        raise InputError(
            f"{path} is not the result of a suite",
            "a JSON object with the rows of the models is expected",
            "pass a file that genai bench session --suite FOLDER -o FILE.json wrote",
        )
    return SuiteResult(rows=rows, **{name: found[name] for name in fields})


def grown(new: SuiteResult, old: SuiteResult) -> list[str]:
    """Return a sentence for each ratio that is more than 5 % above that of a former result.

    Raises:
        OptionError: one of the results has CPU times, and the other has elapsed times.
    """
    check_comparable(new.cpu, old)
    before = {(row["model"], row["threads"]): row for row in old.measured}
    found = []
    for row in new.measured:
        other = before.get((row["model"], row["threads"]), {})
        for ratio, title in RATIOS.items():
            now, then = row.get(ratio), other.get(ratio)
            if now and then and now > TOLERANCE * then:
                found.append(f"{_name(row)}: {title} ratio {then:.3g} -> {now:.3g} (+{100 * (now / then - 1):.0f} %)")
    return found


def check_comparable(cpu: bool, old: SuiteResult) -> None:
    """Raise OptionError if a former result has the other kind of times."""
    if cpu != old.cpu:
        flag = "without --cpu" if cpu else "with --cpu"
        raise OptionError(
            "the results of --against cannot be compared with this measurement",
            f"they were measured {flag}",
            "remove --cpu" if cpu else "add --cpu",
        )


def _mean(ratios: Sequence[float | None]) -> float | None:
    known = [ratio for ratio in ratios if ratio]
    return math.exp(sum(map(math.log, known)) / len(known)) if known else None


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['model']}, {_threads(row['threads'])}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _cells(row: Mapping[str, Any]) -> list[str]:
    def both(name: str) -> str:
        return f"{_number(row[name + '_ms'])} ({_number(row[name + '_spread_ms'])})"

    return [
        row["model"], row["class"], str(row["threads"]), both("run"), both("onnxruntime_run"), _ratio(row["run_ratio"]),
        _number(row["create_ms"]), _number(row["onnxruntime_create_ms"]), _ratio(row["create_ratio"]),
        _number(row["first_ms"]), _number(row["onnxruntime_first_ms"]), _number(row["peak_mb"]),
        _number(row["onnxruntime_peak_mb"]), _ratio(row["memory_ratio"]),
        "infinite" if row["difference"] is None else f"{row['difference']:.1e}",
    ]  # fmt: skip


# The columns of two tables, because one table with all columns is too wide for a page: runs, and the rest.
_PAGE_COLUMNS = ((0, 1, 2, 3, 4, 5, 14), (0, 2, 6, 7, 8, 9, 10, 11, 12, 13))


def _table_of(columns: Sequence[int], rows: Sequence[Mapping[str, Any]]) -> str:
    cells = ([row[column] for column in columns] for row in map(_cells, rows))
    return html_parts.table([_HEADS[column] for column in columns], cells)


def _mean_rows(result: SuiteResult) -> list[list[str]]:
    return [
        [row["class"], str(row["threads"]), str(row["models"]), *(_ratio(row[ratio]) for ratio in RATIOS)]
        for row in result.means()
    ]


def _lines(rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
