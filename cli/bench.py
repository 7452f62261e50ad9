"""`genai bench`: measured speed."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from . import options as opt
from .run import ModelFile, extents
from .terminal import emit

app = typer.Typer(help="Measure speed: medians over several runs.", no_args_is_help=True)
Repeat = Annotated[int, typer.Option("-r", "--repeat", min=1, help="Runs; the median is reported.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def decode(
    model: opt.ModelArgument = None,
    context: Annotated[
        int, typer.Option("-c", "--context", min=1, help="Tokens in the cache before timing starts.")
    ] = 128,
    tokens: Annotated[int, typer.Option("-n", "--tokens", min=1, help="Tokens generated per run.")] = 128,
    batch: Annotated[int, typer.Option("-b", "--batch", min=1, help="Sequences that advance together.")] = 1,
    repeat: Repeat = 5,
    threads: opt.Threads = None,
    accuracy: opt.Accuracy = "auto",
    kv_type: opt.KvType = "auto",
    as_json: AsJson = False,
) -> None:
    """Tokens per second while generating."""
    from genai.benchmark import bench_decode

    loaded = opt.load(model, threads, accuracy, kv_type)
    _report(bench_decode(loaded, context=context, tokens=tokens, batch=batch, repeat=repeat), as_json)


@app.command()
def prefill(
    model: opt.ModelArgument = None,
    tokens: Annotated[int, typer.Option("-n", "--tokens", min=1, help="Prompt length.")] = 512,
    repeat: Repeat = 5,
    threads: opt.Threads = None,
    accuracy: opt.Accuracy = "auto",
    kv_type: opt.KvType = "auto",
    as_json: AsJson = False,
) -> None:
    """Tokens per second while reading a prompt."""
    from genai.benchmark import bench_prefill

    loaded = opt.load(model, threads, accuracy, kv_type)
    _report(bench_prefill(loaded, tokens=tokens, repeat=repeat), as_json)


@app.command()
def session(
    file: ModelFile,
    dims: Annotated[list[str] | None, typer.Option("--dim", help="NAME=EXTENT of a symbolic dimension.")] = None,
    repeat: Repeat = 10,
    threads: Annotated[int, typer.Option("-t", "--threads", min=0, help="CPU threads; 0 = physical cores.")] = 0,
    compare: Annotated[bool, typer.Option("--compare", help="Measure onnxruntime in turn with us.")] = False,
    as_json: AsJson = False,
) -> None:
    """Milliseconds to load and run any ONNX model, on made-up inputs."""
    from genai.session_benchmark import bench_session

    _report(bench_session(file, dims=extents(dims or []), repeat=repeat, threads=threads, compare=compare), as_json)


def _report(result: dict[str, object], as_json: bool) -> None:
    if as_json:
        emit(json.dumps(result), "\n")
        return
    for name, value in result.items():
        shown = f"{value:.4g}" if isinstance(value, float) else value
        emit(f"{name.replace('_', ' '):<20} {shown}", "\n")
