"""From whatever somebody calls a model to a folder that can be loaded: a path, a name in the cache, a name on a hub."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from shlex import quote

from genai.common.log import logger
from genai.common.progress import quietly, task

from ..common.paths import expanded
from ..errors import (
    ConfigError,
    InputError,
    ModelFolderError,
    OptionError,
    TokenizerError,
    UnsupportedModelError,
    did_you_mean,
)
from ..hub.choosing import CHECKPOINT, ONNX
from ..hub.local import exists, pulled_model
from ..hub.pull import PullHooks, PullPlan, pull_model
from ..hub.references import parse
from ..hub.store import PulledModel, models
from ..models.config import Config
from .architectures import find
from .build import BuildPlan, Progress, resolve_model_folder
from .checkpoint import CONFIG, GENERATION_CONFIG, is_checkpoint, read_json
from .folder import check_tokenizer
from .hf_config import HFConfig
from .options import ExportOptions
from .prequantized.checkpoint import read_quantisation, without_quantisation

_log = logger(__name__)


@dataclass(frozen=True)
class BuildHooks:
    """What is asked and told where a model is built; see `resolve_model_folder`. `build` False refuses to build."""

    build: bool = True
    ask: Callable[[str], bool] = lambda question: True
    watch: Callable[[BuildPlan], Progress] = field(default=lambda plan: lambda count: None)
    waiting: Callable[[Path], None] = lambda folder: None


def resolve_model(
    name: str | Path, pulling: PullHooks | None, building: BuildHooks, precision: str | None = None
) -> Path:
    """The folder of a model that can be loaded; pulled and built into the cache if need be.

    Args:
        name: a folder of a model or a checkpoint, a name in the cache, or a reference; see docs/models.md.
        pulling: None = nothing is fetched: what is not here is returned as it is, for the error of whoever reads it.
        precision: how the weights of a checkpoint are stored; None = as it was built last, else "int4".

    Raises:
        OptionError: a precision that there is not, or for a model that is not built here.
        GenaiError: see `pull_model` and `resolve_model_folder`.
    """
    options = ExportOptions(precision=precision) if precision else None  # type: ignore[arg-type]  # checked there
    if pulling is not None and options is not None:
        pulling = replace(pulling, ask=partial(_ask_about_weights, pulling.ask))
    source = find_or_pull(name, pulling, quantised=precision is not None)
    if isinstance(source, PulledModel):
        return _folder_of(source, building, options)
    if options is not None and exists(source) and not is_checkpoint(source):
        raise _built_already(str(name))
    return resolve_model_folder(
        source, options=options, build=building.build, ask=building.ask, watch=building.watch, waiting=building.waiting
    )


def find_or_pull(name: str | Path, pulling: PullHooks | None, *, quantised: bool = False) -> Path | PulledModel:
    """A path as it is; otherwise the model in the cache, where `pulling` puts it if it is not there."""
    if (pulled := pulled_model(name)) is not None:
        return pulled
    path, reference = expanded(name), parse(name)
    if reference is None or pulling is None:
        return path
    # "models/phi" with a folder models/ here is a path with a typo, not a name of somebody called models.
    if not reference.explicit and (exists(path) or Path(str(name).split("/")[0]).is_dir()):
        return path
    return pull_model(reference, replace(pulling, check=_check), quantised=quantised)


def source_of(name: str | Path, pulling: PullHooks | None) -> Path:
    """The checkpoint, or whatever else was pulled, where a command wants one to make something of."""
    source = find_or_pull(name, pulling, quantised=True)
    return source.path if isinstance(source, PulledModel) else source


def _folder_of(model: PulledModel, building: BuildHooks, options: ExportOptions | None) -> Path:
    if model.kind == ONNX:
        if options is not None:
            raise _built_already(model.name)
        return model.path
    if options is None and (built := model.built()):
        return built[0]
    try:
        return resolve_model_folder(
            model.path, options=options, into=model.built_folder,
            build=building.build, ask=building.ask, watch=building.watch, waiting=building.waiting,
        )  # fmt: skip
    except (InputError, ConfigError, TokenizerError, UnsupportedModelError) as error:
        raise type(error)(
            error.what, error.why, f"{error.fix}; `genai rm {quote(model.name)}` removes it from the cache"
        ) from error


def _ask_about_weights(ask: Callable[[PullPlan], bool], plan: PullPlan) -> bool:
    """Refuse before it is fetched what cannot be quantised as asked."""
    if plan.choice.kind == ONNX:
        raise _built_already(plan.name)
    return ask(plan)


def _built_already(name: str) -> OptionError:
    return OptionError(
        f"a precision for {name}",
        "it is no checkpoint: its weights stay as they are stored",
        "leave --precision out, or name the repository of its safetensors (`genai rm` first where it has both)",
    )


def _check(kind: str, folder: Path) -> None:
    """What the small files of a model say already: that nothing here runs it. Raises GenaiError."""
    if kind == CHECKPOINT:
        more = read_json(folder, GENERATION_CONFIG) if (folder / GENERATION_CONFIG).is_file() else {}
        read_quantisation(folder)
        config = without_quantisation(HFConfig(read_json(folder, CONFIG), more))
        check_tokenizer(folder, find(config.model_type).describe(config).vocab_size)
    elif kind == ONNX:
        Config(folder)  # which checks it


def pull(reference: str | Path, *, precision: str | None = None, quiet: bool = False) -> Path:
    """Fetch a model into the cache, unless it is there, and return where it lies.

    Args:
        reference: "org/name", "org/name@revision", "org/name:Q4_K_M", the same behind "hf:", the address of a file, or
            a name in the cache.
        precision: also build a model folder of the checkpoint, with weights stored as "int4", "int8", "fp16" or "fp32",
            and return that.
        quiet: report no progress, and log only warnings.

    Returns:
        The checkpoint's folder, the ONNX model's folder, or the GGUF file; with a precision, the folder that was built.

    Raises:
        AccessError: a token is missing, or a licence has not been accepted. DownloadError: it cannot be fetched.
        ModelFolderError: it is no reference. OptionError: a precision that there is not.
        UnsupportedModelError, ConfigError: no model of this kind runs here; nothing was fetched but its configuration.
    """
    with quietly(quiet):
        if precision is not None:
            return resolve_model(reference, _PULLING, BuildHooks(), precision)
        return source_path(find_or_pull(reference, _PULLING), reference)


def source_path(source: Path | PulledModel, name: str | Path) -> Path:
    """Where it lies. Raises ModelFolderError: it is neither there nor the name of anything."""
    if isinstance(source, PulledModel):
        return source.path
    if not exists(source):
        known = [model.name for model in models()]
        raise ModelFolderError(
            f"{str(name)!r:.120}: no name of a model",
            "it is neither in the cache nor of the form org/name, nor is it a path",
            did_you_mean(str(name), known, "give it as on its page: org/name, or hf:name where there is no org"),
        )
    return source


def loadable(name: str | Path, *, fetch: bool, precision: str | None, quiet: bool) -> Path:
    """What a program loads that names a model: see `genai.LLM`. Nothing is fetched unless `fetch`."""
    if precision is None and not fetch and pulled_model(name) is None:
        return Path(name)
    with quietly(quiet):
        return resolve_model(name, _PULLING if fetch else None, _BUILDING, precision)


def pull_task(plan: PullPlan) -> Progress:
    """The task of a pull; returns what is told the bytes that come."""
    unit, name = (1e9, "GB") if plan.missing_bytes >= 1e9 else (1e6, "MB")
    return task("Pulling", plan.missing_bytes, amount=lambda count: f"{count / unit:.2f} {name}").add


def build_task(plan: BuildPlan) -> Progress:
    """The task of a build; returns what is told the bytes that are read."""
    return task("Building", plan.read_bytes, amount=lambda count: f"{count / 1e9:.2f} GB").add


def _said(question: str) -> bool:
    _log.info("%s", question.replace("Build a", "Building a", 1).rstrip("?"))
    return True


# Hooks of a program, which nobody can ask: the log says what comes.
_PULLING = PullHooks(
    watch=pull_task, notice=_log.info, waiting=lambda folder: _log.info("waiting for another pull (%s)", folder)
)
_BUILDING = BuildHooks(ask=_said, watch=build_task)
