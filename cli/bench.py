"""`genai bench`: measures speed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from genai.common.progress import task
from genai.errors import OptionError

from . import options as opt
from .bench_tables import printed, report, text_of
from .build import encoder_of
from .commands import App
from .model_names import graph_path, model_path
from .run import extents
from .terminal import PlotFile, emit, emit_figures, show_chart

if TYPE_CHECKING:
    from genai.models.model import Model

app = App(
    help="Measure speed. Reports medians of several runs, and percentages of the machine's peak.", no_args_is_help=True
)
Repeat = Annotated[int, typer.Option("-r", "--repeat", min=1, help="Number of runs; the median is reported.")]
_CONTEXTS = (128, 512, 2048, 8192)
_BATCHES = (1, 2, 4, 8, 16)
_ROWS = (1, 2, 4, 8, 16, 32, 128, 512)
_ROWS_OF_FORMATS = (1, 4, 16)
Context = Annotated[
    int, typer.Option("-c", "--context", min=1, help="Number of tokens in the KV cache when timing starts.")
]
NewTokens = Annotated[int, typer.Option("-n", "--tokens", min=1, help="Number of tokens to generate per run.")]
FormatsFlag = Annotated[bool, typer.Option("--formats", help="Measure every weight format on random matrices.")]
EncoderModel = Annotated[
    Path,
    typer.Argument(help="Encoder: org/name, or a folder with a graph or a checkpoint.", parser=model_path),
]
PromptTokens = Annotated[int, typer.Option("-n", "--tokens", min=1, help="Prompt length in tokens.")]


def _several(short: str, flag: str, subject: str) -> Any:
    return typer.Option(short, flag, min=1, help=f"{subject}; may be given several times.")


@app.command()
@opt.flag_groups
def decode(
    model: opt.ModelArgument = None,
    context: Context = 128,
    tokens: NewTokens = 128,
    batch: Annotated[int, typer.Option("-b", "--batch", min=1, help="Number of sequences decoded together.")] = 1,
    repeat: Repeat = 5,
    *,
    flags: opt.ModelFlags,
    as_json: opt.AsJson = False,
) -> None:
    """Measure decode speed in tokens per second. Also reports the share of the memory bandwidth that decoding uses."""
    from genai.bench.speed import bench_decode

    with flags.load(model) as loaded, task("Measuring") as line:
        options = {"context": context, "tokens": tokens, "batch": batch, "repeat": repeat}
        result = bench_decode(loaded, **options, progress=line.show)
    report(result, as_json)


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
    """Measure prefill speed in tokens per second. Also reports matmul speed as a percentage of the machine's peak."""
    from genai.bench.speed import bench_prefill

    with flags.load(model) as loaded, task("Measuring") as line:
        result = bench_prefill(loaded, tokens=tokens, repeat=repeat, progress=line.show)
    report(result, as_json)


