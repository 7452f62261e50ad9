"""The points as a page, with a figure and the plain data beside it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from genai.common.svg import Scatter, Series
from genai.quantize.compare import unbeaten

from .ours import MAKER, ORDER, SIZES, TARGETS
from .points import Point
from .subject import EVAL_SAMPLES, LENGTH, SAMPLES

NAME = "quantisation_curves"
_ROOM = 0.55  # bits that a name in the figure takes
_LABELS = {MAKER: "this toolkit"} | {name: name for name in ("llama.cpp", "ik_llama.cpp", "onnxruntime")}
_HEAD = """# What quantisation costs

Made by `python -m tools.quantisation_curves` (its help says how); the plain data are in
[quantisation_curves.json](quantisation_curves.json). Divergence is KL(float || quantised), nats per token, over
{tokens} tokens that no calibration saw (it had {calib}); both models are computed from dequantised weights in float32,
so that weights alone differ. Bits count all matrices with their scales, zero points and tables, head and embedding
included. The yardstick is the model of [yardstick.md](yardstick.md).

## Divergence over size, on the yardstick

![Divergence over bits per weight]({name}.svg)

llama.cpp and ik_llama.cpp quantise with an importance matrix of the same calibration text, and make float32 of their
files themselves. The least divergence that each reaches with at most so many bits per weight:
"""


def write_report(points: Sequence[Point], docs: Path) -> None:
    """The page, the figure and the data."""
    makers = [maker for maker in _LABELS if any(point.maker == maker for point in points)]
    yardstick = [point for point in points if point.model == "yardstick"]
    (docs / f"{NAME}.svg").write_text(figure(yardstick) + "\n", encoding="utf-8")
    plain = json.dumps([asdict(point) for point in points], indent=1)
    (docs / f"{NAME}.json").write_text(plain + "\n", encoding="utf-8")
    lines = [
        _HEAD.format(name=NAME, tokens=f"{EVAL_SAMPLES * (LENGTH - 1):,}", calib=f"{SAMPLES * LENGTH:,}"),
        *_fronts(yardstick, makers),
        "",
    ]
    lines += ["## Methods, bits and blocks", ""]
    for model in dict.fromkeys(point.model for point in points):
        own = {point.name: point for point in points if point.model == model and point.maker == MAKER}
        base = next(iter(own.values())).base_perplexity
        lines += [f"### On the {model} model (perplexity of the float model: {base:.3f})", ""]
        lines += ["Mean divergence:", "", *_grid(own, lambda point: f"{point.kld:.5f}"), ""]
        lines += ["Perplexity:", "", *_grid(own, lambda point: f"{point.perplexity:.3f}"), ""]
        if any(point.accuracy is not None for point in own.values()):
            lines += ["Questions answered rightly, as the output runs:", ""]
            lines += [*_grid(own, lambda point: f"{100 * (point.accuracy or 0):.1f} %"), ""]
        lines += ["Forms and targets of size, by `distill`:", "", *_listed(list(own.values())), ""]
    lines += ["## Others' outputs", "", *_listed([p for p in yardstick if p.maker != MAKER], maker=True), ""]
    (docs / f"{NAME}.md").write_text("\n".join(lines), encoding="utf-8")


def figure(points: Sequence[Point]) -> str:
    """Divergence over bits, a colour per maker; ours as a line through the best of every size."""
    series = []
    for maker, label in _LABELS.items():
        some = [point for point in points if point.maker == maker]
        if maker == MAKER:
            some = best(some)
            series.append(Series(label, [(point.bits, point.kld, "") for point in some], line=True))
        elif some:
            named = _apart(best(some))
            series.append(Series(label, [(one.bits, one.kld, one.name if one in named else "") for one in some]))
    return Scatter("Divergence over size", "bits per weight", "mean KLD, nats per token", series).svg()


def _apart(points: Sequence[Point]) -> list[Point]:
    """Those whose names have room beside each other."""
    found: list[Point] = []
    for point in points:
        if not found or point.bits - found[-1].bits > _ROOM:
            found.append(point)
    return found


def best(points: Sequence[Point]) -> list[Point]:
    """Those that no other beats in both size and divergence, the smallest first."""
    return unbeaten(points, lambda point: (point.bits, point.kld))


def _fronts(points: Sequence[Point], makers: Sequence[str]) -> Iterator[str]:
    yield "| bits per weight at most | " + " | ".join(_LABELS[maker] for maker in makers) + " |"
    yield "|---|" + "---|" * len(makers)
    for most in TARGETS:
        cells = []
        for maker in makers:
            fitting = [point for point in points if point.maker == maker and point.bits <= most + 0.005]
            one = min(fitting, key=lambda point: point.kld, default=None)
            cells.append("" if one is None else f"{one.kld:.5f} ({one.name}, {one.bits:.2f})")
        yield f"| {most:g} | " + " | ".join(cells) + " |"


def _grid(own: dict[str, Point], said: Callable[[Point], str]) -> Iterator[str]:
    yield "| method | " + " | ".join(f"{bits} bits/{size}" for bits, size in SIZES) + " |"
    yield "|---|" + "---|" * len(SIZES)
    for method in ORDER:
        names = [f"{method}/{bits}/{size}" for bits, size in SIZES]
        yield f"| {method} | " + " | ".join(said(own[name]) if name in own else "" for name in names) + " |"


def _listed(points: Sequence[Point], *, maker: bool = False) -> Iterator[str]:
    yield "| output | bits per weight | mean KLD | 99 % KLD | same top token | perplexity |"
    yield "|---|---|---|---|---|---|"
    for point in sorted(points, key=lambda one: one.bits):
        if not maker and point.name.count("/") == 2:
            continue
        name = f"{_LABELS[point.maker]} {point.name}" if maker else point.name
        yield (
            f"| {name} | {point.bits:.3f} | {point.kld:.5f} ± {point.kld_error:.5f} | {point.p99:.4f} "
            f"| {100 * point.top1:.2f} % | {point.perplexity:.3f} |"
        )
