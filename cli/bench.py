"""`genai bench`: measured speed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from . import options as opt
from .flag_groups import flag_groups
from .run import ModelFile, extents
from .terminal import emit

if TYPE_CHECKING:
    from genai.model import Model

app = typer.Typer(
    help="Measure speed: medians of several runs, and shares of what the machine can do.", no_args_is_help=True
)
Repeat = Annotated[int, typer.Option("-r", "--repeat", min=1, help="Runs; the median is reported.")]
_CONTEXTS = (128, 512, 2048, 8192)
_BATCHES = (1, 2, 4, 8, 16)
_ROWS = (1, 2, 4, 8, 16, 32, 128, 512)
_NAME_WIDTH = 40
# What later rows may hold: 1.234e-05.
_NUMBER_WIDTH = 9


Context = Annotated[int, typer.Option("-c", "--context", min=1, help="Tokens in the cache before timing starts.")]
NewTokens = Annotated[int, typer.Option("-n", "--tokens", min=1, help="Tokens generated per run.")]
PromptTokens = Annotated[int, typer.Option("-n", "--tokens", min=1, help="Prompt length.")]


@app.command()
@flag_groups
def decode(
    model: opt.ModelArgument = None,
    context: Context = 128,
    tokens: NewTokens = 128,
    batch: Annotated[int, typer.Option("-b", "--batch", min=1, help="Sequences that advance together.")] = 1,
    repeat: Repeat = 5,
    *,
    flags: opt.ModelFlags,
    as_json: opt.AsJson = False,
) -> None:
    """Tokens per second while generating. Also the share of the machine's memory bandwidth that they use."""
    from genai.bench.speed import bench_decode

    with flags.load(model) as loaded:
        _report(bench_decode(loaded, context=context, tokens=tokens, batch=batch, repeat=repeat), as_json)


@app.command()
@flag_groups
def prefill(
    model: opt.ModelArgument = None,
    tokens: PromptTokens = 512,
    repeat: Repeat = 5,
    *,
    flags: opt.ModelFlags,
    as_json: opt.AsJson = False,
) -> None:
    """Tokens per second while reading a prompt. Also the share of the machine's products per second that they use."""
    from genai.bench.speed import bench_prefill

    with flags.load(model) as loaded:
        _report(bench_prefill(loaded, tokens=tokens, repeat=repeat), as_json)


