"""`genai bench`: measured speed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from genai.common.progress_line import ProgressLine
from genai.errors import OptionError

from . import options as opt
from .commands import App
from .run import ModelFile, extents
from .terminal import PlotFile, emit, emit_figures, show_chart

if TYPE_CHECKING:
    from genai.models.model import Model

app = App(help="Measure speed: medians of several runs, and shares of what the machine can do.", no_args_is_help=True)
Repeat = Annotated[int, typer.Option("-r", "--repeat", min=1, help="Runs; the median is reported.")]
_CONTEXTS = (128, 512, 2048, 8192)
_BATCHES = (1, 2, 4, 8, 16)
_ROWS = (1, 2, 4, 8, 16, 32, 128, 512)
_ROWS_OF_FORMATS = (1, 4, 16)
# What later rows may hold: 0.01234.
_NUMBER_WIDTH = 7
Context = Annotated[int, typer.Option("-c", "--context", min=1, help="Tokens in the cache before timing starts.")]
NewTokens = Annotated[int, typer.Option("-n", "--tokens", min=1, help="Tokens generated per run.")]
FormatsFlag = Annotated[bool, typer.Option("--formats", help="Every format of weights, on made-up matrices.")]
PromptTokens = Annotated[int, typer.Option("-n", "--tokens", min=1, help="Prompt length.")]


def _several(short: str, flag: str, subject: str) -> Any:
    return typer.Option(short, flag, min=1, help=f"{subject}; may be given several times.")


@app.command()
@opt.flag_groups
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
    """Tokens per second while generating. Also the share of the machine's memory bandwidth that this uses."""
    from genai.bench.speed import bench_decode

    with flags.load(model) as loaded, ProgressLine("Measuring") as line:
        options = {"context": context, "tokens": tokens, "batch": batch, "repeat": repeat}
        result = bench_decode(loaded, **options, progress=line.show)
    _report(result, as_json)


@app.command()
@opt.flag_groups
def prefill(
    model: opt.ModelArgument = None,
    tokens: PromptTokens = 512,
    repeat: Repeat = 5,
    *,
    flags: opt.ModelFlags,
    as_json: opt.AsJson = False,
) -> None:
    """Tokens per second while reading a prompt. Also the share of the machine's products per second that this uses."""
    from genai.bench.speed import bench_prefill

    with flags.load(model) as loaded, ProgressLine("Measuring") as line:
        result = bench_prefill(loaded, tokens=tokens, repeat=repeat, progress=line.show)
    _report(result, as_json)


