"""Resolve a model's name (a path, a name in the cache or a name on a hub) to a folder that can be loaded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from shlex import quote

from genai.common.log import logger
from genai.common.progress import quietly

from ..common.paths import expanded
from ..errors import (
    ConfigError,
    GenaiError,
    InputError,
    ModelFolderError,
    OptionError,
    TokenizerError,
    UnsupportedModelError,
    about,
    did_you_mean,
)
from ..hub.built import note_use
from ..hub.choosing import CHECKPOINT, ONNX
from ..hub.known import known_models, names_of_family
from ..hub.local import exists, named_or, pulled_model
from ..hub.pull import PullHooks, PullPlan, plan_pull, pull_model
from ..hub.references import parse
from ..hub.store import PulledModel, models
from ..models.config import Config
from ..models.exported_config import chosen_graph
from ..models.folders import gguf_encoder
from ..weight_files.gguf import is_gguf
from .architectures import find
from .build import BuildPlan, default_precision, resolve_model_folder
from .checkpoint import CONFIG, is_checkpoint, read_config, read_json
from .encoders.families import describe, is_encoder
from .folder import check_tokenizer, require_tokenizer
from .options import ExportOptions
from .prequantized.checkpoint import read_quantisation, without_quantisation

_log = logger(__name__)
# The file of sentence-transformers that lists the modules of an encoder.
MODULES = "modules.json"


@dataclass(frozen=True)
class BuildHooks:
    """Callbacks for building a model; see `resolve_model_folder`. If `build` is False, an error is raised instead."""

    build: bool = True
    ask: Callable[[str], bool] = lambda question: True
    watch: Callable[[BuildPlan], None] = lambda plan: None
    waiting: Callable[[Path], None] = lambda folder: None


def resolve_model(
    name: str | Path, pulling: PullHooks | None, building: BuildHooks, precision: str | None = None
) -> Path:
    """Return the folder of a loadable model. If necessary, pull the model and build it in the cache.

    Args:
        name: a model folder, a checkpoint, a name in the cache, or a reference; see docs/how-to/get-models.md.
        pulling: callbacks for pulling. None means that nothing is downloaded; a missing path is then returned
            unchanged, and the reader reports the error.
        precision: storage format for a checkpoint's weights, or the precision of one of several exported graphs; None
            means the format of the last build, or else "int4"; and the most suitable graph.

    Raises:
        OptionError: the precision is not supported, or the model cannot be built because it is not a checkpoint.
        GenaiError: see `pull_model` and `resolve_model_folder`.
    """
    if pulling is not None and precision:
        pulling = replace(pulling, ask=partial(_ask_about_weights, pulling.ask))
    folder = _resolved(name, pulling, building, precision)
    note_use(folder)
    return folder


def _resolved(name: str | Path, pulling: PullHooks | None, building: BuildHooks, precision: str | None) -> Path:
    source = find_or_pull(name, pulling, precision=precision, encoders=False)
    if isinstance(source, PulledModel):
        return _folder_of(source, building, precision)
    if precision and exists(source) and not is_checkpoint(source):
        return _graph_in(source, precision, str(name))
    return resolve_model_folder(
        source, options=_options(precision), build=building.build, ask=building.ask, watch=building.watch,
        waiting=building.waiting,
    )  # fmt: skip


def _options(precision: str | None) -> ExportOptions | None:
    return ExportOptions(precision=precision) if precision else None  # type: ignore[arg-type]  # checked there


def _graph_in(folder: Path, precision: str, name: str) -> Path:
    """Return the graph of a model folder in a precision. Raise OptionError if the folder has no graph to choose."""
    graph = chosen_graph(folder, precision)
    if graph is None:
        raise _built_already(name)
    return graph


def find_or_pull(
    name: str | Path, pulling: PullHooks | None, *, precision: str | None = None, encoders: bool = True
) -> Path | PulledModel:
    """Return an existing path, or the cached model, which is pulled first if it is missing and `pulling` is given.

    Without `encoders`, checkpoints of encoders are refused before their weights are downloaded.
    """
    if (pulled := pulled_model(name)) is not None:
        return pulled
    path, reference = named_or(expanded(name)), parse(name)
    if reference is None or pulling is None:
        return path
    if not reference.explicit and (exists(path) or not _names_no_folder(name)):
        return path
    check = partial(_check, encoders=encoders)
    return pull_model(reference, replace(pulling, check=check), precision=precision)


def _names_no_folder(name: str | Path) -> bool:
    """Return False if the org of a name is a folder here: then "models/phi" is a mistyped path, not a model."""
    return not Path(str(name).split("/")[0]).is_dir()


def found_model(name: str | Path) -> Path | PullPlan:
    """Return the path that describes a model: a model folder, a checkpoint, a GGUF file, or any other existing path.

    A checkpoint or GGUF file that was built in the cache is described by the model folder that was built from it. For
    a model that is neither a path nor in the cache, return the plan of its download; nothing is downloaded.

    Raises:
        GenaiError: see `plan_pull`.
    """
    source = find_or_pull(name, None)
    if isinstance(source, PulledModel):
        if source.kind == ONNX:
            return source.path
        return next(iter(source.built()), source.path)
    reference = parse(name)
    if reference is not None and not exists(source) and (reference.explicit or _names_no_folder(name)):
        return plan_pull(reference)
    if is_checkpoint(source):
        with suppress(ModelFolderError):  # not built
            return resolve_model_folder(source, build=False)
    return source


def encoder_folder(name: str | Path, pulling: PullHooks | None) -> Path:
    """Return the folder of an encoder: a path, or the files of a cached model, which is pulled first if it is missing.

    Args:
        name: see `resolve_model`.
        pulling: callbacks for pulling. None means that nothing is downloaded.

    Raises:
        ModelFolderError: the name is not in the cache, and `pulling` is None.
        UnsupportedModelError: the model is a GGUF file.
        GenaiError: see `pull_model`.
    """
    source = find_or_pull(name, pulling)
    if isinstance(source, PulledModel):
        note_use(source.folder)
        if source.path.is_file():
            raise gguf_encoder(source.name)
        return source.path
    reference = parse(name)
    if reference is not None and not exists(source) and (reference.explicit or _names_no_folder(name)):
        raise ModelFolderError(
            f"{reference.name} is not in the cache",
            "nothing is downloaded without a request",
            f"run `genai pull {quote(reference.name)}`, or pass pull=True in Python",
        )
    return source


def source_of(name: str | Path, pulling: PullHooks | None) -> Path:
    """Return the path of a checkpoint or of another kind of pulled model, for a command that converts it."""
    source = find_or_pull(name, pulling, precision="int4")
    return source.path if isinstance(source, PulledModel) else source


def _folder_of(model: PulledModel, building: BuildHooks, precision: str | None) -> Path:
    if model.kind == ONNX:
        return _graph_in(model.path, precision, model.name) if precision else model.path
    options = _options(precision)
    if options is None and (built := model.built()):
        return built[0]
    try:
        return resolve_model_folder(
            model.path, options=options, into=model.built_folder,
            build=building.build, ask=building.ask, watch=building.watch, waiting=building.waiting,
        )  # fmt: skip
    except (InputError, ConfigError, TokenizerError, UnsupportedModelError) as error:
        raise type(error)(
            error.what,
            error.why,
            f"{error.fix}; to remove the model from the cache, run `genai rm {quote(model.name)}`",
        ) from error


def _ask_about_weights(ask: Callable[[PullPlan], bool], plan: PullPlan) -> bool:
    """Raise before the download if the model's weights cannot be stored with the requested precision."""
    if plan.choice.kind == ONNX and not plan.choice.precision:
        raise _built_already(plan.name)
    return ask(plan)


