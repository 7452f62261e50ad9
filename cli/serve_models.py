"""The models of `genai serve`: a model that generates text, a model for embeddings and a model for reranking."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from genai.errors import OptionError

from . import options as opt
from .build import encoder_of

if TYPE_CHECKING:
    from genai.llm.llm import LLM
    from genai.server.encoders import Encoders
    from genai.server.serving import ServerOptions

EmbedderOption = Annotated[
    str | None, typer.Option("--embedder", metavar="MODEL", help="Encoder for /v1/embeddings: org/name or folder.")
]
RerankerOption = Annotated[
    str | None, typer.Option("--reranker", metavar="MODEL", help="Encoder for /v1/rerank: org/name or folder.")
]
MAX_SEQUENCES = 32
"""The default of --max-sequences."""
# Options of encoders, too; the other options concern models that generate text.
_OF_ENCODERS = ("threads", "accuracy", "device", "precision", "yes", "quiet", "verbose")


@contextmanager
def served_models(
    model: Path | None, embedder: str | None, reranker: str | None, flags: opt.EngineFlags, options: ServerOptions,
    *, max_sequences: int,
) -> Iterator[tuple[LLM | None, Encoders]]:  # fmt: skip
    """Load the models. MODEL can be an encoder; then no model that generates text is loaded.

    Raises:
        OptionError: MODEL and another option name models for the same endpoint, or an option has no effect.
    """
    from genai.embed.embedder import Embedder
    from genai.embed.reranker import Reranker
    from genai.server.encoders import Encoders

    named: dict[str, Path | None] = {
        option: None if text is None else encoder_of(_path(text), "fp32", yes=flags.yes)
        for option, text in (("--embedder", embedder), ("--reranker", reranker))
    }
    alone = None if model is None else encoder_folder(model)
    precision = "fp32"
    if alone is not None:
        option = endpoint_option(alone)
        if named[option] is not None:
            raise OptionError(
                f"{option} cannot be used with {model}", "both are models for the same endpoint", "remove one of them"
            )
        text_options = {
            "max_sequences": max_sequences != MAX_SEQUENCES,
            "reuse_replies": options.reuse_replies,
            "keep_headers": options.keep_headers,
            "adapter_dir": options.adapter_dir is not None,
        }
        _check_flags(flags, text_options, alone)
        named[option], precision = alone, flags.precision or precision
    common: dict[str, Any] = {"threads": flags.threads, "accuracy": flags.accuracy, "device": flags.device or "cpu"}
    with ExitStack() as stack:
        made: list[Any] = []
        for option, kind in (("--embedder", Embedder), ("--reranker", Reranker)):
            folder, chosen = named[option], {**common, "precision": precision if named[option] is alone else "fp32"}
            made.append(None if folder is None else stack.enter_context(kind(folder, **chosen)))
        llm = None if alone else stack.enter_context(flags.load_llm(model, max_sequences=max_sequences))
        names = [None if text is None else _name(text) for text in (embedder, reranker)]
        yield llm, Encoders(*made, embedder_name=names[0], reranker_name=names[1])


def encoder_folder(model: Path) -> Path | None:
    """Return the folder of MODEL if it is an encoder; None if it generates text, or is not on this machine."""
    from genai.convert.checkpoint import is_checkpoint
    from genai.convert.resolve import found_model
    from genai.embed.describe import is_encoder_folder
    from genai.models.exported_config import is_exported_decoder

    found = found_model(model)
    if not isinstance(found, Path) or (not is_checkpoint(found) and is_exported_decoder(found)):
        return None
    return found if is_encoder_folder(found) else None


def endpoint_option(folder: Path) -> str:
    """Return the option that names an encoder for its endpoint."""
    from genai.embed.folder import read_encoder_folder

    description = read_encoder_folder(folder)
    return "--reranker" if description.is_classifier or description.score else "--embedder"


def _check_flags(flags: opt.EngineFlags, text_options: Mapping[str, bool], folder: Path) -> None:
    named = [
        field.name
        for field in dataclasses.fields(flags)
        if field.name not in _OF_ENCODERS and getattr(flags, field.name) != field.default
    ]
    named += [name for name, is_set in text_options.items() if is_set]
    if named:
        raise OptionError(
            f"--{named[0].replace('_', '-')} cannot be used with {folder}",
            "this option applies to models that generate text, and this is an encoder", "remove the option",
        )  # fmt: skip


def _path(text: str) -> Path:
    from .model_names import model_path

    return model_path(text)


def _name(text: str) -> str:
    """Return the last part of a path or of a name, which is the model's name in requests."""
    return Path(text).expanduser().absolute().name
