"""Options that several commands share, declared once."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .checkpoint import model_folder
from .terminal import Voice, interrupts_end_the_process

if TYPE_CHECKING:
    from genai.llm import LLM
    from genai.model import Model

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
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Say nothing on stderr but warnings and errors.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Say more on stderr.")]


@dataclass(frozen=True)
class ModelFlags:
    """How a model computes."""

    threads: Threads = None
    accuracy: Accuracy = "auto"
    kv_type: KvType = "auto"

    def load(self, folder: Path | None) -> Model:
        """Load a model folder, a Hugging Face checkpoint (built into the cache if need be), or the bundled model."""
        from genai.model import Model

        with interrupts_end_the_process():
            return Model(folder_of(folder), threads=self.threads, accuracy=self.accuracy, kv_dtype=self.kv_type)


def folder_of(given: Path | None, *, build: bool = True) -> Path:
    """The model folder that MODEL stands for: built from a checkpoint if need be, or that of the bundled model."""
    from genai.bundled import bundled_model

    return (model_folder(given, build=build) if given else None) or bundled_model()


@dataclass(frozen=True)
class TextFlags(ModelFlags):
    """What all commands share that generate text."""

    ctx_size: CtxSize = None
    build: Build = True
    show_prompt: DumpPrompt = False
    stats: Stats = None
    quiet: Quiet = False
    verbose: Verbose = False

    @property
    def voice(self) -> Voice:
        """What is said besides the text."""
        return Voice(quiet=self.quiet, verbose=self.verbose)

    def load_llm(self, folder: Path | None, *, alone: bool = True) -> LLM:
        """Load a model folder, a checkpoint (unless `build` is off, built if need be) or the bundled model.

        Args:
            alone: nothing else is going on, so that Ctrl-C may end the process.
        """
        from genai.llm import LLM

        folder = model_folder(folder, build=self.build) if folder else None
        with interrupts_end_the_process() if alone else nullcontext():
            llm = LLM(
                folder,
                threads=self.threads,
                accuracy=self.accuracy,
                kv_dtype=self.kv_type,
                context_size=self.ctx_size,
                quiet=self.quiet,
            )
        model, voice = llm.model, self.voice
        voice.detail(f"{model.folder}: {model.info.parameters:,} parameters, cache {model.info.kv_dtype}")
        if model.config.ignored_keys:
            voice.detail(f"config keys without effect here: {', '.join(model.config.ignored_keys)}")
        return llm