def _built_already(name: str) -> OptionError:
    return OptionError(
        f"a precision cannot be set for {name}",
        "only a checkpoint can be stored in another precision",
        "omit --precision, or use a repository with safetensors weights; if the cached repository has these weights as "
        "well, run `genai rm` first",
    )


def _check(kind: str, folder: Path, *, encoders: bool = True) -> None:
    """Raise GenaiError if a model's small files show that the model cannot run here."""
    if (
        kind == CHECKPOINT
        and encoders
        and is_encoder(read_json(folder, CONFIG), has_modules=(folder / MODULES).is_file())
    ):
        describe(read_json(folder, CONFIG))
        require_tokenizer(folder)
    elif kind == CHECKPOINT:
        read_quantisation(folder)
        config = without_quantisation(read_config(folder))
        check_tokenizer(folder, find(config.model_type).describe(config).vocab_size)
    elif kind == ONNX and (folder / "genai_config.json").is_file():
        Config(folder)  # the constructor validates it
    elif kind == ONNX:
        described = read_json(folder, CONFIG)
        if not encoders and is_encoder(described, has_modules=(folder / MODULES).is_file()):
            raise about(
                "graph",
                UnsupportedModelError(
                    f"{folder.name}: the model is an encoder, which generates no text",
                    f"its config.json has the type {described.get('model_type')!r:.40}",
                    "to compute vectors with it, run `genai embed ORG/NAME`",
                ),
            )
        require_tokenizer(folder)