@app.command()
@flag_groups
def context(
    model: opt.ModelArgument = None,
    lengths: Annotated[
        list[int] | None,
        typer.Option("-c", "--context", min=1, help="Context length; may be given several times.", show_default=False),
    ] = None,
    tokens: NewTokens = 32,
    repeat: Repeat = 3,
    *,
    flags: opt.ModelFlags,
    as_json: opt.AsJson = False,
) -> None:
    """Prefill and decode by length of context. By default 128, 512, 2048 and 8192, as far as the model goes."""
    from genai.bench.speed import sweep_context

    with flags.load(model) as loaded:
        fitting = [length for length in _CONTEXTS if length + tokens < loaded.context_size]
        chosen = lengths or fitting or [loaded.context_size // 2]
        _table(sweep_context(loaded, chosen, tokens=tokens, repeat=repeat), as_json)


@app.command()
@flag_groups
def batch(
    model: opt.ModelArgument = None,
    sizes: Annotated[
        list[int] | None,
        typer.Option("-b", "--batch", min=1, help="Sequences; may be given several times.", show_default=False),
    ] = None,
    context: Context = 128,
    tokens: NewTokens = 32,
    repeat: Repeat = 3,
    *,
    flags: opt.ModelFlags,
    as_json: opt.AsJson = False,
) -> None:
    """Decode by number of sequences that advance together. By default 1, 2, 4, 8 and 16."""
    from genai.bench.speed import sweep_batch

    with flags.load(model) as loaded:
        rows = sweep_batch(loaded, sizes or _BATCHES, context=context, tokens=tokens, repeat=repeat)
        _table(rows, as_json)


@app.command()
def threads(
    model: opt.ModelArgument = None,
    counts: Annotated[
        list[int] | None,
        typer.Option("-t", "--threads", min=1, help="Threads; may be given several times.", show_default=False),
    ] = None,
    context: Context = 256,
    tokens: NewTokens = 32,
    repeat: Repeat = 3,
    accuracy: opt.Accuracy = "auto",
    kv_type: opt.KvType = "auto",
    as_json: opt.AsJson = False,
) -> None:
    """Decode and prefill by number of threads. By default 1, 2, 4 and so on up to the physical cores."""
    from genai.bench.speed import sweep_threads
    from genai.kernels.cpu.cores import default_threads

    chosen = counts or sorted({1, *(n for n in (2, 4, 8, 16, 32, 64) if n < default_threads()), default_threads()})

    def load(count: int) -> Model:
        return opt.ModelFlags(count, accuracy, kv_type).load(model)

    rows = sweep_threads(load, chosen, context=context, tokens=tokens, repeat=repeat)
    _table(rows, as_json)


@app.command()
def startup(
    model: opt.ModelArgument = None,
    tokens: PromptTokens = 128,
    cold: Annotated[bool, typer.Option("--cold", help="With an empty kernel cache each time.")] = False,
    repeat: Repeat = 5,
    threads: opt.Threads = None,
    as_json: opt.AsJson = False,
) -> None:
    """Seconds from the start of a process to the first token."""
    from genai.bench.startup import bench_startup

    folder = opt.folder_of(model)
    _report(bench_startup(folder, tokens=tokens, threads=threads, cold=cold, repeat=repeat), as_json)


@app.command()
def kernels(
    model: opt.ModelArgument = None,
    rows: Annotated[
        list[int] | None,
        typer.Option("-m", "--rows", min=1, help="Rows at once; may be given several times.", show_default=False),
    ] = None,
    repeat: Repeat = 5,
    threads: opt.Threads = None,
    accuracy: opt.Accuracy = "auto",
    as_json: opt.AsJson = False,
) -> None:
    """A model's products one kind at a time, by number of rows. As shares of bandwidth and of products per second."""
    from genai.bench.kernels import bench_kernels

    with opt.ModelFlags(threads, accuracy).load(model) as loaded:
        _table(bench_kernels(loaded, rows=rows or _ROWS, repeat=repeat), as_json)


@app.command()
def session(
    file: ModelFile,
    dims: Annotated[list[str] | None, typer.Option("--dim", help="NAME=EXTENT of a symbolic dimension.")] = None,
    repeat: Repeat = 10,
    threads: Annotated[int, typer.Option("-t", "--threads", min=0, help="CPU threads; 0 = physical cores.")] = 0,
    compare: Annotated[bool, typer.Option("--compare", help="Measure onnxruntime in turn with us.")] = False,
    as_json: opt.AsJson = False,
) -> None:
    """Milliseconds to load and run any ONNX model, on made-up inputs."""
    from genai.bench.session import bench_session

    _report(bench_session(file, dims=extents(dims or []), repeat=repeat, threads=threads, compare=compare), as_json)


def _report(result: Mapping[str, object], as_json: bool) -> None:
    if as_json:
        emit(json.dumps(result), "\n")
        return
    for name, value in result.items():
        emit(f"{name.replace('_', ' '):<24} {_shown(name, value)}", "\n")


def _table(rows: Iterable[Mapping[str, object]], as_json: bool) -> None:
    """Rows as they come, under one heading; as JSON all of them at the end."""
    if as_json:
        emit(json.dumps(list(rows)), "\n")
        return
    widths: list[int] = []
    for row in rows:
        cells = [_shown(name, value) for name, value in row.items()]
        if not widths:
            widths = [max(len(name), len(cell), _NUMBER_WIDTH) for name, cell in zip(row, cells, strict=True)]
            if isinstance(next(iter(row.values())), str):
                widths[0] = max(widths[0], _NAME_WIDTH)  # later rows may have longer names
            emit("  ".join(f"{name:>{width}}" for name, width in zip(row, widths, strict=True)), "\n")
        emit("  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)), "\n")


def _shown(name: str, value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        if name.endswith("share") or name.startswith("of "):
            return f"{100 * value:.1f} %"
        if name == "bandwidth":
            return f"{value / 1e9:.1f} GB/s"
        if name.endswith("operations"):
            return f"{value / 1e12:.2f} TOP/s"
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)
