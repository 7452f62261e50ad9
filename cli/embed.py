"""`genai embed` and `genai rerank`: vectors of texts, and scores of documents for a query."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from genai.common.progress import quietly, task as progress_task
from genai.errors import OptionError

from . import options as opt
from .build import encoder_of
from .model_names import model_path
from .terminal import Voice

if TYPE_CHECKING:
    from genai.embed.embedder import Embedder
    from genai.embed.files import EmbedProgress
    from genai.embed.pooling import Floats

ModelFolder = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL",
        help="org/name, or folder with an ONNX graph or a checkpoint, and a tokenizer.",
        parser=model_path,
    ),
]
GraphFile = Annotated[
    str | None,
    typer.Option("--file", help="Graph in MODEL, such as onnx/model_quantized.onnx [default: onnx/model.onnx]."),
]
Input = Annotated[
    Path | None,
    typer.Argument(metavar="INPUT", help="JSONL, CSV, TSV, Parquet or text file (one text per line), or - for stdin."),
]
Column = Annotated[str, typer.Option("--column", help="Field of a line that contains the text.")]
Format = Annotated[
    str | None,
    typer.Option(
        "--format", help="Input format: jsonl, text, csv, tsv or parquet [default: INPUT's extension; jsonl for stdin]."
    ),
]
MaxLength = Annotated[
    int | None, typer.Option("--max-length", help="Maximum number of tokens of a text [default: the model's].", min=1)
]
Truncate = Annotated[bool, typer.Option("--truncate/--no-truncate", help="Truncate texts that are too long.")]
Precision = Annotated[
    str, typer.Option("--precision", help="Weight precision if MODEL is a checkpoint: fp32, fp16, int8 or int4.")
]
_QUIET_HELP = "Print only results and errors."
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help=_QUIET_HELP)]


def embed(
    model: ModelFolder,
    input: Input = None,
    *,
    text: Annotated[list[str] | None, typer.Option("-p", "--prompt", help="Text to embed (repeatable).")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="File to write: .npy, .jsonl or .parquet.")
    ] = None,
    file: GraphFile = None,
    column: Column = "text",
    format: Format = None,
    pooling: Annotated[
        str | None,
        typer.Option("--pooling", help="mean, cls, lasttoken, max or weightedmean [default: as modules.json says]."),
    ] = None,
    prompt_name: Annotated[
        str | None, typer.Option("--prompt-name", help="Prompt of the model to put before each text, such as query.")
    ] = None,
    task: Annotated[
        str | None, typer.Option("--task", help="Task whose adapter is used, for jina-embeddings-v3 [default: none].")
    ] = None,
    kind: Annotated[
        str,
        typer.Option("--kind", help="dense, or sparse (weights of tokens) or multi (a vector per token) for BGE-M3."),
    ] = "dense",
    dimensions: Annotated[
        int | None, typer.Option("--dimensions", help="Keep only this number of dimensions.", min=1)
    ] = None,
    normalize: Annotated[
        bool | None, typer.Option("--normalize/--no-normalize", help="Make vectors of length 1 [default: the model's].")
    ] = None,
    truncate: Truncate = True,
    max_length: MaxLength = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing OUTPUT.")] = False,
    precision: Precision = "fp32",
    yes: opt.Yes = False,
    threads: opt.ThreadsOption = None,
    quiet: Quiet = False,
) -> None:
    """Compute a vector for each line of a file, or for each text given with -p.

    Vectors go to the file of --output in the order of INPUT, or to stdout, one JSON list per line. If a run with
    --output is interrupted, continue it with --resume.
    """
    from genai.embed.embedder import Embedder
    from genai.embed.files import TEXT_COLUMN, check_output, embed_file, output_format, text_of, vectors_of_lines
    from genai.llm.batch.lines import open_lines

    _check_sources(model, input, text, output)
    if kind not in ("dense", "sparse", "multi") or (kind != "dense" and (output or prompt_name or dimensions)):
        raise OptionError(
            f"--kind {kind!r:.40}",
            "the kinds are dense, sparse and multi, and only dense can be used with -o, --prompt-name and --dimensions",
            "choose a kind; results of sparse and multi go to stdout",
        )
    if output is None and (resume or force):
        raise OptionError(
            f"{'--resume' if resume else '--force'} cannot be used without --output",
            "vectors on stdout are neither continued nor overwritten",
            "remove it, or add --output",
        )
    if resume and force:
        raise OptionError(
            "--force cannot be used with --resume", "one overwrites OUTPUT, the other continues it", "remove one"
        )
    begin = "force" if force else "resume" if resume else "new"
    if output is not None:  # before the model is loaded
        output_format(output)
        check_output(output, begin)
        opt.check_apart([("INPUT", input), ("--output", output)])
    lines = open_lines(input, format) if input is not None else None
    if lines is not None:
        lines.check_column(column, "--column", is_default=column == TEXT_COLUMN)  # before the model is loaded
    options: dict[str, Any] = {"prompt_name": prompt_name, "dimensions": dimensions, "truncate": truncate}
    with Embedder(
        encoder_of(model, precision, yes=yes),
        file=file,
        pooling=pooling,
        normalize=normalize,
        max_length=max_length,
        threads=threads,
        precision=precision,
        task=task,
    ) as embedder:
        voice = Voice(quiet)
        if kind != "dense":
            _print_parts(embedder, kind, text if lines is None else (text_of(lines, line, column)[0] for line in lines))
            return
        embed_texts: Callable[[Sequence[str]], Floats] = partial(embedder.embed, **options)
        embed_texts([])  # raises the errors of options
        voice.say(f"{dimensions or embedder.dimensions} dimensions, {'+'.join(embedder.pooling)} pooling")
        if lines is None or output is None:
            vectors: Iterable[Floats] = (
                embed_texts(text or []) if lines is None else vectors_of_lines(lines, embed_texts, column=column)
            )
            for vector in vectors:
                typer.echo(json.dumps([float(str(number)) for number in vector]))
            return
        settings = {"model": embedder.identity(), "file": file, **options}
        with quietly(quiet), _Line() as line:
            try:
                report = embed_file(
                    lines, output, embed_texts, dimensions or embedder.dimensions,
                    column=column, begin=begin, settings=settings, progress=line.show,
                )  # fmt: skip
            except KeyboardInterrupt:
                counted = "1 vector is" if line.texts == 1 else f"{line.texts:,} vectors are"
                voice.say(f"{counted} kept; to continue, run the command again with --resume ({output})")
                raise
        new = report.texts - report.kept
        kept = f" · {report.kept:,} already done" if report.kept else ""
        rate = new / max(report.seconds, 1e-9)
        counted = f"{report.texts:,} text{'s' * (report.texts != 1)}"
        voice.say(f"{output}: {counted}{kept} · {report.seconds:,.1f} s · {rate:,.0f} texts/s")


def rerank(
    model: ModelFolder,
    input: Input = None,
    *,
    query: Annotated[str, typer.Option("-q", "--query", help="Query to score the documents for.")],
    document: Annotated[list[str] | None, typer.Option("-p", "--prompt", help="Document (repeatable).")] = None,
    top_n: Annotated[
        int | None, typer.Option("-n", "--top-n", help="Number of documents to print [default: all].", min=1)
    ] = None,
    instruction: Annotated[
        str | None,
        typer.Option("--instruction", help="Instruction for a generating reranker, or text before a query."),
    ] = None,
    prompt_name: Annotated[
        str | None, typer.Option("--prompt-name", help="Prompt of the model to use as the instruction, such as web.")
    ] = None,
    file: GraphFile = None,
    column: Column = "text",
    format: Format = None,
    truncate: Truncate = True,
    max_length: MaxLength = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per document.")] = False,
    label: Annotated[
        int | None,
        typer.Option("--label", help="Logit that is the score, from 0, for a model with several [default: the last]."),
    ] = None,
    activation: Annotated[
        str | None,
        typer.Option("--activation", help="Function of logits: Sigmoid, Softmax or Identity [default: the model's]."),
    ] = None,
    precision: Precision = "fp32",
    yes: opt.Yes = False,
    threads: opt.ThreadsOption = None,
    # Here, -q is short for --query.
    quiet: Annotated[bool, typer.Option("--quiet", help=_QUIET_HELP)] = False,
) -> None:
    """Print the documents of a file, or those given with -p, in descending order of their scores for a query.

    A line has the score, the document's number (from 0) and the document, separated by tabs.
    """
    from genai.embed.files import text_of
    from genai.embed.reranker import Reranker
    from genai.llm.batch.lines import open_lines

    _check_sources(model, input, document, None)
    documents = document or []
    if input is not None:
        lines = open_lines(input, format)
        lines.check_column(column, "--column")
        documents = [text_of(lines, line, column)[0] for line in lines]
    if instruction is not None and prompt_name is not None:
        raise OptionError(
            "--instruction cannot be used with --prompt-name", "both name the text before the query", "remove one"
        )
    with quietly(quiet), Reranker(
        encoder_of(model, precision, yes=yes), file=file, max_length=max_length, threads=threads, precision=precision,
        label=label, activation=activation,
    ) as reranker:  # fmt: skip
        options: dict[str, Any] = {"prompt_name": prompt_name, "prompt": instruction, "truncate": truncate}
        for found in reranker.rank(query, documents, top_n=top_n, **options):
            if as_json:
                typer.echo(json.dumps({"index": found.index, "score": found.score, "document": found.document}))
            else:
                shown = " ".join(found.document.split())
                typer.echo(f"{found.score:.4f}\t{found.index}\t{shown}")


def _print_parts(embedder: Embedder, kind: str, texts: Iterable[str] | None) -> None:
    """Print one JSON object or list per text: weights by token id, or a vector per token."""
    for text in texts or []:
        if kind == "sparse":
            typer.echo(json.dumps({str(id_): weight for id_, weight in cast(Any, embedder.embed_sparse(text)).items()}))
        else:
            rows = cast(Any, embedder.embed_multi(text)).tolist()
            typer.echo(json.dumps([[float(f"{number:.9g}") for number in row] for row in rows]))


def _check_sources(model: object, input: Path | None, texts: list[str] | None, output: Path | None) -> None:
    if (input is None) == (not texts):
        raise OptionError(
            "give INPUT or -p, but not both" if input is not None else "there is no text",
            f"{model} is MODEL, the first argument; texts come from INPUT, the second argument, or from -p",
            "pass INPUT, or -p TEXT; to read stdin with one text per line, pass - --format text",
        )
    if texts and output is not None:
        raise OptionError(
            "--output cannot be used with -p", "vectors of -p go to stdout", "remove --output, or pass INPUT"
        )


class _Line:
    """The live progress bar.

    Attributes:
        texts: number of texts in the output so far.
    """

    def __init__(self) -> None:
        self._line, self.texts = progress_task("Embedding"), 0

    def show(self, progress: EmbedProgress) -> None:
        """Update the bar."""
        self.texts = progress.texts
        counted = f"{progress.texts:,} text{'s' * (progress.texts != 1)}"
        if progress.total is None:
            self._line.count(counted)
        else:
            self._line.show(progress.done, progress.total, counted)

    def __enter__(self) -> _Line:
        return self

    def __exit__(self, *_: object) -> None:
        self._line.close()
