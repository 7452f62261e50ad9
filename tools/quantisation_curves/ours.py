"""Outputs of `genai quantize`: methods by bits and block size, named formats, and size targets."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import genai
from genai.errors import OptionError
from genai.evaluate.tasks import Question, evaluate
from genai.quant.methods import METHODS
from genai.quantize.run import quantize_model

from .points import Points, point
from .subject import Subject

ORDER = ("rtn", "search", "importance", "hqq", "awq", "gptq", "distill")
SIZES = ((2, 32), (3, 32), (4, 32), (4, 128), (8, 32))
FORMATS = ("nl2", "nl3", "nl4", "q6_k")
TARGETS = (2.4, 3.0, 3.5, 4.25, 4.5, 5.5, 6.5)
MAKER = "genai"


def table_ways() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and options of every method, for each uniform bit width and block size."""
    for bits, size in SIZES:
        for method in ORDER:
            yield f"{method}/{bits}/{size}", {"method": method, "bits": bits, "block_size": size}


def curve_ways() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and options of the most accurate settings for every size."""
    for name in FORMATS:
        yield f"distill/{name}", {"method": "distill", "format": name, "embedding_bits": None}
    for bits in TARGETS:
        yield f"target {bits:g}", {"method": "distill", "target_bits": bits, "target_runtime": "any"}


def measure(
    subject: Subject, ways: Iterator[tuple[str, Mapping[str, Any]]], work: Path, points: Points,
    questions: Sequence[Question] = (),
) -> None:  # fmt: skip
    """Make the missing outputs, store their points and reports, and delete their weights.

    Args:
        questions: questions to ask each output; may be empty.
    """
    for name, options in ways:
        if points.has(subject.name, MAKER, name):
            continue
        folder = work / subject.name / name.replace("/", "-").replace(" ", "-")
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        has_target = "target_bits" in options
        if subject.calib is not None and METHODS[options["method"]].needs == "nothing" and not has_target:
            options = {**options, "calib": None}
        if has_target and (earlier := sorted(folder.parent.glob("target-*/quantization_report.json"))):
            options = {**options, "sensitivity": earlier[0]}
        try:
            report = quantize_model(subject.checkpoint, folder, subject.options(**options), plain_roundings=False)
        except OptionError as error:  # the model is too small for the target
            print(f"{subject.name} {name}: {error}", flush=True)
            continue
        assert report.quality is not None
        accuracy = None
        if questions:
            with genai.Model(folder) as model:
                outcomes = evaluate(model, questions)
            accuracy = sum(outcome.right for outcome in outcomes) / len(outcomes)
        bits = 8 * sum(row.nbytes for row in report.matrices) / report.weights
        seconds = report.seconds.get("quantising", 0.0) + report.seconds.get("sensitivity", 0.0)
        points.add(point(subject.name, MAKER, name, bits, report.quality, accuracy=accuracy, seconds=seconds))
        for data in folder.glob("*.onnx*"):
            data.unlink()
