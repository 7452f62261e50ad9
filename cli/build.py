"""`genai build`: a Hugging Face checkpoint becomes a model folder."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from .checkpoint import interruptible, watch
from .terminal import emit, say


def build(
    checkpoint: Annotated[Path, typer.Argument(help="Folder with config.json, *.safetensors and a tokenizer.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Model folder to make.")],
    precision: Annotated[str, typer.Option(help="Weights as int4, int8, fp16 or fp32.")] = "int4",
    block_size: Annotated[int, typer.Option(help="Weights that share a scale: 16, 32, 64, 128 or 256.")] = 32,
    asymmetric: Annotated[bool, typer.Option("--asymmetric", help="Give every block a zero point.")] = False,
    head_precision: Annotated[
        str | None, typer.Option(help="Of the head [default: as the rest].", show_default=False)
    ] = None,
    embedding_precision: Annotated[
        str | None, typer.Option(help="Of the embeddings [default: the head's if tied].", show_default=False)
    ] = None,
    accuracy_level: Annotated[int, typer.Option(help="4: int8 activations in products; 1: fp32.")] = 4,
    force: Annotated[bool, typer.Option("--force", help="Put 0 where weights are NaN or infinite.")] = False,
) -> None:
    """Build a model folder from a Hugging Face checkpoint; prints the folder."""
    from genai.builder.build import execute, plan_build
    from genai.builder.options import ExportOptions

    values: dict[str, Any] = {"head_precision": head_precision, "embedding_precision": embedding_precision}
    options = ExportOptions(
        precision=precision,  # type: ignore[arg-type]  # checked there
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
    written = sum(file.stat().st_size for file in folder.iterdir())
    say(f"{plan.checkpoint.config.model_type}: {written / 1e6:.0f} MB in {time.monotonic() - start:.1f} s")
    emit(str(folder), "\n")
