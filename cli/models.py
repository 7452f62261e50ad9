"""`genai pull`, `list`, `show` and `rm`: manage named models in the cache."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from genai.common.memory_limits import format_bytes as size
from genai.common.progress import task
from genai.errors import GenaiError, ModelFolderError, did_you_mean

from . import options as opt
from .build import ask as ask_to_build, interruptible, say_remarks, waiting
from .info import figures_of
from .pulling import PullDialog
from .terminal import agreed, emit, emit_figures, say
from .wrapping import printable

if TYPE_CHECKING:
    from genai.hub.built import BuiltModel
    from genai.hub.store import PulledModel

Reference = Annotated[
    str, typer.Argument(help="org/name, org/name@revision, org/name:Q4_K_M, a URL, or a name from `genai list`.")
]
Name = Annotated[
    str, typer.Argument(help="Name from `genai list`; the org, or the hash, may be omitted if only one model matches.")
]


def pull(
    reference: Reference,
    precision: opt.Precision = None,
) -> None:
    """Download a model from Hugging Face, or a file from a URL, into the cache, and print the path.

    If a repository has several formats, downloads only one: the format after the colon, or the best for this machine.
    """
    from genai.convert.resolve import BuildHooks, find_or_pull, resolve_model, source_path

    pulling = PullDialog(yes=True, precision=precision).hooks
    with interruptible("genai: interrupted; the download is kept, and the same command resumes it"):
        if precision is not None:
            path = resolve_model(reference, pulling, BuildHooks(True, ask_to_build, say_remarks, waiting), precision)
        else:
            path = source_path(find_or_pull(reference, pulling), reference)
    emit(str(path), "\n")


def list_models(as_json: opt.AsJson = False) -> None:
    """List the models in the cache: pulled models and built models, with kind, size, precision, date and last use.

    Built models come from local checkpoints and GGUF files. Unfinished downloads and the total are listed last.
    """
    from genai.hub.built import built_models, models_folder
    from genai.hub.store import hub_folder, models, unfinished

    with task("Reading the cache"):
        pulled = [facts_of(model) for model in models()]
        built = [_built_facts(model) for model in built_models()]
        rest = [_unfinished(folder) for folder in unfinished()]
    total = sum(row["bytes"] for row in (*pulled, *built, *rest))
    if as_json:
        emit(json.dumps({"models": pulled, "built": built, "unfinished": rest, "total_bytes": total}, indent=2), "\n")
        return
    if not pulled and not built and not rest:
        say(
            "genai: the cache is empty; to download a model, run `genai pull org/name`; "
            "if MODEL is omitted, commands use the bundled model"
        )
        return
    emit_figures(
        [
            *((printable(row["name"]), _line(row, row["precision"], f"pulled {row['pulled'][:10]}")) for row in pulled),
            *((printable(row["name"]), _built_line(row)) for row in built),
            *((printable(row["name"]), f"unfinished, {size(row['bytes'])}") for row in rest),
            ("total", f"{size(total)} in {hub_folder()} and {models_folder()}"),
        ]
    )


def _line(row: dict[str, Any], *parts: str) -> str:
    used = f"used {row['used'][:10]}" if row["used"] else "not used yet"
    return ", ".join([row["kind"], size(row["bytes"]), *parts, used])


def _built_line(row: dict[str, Any]) -> str:
    known = [row["precision"]] if row["precision"] else []
    source = f" from {printable(row['source'])}" if row["source"] else ""
    return _line(row, *known, f"built {row['built'][:10]}{source}")


def rm(
    name: Name,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Remove a model from the cache: its files, and the models built from them. Also removes unfinished downloads.

    Removes a built model by its name in `genai list`. Never removes a path outside the cache.
    """
    from genai.hub.built import forget_use, remove_built
    from genai.hub.store import bytes_below, remove

    built = _built_named(name)
    folder = _folder_named(name) if built is None else built.folder
    question = f"Remove {folder} ({size(bytes_below(folder))})?"
    if not yes:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise ModelFolderError(
                f"{name}: the model was not removed",
                "removal needs confirmation, and stdin is not a terminal",
                f"add --yes: `genai rm {quote(name)} --yes`",
            )
        if not agreed(question, default=False):
            say("genai: nothing was removed")
            raise typer.Exit(1)
    freed = bytes_below(folder)
    if built is None:
        remove(folder)
        forget_use(folder)
    else:
        remove_built(built)
    say(f"genai: removed {name}, {size(freed)}")


def show(name: Name, as_json: opt.AsJson = False) -> None:
    """Describe a cached model: path, files, licence, revision, and the output of `genai info`."""
    from genai.doctor.model_info import describe
    from genai.hub.choosing import ONNX
    from genai.hub.store import folders_in

    if (built := _built_named(name)) is not None:
        _show_built(built, as_json=as_json)
        return
    model = _model_named(name)
    facts = {
        **facts_of(model),
        "place": str(model.path),
        "source": model.source,
        "revision": model.revision,
        "license": model.license,
        "files": {file.path: file.size for file in model.files},
        "built": [str(folder) for folder in folders_in(model.built_folder)],
        "info": None,
    }
    folders = [model.path] if model.kind == ONNX else model.built()
    try:
        with task(f"Reading {model.name}"):
            facts["info"] = describe(folders[0], device="cpu") if folders else None
    except GenaiError as error:
        say(f"genai: {error}")
    emit_figures(json.dumps(facts, indent=2) if as_json else [(key, printable(text)) for key, text in _lines(facts)])


