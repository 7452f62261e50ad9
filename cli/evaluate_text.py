"""`genai eval ppl` and `kld`: how well a model predicts a text, and how far another one is from it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from . import options as opt
from .evaluate_sides import Bos, OtherAccuracy, OtherArgument, OtherKvType, loaded, sides, to_json
from .flag_groups import flag_groups
from .terminal import emit, read_stdin, say

if TYPE_CHECKING:
    from genai.evaluation import Divergence, Perplexity, Progress

_SECONDS_BETWEEN_DRAWINGS = 0.1

TextFile = Annotated[str, typer.Option("-f", "--file", help="The text, UTF-8; - reads stdin.", show_default=False)]
WindowOption = Annotated[
    int | None,
    typer.Option("-w", "--window", help="Tokens per window [default: context, <= 2048].", show_default=False),
]
StrideOption = Annotated[
    int | None,
    typer.Option(help="Tokens from window to window [default: half a window].", show_default=False),
]


@flag_groups
def ppl(
    file: TextFile,
    model: opt.ModelArgument = None,
    window: WindowOption = None,
    stride: StrideOption = None,
    bos: Bos = None,
    *,
    flags: opt.ModelFlags,
    as_json: opt.AsJson = False,
) -> None:
    """Perplexity on a text, in sliding windows; also bits per byte, which other tokenizers can be compared by."""
    text = _read(file)
    from genai.evaluation import perplexity

    with flags.load(model) as subject, _ProgressLine() as line:
        result = perplexity(subject, text, window=window, stride=stride, bos=bos, progress=line.show)
    emit(to_json(result) if as_json else _perplexity_table(result), "\n")


@flag_groups
def kld(
    file: TextFile,
    base: opt.ModelArgument = None,
    other: OtherArgument = None,
    window: WindowOption = None,
    stride: StrideOption = None,
    bos: Bos = None,
    *,
    flags: opt.ModelFlags,
    other_accuracy: OtherAccuracy = None,
    other_kv_type: OtherKvType = None,
    as_json: opt.AsJson = False,
) -> None:
    """KL divergence of OTHER from BASE at every token of a text; OTHER may be BASE computed in another way."""
    text = _read(file)
    from genai.evaluation import kl_divergence

    both = sides(base, other, flags, other_accuracy, other_kv_type)
    with loaded(*both) as (reference, subject), _ProgressLine() as line:
        result = kl_divergence(reference, subject, text, window=window, stride=stride, bos=bos, progress=line.show)
    emit(to_json(result) if as_json else _divergence_table(result), "\n")


def _read(file: str) -> str:
    from genai.evaluation import read_text_file

    return read_stdin() if file == "-" else read_text_file(file)


def _perplexity_table(result: Perplexity) -> str:
    return _table(
        {
            "perplexity": f"{result.perplexity:.4f} ± {result.perplexity_error:.4f}",
            "nats per token": f"{result.nats_per_token:.5f} ± {result.nats_error:.5f}",
            "bits per byte": f"{result.bits_per_byte:.5f}",
            "scored": f"{result.tokens} tokens, {result.num_bytes} bytes",
            "windows": _windows(result),
        }
    )


def _divergence_table(result: Divergence) -> str:
    return _table(
        {
            "mean KLD": f"{result.mean:.6f} ± {result.mean_error:.6f} nats",
            "median": f"{result.median:.6f}",
            "90 %": f"{result.p90:.6f}",
            "99 %": f"{result.p99:.6f}",
            "maximum": f"{result.maximum:.6f}",
            "same top token": f"{100 * result.top1_agreement:.3f} %",
            "RMS Δp": f"{100 * result.rms_probability_difference:.3f} %",
            "perplexity BASE": f"{result.base_perplexity:.4f}",
            "perplexity OTHER": f"{result.other_perplexity:.4f}",
            "ln(OTHER / BASE)": f"{result.log_ratio:.6f} ± {result.log_ratio_error:.6f}",
            "scored": f"{result.tokens} tokens",
            "windows": _windows(result),
        }
    )


def _windows(result: Perplexity | Divergence) -> str:
    bos = "with BOS" if result.bos else "no BOS"
    return f"{result.windows} of up to {result.window} tokens, stride {result.stride}, {bos}"


def _table(rows: dict[str, str]) -> str:
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


class _ProgressLine:
    """One line on stderr: rewritten in a terminal; elsewhere only its last state is written."""

    def __init__(self) -> None:
        self._last, self._drawn = "", 0.0
        self._live = sys.stderr is not None and sys.stderr.isatty()

    def __enter__(self) -> _ProgressLine:
        return self

    def show(self, progress: Progress) -> None:
        speed = progress.tokens_per_second
        left = (progress.total - progress.scored) * progress.seconds / progress.scored if progress.scored else 0.0
        ending = f" · {left:.0f} s left" if progress.scored < progress.total else f" in {progress.seconds:.1f} s"
        self._last = f"{progress.scored}/{progress.total} tokens scored · {speed:.0f} tok/s{ending}"
        done = progress.scored == progress.total
        if self._live and (done or progress.seconds - self._drawn > _SECONDS_BETWEEN_DRAWINGS):
            self._drawn = progress.seconds
            print(f"\r{self._last}\x1b[K", end="", file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        if self._last:
            say("" if self._live else self._last)
