"""`genai build`: makes a model folder from a Hugging Face checkpoint or a GGUF file. Other commands call it too."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from genai.common.memory_limits import format_bytes
from genai.common.paths import expanded

from .model_names import model_path
from .pulling import PullDialog
from .terminal import agreed, emit, say, termination_raises

if TYPE_CHECKING:
    from genai.convert.build import BuildPlan
    from genai.convert.options import ExportOptions


def build(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            help="Folder with config.json, *.safetensors and a tokenizer; a GGUF file; org/name; or a short name.",
            parser=model_path,
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="Model folder to create.")],
    precision: Annotated[
        str | None,
        typer.Option(
            help="Weight precision: int4, int8, fp16, fp32 or kept (unchanged) [default: int4; kept if quantised]."
        ),
    ] = None,
    block_size: Annotated[int, typer.Option(help="Number of weights per scale: 16, 32, 64, 128 or 256.")] = 32,
    asymmetric: Annotated[bool, typer.Option("--asymmetric", help="Use one zero point per block.")] = False,
    head_precision: Annotated[str | None, typer.Option(help="Precision of the LM head [default: --precision].")] = None,
    embedding_precision: Annotated[
        str | None, typer.Option(help="Precision of the embeddings [default: see docs/how-to/convert.md].")
    ] = None,
    accuracy_level: Annotated[int, typer.Option(help="Activation precision in matmuls: 4 = int8, 1 = fp32.")] = 4,
    mtp: Annotated[
        bool | None,
        typer.Option("--mtp/--no-mtp", help="Require the MTP head, or leave it out [default: convert it if present]."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace NaN and infinite weights with 0.")] = False,
) -> None:
    """Build a model folder from a Hugging Face checkpoint or a GGUF file, and print its path."""
    from genai.convert.build import default_precision, execute, plan_build
    from genai.convert.encoders.build import is_encoder_checkpoint
    from genai.convert.options import ExportOptions

    values: dict[str, Any] = {"head_precision": head_precision, "embedding_precision": embedding_precision}
    checkpoint = checkpoint_of(checkpoint)
    is_encoder = is_encoder_checkpoint(expanded(checkpoint))
    chosen = precision or ("fp32" if is_encoder else default_precision(expanded(checkpoint)))
    options = ExportOptions(
        precision=chosen,  # type: ignore[arg-type]  # ExportOptions checks it
        block_size=block_size,
        symmetric=not asymmetric,
        accuracy_level=accuracy_level,
        mtp=mtp,
        **values,
    )
    start = time.monotonic()
    if is_encoder:
        _build_encoder(expanded(checkpoint), output, options)
        return
    plan = plan_build(checkpoint, options, force=force)
    say_remarks(plan)
    with interruptible():
        folder = execute(plan, output)
    for name in plan.weights.replaced:
        say(f"genai: {name} contained NaN or infinite values, which --force replaced with 0")
    for remark in [*plan.prequantized, *plan.rounded]:
        say(f"genai: {remark}")
    if plan.spec.mtp is not None:
        head = sum(file.stat().st_size for file in folder.glob("mtp.onnx*"))
        say(f"genai: the MTP head takes {format_bytes(head)}; to build the model without it, pass --no-mtp")
    written = sum(file.stat().st_size for file in folder.iterdir())
    say(f"{plan.checkpoint.config.model_type}: {format_bytes(written)} in {time.monotonic() - start:.1f} s")
    emit(str(folder), "\n")


def _build_encoder(checkpoint: Path, output: Path, options: ExportOptions) -> None:
    from genai.common.progress import task
    from genai.convert.encoders.build import build_encoder, weight_bytes

    start, size = time.monotonic(), weight_bytes(checkpoint)
    with interruptible(), task("Building", size, amount=lambda count: format_bytes(int(count))) as building:
        folder = build_encoder(checkpoint, output, options, progress=building.add)
    written = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    say(f"an encoder, for genai embed or genai rerank: {format_bytes(written)} in {time.monotonic() - start:.1f} s")
    emit(str(folder), "\n")


def model_folder(path: Path, *, build: bool = True, precision: str | None = None, yes: bool = False) -> Path:
    """Return the model folder for a path: the path itself, or a cached build of a checkpoint or GGUF file.

    A path that is the name of a model, such as org/name, is pulled first.
    """
    from genai.convert.resolve import BuildHooks, resolve_model

    plans: list[BuildPlan] = []

    def watched(plan: BuildPlan) -> None:
        plans.append(plan)
        say_remarks(plan)

    pulling = PullDialog(yes=yes, precision=precision)
    building = BuildHooks(build, lambda question: pulling.agreed(question) or ask(question), watched, waiting)
    with interruptible(lambda: _interrupted(pulling, plans)):
        folder = resolve_model(path, pulling.hooks, building, precision)
    for plan in plans:
        for remark in [*plan.prequantized, *plan.rounded]:
            say(f"genai: {remark}")
        removal = _removal(folder, path)
        say(f"genai: stored in {folder}, from where later runs load the model; to free the space, {removal}")
    return folder


def _interrupted(pulling: PullDialog, plans: list[BuildPlan]) -> str:
    """Return the message after an interrupt, which names only the steps that had started."""
    done = ["the download is kept"] * pulling.started + ["the unfinished build was deleted"] * bool(plans)
    return f"genai: interrupted; {' and '.join(done) or 'nothing was built'}"


def _removal(folder: Path, path: Path) -> str:
    """Return the instruction that removes a built model from the cache."""
    from genai.hub.built import models_folder
    from genai.hub.local import pulled_model

    if folder.parent != models_folder() and (pulled := pulled_model(path)) is not None:
        return f"run `genai rm {quote(pulled.name)}`, which also removes the download"
    return f"run `genai rm {quote(folder.name)}`"


def checkpoint_of(path: Path) -> Path:
    """Return the path to convert: the path itself, or the model of that name, pulled after confirmation."""
    from genai.convert.resolve import source_of

    pulling = PullDialog()
    with interruptible(lambda: _interrupted(pulling, [])):
        return source_of(path, pulling.hooks)


def encoder_of(path: Path, precision: str, *, yes: bool) -> Path:
    """Return the folder of an encoder: the path itself, or the model of that name, pulled after confirmation."""
    from genai.convert.resolve import encoder_folder

    pulling = PullDialog(yes=yes, precision=precision)
    with interruptible(lambda: _interrupted(pulling, [])):
        return encoder_folder(path, pulling.hooks)


@contextmanager
def interruptible(message: str | Callable[[], str] = "genai: interrupted, nothing was built") -> Iterator[None]:
    """Turn SIGTERM into an exception, like Ctrl-C, so that unfinished output is deleted; then print `message`."""
    try:
        with termination_raises():
            yield
    except (KeyboardInterrupt, SystemExit):
        say(message if isinstance(message, str) else message())
        raise


def waiting(folder: Path) -> None:
    """Report that another process is building into the same cache folder."""
    say(f"genai: waiting for another process that is building in {folder} (Ctrl-C to cancel)")


def ask(question: str) -> bool:
    """Ask a question if there is a terminal; otherwise, report the action and return True."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        say(f"genai: {question.replace('Build a', 'Building a').rstrip('?')}")
        return True
    return agreed(question)


def say_remarks(plan: BuildPlan) -> None:
    """Print remarks about the checkpoint."""
    for remark in plan.remarks:
        say(f"genai: {remark}")
