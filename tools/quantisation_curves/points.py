"""What was measured: a point per output, kept in one JSON file that a later run goes on with."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from genai.quantize.quality import Quality


@dataclass(frozen=True)
class Point:
    """One quantised model.

    Attributes:
        model: which was quantised. maker: by what: "genai", "llama.cpp", "ik_llama.cpp" or "onnxruntime".
        name: of the way, such as "gptq/4/32" or "Q4_K_M".
        bits: per weight, of all matrices with their scales, head and embedding included; norms are floats in all.
        kld, kld_error, median, p99: divergence from the float model in nats per token. top1: share of equal top tokens.
        perplexity: of the quantised model, base_perplexity: of the float one.
        accuracy: share of the bundled questions answered rightly; None = not asked.
        seconds: that quantising took, without evaluation; perhaps beside other work, so that pages do not say it.
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
    """Of a measured quality."""
    return Point(
        model, maker, name, bits, quality.kld, quality.kld_error, quality.median, quality.p99, quality.top1_agreement,
        quality.perplexity, quality.base_perplexity, accuracy, seconds,
    )  # fmt: skip


class Points:
    """The points of a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.all: list[Point] = []
        if path.exists():
            self.all = [Point(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]

    def has(self, model: str, maker: str, name: str) -> bool:
        """Whether this was measured."""
        return any((one.model, one.maker, one.name) == (model, maker, name) for one in self.all)

    def add(self, one: Point) -> None:
        """Keep a point, on the disk too, and print it."""
        self.all.append(one)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps([asdict(one) for one in self.all], indent=1) + "\n", encoding="utf-8")
        partial.rename(self.path)
        accuracy = "" if one.accuracy is None else f", {one.accuracy:.1%} of the questions"
        print(f"{one.model} {one.maker} {one.name}: {one.bits:.3f} bits, KLD {one.kld:.5f}{accuracy}", flush=True)
