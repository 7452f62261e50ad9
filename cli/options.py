"""Options that several commands share, declared once."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .checkpoint import model_folder
from .terminal import interrupts_end_the_process

if TYPE_CHECKING:
    from genai.llm import LLM
    from genai.model import Model

    from .terminal import Voice

ModelArgument = Annotated[
    Path | None, typer.Argument(help="Model folder; without it, the bundled model.", show_default=False)
]
Build = Annotated[
    bool,
    typer.Option("--build/--no-build", help="Build a model where MODEL is a Hugging Face checkpoint, the first time."),
]
Threads = Annotated[
    int | None, typer.Option("-t", "--threads", help="CPU threads [default: physical cores].", show_default=False)
]
Accuracy = Annotated[str, typer.Option(help='"auto" obeys the model; "fp32" keeps activations and cache in fp32.')]
KvType = Annotated[str, typer.Option("--kv-type", help="Type of cached keys and values: auto, fp16 or fp32.")]
CtxSize = Annotated[
    int | None,
    typer.Option(
        "-c", "--ctx-size", help="Tokens of context [default: what fits in half of free memory].", show_default=False
    ),
]
DumpPrompt = Annotated[bool, typer.Option("--dump-prompt", help="Show the exact prompt text and tokens, on stderr.")]
Stats = Annotated[
    bool | None, typer.Option("--stats/--no-stats", help="Figures after each reply, on stderr.", show_default=False)
]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Say nothing on stderr but errors.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Say more on stderr.")]


def load(
    folder: Path | None, threads: int | None, accuracy: str = "auto", kv_type: str = "auto", build: bool = True
) -> Model:
    """Load a model folder, a Hugging Face checkpoint (built into the cache unless `build` is False), or our own."""
    from genai.model import Model

    with interrupts_end_the_process():
        return Model(folder_of(folder, build=build), threads=threads, accuracy=accuracy, kv_dtype=kv_type)


def folder_of(given: Path | None, *, build: bool = True) -> Path:
    """The model folder that MODEL stands for: built from a checkpoint if need be, or that of the bundled model."""
    from genai.bundled import bundled_model

    return (model_folder(given, build=build) if given else None) or bundled_model()


def load_llm(
    folder: Path | None,
    voice: Voice,
    *,
    threads: int | None,
    accuracy: str,
    kv_type: str,
    ctx_size: int | None,
    alone: bool = True,
    build: bool = True,
) -> LLM:
    """Load a model folder, a checkpoint or the bundled model, to generate with.

    Args:
        alone: nothing else is going on, so that Ctrl-C may end the process.
        build: False refuses a Hugging Face checkpoint that is not in the cache of built models.
    """
    from genai.llm import LLM

    folder = model_folder(folder, build=build) if folder else None
    with interrupts_end_the_process() if alone else nullcontext():
        llm = LLM(
            folder, threads=threads, accuracy=accuracy, kv_dtype=kv_type, context_size=ctx_size, quiet=voice.quiet
        )
    model = llm.model
    voice.detail(f"{model.folder}: {model.info.parameters:,} parameters, cache {model.info.kv_dtype}")
    if model.config.ignored_keys:
        voice.detail(f"config keys without effect here: {', '.join(model.config.ignored_keys)}")
    return llm
