"""The models of `genai serve` if there are several: the list on the command line, or a file."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from genai.common.reading import read_text_file
from genai.errors import GenaiError, InputError, OptionError, did_you_mean
from genai.hub.known import BUNDLED_MODEL

from . import options as opt
from .build import encoder_of
from .model_names import model_path, request_name
from .serve_models import encoder_folder, endpoint_option

if TYPE_CHECKING:
    from genai.server.request_log import RequestLog
    from genai.server.routed import RoutedModel
    from genai.server.router import Router
    from genai.server.serving import ServerOptions
    from genai.server.traces import Traces

_MODELS_HELP = (
    "Short name, org/name, folder or GGUF file of a model [default: the bundled model]; several are possible."
)
ModelsArgument = Annotated[list[Path] | None, typer.Argument(help=_MODELS_HELP, parser=model_path, metavar="MODEL")]


@dataclasses.dataclass(frozen=True)
class RouterFlags:
    """Options for several models."""

    models: Annotated[Path | None, typer.Option("--models", help="TOML file with models, loaded on demand.")] = None
    memory: Annotated[
        str | None,
        typer.Option("--memory", help="Memory of all loaded models, such as 16GB [default: 95 % of the free memory]."),
    ] = None
    keep: Annotated[
        str | None,
        typer.Option("--keep", help="Unload a model that no request used for this time, such as 10m."),
    ] = None
    pin: Annotated[
        list[str] | None,
        typer.Option("--pin", help="Name of a model to load at the start and never unload; may be repeated."),
    ] = None

    def is_used(self, models: Sequence[Path]) -> bool:
        """Return True if the models are loaded on demand."""
        return len(models) > 1 or any(getattr(self, field.name) for field in dataclasses.fields(self))


@dataclasses.dataclass(frozen=True)
class _Entry:
    """A model as it is named on the command line or in a file."""

    name: str
    model: Path
    adapters: Mapping[str, tuple[Path, float]]
    settings: Mapping[str, Any]
    where: str = ""


# The keys of a model in a file, with their types.
_KEYS: Mapping[str, type | tuple[type, ...]] = {
    "model": str, "pinned": bool, "keep": (str, int, float), "ctx-size": int, "cache": str, "max-sequences": int,
    "lora": dict, "prefix-cache": str,
}  # fmt: skip


def make_router(
    models: Sequence[Path], encoders: Sequence[str | None], chosen: RouterFlags, flags: opt.EngineFlags,
    options: ServerOptions, *, max_sequences: int, log: RequestLog | None, traces: Traces | None,
) -> Router:  # fmt: skip
    """Return the router of several models.

    Raises:
        GenaiError: a model cannot be found, or an option does not apply to several models.
    """
    from genai.common.memory_limits import available_memory
    from genai.models.memory_plan import usable
    from genai.quantize.options import parse_size
    from genai.server.router import Router

    _check_flags(flags)
    memory = usable(available_memory())
    if chosen.memory is not None:
        try:
            memory = parse_size(chosen.memory)
        except OptionError as error:
            raise OptionError(
                f"--memory is {chosen.memory!r:.80}", error.why, "for example, use --memory 16GB"
            ) from None
    if not models and chosen.models is None:
        models = [Path(BUNDLED_MODEL)]
    entries = _listed([*models, *(model_path(one) for one in encoders if one is not None)], flags)
    entries += [] if chosen.models is None else _in_file(chosen.models)
    if chosen.pin and (unknown := sorted({*chosen.pin} - {entry.name for entry in entries})):
        known = [entry.name for entry in entries]
        raise OptionError(
            f"--pin {unknown[0]:.80}: there is no such model", f"the models are {', '.join(known)}"[:500],
            did_you_mean(unknown[0], known, "use one of these names"),
        )  # fmt: skip
    keep = None if chosen.keep is None else read_duration(chosen.keep, "--keep")
    routed = [_routed(entry, flags, keep, chosen.pin or (), max_sequences) for entry in entries]
    return Router(routed, memory, options, log=log, traces=traces)


# How each option for one model is chosen for one of several models.
_PER_MODEL = {
    "lora": "write MODEL+ADAPTER, or use lora in the file of --models",
    "prefix_cache": "use prefix-cache in the file of --models",
}


def _check_flags(flags: opt.EngineFlags) -> None:
    for name in ("lora", "draft", "speculate", "lookup_file", "prefix_cache", "prefix_cache_size"):
        if getattr(flags, name):
            option = f"--{name.replace('_', '-')}"
            raise OptionError(
                f"{option} cannot be used with several models",
                "models that are loaded on demand share the options of the command line",
                _PER_MODEL.get(name, f"serve the model that needs {option} alone, with `genai serve` at another port"),
            )


def _listed(models: Sequence[Path], flags: opt.EngineFlags) -> list[_Entry]:
    """Return the models of the command line. Several adapters of one model belong to one entry."""
    found: dict[str, _Entry] = {}
    split = [(base, with_adapter) for base, with_adapter in map(flags.with_adapter, models) if base is not None]
    for base, with_adapter in split:
        is_ambiguous = any(request_name(other) == request_name(base) for other, _ in split if other != base)
        adapters = {name: (path, scale) for name, path, scale in map(opt.read_lora, with_adapter.lora or ())}
        name = request_name(base, with_hash=is_ambiguous)
        known = found.get(name)
        if known is not None and (known.model != base or not adapters):
            raise OptionError(
                f"two models have the name {name!r:.80}", "requests select a model by its name",
                "name them in a file, and pass it with --models",
            )  # fmt: skip
        found[name] = _Entry(name, base, {**(known.adapters if known else {}), **adapters}, {})
    return list(found.values())


def _in_file(path: Path) -> list[_Entry]:
    """Read a file of models: a table [models.NAME] for each."""
    try:
        content = tomllib.loads(read_text_file(path))
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path} is not a TOML file", str(error), "correct the file") from error
    tables = content.get("models")
    if not isinstance(tables, dict) or not tables or len(content) > 1:
        raise InputError(
            f"{path} has no models", "the file has a table [models.NAME] for each model, and nothing else",
            'write [models.qwen] and the line model = "qwen3-0.6b", for example',
        )  # fmt: skip
    return [_entry(path, name, table) for name, table in tables.items()]


def _entry(path: Path, name: str, table: Any) -> _Entry:
    where = f"{path}, [models.{name}]"
    for key, value in table.items() if isinstance(table, dict) else [("", table)]:
        if key not in _KEYS:
            fix = did_you_mean(key, _KEYS, "remove the key")
            raise InputError(f"{where}: unknown key {key!r:.80}", f"the keys are {', '.join(_KEYS)}", fix)
        if not isinstance(value, _KEYS[key]) or (isinstance(value, bool) and _KEYS[key] is not bool):
            raise InputError(
                f"{where}: {key} = {value!r:.80}", "the value has the wrong type", "see docs/how-to/router.md"
            )
    if "prefix-cache" in table:
        table = {**table, "prefix-cache": path.absolute().parent / Path(table["prefix-cache"]).expanduser()}
    lora = {adapter: _adapter(path, where, adapter, source) for adapter, source in table.get("lora", {}).items()}
    return _Entry(name, _in_folder(path, table.get("model", name)), lora, table, where)


def _in_folder(path: Path, model: str) -> Path:
    """Return MODEL of a file. A relative path begins at the file's folder."""
    beside = path.absolute().parent / model
    return model_path(beside if beside.exists() else model)


