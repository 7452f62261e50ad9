"""The report on a quantisation, as data, as text and as an HTML page with plots."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..common import html_parts
from ..common.html_parts import escaped, table
from ..common.memory_limits import format_bytes
from ..common.svg import Bars, Scatter, Series
from ..common.to_json import to_json
from .quality import Quality

NAME = "quantization_report"


@dataclass(frozen=True)
class MatrixRow:
    """One matrix.

    Attributes:
        name, part, layer, rows, columns: identification and shape of the matrix.
        stored: description of the storage format.
        bits_per_weight, nbytes: size in the file, including scales and zero points.
        weight_error: ||W - V|| ** 2 / ||W|| ** 2.
        output_error: the same ratio for the matrix's outputs; None if no inputs were recorded.
        sensitivity: for each candidate, the divergence of the model in which only this matrix is stored in that format.
        notes: notes of the method.
        seconds: duration of the quantisation.
        computed_by: "onnxruntime" if onnxruntime has a kernel for the format; "functions" if it runs the model's
            functions.
    """

    name: str
    part: str
    layer: int | None
    rows: int
    columns: int
    stored: str
    bits_per_weight: float
    nbytes: int
    weight_error: float
    output_error: float | None
    sensitivity: Mapping[str, float]
    notes: Mapping[str, Any]
    seconds: float
    computed_by: str


@dataclass(frozen=True)
class Point:
    """A model on the curve of divergence against size.

    Attributes:
        label: label of the point.
        bits_per_weight: bits per weight, counting all tensors.
        kld: mean divergence in nats per token.
        kind: "this output", "measured", or "predicted" from the matrices' sensitivities.
    """

    label: str
    bits_per_weight: float
    kld: float
    kind: str


@dataclass(frozen=True)
class Report:
    """The contents of quantization_report.json. docs/reference/quantisation-options.md describes the fields."""

    command: str
    source: str
    output: str
    options: Mapping[str, Any]
    weights: int
    nbytes: int
    folder_bytes: int
    bits_per_weight: float
    parts: Mapping[str, Mapping[str, float]]
    readers: Sequence[str]
    calibration: str | None
    evaluation: str | None
    quality: Quality | None
    matrices: Sequence[MatrixRow]
    curve: Sequence[Point]
    seconds: Mapping[str, float]
    peak_memory: int
    remarks: Sequence[str] = field(default_factory=tuple)

    def to_json(self) -> str:
        """Return the report as JSON. Numbers that JSON cannot represent become null."""
        return to_json(self, indent=1) + "\n"

    def _repr_html_(self) -> str:
        """Return the main figures and the sizes of the parts for a notebook."""
        return html_parts.figures(figures(self)) + table(_PART_HEADS, _part_rows(self))

    def write(self, folder: Path) -> None:
        """Write quantization_report.json, .md and .html."""
        for suffix, text in ((".json", self.to_json()), (".md", markdown(self)), (".html", page(self))):
            (folder / f"{NAME}{suffix}").write_text(text, encoding="utf-8", errors="backslashreplace")


def read_report(folder: Path) -> dict[str, Any]:
    """Return the report of a folder as plain data."""
    content: dict[str, Any] = json.loads((folder / f"{NAME}.json").read_text(encoding="utf-8"))
    options = content.get("options")
    if isinstance(options, dict) and "form" in options:  # the key's name in earlier versions
        options["format"] = options.pop("form")
    return content


# Rows of tables, for text and HTML


def figures(report: Report) -> list[tuple[str, str]]:
    """Return the main figures as pairs of name and value."""
    rows = [
        ("model", report.source),
        ("size", f"{format_bytes(report.nbytes)}, {report.bits_per_weight:.3f} bits per weight, counting all tensors"),
        ("folder", format_bytes(report.folder_bytes)),
    ]
    if (quality := report.quality) is not None:
        rows += [
            ("perplexity", f"{quality.perplexity:.4f} (float {quality.base_perplexity:.4f})"),
            ("mean KLD", f"{quality.kld:.6f} ± {quality.kld_error:.6f} nats per token"),
            ("median, 90 %, 99 %", f"{quality.median:.6f}, {quality.p90:.6f}, {quality.p99:.6f}"),
            ("same top token", f"{100 * quality.top1_agreement:.2f} % of {quality.tokens} tokens"),
        ]
    else:
        rows.append(("quality", "not measured (--no-eval)"))
    rows += [
        ("calibration", report.calibration or "none: no method in use needs data"),
        ("evaluation", report.evaluation or "none"),
        ("read by", ", ".join(report.readers)),
        ("time", ", ".join(f"{name} {seconds:.1f} s" for name, seconds in report.seconds.items())),
        ("peak memory", format_bytes(report.peak_memory) if report.peak_memory else "unknown"),
        ("command", report.command),
    ]
    return rows


def _part_rows(report: Report) -> list[list[str]]:
    return [
        [name, f"{row['weights']:,.0f}", format_bytes(int(row["nbytes"])), f"{row['bits_per_weight']:.3f}"]
        for name, row in report.parts.items()
    ]


def _matrix_rows(report: Report) -> list[list[str]]:
    return [
        [
            row.name, f"{row.rows} x {row.columns}", row.stored, f"{row.bits_per_weight:.3f}",
            f"{row.weight_error:.3e}", "-" if row.output_error is None else f"{row.output_error:.3e}",
            _note_text(row.notes), f"{row.seconds:.2f}",
        ]
        for row in report.matrices
    ]  # fmt: skip


_PART_HEADS = ["part", "weights", "size", "bits per weight"]
_MATRIX_HEADS = ["matrix", "shape", "stored as", "bits", "weight error", "output error", "notes", "s"]


def _note_text(notes: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in notes.items()
    )


def markdown(report: Report) -> str:
    """Return the report as Markdown."""
    lines = [f"# {Path(report.output).name}", ""]
    lines += [f"- **{name}**: {value}" for name, value in figures(report)]
    lines += [f"- **remark**: {remark}" for remark in report.remarks]
    lines += ["", "## Parts", "", *_markdown_table(_PART_HEADS, _part_rows(report))]
    if report.curve:
        rows = [[one.label, one.kind, f"{one.bits_per_weight:.3f}", f"{one.kld:.6f}"] for one in report.curve]
        lines += ["", "## KLD and size", "", *_markdown_table(["model", "how", "bits per weight", "mean KLD"], rows)]
    lines += ["", "## Matrices", "", *_markdown_table(_MATRIX_HEADS, _matrix_rows(report)), ""]
    return "\n".join(lines)


def _markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [heads, ["---"] * len(heads), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64em; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 1em 0; font-size: 14px } td, th { padding: .15em .6em; text-align: left }
tr:nth-child(even) { background: #f6f6f6 } svg { max-width: 100%; height: auto } code { background: #f2f2f2 }
"""


