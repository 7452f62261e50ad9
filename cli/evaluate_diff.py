"""`genai eval diff`: finds the first layer and operator at which two runs differ."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from genai.common.progress import task
from genai.common.to_json import to_json
from genai.errors import OptionError

from . import options as opt
from .evaluate import Bos, OtherArgument, PairFlags, loaded
from .terminal import PlotFile, emit, read_stdin, show_chart

if TYPE_CHECKING:
    from genai.common.plots import Chart
    from genai.evaluate import ModelDiff, ValueDiff

_DEFAULT_PROMPT = "What is 12 + 7? Count from 3 to 7."
_COLUMNS = f"  {'layer':>5}  {'operator':<32}  {'rel. RMS':>8}  {'max abs':>8}  {'cosine':>9}  {'shape':<16}  value"


@opt.flag_groups
def diff(
    base: opt.ModelArgument = None,
    other: OtherArgument = None,
    against: Annotated[
        str | None,
        typer.Option(help="Compare BASE with another engine on the same graph: onnxruntime or reference (NumPy)."),
    ] = None,
    prompt: Annotated[str, typer.Option("-p", "--prompt", help="Prompt to process, or - for stdin.")] = (
        _DEFAULT_PROMPT
    ),
    tolerance: Annotated[float, typer.Option(help="Relative RMS error above which values count as different.")] = 0.05,
    isolate: Annotated[
        bool,
        typer.Option("--isolate", help="Feed each operator the other side's inputs, so that errors do not accumulate."),
    ] = False,
    show_all: Annotated[
        bool, typer.Option("--all", help="Show every value, including values that only one side has.")
    ] = False,
    bos: Bos = None,
    plot: PlotFile = None,
    *,
    flags: PairFlags,
    as_json: opt.AsJson = False,
) -> None:
    """Compare two models, or one model run in two ways, value by value, and mark the first difference.

    Without --all, the table shows the worst value of each layer and the values around the first difference.
    """
    from genai.evaluate import diff_models, diff_with_onnxruntime, encode_prompt
    from genai.evaluate.model_diff import check_tolerance
    from genai.evaluate.values import import_onnxruntime

    check_tolerance(tolerance)
    first, second = flags.sides(base, other)
    _check(against, [other, flags.other_accuracy, flags.other_kv_type])
    if against == "reference":
        first = base, replace(first[1], device=against, accuracy="fp32", threads=None)
    if against != "onnxruntime" and first == second:
        raise OptionError(
            "BASE would be compared with itself",
            "both sides are the same model with the same options",
            "add OTHER, --other-accuracy, --other-kv-type or --against",
        )
    text = read_stdin() if prompt == "-" else prompt
    if against == "onnxruntime":
        import_onnxruntime()
        with flags.load(base) as model, task("Comparing"):
            tokens = encode_prompt(model, text, bos)
            result = diff_with_onnxruntime(model, tokens, tolerance=tolerance, isolate=isolate, threads=flags.threads)
    else:
        with loaded(first, second) as (reference, subject), task("Comparing"):
            tokens = encode_prompt(reference, text, bos)
            result = diff_models(reference, subject, tokens, tolerance=tolerance, isolate=isolate)
    layers = {"layers_only_in_base": result.layers_only_in_base, "layers_only_in_other": result.layers_only_in_other}
    emit(to_json(result, layers) if as_json else _report(result, show_all), "\n")
    show_chart(_chart(result), plot, as_json=as_json)


def _check(against: str | None, of_other: list[object]) -> None:
    """Raise OptionError if `against` is unknown, or if the other side is specified twice."""
    if against not in (None, "onnxruntime", "reference"):
        raise OptionError(
            f"--against is {against!r}", "allowed: onnxruntime, reference", "use one of these values, or pass OTHER"
        )
    if against is not None and any(item is not None for item in of_other):
        raise OptionError(
            "--against contradicts OTHER, --other-accuracy and --other-kv-type",
            f"with --against, one side is BASE and the other is {against} on the same graph",
            "remove --against, or remove OTHER, --other-accuracy and --other-kv-type",
        )


def _chart(result: ModelDiff) -> Chart:
    """Return a chart of the worst value in each layer that exists in both runs."""
    from genai.common.plots import Chart

    worst: dict[int, float] = {}
    for value in result.values:
        if value.layer is not None and math.isfinite(value.relative_rms):
            worst[value.layer] = max(worst.get(value.layer, 0.0), value.relative_rms)
    names = [str(layer) for layer in sorted(worst)]
    return Chart("Largest relative RMS error", "layer", names, {"error": [worst[layer] for layer in sorted(worst)]})


def _report(result: ModelDiff, show_all: bool) -> str:
    indices = range(len(result.values)) if show_all else result.interesting()
    lines = [f"BASE   {result.base}", f"OTHER  {result.other}", f"prompt {result.tokens} tokens", "", _COLUMNS]
    last = -1
    for index in indices:
        if index > last + 1:
            lines.append("  …")
        lines.append(_row(result.values[index], index == result.first))
        last = index
    lines += ["  …"] if last < len(result.values) - 1 else []
    lines += ["", result.verdict(), *_one_sided(result, show_all)]
    return "\n".join(lines)


def _row(value: ValueDiff, marked: bool) -> str:
    layer = "-" if value.layer is None else str(value.layer)
    return (
        f"{'>' if marked else ' '} {layer:>5}  {value.op_type:<32}  {value.relative_rms:>8.1e}  {value.max_abs:>8.1e}"
        f"  {value.cosine:>9.6f}  {value.shape_text:<16}  {value.name}"
    )


def _one_sided(result: ModelDiff, show_all: bool) -> list[str]:
    lines = []
    for side, names, layers in (
        ("BASE", result.only_in_base, result.layers_only_in_base),
        ("OTHER", result.only_in_other, result.layers_only_in_other),
    ):
        if layers:
            lines.append(f"layers only in {side}: {', '.join(map(str, layers))}")
        if names:
            lines.append(f"values only in {side}: {len(names)}")
            lines += [f"  {name}" for name in names] if show_all else []
    return lines
