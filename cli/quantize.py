"""`genai quantize`: a float model becomes a quantised one, with a report that says what it cost."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from genai.common.progress_line import ProgressLine
from genai.errors import OptionError

from .build import checkpoint_of, interruptible
from .terminal import emit, emit_figures, say
from .variables import is_variable

if TYPE_CHECKING:
    from genai.quantize.options import QuantizeOptions

_INTERRUPTED = "genai: interrupted; finished matrices are kept, run the same command again"
AsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]
Threads = Annotated[int | None, typer.Option("-t", "--threads", help="CPU threads [default: physical cores].")]
Bits = Annotated[float | None, typer.Option(help="Bits per weight, all tensors counted, to spend where they help.")]
MostKld = Annotated[
    float | None, typer.Option(help="Mean KLD that --compare allows in what it says to take [default: 0.02].")
]
# Its earlier name.
EarlierForm = Annotated[str | None, typer.Option("--form", hidden=True, help="Earlier name of --format.")]
SensitivityReport = Annotated[
    Path | None, typer.Option(help="Report of an earlier output with a target: not measured again.")
]


def quantize(
    ctx: typer.Context,
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Hugging Face folder, or decoder folder in floats.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Model folder to make.")],
    bits: Annotated[
        int | None, typer.Option(help="Bits per weight: 2, 3, 4, 5, 6, 8; 0 keeps floats [default: 4].")
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(help="Weights that share a scale: 16 to 256; 0 = a row's [default: 32].")
    ] = None,
    format: Annotated[
        str, typer.Option(help="uniform, q2_k to q6_k, nl2 to nl4, iq4_xs, iq4_nl, mxfp4, nf4 or fp4.")
    ] = "uniform",
    form: EarlierForm = None,
    qdq: Annotated[bool, typer.Option("--qdq", help="Write products as DequantizeLinear and MatMul.")] = False,
    asymmetric: Annotated[bool, typer.Option("--asymmetric", help="Give every block a zero point.")] = False,
    method: Annotated[
        str, typer.Option("-m", "--method", help="rtn, search, importance, hqq, gptq, awq or distill.")
    ] = "search",
    float_scales: Annotated[bool, typer.Option("--float-scales", help="Store scales as float32.")] = False,
    head_bits: Annotated[int | None, typer.Option(help="Bits of the head [default: --bits].")] = None,
    embedding_bits: Annotated[
        int | None, typer.Option(help="Bits of the token embedding [default: 8; --bits if it is the head].")
    ] = None,
    recipe: Annotated[Path | None, typer.Option(help="YAML file: choices by patterns over names.")] = None,
    target_bits: Bits = None,
    target_size: Annotated[str | None, typer.Option(help="Size of all tensors, such as 2GB, to spend so.")] = None,
    target_kld: Annotated[float | None, typer.Option(help="Mean KLD to keep, at the least size.")] = None,
    target_runtime: Annotated[
        str, typer.Option(help="What targets choose from: onnxruntime (what it has kernels for), or any.")
    ] = "onnxruntime",
    sensitivity: SensitivityReport = None,
    calib: Annotated[Path | None, typer.Option(help="Calibration text [default: the model writes one].")] = None,
    samples: Annotated[int, typer.Option(help="Sequences of calibration.", min=1)] = 128,
    length: Annotated[int, typer.Option(help="Tokens of a sequence.", min=2)] = 512,
    seed: Annotated[int, typer.Option(help="Seed of what is drawn.", min=0)] = 0,
    evaluate: Annotated[bool, typer.Option("--eval/--no-eval", help="Measure perplexity and KLD.")] = True,
    eval_file: Annotated[Path | None, typer.Option(help="Text to measure with [default: see docs].")] = None,
    eval_samples: Annotated[int, typer.Option(help="Sequences to measure with.", min=1)] = 16,
    accuracy_level: Annotated[int, typer.Option(help="Activations in products: 4 = int8, 1 = fp32.")] = 4,
    requantize: Annotated[bool, typer.Option("--requantize", help="Take a quantised model for a float one.")] = False,
    compare: Annotated[
        str | None,
        typer.Option(help='Make several, "method/bits/block,method/format,…" or "default", and say which to take.'),
    ] = None,
    max_kld: MostKld = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Quantise a model, measure what it cost, and print its path."""
    from genai.quantize.options import QuantizeOptions, parse_size
    from genai.quantize.report import figures
    from genai.quantize.run import quantize_model

    model = checkpoint_of(model)
    options = QuantizeOptions(
        format=_format(ctx, format, form), bits=bits, block_size=block_size, qdq=qdq, symmetric=not asymmetric,
        method=method, half_scales=not float_scales,
        head_bits=head_bits, embedding_bits=embedding_bits, recipe=recipe, target_bits=target_bits,
        target_size=None if target_size is None else parse_size(target_size), target_kld=target_kld,
        target_runtime=target_runtime, sensitivity=sensitivity, calib=calib,
        samples=samples, length=length, seed=seed, evaluate=evaluate, eval_file=eval_file, eval_samples=eval_samples,
        accuracy_level=accuracy_level, requantize=requantize, threads=threads,
    )  # fmt: skip
    start, command = time.monotonic(), shlex.join(["genai", *sys.argv[1:]])
    if compare is not None:
        _compare(model, output, compare, options, max_kld, command, as_json=as_json)
        return
    if max_kld is not None:
        raise OptionError(f"max_kld is {max_kld}", "it says which of several outputs to take", "leave it out")
    with interruptible(_INTERRUPTED), PhaseProgress() as phases:
        report = quantize_model(model, output, options, progress=phases.show, command=command)
    for remark in report.remarks:
        say(f"genai: {remark}")
    say(f"genai: done in {time.monotonic() - start:.1f} s; read {output / 'quantization_report.html'}")
    if as_json:
        emit(report.to_json())
    else:
        emit_figures(figures(report))
        emit(str(output), "\n")