def _adapter(path: Path, where: str, name: str, source: Any) -> tuple[Path, float]:
    if not isinstance(source, str):
        raise InputError(f"{where}: lora.{name} = {source!r:.80}", "a path is expected", "write a text")
    _, found, scale = opt.read_lora(f"{name}={source}")
    return path.absolute().parent / found, scale


def _routed(
    entry: _Entry, flags: opt.EngineFlags, keep: float | None, pinned: Sequence[str], max_sequences: int
) -> RoutedModel:
    """Find the files of a model."""
    from genai.quantize.options import parse_size
    from genai.server.routed import RoutedModel

    settings = entry.settings
    try:
        encoder = encoder_folder(entry.model)
        options = {"threads": flags.threads, "accuracy": flags.accuracy}
        if encoder is None:
            kind, folder = "completion", flags.folder_of(entry.model)
            options |= {"device": flags.device, "kv_dtype": flags.kv_type, "kv_dtype_force": flags.kv_force}
            if "prefix-cache" in settings:
                options["prefix_cache_dir"] = settings["prefix-cache"]
        elif "prefix-cache" in settings:
            raise OptionError("prefix-cache is set", "the model is an encoder, which has no cache", "remove the key")
        else:
            kind = {"--embedder": "embedding", "--reranker": "rerank"}[endpoint_option(encoder)]
            folder = encoder_of(encoder, "fp32", yes=flags.yes)
            options["device"] = flags.device or "cpu"
        is_pinned = entry.name in pinned or settings.get("pinned", False)
        if "keep" in settings:
            keep = read_duration(str(settings["keep"]), "keep")
        cache = settings.get("cache")
        return RoutedModel(
            entry.name, folder, kind, entry.adapters,  # type: ignore[arg-type]
            is_pinned=is_pinned,
            keep=keep,
            context_size=settings.get("ctx-size", flags.ctx_size if encoder is None else None),
            cache_bytes=None if cache is None else parse_size(cache),
            max_sequences=settings.get("max-sequences", max_sequences),
            options=options,
        )  # fmt: skip
    except GenaiError as error:
        if entry.where:
            for name, key in _KEY_OF.items():
                error.what, error.why, error.fix = (
                    part.replace(name, key) for part in (error.what, error.why, error.fix)
                )
            error.what = f"{entry.where}: {error.what}"
        raise


# The names of options in Python, and the keys of a file.
_KEY_OF = {"context_size": "ctx-size", "cache_bytes": "cache", "max_sequences": "max-sequences"}


_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def read_duration(text: str, name: str) -> float:
    """Return the seconds of a duration such as "10m", "90s" or "1.5h". Raise OptionError for other texts."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smhd]?)", text.strip())
    if match is None or not float(match[1]):
        raise OptionError(f"{name} is {text!r:.80}", "a time above 0 is expected", f"for example, use {name} 10m")
    return float(match[1]) * _SECONDS[match[2]]