@app.command()
@opt.flag_groups
def context(
    model: opt.ModelArgument = None,
    lengths: Annotated[list[int] | None, _several("-c", "--context", "Context length")] = None,
    beside: Annotated[
        str | None, typer.Option(help="Measure with keys and values of this type as well, in turn: fp16, fp32, int8.")
    ] = None,
    tokens: NewTokens = 32,
    repeat: Repeat = 3,
    plot: PlotFile = None,
    *,
    flags: opt.ModelFlags,
    as_json: opt.AsJson = False,
) -> None:
    """Speed of prefill and decode by length of context. By default 128, 512, 2048, 8192, as far as the model goes."""
    from genai.bench.speed import sweep_context

    with ExitStack() as stack:
        loaded = [stack.enter_context(flags.load(model))]
        if beside is not None:
            loaded.append(stack.enter_context(replace(flags, kv_type=beside).load(model)))
        line = stack.enter_context(ProgressLine("Measuring"))
        most = min(one.context_size for one in loaded)
        fitting = [length for length in _CONTEXTS if length + tokens < most]
        chosen = lengths or fitting or [most // 2]
        rows = sweep_context(loaded, chosen, tokens=tokens, repeat=repeat, progress=line.show)
        _table(rows, as_json, line, plot)


@app.command()
@opt.flag_groups
def batch(
    model: opt.ModelArgument = None,
    sizes: Annotated[list[int] | None, _several("-b", "--batch", "Number of sequences")] = None,
    context: Context = 128,
    tokens: NewTokens = 32,
    repeat: Repeat = 3,
    plot: PlotFile = None,
    *,
    flags: opt.ModelFlags,
    as_json: opt.AsJson = False,
) -> None:
    """Speed of decode by number of sequences that advance together. By default 1, 2, 4, 8 and 16."""
    from genai.bench.speed import sweep_batch

    with flags.load(model) as loaded, ProgressLine("Measuring") as line:
        options = {"context": context, "tokens": tokens, "repeat": repeat}
        rows = sweep_batch(loaded, sizes or _BATCHES, **options, progress=line.show)
        _table(rows, as_json, line, plot)


@app.command()
def threads(
    model: opt.ModelArgument = None,
    counts: Annotated[list[int] | None, _several("-t", "--threads", "Number of threads")] = None,
    context: Context = 256,
    tokens: NewTokens = 32,
    repeat: Repeat = 3,
    accuracy: opt.Accuracy = "auto",
    kv_type: opt.KvType = "auto",
    kv_force: opt.KvForce = False,
    plot: PlotFile = None,
    as_json: opt.AsJson = False,
) -> None:
    """Speed of decode and prefill by number of threads. By default 1, 2, 4 and so on up to the physical cores."""
    from genai.bench.speed import sweep_threads
    from genai.common.cores import default_threads

    chosen = counts or sorted({1, *(n for n in (2, 4, 8, 16, 32, 64) if n < default_threads()), default_threads()})

    def load(count: int) -> Model:
        return opt.ModelFlags(count, accuracy, kv_type, kv_force, device="cpu").load(model)  # whatever the folder asks

    with ProgressLine("Measuring") as line:
        rows = sweep_threads(load, chosen, context=context, tokens=tokens, repeat=repeat, progress=line.show)
        _table(rows, as_json, line, plot)


@app.command()
def startup(
    model: opt.ModelArgument = None,
    tokens: PromptTokens = 128,
    cold: Annotated[bool, typer.Option("--cold", help="Start with an empty kernel cache each time.")] = False,
    repeat: Repeat = 5,
    threads: opt.ThreadsOption = None,
    device: opt.Device = None,
    as_json: opt.AsJson = False,
) -> None:
    """Seconds from the start of a process to the first token."""
    from genai.bench.speed import bench_startup
    from genai.devices import check_device
    from genai.models.model_options import check_model_options

    check_model_options(threads=threads, device=device)
    check_device(device)
    folder, options = opt.folder_of(model), dict[str, Any](threads=threads, device=device)
    with ProgressLine("Measuring") as line:
        result = bench_startup(folder, tokens=tokens, **options, cold=cold, repeat=repeat, progress=line.show)
    _report(result, as_json)


@app.command()
def kernels(
    model: opt.ModelArgument = None,
    rows: Annotated[list[int] | None, _several("-m", "--rows", "Tokens at once")] = None,
    context: Annotated[
        int, typer.Option("-c", "--context", min=1, help="Tokens that attention sees, as far as the model goes.")
    ] = 8192,
    formats: FormatsFlag = False,
    repeat: Repeat = 5,
    threads: opt.ThreadsOption = None,
    accuracy: opt.Accuracy = "auto",
    device: opt.Device = None,
    as_json: opt.AsJson = False,
) -> None:
    """Speed of each kind of matrix product in a model, by number of tokens. Also as shares of the ceilings.

    Then attention of one token over so many others, by the type of cached keys and values.
    """
    from genai.bench.attention import bench_attention
    from genai.bench.kernels import bench_kernels

    if formats:
        from genai.bench.formats import bench_formats

        if model is not None:
            raise OptionError(
                f"--formats with the model {str(model)!r}",
                "it measures matrices that are made up, of every format, not a model's",
                "leave one of the two out",
            )
        if device not in (None, "cpu"):
            raise OptionError(f"--formats with --device {device}", "it measures the CPU's kernels", "leave one out")
        with ProgressLine("Measuring") as line:
            exact = accuracy == "fp32"
            rows_measured = bench_formats(rows=rows or _ROWS_OF_FORMATS, threads=threads, repeat=repeat, exact=exact)
            _table(rows_measured, as_json, line, None)
        return
    with opt.ModelFlags(threads, accuracy, device=device).load(model) as loaded, ProgressLine("Measuring") as line:
        products = bench_kernels(loaded, rows=rows or _ROWS, repeat=repeat)
        attention = bench_attention(loaded, context=context, repeat=repeat)
        rows_measured = chain(products, attention)
        _table(rows_measured if as_json else map(_for_a_column, rows_measured), as_json, line, None)


def _for_a_column(row: dict[str, Any]) -> dict[str, Any]:
    """A row of kernels for a table of 60 columns: "decode" and "prefill" are the numerics of few and of many tokens."""
    short = {"decode": "few", "prefill": "many"}
    return {"as" if name == "numerics" else name: short.get(value, value) for name, value in row.items()}


@app.command()
@opt.flag_groups
def throughput(
    model: opt.ModelArgument = None,
    requests: Annotated[int, typer.Option("--requests", min=1, help="Requests in all.")] = 64,
    prompt: Annotated[int, typer.Option("-p", "--prompt", min=1, help="Mean length of prompts.")] = 128,
    tokens: Annotated[int, typer.Option("-n", "--tokens", min=2, help="Mean length of replies.")] = 64,
    rate: Annotated[
        float | None, typer.Option("--rate", help="Requests per second [0.7 of what was reached at once].")
    ] = None,
    long_prompt: Annotated[
        int | None, typer.Option(min=32, help="Tokens read while a reply is watched [2048, as far as the model goes].")
    ] = None,
    sequences: Annotated[int, typer.Option("--sequences", min=1, help="Requests that run side by side.")] = 32,
    *,
    flags: opt.ModelFlags,
    as_json: opt.AsJson = False,
) -> None:
    """Many requests: all at once, arriving at random, and a reply that is watched while a long prompt is read.

    Tokens per second, seconds to the first token (ttft) and milliseconds between two tokens (itl), as percentiles.
    """
    from genai.bench.throughput import bench_throughput

    with flags.load(model) as loaded, ProgressLine("Measuring") as line:
        longest = long_prompt or min(2048, loaded.context_size // 2)
        results = list(
            bench_throughput(
                loaded, requests=requests, prompt=prompt, tokens=tokens, rate=rate, long_prompt=longest,
                max_sequences=sequences, progress=line.show,
            )
        )  # fmt: skip
        line.close()
    if as_json:
        emit(json.dumps(results), "\n")
        return
    for index, row in enumerate(results):
        emit(("\n" if index else "") + str(row["run"]), "\n")
        emit_figures((name, _text_of(name, value)) for name, value in row.items() if name != "run")


@app.command()
@opt.flag_groups
def lora(
    model: opt.ModelArgument = None,
    ranks: Annotated[list[int] | None, _several("-r", "--rank", "Rank of the adapters")] = None,
    batches: Annotated[list[int] | None, _several("-b", "--batch", "Number of sequences")] = None,
    context: Context = 128,
    tokens: NewTokens = 32,
    prompt: Annotated[int, typer.Option("-p", "--prompt", min=1, help="Prompt length for prefill.")] = 512,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Runs; medians are reported.")] = 5,
    *,
    flags: opt.ModelFlags,
    as_json: opt.AsJson = False,
) -> None:
    """What adapters cost: decode and prefill without places, with places and no adapter, and with made-up adapters.

    Every sequence of a batch has an adapter of its own, on all projections. By default rank 16, batches of 1 and 16.
    """
    from genai.bench.lora import bench_lora

    with ProgressLine("Measuring") as line:
        rows = bench_lora(
            lambda lora: flags.load(model, lora=lora), ranks=ranks or [16], batches=batches or [1, 16], context=context,
            tokens=tokens, prompt=prompt, repeat=repeat, progress=line.show,
        )  # fmt: skip
        _table(rows, as_json, line, None)


@app.command()
@opt.flag_groups
def speculation(
    model: opt.ModelArgument = None,
    files: Annotated[
        list[Path] | None,
        typer.Option("-f", "--file", help="Measure with this prompt and the model's own reply; may be repeated."),
    ] = None,
    draft: opt.Draft = None,
    lookup_file: opt.LookupFile = None,
    tokens: Annotated[int, typer.Option("-n", "--tokens", min=2, help="Most tokens of a reply.")] = 256,
    batch: Annotated[int, typer.Option("-b", "--batch", min=1, help="Sequences that are answered together.")] = 1,
    repeat: Repeat = 5,
    *,
    flags: opt.ModelFlags,
    as_json: opt.AsJson = False,
) -> None:
    """What guessing tokens gains, or costs: the same replies without and with it, in turn.

    Without files it is measured with texts that are put into the model's mouth: an edited program, a summary, prose
    and digits in which nothing comes again.
    """
    from genai.bench.speculation import Case, bench_speculation
    from genai.common.reading import read_text_file
    from genai.llm.speculation import Speculation

    cases = [Case(file.name, read_text_file(file)) for file in files or ()]
    with flags.load(model) as loaded, ExitStack() as stack, ProgressLine("Measuring") as line:
        beside = flags if flags.device else replace(flags, device=loaded.decoder.executor.device)
        guesser = stack.enter_context(beside.load(Path(draft))) if draft else None
        chosen = Speculation(draft=guesser, lookup_file=lookup_file)
        options: dict[str, Any] = {"cases": cases, "tokens": tokens, "batch": batch, "repeat": repeat}
        _table(bench_speculation(loaded, chosen, **options, progress=line.show), as_json, line, None)


@app.command()
def session(
    file: ModelFile,
    dims: Annotated[list[str] | None, typer.Option("--dim", help="NAME=EXTENT: a symbolic dimension.")] = None,
    repeat: Repeat = 10,
    threads: Annotated[int, typer.Option("-t", "--threads", min=0, help="CPU threads; 0 = physical cores.")] = 0,
    compare: Annotated[bool, typer.Option("--compare", help="Measure onnxruntime as well, in turn.")] = False,
    as_json: opt.AsJson = False,
) -> None:
    """Milliseconds to load and run any ONNX model, on made-up inputs."""
    from genai.bench.session import bench_session

    _report(bench_session(file, dims=extents(dims or []), repeat=repeat, threads=threads, compare=compare), as_json)


def _report(result: Mapping[str, object], as_json: bool) -> None:
    rows = ((name.replace("_", " "), _text_of(name, value)) for name, value in result.items())
    emit_figures(json.dumps(result) if as_json else rows)


def _table(rows: Iterable[Mapping[str, Any]], as_json: bool, line: ProgressLine, plot: Path | None) -> None:
    """Rows as they come, under one heading, and a plot of them; as JSON all of them at the end."""
    printed = list(_printed(rows, as_json, line))
    line.close()
    if as_json:
        emit(json.dumps(printed), "\n")
    speeds = [name for name in printed[0] if name.endswith("tok/s")] if printed else []
    if speeds:
        from genai.common.plots import Chart

        axis = next(iter(printed[0]))
        series = {name: [float(row[name]) for row in printed] for name in speeds}
        chart = Chart("Speed", axis, [str(row[axis]) for row in printed], series, "tok/s")
        show_chart(chart, plot, as_json=as_json)


def _printed(rows: Iterable[Mapping[str, Any]], as_json: bool, line: ProgressLine) -> Iterator[Mapping[str, Any]]:
    """The rows, each when it was printed, narrow: words of a heading stand above each other, names above their rows."""
    widths: list[int] = []
    named = ""
    for row in rows:
        yield row
        if as_json:
            continue
        line.close()
        (first, value), *_ = row.items()
        name = value if isinstance(value, str) else ""
        cells = {key: _text_of(key, value) for key, value in row.items() if not name or key != first}
        if not widths:
            heads = [key.split() for key in cells]
            for key, head in zip(cells, heads, strict=True):
                least = _NUMBER_WIDTH if isinstance(row[key], float) else 0
                widths.append(max(least, *map(len, [*head, cells[key]])))
            for words in reversed(list(zip_longest(*map(reversed, heads), fillvalue=""))):
                _emit_cells(words, widths)
        if name != named:
            emit(named := name, "\n")
        _emit_cells(cells.values(), widths)


def _emit_cells(cells: Iterable[str], widths: list[int]) -> None:
    emit("  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip(), "\n")


def _text_of(name: str, value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        if name.endswith("share") or name.startswith("of "):
            return f"{100 * value:.1f} %"
        if name == "bandwidth":
            return f"{value / 1e9:.1f} GB/s"
        if name.endswith("operations"):
            return f"{value / 1e12:.2f} TOP/s"
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{4 if abs(value) >= 1e-3 else 2}g}"
    return str(value)