def _format(ctx: typer.Context, format: str, form: str | None) -> str:
    """The format, which may be given by the option's earlier name.

    GENAI_FORMAT serves `genai batch` and `genai quantize-onnx`, too: what only those know is for them, and GENAI_FORM
    is for this command alone.
    """
    from genai.llm.batch.lines import FORMATS as FILES
    from genai.quantize.choices import UNIFORM
    from genai.quantize.onnx_graph.types import QuantFormat

    others = (*FILES, *QuantFormat.__members__)
    if is_variable(ctx, "format") and (form is not None or format in others):
        format = UNIFORM
    if form is None:
        return format
    say("genai: --form (GENAI_FORM) is now --format (GENAI_FORMAT)")
    if format == UNIFORM:
        return form
    if is_variable(ctx, "form"):
        return format
    raise OptionError("--format and --form", "the second is an earlier name of the first", "leave --form out")


def _compare(
    model: Path,
    output: Path,
    variants: str,
    options: QuantizeOptions,
    max_kld: float | None,
    command: str,
    *,
    as_json: bool,
) -> None:
    from genai.quantize.compare import MOST_KLD, compare, parse_variants, rows

    parsed = parse_variants(variants)
    with interruptible(_INTERRUPTED), PhaseProgress() as phases:
        most = MOST_KLD if max_kld is None else max_kld
        result = compare(model, output, parsed, options, most_kld=most, progress=phases.show, command=command)
    say(f"genai: take {result.taken}, {result.why}; read {output / 'comparison.html'}")
    if as_json:
        emit((output / "comparison.json").read_text(encoding="utf-8"))
    else:
        for row in rows(result):
            emit("  ".join([f"{row[0]:<32}", *(f"{cell:>10}" for cell in row[1:])]), "\n")
        emit(str(output / result.taken), "\n")


class PhaseProgress:
    """A line of progress per phase."""

    def __init__(self) -> None:
        self._line: ProgressLine | None = None
        self._phase = ""

    def show(self, phase: str, done: float, total: float) -> None:
        """So much of a phase is done."""
        if phase != self._phase:
            self.close()
            self._phase, self._line = phase, ProgressLine(phase)
            self._line.show(0, total)
        if self._line is not None:
            self._line.show(done, total)

    def close(self) -> None:
        """Take the line away."""
        if self._line is not None:
            self._line.close()

    def __enter__(self) -> PhaseProgress:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()
