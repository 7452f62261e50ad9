"""The measurements: one point per output, in a JSON file to which later runs add points."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from genai.quantize.quality import Quality


@dataclass(frozen=True)
class Point:
    """One quantised model.

    Attributes:
        model: name of the model that was quantised.
        maker: quantiser: "genai", "llama.cpp", "ik_llama.cpp" or "onnxruntime".
        name: settings, for example "gptq/4/32" or "Q4_K_M".
        bits: bits per weight over all matrices and their scales, including head and embedding; norms are always floats.
        kld: mean divergence from the float model, in nats per token.
        kld_error: standard error of kld.
        median: median divergence.
        p99: 99th percentile of the divergence.
        top1: share of positions with the same top token as the float model.
        perplexity: perplexity of the quantised model.
        base_perplexity: perplexity of the float model.
        accuracy: share of the bundled questions with right replies; None if no questions were asked.
        seconds: quantisation time without evaluation; not on pages, because other programs may have slowed it down.
    """

    model: str
    maker: str
    name: str
    bits: float
    kld: float
    kld_error: float
    median: float
    p99: float
    top1: float
    perplexity: float
    base_perplexity: float
    accuracy: float | None = None
    seconds: float | None = None


def point(
    model: str, maker: str, name: str, bits: float, quality: Quality, *, accuracy: float | None = None,
    seconds: float | None = None,
) -> Point:  # fmt: skip
    """Return a point with a measured quality."""
    return Point(
        model, maker, name, bits, quality.kld, quality.kld_error, quality.median, quality.p99, quality.top1_agreement,
        quality.perplexity, quality.base_perplexity, accuracy, seconds,
    )  # fmt: skip


class Points:
    """The points in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.all: list[Point] = []
        if path.exists():
            self.all = [Point(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]

    def has(self, model: str, maker: str, name: str) -> bool:
        """Return True if the output has been measured."""
        return any((one.model, one.maker, one.name) == (model, maker, name) for one in self.all)

    def add(self, one: Point) -> None:
        """Append a point, write the file, and print the point."""
        self.all.append(one)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps([asdict(one) for one in self.all], indent=1) + "\n", encoding="utf-8")
        partial.rename(self.path)
        accuracy = "" if one.accuracy is None else f", {one.accuracy:.1%} of the questions"
        print(f"{one.model} {one.maker} {one.name}: {one.bits:.3f} bits, KLD {one.kld:.5f}{accuracy}", flush=True)