def _show_built(model: BuiltModel, *, as_json: bool) -> None:
    """Describe a model that was built from a local checkpoint or GGUF file."""
    from genai.doctor.model_info import describe

    facts = {**_built_facts(model), "place": str(model.folder), "info": None}
    if (model.folder / "genai_config.json").is_file():
        with task(f"Reading {model.name}"):
            facts["info"] = describe(model.folder, device="cpu")
    rows = [
        ("name", facts["name"]),
        ("kind", ", ".join(filter(None, (facts["kind"], facts["precision"], size(facts["bytes"]))))),
        ("path", facts["place"]),
        ("source", facts["source"] or "not recorded"),
        ("built", facts["built"]),
        ("last use", facts["used"] or "not used yet"),
        *(figures_of(facts["info"]) if facts["info"] is not None else ()),
    ]
    emit_figures(json.dumps(facts, indent=2) if as_json else [(key, printable(text)) for key, text in rows])


def _lines(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "name", facts["name"]
    yield "kind", f"{facts['kind']}, {facts['precision']}, {size(facts['bytes'])} including builds"
    yield "path", facts["place"]
    yield "source", f"{facts['source']}{', revision ' + facts['revision'] if facts['revision'] else ''}"
    yield "licence", facts["license"] or "not given on the model's page"
    yield "pulled", facts["pulled"]
    yield "last use", facts["used"] or "not used yet"
    yield "files pulled", ", ".join(f"{path} {size(count)}" for path, count in facts["files"].items())
    yield "built", ", ".join(facts["built"]) or "nothing yet"
    if facts["info"] is not None:
        yield from figures_of(facts["info"])


def facts_of(model: PulledModel) -> dict[str, Any]:
    """Return the facts that `genai list` shows about a model."""
    from genai.hub.built import last_use
    from genai.hub.store import bytes_below

    return {
        "name": model.name,
        "kind": model.kind,
        "bytes": bytes_below(model.folder),
        "precision": _precision(model),
        "pulled": model.pulled,
        "used": last_use(model.folder),
    }


def _built_facts(model: BuiltModel) -> dict[str, Any]:
    from genai.hub.built import last_use
    from genai.hub.store import bytes_below

    return {
        "name": model.name,
        "kind": model.kind,
        "bytes": bytes_below(model.folder),
        "precision": model.precision,
        "source": model.source,
        "built": model.built,
        "used": last_use(model.folder),
    }


def _precision(model: PulledModel) -> str:
    """Return the precision of the stored weights, and the precisions of the models built from them."""
    from genai.common.reading import file_text, json_object
    from genai.hub.choosing import CHECKPOINT, ONNX, precision_in
    from genai.onnx.layouts import decoder_variants

    stored = precision_in(model.root)
    if model.kind == ONNX and not stored:
        stored = ", ".join(one.precision for one in decoder_variants(file.path for file in model.files))
    if model.kind == CHECKPOINT:
        try:
            text = file_text(model.path / "config.json", GenaiError, GenaiError) or "{}"
            config = json_object(text, "config.json", GenaiError)
        except GenaiError:
            config = {}
        stored = str(config.get("dtype") or config.get("torch_dtype") or "")[:20]
    built = sorted({folder.name.rsplit("-", 2)[1] for folder in model.built() if folder.name.count("-") > 1})
    return " → ".join(filter(None, (stored or "as stored", ", ".join(built))))


def _unfinished(folder: Path) -> dict[str, Any]:
    from genai.hub.store import bytes_below

    return {"name": folder.name, "bytes": bytes_below(folder)}


def _built_named(name: str) -> BuiltModel | None:
    """Return a built model by its name, also without its hash, unless another entry of the cache has this name."""
    from genai.hub.built import find_build, find_built
    from genai.hub.references import parse
    from genai.hub.store import find, folder_name, unfinished

    reference = parse(name)
    is_taken = find(name if reference is None else reference.name) is not None
    is_taken = is_taken or any(folder.name in (name, folder_name(name)) for folder in unfinished())
    return find_built(name) if is_taken else find_build(name)


def _folder_named(name: str) -> Path:
    """Return the folder of a model, or of an unfinished download."""
    from genai.hub.store import PARTIAL, folder_name, unfinished

    # Damaged data at a model's final path comes before its partial download, because it blocks the download.
    for folder in sorted(unfinished(), key=lambda one: one.parent.name == PARTIAL):
        if folder.name in (name, folder_name(name)):
            return folder
    return _model_named(name).folder


def _model_named(name: str) -> PulledModel:
    from genai.hub.built import built_models
    from genai.hub.local import exists
    from genai.hub.references import parse
    from genai.hub.store import find, models
    from genai.models.folders import bundled_model

    reference = parse(name)
    pulled = find(name if reference is None else reference.name)
    if pulled is None:
        known = [*(model.name for model in models()), *(model.name for model in built_models())]
        why = f"cached models: {', '.join(known[:8])}" if known else "the cache is empty"
        if exists(Path(name)):
            why = f"it is a path outside the cache; {why}"
        is_bundled = name == bundled_model().name
        otherwise = f"`genai info {name}` describes the model" if is_bundled else "`genai list` shows the cached models"
        raise ModelFolderError(
            f"{name:.200} is not in the cache",
            f"it is the bundled model, a part of the toolkit; {why}" if is_bundled else why,
            otherwise if is_bundled else did_you_mean(name, known, otherwise),
        )
    return pulled