@app.command()
@opt.flag_groups
def context(
    model: opt.ModelArgument = None,
    lengths: Annotated[list[int] | None, _several("-c", "--context", "Context length")] = None,
    beside: Annotated[
        str | None, typer.Option(help="Second KV cache type to measure in alternating runs: fp16, fp32 or int8.")
    ] = None,
    tokens: NewTokens = 32,
    repeat: Repeat = 3,
    plot: PlotFile = None,
    *,
    flags: opt.ModelFlags,
    as_json: opt.AsJson = False,
) -> None:
    """Measure prefill and decode speed by context length. Default: 128, 512, 2048, 8192, up to the model's limit."""
    from genai.bench.speed import sweep_context

    with ExitStack() as stack:
        loaded = [stack.enter_context(flags.load(model))]
        if beside is not None:
            loaded.append(stack.enter_context(replace(flags, kv_type=beside).load(model)))
        line = stack.enter_context(task("Measuring"))
        most = min(one.context_size for one in loaded)
        fitting = [length for length in _CONTEXTS if length + tokens < most]
        chosen = lengths or fitting or [most // 2]
        rows = sweep_context(loaded, chosen, tokens=tokens, repeat=repeat, progress=line.show)
        _table(rows, as_json, plot)


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
    """Measure decode speed by number of sequences decoded together. Default numbers: 1, 2, 4, 8 and 16."""
    from genai.bench.speed import sweep_batch

    with flags.load(model) as loaded, task("Measuring") as line:
        options = {"context": context, "tokens": tokens, "repeat": repeat}
        rows = sweep_batch(loaded, sizes or _BATCHES, **options, progress=line.show)
        _table(rows, as_json, plot)


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
    """Measure decode and prefill speed by number of threads. Default: 1, 2, 4 and so on, up to all physical cores."""
    from genai.bench.speed import sweep_threads
    from genai.common.cores import default_threads

    chosen = counts or sorted({1, *(n for n in (2, 4, 8, 16, 32, 64) if n < default_threads()), default_threads()})

    def load(count: int) -> Model:
        # The command varies the number of CPU threads, so it overrides the device that the folder's config names.
        return opt.ModelFlags(count, accuracy, kv_type, kv_force, device="cpu").load(model)

    with task("Measuring") as line:
        rows = sweep_threads(load, chosen, context=context, tokens=tokens, repeat=repeat, progress=line.show)
        _table(rows, as_json, plot)


@app.command()
def startup(
    model: opt.ModelArgument = None,
    tokens: PromptTokens = 128,
    cold: Annotated[bool, typer.Option("--cold", help="Start each run with an empty kernel cache.")] = False,
    commands: Annotated[
        bool | None,
        typer.Option("--commands/--no-commands", help="Also measure the start of each command [default: if possible]."),
    ] = None,
    repeat: Repeat = 5,
    threads: opt.ThreadsOption = None,
    device: opt.Device = None,
    as_json: opt.AsJson = False,
) -> None:
    """Measure the time from the start of a process to the first token, in seconds.

    Also measures the time that each command needs on a terminal to show a first sign and its first output.
    """
    from genai.bench.commands import bench_commands, can_measure, import_seconds
    from genai.bench.speed import bench_startup
    from genai.devices import check_device
    from genai.doctor.processor import read_processor
    from genai.models.model_options import check_model_options

    check_model_options(threads=threads, device=device)
    check_device(device)
    folder, options = opt.folder_of(model), dict[str, Any](threads=threads, device=device)
    with task("Measuring the model") as line:
        result = bench_startup(folder, tokens=tokens, **options, cold=cold, repeat=repeat, progress=line.show)
        result = {"processor": read_processor().name, **result, "import s": import_seconds(repeat)}
    if not as_json:
        report(result, as_json)
    rows: list[Mapping[str, Any]] = []
    if can_measure() if commands is None else commands:
        with task("Measuring the commands") as line:
            measured = bench_commands(_commands(), repeat=repeat, progress=line.show)
            rows = list(printed(measured, as_json))
    if as_json:
        emit(json.dumps({**result, "commands": rows}), "\n")


def _commands() -> dict[str, list[str]]:
    """Return the arguments with which each command is started: its help, or a short run with the bundled model."""
    from .app import command  # it imports this module

    names: list[list[str]] = []
    for name, one in command().commands.items():
        names += [[name, inner] for inner in one.commands] if hasattr(one, "commands") else [[name]]
    runs = {
        "genai --version": ["--version"],
        "genai --help": ["--help"],
        "genai chat": ["chat"],
        "genai generate --raw -n 8": ["generate", "--raw", "-p", "Luna", "-n", "8"],
        "genai info": ["info"],
        "genai list": ["list"],
    }
    return runs | {f"genai {' '.join(name)} --help": [*name, "--help"] for name in names}


@app.command()
def kernels(
    model: opt.ModelArgument = None,
    rows: Annotated[list[int] | None, _several("-m", "--rows", "Number of tokens per matmul")] = None,
    context: Annotated[
        int, typer.Option("-c", "--context", min=1, help="Number of cached tokens that attention reads.")
    ] = 8192,
    formats: FormatsFlag = False,
    repeat: Repeat = 5,
    threads: opt.ThreadsOption = None,
    accuracy: opt.Accuracy = "auto",
    device: opt.Device = None,
    as_json: opt.AsJson = False,
) -> None:
    """Measure each kind of matmul in a model, by number of tokens. Also reports percentages of the machine's peak.

    Also measures the attention of one token over the cached tokens, for each KV cache type.
    """
    from genai.bench.attention import bench_attention
    from genai.bench.kernels import bench_kernels

    if formats:
        from genai.bench.formats import bench_formats

        if model is not None:
            raise OptionError(
                f"--formats cannot be used with the model {str(model)!r}",
                "--formats measures random matrices in every format, not a model's weights",
                "remove --formats, or leave out MODEL",
            )
        if device not in (None, "cpu"):
            raise OptionError(
                f"--formats cannot be used with --device {device}",
                "--formats measures only CPU kernels",
                "remove one of the two",
            )
        with task("Measuring"):
            exact = accuracy == "fp32"
            rows_measured = bench_formats(rows=rows or _ROWS_OF_FORMATS, threads=threads, repeat=repeat, exact=exact)
            _table(rows_measured, as_json, None)
        return
    with opt.ModelFlags(threads, accuracy, device=device).load(model) as loaded, task("Measuring"):
        products = bench_kernels(loaded, rows=rows or _ROWS, repeat=repeat)
        attention = bench_attention(loaded, context=context, repeat=repeat)
        rows_measured = chain(products, attention)
        _table(rows_measured if as_json else map(_for_a_column, rows_measured), as_json, None)


def _for_a_column(row: dict[str, Any]) -> dict[str, Any]:
    """Abbreviate a row for a table of 60 columns: "numerics" to "as", "decode" to "few", and "prefill" to "many"."""
    short = {"decode": "few", "prefill": "many"}
    return {"as" if name == "numerics" else name: short.get(value, value) for name, value in row.items()}


@app.command()
@opt.flag_groups
def throughput(
    model: opt.ModelArgument = None,
    requests: Annotated[int, typer.Option("--requests", min=1, help="Number of requests.")] = 64,
    prompt: Annotated[int, typer.Option("-p", "--prompt", min=1, help="Mean prompt length in tokens.")] = 128,
    tokens: Annotated[int, typer.Option("-n", "--tokens", min=2, help="Mean reply length in tokens.")] = 64,
    rate: Annotated[
        float | None,
        typer.Option("--rate", help="Requests per second [default: 70% of the rate that the first run reaches]."),
    ] = None,
    long_prompt: Annotated[
        int | None,
        typer.Option(min=32, help="Length of the long prompt in tokens [default: 2048, at most half the context]."),
    ] = None,
    sequences: Annotated[int, typer.Option("--sequences", min=1, help="Maximum number of concurrent requests.")] = 32,
    *,
    flags: opt.ModelFlags,
    as_json: opt.AsJson = False,
) -> None:
    """Measure throughput and latency. Three runs: all requests at once, random arrivals, a reply during a long prefill.

    Reports tokens per second, and percentiles of the time to first token (ttft, in seconds) and of the inter-token
    latency (itl, in milliseconds).
    """
    from genai.bench.throughput import bench_throughput

    with flags.load(model) as loaded, task("Measuring") as line:
        longest = long_prompt or min(2048, loaded.context_size // 2)
        results = list(
            bench_throughput(
                loaded, requests=requests, prompt=prompt, tokens=tokens, rate=rate, long_prompt=longest,
                max_sequences=sequences, progress=line.show,
            )
        )  # fmt: skip
    if as_json:
        emit(json.dumps(results), "\n")
        return
    for index, row in enumerate(results):
        emit(("\n" if index else "") + str(row["run"]), "\n")
        emit_figures((name, text_of(name, value)) for name, value in row.items() if name != "run")


@app.command()
@opt.flag_groups
def serve(
    model: opt.ModelArgument = None,
    clients: Annotated[list[int] | None, _several("-c", "--clients", "Number of concurrent requests")] = None,
    prompt: Annotated[int, typer.Option("-p", "--prompt", min=1, help="Prompt length in tokens.")] = 128,
    tokens: Annotated[int, typer.Option("-n", "--tokens", min=2, help="Reply length in tokens.")] = 64,
    repeat: Repeat = 3,
    compare: Annotated[
        str | None,
        typer.Option("--compare", help="URL of another server, or command with {port} that starts it, to measure too."),
    ] = None,
    *,
    flags: opt.ModelFlags,
    as_json: opt.AsJson = False,
) -> None:
    """Measure the server beside its engine without a server. Default numbers of clients: 1, 8 and 32.

    Reports tokens per second, percentiles of the time to first token (ttft) and of the time between two tokens (itl),
    and the processor time of the client.
    """
    from genai.bench.serving import CLIENTS, bench_serve

    with flags.load(model) as loaded, task("Measuring") as line:
        options: dict[str, Any] = {"prompt": prompt, "tokens": tokens, "repeat": repeat, "compare": compare}
        rows = bench_serve(loaded, clients=clients or CLIENTS, **options, progress=line.show)
        _table(rows, as_json, None)


@app.command()
@opt.flag_groups
def lora(
    model: opt.ModelArgument = None,
    ranks: Annotated[list[int] | None, _several("-r", "--rank", "Rank of the adapters")] = None,
    batches: Annotated[list[int] | None, _several("-b", "--batch", "Number of sequences")] = None,
    context: Context = 128,
    tokens: NewTokens = 32,
    prompt: Annotated[int, typer.Option("-p", "--prompt", min=1, help="Prompt length for prefill in tokens.")] = 512,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Number of runs; medians are reported.")] = 5,
    *,
    flags: opt.ModelFlags,
    as_json: opt.AsJson = False,
) -> None:
    """Measure the cost of adapters. Compares the model without adapter inputs, with inputs only, and with adapters.

    The adapters have random weights and cover all projections. Each sequence of a batch uses a different adapter. The
    default is rank 16 and batches of 1 and 16.
    """
    from genai.bench.lora import bench_lora

    with task("Measuring") as line:
        rows = bench_lora(
            lambda lora: flags.load(model, lora=lora), ranks=ranks or [16], batches=batches or [1, 16], context=context,
            tokens=tokens, prompt=prompt, repeat=repeat, progress=line.show,
        )  # fmt: skip
        _table(rows, as_json, None)


@app.command()
@opt.flag_groups
def speculation(
    model: opt.ModelArgument = None,
    files: Annotated[
        list[Path] | None,
        typer.Option("-f", "--file", help="Measure the reply to the prompt in this file; may be given several times."),
    ] = None,
    draft: opt.Draft = None,
    lookup_file: opt.LookupFile = None,
    mtp: Annotated[
        bool, typer.Option("--mtp-only", help="Propose tokens only with the MTP head of the model's folder.")
    ] = False,
    tokens: Annotated[int, typer.Option("-n", "--tokens", min=2, help="Maximum number of tokens per reply.")] = 256,
    batch: Annotated[int, typer.Option("-b", "--batch", min=1, help="Number of sequences decoded together.")] = 1,
    repeat: Repeat = 5,
    *,
    flags: opt.ModelFlags,
    as_json: opt.AsJson = False,
) -> None:
    """Measure the gain or loss from speculative decoding. Generates the same replies with and without speculation.

    Without --file, the replies are fixed texts: an edited program, a summary, and prose and digits without
    repetitions.
    """
    from genai.bench.speculation import Case, bench_speculation
    from genai.common.reading import read_text_file
    from genai.llm.speculation import Speculation

    cases = [Case(file.name, read_text_file(file)) for file in files or ()]
    if mtp and (draft or lookup_file):
        raise OptionError(
            f"--mtp-only cannot be used with {'--draft' if draft else '--lookup-file'}",
            "only the MTP head proposes tokens with this option",
            "remove one of the two",
        )
    with flags.load(model, mtp=mtp) as loaded, ExitStack() as stack, task("Measuring") as line:
        beside = flags if flags.device else replace(flags, device=loaded.decoder.executor.device)
        guesser = stack.enter_context(beside.load(Path(draft))) if draft else None
        chosen = Speculation(lookup=not mtp, draft=guesser, lookup_file=lookup_file, mtp=mtp)
        options: dict[str, Any] = {"cases": cases, "tokens": tokens, "batch": batch, "repeat": repeat}
        _table(bench_speculation(loaded, chosen, **options, progress=line.show), as_json, None)


@app.command()
def session(
    file: Annotated[
        Path | None, typer.Argument(metavar="MODEL.onnx", help="ONNX file.", parser=graph_path, show_default=False)
    ] = None,
    dims: Annotated[
        list[str] | None, typer.Option("--dim", help="NAME=EXTENT or INPUT:AXIS=EXTENT: size of a dimension.")
    ] = None,
    repeat: Annotated[
        int | None, typer.Option("-r", "--repeat", min=1, help="Number of runs; the median is reported [default: 10].")
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option("-t", "--threads", min=1, help="CPU threads [default: physical cores; for a suite 1 and 2]."),
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Also measure onnxruntime, in alternating runs.")] = False,
    cpu: Annotated[
        bool, typer.Option("--cpu", help="Measure the CPU time of one thread, for machines with other work.")
    ] = False,
    suite: Annotated[
        Path | None, typer.Option("--suite", help="Compare all models of this folder with onnxruntime.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", help='With --suite: names of models, or patterns such as "resnet*".')
    ] = None,
    output: Annotated[
        list[Path] | None,
        typer.Option("-o", "--output", help="With --suite: write the result to a .json, .md or .html file."),
    ] = None,
    against: Annotated[
        Path | None, typer.Option("--against", help="With --suite: exit with 1 if a ratio is 5% above this .json file.")
    ] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Measure the time in milliseconds to load any ONNX model and to run it on random inputs."""
    from genai.bench.session import bench_session

    if cpu and threads not in (None, 1):
        raise OptionError(
            f"--cpu cannot be used with --threads {threads}",
            "--cpu measures the CPU time of one thread",
            "remove one of the two",
        )
    if suite is not None:
        from .bench_suite import measure_suite

        _check_suite(file, compare)
        measure_suite(
            suite, dims=extents(dims or []), repeat=repeat, threads=threads, cpu=cpu, only=only or [],
            outputs=output or [], against=against, as_json=as_json,
        )  # fmt: skip
        return
    for flag, value in (("--only", only), ("--output", output), ("--against", against)):
        if value:
            raise OptionError(f"{flag} needs --suite", f"{flag} is for a folder of models", "add --suite FOLDER")
    if file is None:
        raise OptionError("no model", "the command measures a model or a folder", "pass MODEL.onnx, or --suite FOLDER")
    with task("Measuring"):
        result = bench_session(
            file, dims=extents(dims or []), repeat=repeat or 10, threads=threads or 0, compare=compare, cpu=cpu
        )
    report(result, as_json)


def _check_suite(file: Path | None, compare: bool) -> None:
    if file is not None:
        raise OptionError(
            f"--suite cannot be used with the model {str(file)!r}",
            "--suite measures the models of a folder",
            "remove one of the two; to select models of the folder, use --only",
        )
    if compare:
        raise OptionError("--compare cannot be used with --suite", "--suite always compares", "remove --compare")


@app.command()
def embed(
    model: EncoderModel,
    repeat: Repeat = 5,
    threads: opt.ThreadsOption = None,
    precision: Annotated[
        str, typer.Option(help="Weight precision of a checkpoint: fp32, fp16, int8 or int4.")
    ] = "fp32",
    compare: Annotated[bool, typer.Option("--compare", help="Also measure onnxruntime, in alternating runs.")] = False,
    as_json: opt.AsJson = False,
) -> None:
    """Measure the speed of an encoder for one text, for batches and for texts of mixed lengths."""
    from genai.bench.embeddings import bench_embed

    folder = encoder_of(model, precision, yes=False)
    rows = bench_embed(folder, repeat=repeat, threads=threads, precision=precision, compare=compare)
    with task("Measuring"):
        _table(rows, as_json, None)


def _table(rows: Iterable[Mapping[str, Any]], as_json: bool, plot: Path | None) -> None:
    """Print rows as they arrive, under one heading, then a plot; with `as_json`, print all rows at the end."""
    found = list(printed(rows, as_json))
    if as_json:
        emit(json.dumps(found), "\n")
    speeds = [name for name in found[0] if name.endswith("tok/s")] if found else []
    if speeds:
        from genai.common.plots import Chart

        axis = next(iter(found[0]))
        series = {name: [float(row[name]) for row in found] for name in speeds}
        chart = Chart("Speed", axis, [str(row[axis]) for row in found], series, "tok/s")
        show_chart(chart, plot, as_json=as_json)