def page(report: Report) -> str:
    """Return the report as an HTML page without scripts or external resources; texts are escaped."""
    title = f"Quantisation of {Path(report.source).name}"
    remarks = "".join(f"<p><b>{escaped(remark)}</b></p>" for remark in report.remarks)
    plots = "\n".join(plot.svg() for plot in _plots(report))
    return html_page(
        title,
        f"{html_parts.figures(figures(report))}\n{remarks}\n{plots}\n"
        f"<h2>Parts</h2>\n{table(_PART_HEADS, _part_rows(report))}\n"
        f"<h2>Matrices</h2>\n{table(_MATRIX_HEADS, _matrix_rows(report))}",
    )


def html_page(title: str, body: str) -> str:
    """Return an HTML page; `body` is HTML."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escaped(title)}</title>'
        f"<style>{_STYLE}</style></head><body>\n<h1>{escaped(title)}</h1>\n{body}\n</body></html>\n"
    )


def _plots(report: Report) -> list[Bars | Scatter]:
    parts = Bars("Bits per weight by part", [(name, row["bits_per_weight"]) for name, row in report.parts.items()])
    plots: list[Bars | Scatter] = [parts]
    if report.curve:
        plots.append(curve_plot(report.curve))
    if (quality := report.quality) is not None:
        quantiles = [
            ("median", quality.median),
            ("90 %", quality.p90),
            ("99 %", quality.p99),
            ("max", quality.maximum),
        ]
        plots.append(Bars("KLD quantiles over tokens, in nats", quantiles))
    errors = [(row.name, row.weight_error if row.output_error is None else row.output_error) for row in report.matrices]
    plots.append(Bars("Relative squared error of outputs (or of weights, if no inputs were recorded)", errors))
    if sensitive := [(row.name, max(row.sensitivity.values())) for row in report.matrices if row.sensitivity]:
        plots.append(Bars("Sensitivity: KLD if only this matrix is stored with the fewest bits", sensitive))
    return plots


def curve_plot(points: Sequence[Point]) -> Scatter:
    """Return the plot of divergence against size."""
    kinds = dict.fromkeys(point.kind for point in points)
    series = [
        Series(kind, [(p.bits_per_weight, p.kld, p.label) for p in points if p.kind == kind], line=kind == "predicted")
        for kind in kinds
    ]
    return Scatter("Mean KLD against bits per weight of all tensors", "bits per weight", "nats per token", series)
