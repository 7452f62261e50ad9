"""Comparison of several ways to quantise one model, with a page that recommends one of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ..common.atomic_files import write_whole
from ..common.html_parts import passage, table as html_table
from ..common.memory_limits import format_bytes
from ..common.renamed import renamed_fields
from ..errors import ModelFolderError, OptionError, whole_number
from .choices import FORMATS, UNIFORM
from .options import QuantizeOptions
from .report import Point, curve_plot, html_page, read_report
from .run import Progress, quantize_model, unwritable

T = TypeVar("T")
DEFAULT_VARIANTS = "rtn/4/128,rtn/4/32,search/4/32,gptq/4/128,gptq/4/32,distill/4/32,search/8/32"
# Below this mean divergence, two models differ only in rare tokens.
MOST_KLD = 0.02
_HEADS = [
    "output",
    "bits per weight",
    "size",
    "mean KLD",
    "99 % KLD",
    "same top token",
    "perplexity",
    "quantising time",
    "in onnxruntime",
]


@renamed_fields(form="format")
@dataclass(frozen=True)
class Variant:
    """One way to quantise: a method, and a format with its bits and block size (None: the format's default)."""

    method: str
    bits: int | None = None
    block_size: int | None = None
    format: str = UNIFORM

    @property
    def name(self) -> str:
        words = (self.method, None if self.format == UNIFORM else self.format, self.bits, self.block_size)
        return "-".join(str(word) for word in words if word is not None)

    def of(self, options: QuantizeOptions) -> QuantizeOptions:
        """Return the options with this variant's values."""
        return replace(
            options, method=self.method, format=self.format, bits=self.bits, block_size=self.block_size, report=True
        )


def parse_variants(text: str) -> list[Variant]:
    """Parse variants of the form "method/bits/block" or "method/format", separated by commas, or "default".

    Raises:
        OptionError: a part is malformed, or there are fewer than two variants.
    """
    variants = []
    for part in (DEFAULT_VARIANTS if text == "default" else text).split(","):
        words = part.strip().split("/")
        bits, block = (whole_number(word) for word in (*words[1:], "", "")[:2])
        if len(words) == 3 and bits is not None and block is not None:
            variants.append(Variant(words[0], bits, block))
        elif len(words) == 2 and words[1] in FORMATS:
            variants.append(Variant(words[0], format=words[1]))
        else:
            raise OptionError(
                f"{part!r:.200} is not a variant",
                f"variants have the form method/bits/block or method/format; the formats are {', '.join(FORMATS)}",
                f"pass variants such as {DEFAULT_VARIANTS}",
            )
    if len(set(variants)) < 2:
        raise OptionError(
            f"{text!r} has only one variant",
            "a comparison needs at least two different variants",
            f"pass variants such as {DEFAULT_VARIANTS}",
        )
    return list(dict.fromkeys(variants))


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison.

    Attributes:
        reports: reports by name, ordered by size.
        front: names of the outputs on the Pareto front of size and divergence.
        taken: name of the recommended output.
        why: reason for the recommendation.
    """

    reports: dict[str, dict[str, Any]]
    front: Sequence[str]
    taken: str
    why: str

    def _repr_html_(self) -> str:
        """Return the table with one row per output for a notebook."""
        return html_table(_HEADS, rows(self)) + passage(f"Recommended: {self.taken}, {self.why}.")


def compare(
    source: str | Path,
    output: str | Path,
    variants: Sequence[Variant],
    options: QuantizeOptions,
    *,
    most_kld: float = MOST_KLD,
    progress: Progress = lambda phase, done, total: None,
    command: str = "",
) -> Comparison:
    """Quantise a model in several ways, each to a folder in `output`, and write comparison.html, .md and .json there.

    Existing variants that were made from the same model with the same options are reused. All variants are evaluated
    with the same text.

    Raises:
        OptionError: evaluation is off, or an option is set that the variants determine. Other errors: see
            quantize_model.
        ModelFolderError: `output` contains something else.
    """
    if not options.evaluate:
        raise OptionError(
            "evaluate is off",
            "outputs are compared by their KL divergence, which the evaluation measures",
            "omit --no-eval",
        )
    if not (math.isfinite(most_kld) and most_kld > 0):
        raise OptionError(
            f"max_kld is {most_kld}",
            "the limit must be a finite number of nats above 0",
            "set max_kld to a positive number",
        )
    for name in options.non_default(("method", "format", "bits", "block_size", "recipe")):
        raise OptionError(
            f"{name} is {getattr(options, name)}, but several outputs are compared",
            "each variant, such as gptq/4/32, sets its own method and format",
            f"omit {name}, or quantise to one output",
        )
    ways = {variant.name: variant.of(options) for variant in variants}
    output = Path(output)
    try:
        output.mkdir(exist_ok=True)
    except OSError as error:
        raise unwritable(output, error) from error
    reports = {}
    for name, way in ways.items():
        folder = output / name
        if folder.exists():
            reports[name] = _existing_report(folder, source, way)
            continue
        quantize_model(source, folder, way, command=command, progress=partial(_labelled, progress, name))
        reports[name] = read_report(folder)
    result = choose_variant(reports, most_kld)
    try:
        _write(result, output, str(source), command)
    except OSError as error:
        raise unwritable(output, error) from error
    return result


def _labelled(progress: Progress, name: str, phase: str, done: float, total: float) -> None:
    progress(f"{name}: {phase}", done, total)


def _existing_report(folder: Path, source: str | Path, way: QuantizeOptions) -> dict[str, Any]:
    """Return the report of an existing variant. Raise ModelFolderError if the folder contains anything else."""
    try:
        report = read_report(folder)
    except (OSError, ValueError):
        report = {}
    expected = {name: getattr(way, name) for name in ("method", "format", "bits", "block_size", "seed")}
    made_with = report.get("options", {})
    if report.get("source") != str(source) or any(made_with.get(key) != value for key, value in expected.items()):
        raise ModelFolderError(
            f"{folder} already exists",
            f"the folder does not contain {folder.name} of {source} with the same options",
            "delete the folder, or choose another output path",
        )
    return report


def unbeaten(outputs: Iterable[T], costs: Callable[[T], tuple[float, float]]) -> list[T]:
    """Return the outputs that no other output beats in both size and divergence, smallest first.

    Args:
        costs: returns the size and the divergence of an output.
    """
    front: list[T] = []
    for output in sorted(outputs, key=costs):
        if not front or costs(output)[1] < costs(front[-1])[1]:
            front.append(output)
    return front


def choose_variant(reports: dict[str, dict[str, Any]], most_kld: float) -> Comparison:
    """Recommend the smallest output with a divergence of at most `most_kld`, or else the most accurate output."""
    ordered = dict(sorted(reports.items(), key=lambda item: item[1]["nbytes"]))
    front = unbeaten(ordered, lambda name: (ordered[name]["nbytes"], ordered[name]["quality"]["kld"]))
    good = [name for name in front if ordered[name]["quality"]["kld"] <= most_kld]
    if good:
        return Comparison(
            ordered, front, good[0], f"the smallest variant with a mean KLD of at most {most_kld:g} nats per token"
        )
    return Comparison(
        ordered, front, front[-1], f"the most accurate variant; no variant has a mean KLD of {most_kld:g} nats or less"
    )


def rows(result: Comparison) -> list[list[str]]:
    """Return the table with one row per output."""
    table = []
    for name, report in result.reports.items():
        quality = report["quality"]
        mark = " (recommended)" if name == result.taken else "" if name in result.front else " (dominated)"
        table.append(
            [
                name + mark, f"{report['bits_per_weight']:.3f}", format_bytes(report["nbytes"]),
                f"{quality['kld']:.6f}", f"{quality['p99']:.5f}", f"{100 * quality['top1_agreement']:.2f} %",
                f"{quality['perplexity']:.4f}", f"{report['seconds'].get('quantising', 0.0):.1f} s",
                "kernels" if "onnxruntime" in report["readers"] else "functions",
            ]
        )  # fmt: skip
    return table


def _write(result: Comparison, output: Path, source: str, command: str) -> None:
    points = [
        Point(
            name,
            report["bits_per_weight"],
            report["quality"]["kld"],
            "Pareto front" if name in result.front else "dominated",
        )
        for name, report in result.reports.items()
    ]
    base = next(iter(result.reports.values()))["quality"]["base_perplexity"]
    said = f"Recommended: {result.taken}, {result.why}. The float model's perplexity is {base:.4f}."
    plain: dict[str, Any] = {"taken": result.taken, "why": result.why, "front": list(result.front), "command": command}
    plain |= {"reports": result.reports}
    write_whole(output / "comparison.json", (json.dumps(plain, indent=1) + "\n").encode())
    table = [_HEADS, ["---"] * len(_HEADS), *rows(result)]
    lines = [f"# {source}", "", said, "", *("| " + " | ".join(row) + " |" for row in table), ""]
    write_whole(output / "comparison.md", "\n".join(lines).encode(errors="backslashreplace"))
    links = "".join(f'<li><a href="{name}/quantization_report.html">{name}</a></li>' for name in result.reports)
    body = f"<p><b>{said}</b></p>{curve_plot(points).svg()}{html_table(_HEADS, rows(result))}<ul>{links}</ul>"
    page = html_page(f"Quantised versions of {Path(source).name}", body)
    write_whole(output / "comparison.html", page.encode(errors="backslashreplace"))