def pull(reference: str | Path, *, precision: str | None = None, quiet: bool = False) -> Path:
    """Download a model to the cache, unless the cache already holds it, and return its path.

    Args:
        reference: "org/name", "org/name@revision", "org/name:Q4_K_M" (a GGUF file) or "org/name:q4" (a graph), each
            optionally with the prefix "hf:"; the URL of a file; or a name in the cache.
        precision: if set, also build a model folder from the checkpoint, with weights stored as "int4", "int8", "fp16"
            or "fp32", and return that folder. If the repository has graphs in several precisions and no checkpoint,
            pull and return the graph in this precision, for example "q4".
        quiet: True to report no progress and log only warnings.

    Returns:
        The checkpoint's folder, the ONNX model's folder, or the GGUF file; with a precision, the folder that was built.

    Raises:
        AccessError: a token is missing, or a licence has not been accepted.
        DownloadError: the download failed.
        ModelFolderError: `reference` is not a valid reference.
        OptionError: the precision is not supported.
        UnsupportedModelError, ConfigError: this kind of model cannot run here; only its configuration was downloaded.
    """
    with quietly(quiet):
        if precision is not None:
            return resolve_model(reference, PULLING, BuildHooks(), precision)
        return source_path(find_or_pull(reference, PULLING), reference)


def source_path(source: Path | PulledModel, name: str | Path) -> Path:
    """Return the path of a model. Raise ModelFolderError if it is neither a path nor in the cache."""
    if isinstance(source, PulledModel):
        return source.path
    if not exists(source):
        known, family = [*(model.name for model in models()), *known_models()], names_of_family(str(name))
        otherwise = "use the name on the model's page (org/name), or hf:name for a model without org"
        raise ModelFolderError(
            f"{str(name)!r:.120} is not a model name",
            "a model must be in the cache, have a short name or a name of the form org/name, or be an existing path",
            did_you_mean(str(name), known, f"did you mean {' or '.join(family)}?" if family else otherwise),
        )
    return source


def loadable(name: str | Path, *, fetch: bool, precision: str | None, quiet: bool) -> Path:
    """Return the path to load for a model's name in a program; see `genai.LLM`. Download only if `fetch` is True."""
    path = expanded(name)
    if precision is None and not fetch and pulled_model(name) is None and not is_gguf(path):
        _check_needs_no_build(path)
        return Path(name)
    with quietly(quiet):
        return resolve_model(name, PULLING if fetch else None, _BUILDING, precision)


def _check_needs_no_build(path: Path) -> None:
    """Raise ModelFolderError if a program must set a precision to load a path."""
    if not is_checkpoint(path):
        return
    _check_type(path)
    with_precision = '"int4"'
    with suppress(GenaiError):  # damaged files are reported when the model is built
        with_precision = f'"{default_precision(path)}"'
    raise ModelFolderError(
        f"{path}: a checkpoint is not a model folder",
        "a checkpoint must be built first, and only `precision` starts a build",
        f"pass precision={with_precision} to build it once and keep it in the cache; or run `genai build "
        f"{quote(str(path))} -o FOLDER`, and pass FOLDER",
    )


def _check_type(folder: Path) -> None:
    """Raise UnsupportedModelError if no precision can make the checkpoint generate text, such as an encoder."""
    try:
        find(read_config(folder).model_type)
    except UnsupportedModelError:
        raise
    except GenaiError:  # damaged files are reported when the model is built
        return


def _said(question: str) -> bool:
    _log.info("%s", question.replace("Build a", "Building a", 1).rstrip("?"))
    return True


# Hooks for programs. Programs cannot prompt the user, so the log announces each step instead.
PULLING = PullHooks(notice=_log.info, waiting=lambda folder: _log.info("waiting for another pull (%s)", folder))
_BUILDING = BuildHooks(ask=_said)
