"""`genai build`: a Hugging Face checkpoint or a GGUF file becomes a model folder, also where other commands get one."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from genai.common.paths import expanded

from .pulling import PullDialog
from .terminal import agreed, emit, say

if TYPE_CHECKING:
    from genai.convert.build import BuildPlan


def build(
    checkpoint: Annotated[
        Path, typer.Argument(help="Folder with config.json, *.safetensors and a tokenizer; a GGUF file; or org/name.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="Model folder to make.")],
    precision: Annotated[
        str | None,
        typer.Option(help="Store weights as int4, int8, fp16, fp32, or kept as they are [default: int4, or kept]."),
    ] = None,
    block_size: Annotated[int, typer.Option(help="How many weights share a scale: 16, 32, 64, 128, 256.")] = 32,
    asymmetric: Annotated[bool, typer.Option("--asymmetric", help="Give every block a zero point.")] = False,
    head_precision: Annotated[str | None, typer.Option(help="Precision of the head [default: --precision].")] = None,
    embedding_precision: Annotated[
        str | None, typer.Option(help="Precision of the embeddings [default: see docs/build.md].")
    ] = None,
    accuracy_level: Annotated[int, typer.Option(help="Activations in products: 4 = int8, 1 = fp32.")] = 4,
    force: Annotated[bool, typer.Option("--force", help="Put 0 where weights are NaN or infinite.")] = False,
) -> None:
    """Build a model folder from a Hugging Face checkpoint or a GGUF file, and print its path."""
    from genai.convert.build import default_precision, execute, plan_build
    from genai.convert.options import ExportOptions

    values: dict[str, Any] = {"head_precision": head_precision, "embedding_precision": embedding_precision}
    checkpoint = checkpoint_of(checkpoint)
    options = ExportOptions(
        precision=precision or default_precision(expanded(checkpoint)),  # type: ignore[arg-type]  # checked there
        block_size=block_size,
        symmetric=not asymmetric,
        accuracy_level=accuracy_level,
        **values,
    )
    report: list[Any] = []
    start = time.monotonic()
    plan = plan_build(checkpoint, options, force=force, progress=lambda count: report[0](count))
    report.append(watch(plan))
    with interruptible():
        folder = execute(plan, output)
    for name in plan.weights.replaced:
        say(f"genai: {name} held NaN or infinite values, now 0 (--force)")
    for remark in [*plan.prequantized, *plan.rounded]:
        say(f"genai: {remark}")
    written = sum(file.stat().st_size for file in folder.iterdir())
    say(f"{plan.checkpoint.config.model_type}: {written / 1e6:.0f} MB in {time.monotonic() - start:.1f} s")
    emit(str(folder), "\n")


def model_folder(path: Path, *, build: bool = True, precision: str | None = None, yes: bool = False) -> Path:
    """A model folder as it is; a checkpoint or a GGUF file built into the cache, and a name pulled, asking first."""
    from genai.convert.resolve import BuildHooks, resolve_model

    plans: list[BuildPlan] = []

    def watched(plan: BuildPlan) -> Callable[[int], None]:
        plans.append(plan)
        return watch(plan)

    pulling = PullDialog(yes=yes, precision=precision)
    building = BuildHooks(build, lambda question: pulling.agreed(question) or ask(question), watched, waiting)
    with interruptible("genai: interrupted; what was downloaded is kept, of a build nothing"):
        folder = resolve_model(path, pulling.hooks, building, precision)
    for plan in plans:
        for remark in [*plan.prequantized, *plan.rounded]:
            say(f"genai: {remark}")
        say(f"genai: stored in {folder}, from which it starts from now on; remove that folder to have the room back")
    return folder


def checkpoint_of(path: Path) -> Path:
    """Where a command makes something of a model: the path as it is, or what is pulled by that name, after asking."""
    from genai.convert.resolve import source_of

    with interruptible("genai: interrupted; what was downloaded is kept"):
        return source_of(path, PullDialog().hooks)


@contextmanager
def interruptible(message: str = "genai: interrupted, nothing was built") -> Iterator[None]:
    """SIGTERM ends the block by an exception, as Ctrl-C does: the unfinished folder is removed, and `message` said."""
    on_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    try:
        if on_main:
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        yield
    except (KeyboardInterrupt, SystemExit):
        # The bar's line has no end yet.
        say(("\n" if sys.stderr.isatty() else "") + message)
        raise
    finally:
        if on_main:
            signal.signal(signal.SIGTERM, before)


def waiting(folder: Path) -> None:
    """Another process builds into the same cache."""
    say(f"genai: waiting for another build in {folder} (Ctrl-C ends this)")


def ask(question: str) -> bool:
    """Ask where somebody can answer; elsewhere say what happens and go on."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        say(f"genai: {question.replace('Build a', 'Building a').rstrip('?')}")
        return True
    return agreed(question)


def watch(plan: BuildPlan) -> Callable[[int], None]:
    """Say what is odd about the checkpoint; then a bar for terminals, nothing elsewhere."""
    from genai.convert.resolve import build_task

    for remark in plan.remarks:
        say(f"genai: {remark}")
    return build_task(plan)
