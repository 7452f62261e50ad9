"""Model folders that were built into the cache from local checkpoints and GGUF files, and the last use of all models.

models/NAME-HASH/        a model folder; the hash changes if its source or the options of the build change
built_from/NAME-HASH.json  the source and the precision of a model folder in models/
last_use/FOLDER          an empty file, whose modification time is the last use of a folder in models/ or hub/
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from genai.kernels.cpu.jit.kernel_cache import cache_root

from ..common.atomic_files import write_whole
from ..common.locks import locked
from ..common.reading import file_text, json_object
from ..errors import GenaiError, ModelFolderError, StateError
from .store import PARTIAL, bytes_below, folders_in, hub_folder

BUILT_DECODER = "built"
_UNFINISHED = "unfinished build"
# The end of a folder's name.
_HASH = re.compile(r"-[0-9a-f]{12}\Z")
_DECODER, _ENCODER = "genai_config.json", "onnx/model.onnx"


@dataclass(frozen=True)
class BuiltModel:
    """A model folder in the cache that was built from a local checkpoint or GGUF file.

    Attributes:
        name: name of the folder, which is the name in `genai list`.
        kind: "built", "built encoder", or "unfinished build".
        built: time of the build, ISO 8601 with the local UTC offset.
        folder: the folder.
        source: path of the checkpoint or GGUF file; "" if it is unknown.
        precision: storage format of the weights; "" if it is unknown.
    """

    name: str
    kind: str
    built: str
    folder: Path
    source: str = ""
    precision: str = ""


def models_folder() -> Path:
    """Return the cache folder of models that were built from local files."""
    return cache_root() / "models"


def built_models() -> list[BuiltModel]:
    """Return the models that were built into the cache, sorted by name, including interrupted builds."""
    return [_described(folder) for folder in folders_in(models_folder(), hidden=True)]


def find_built(name: str) -> BuiltModel | None:
    """Return the built model with this name, or None."""
    return next((model for model in built_models() if model.name == name), None)


def name_without_hash(folder: Path) -> str:
    """Return the name of a model's folder; if it was built into the cache, without the hash."""
    return _HASH.sub("", folder.name) if folder.parent == models_folder() else folder.name


def find_build(name: str) -> BuiltModel | None:
    """Return the built model with this name, or the only one whose name without its hash is this name; None if absent.

    Raises:
        ModelFolderError: several builds have the name without their hashes; the error lists them.
    """
    known = built_models()
    if (exact := next((model for model in known if model.name == name), None)) is not None:
        return exact
    short = name.removesuffix(".gguf")
    found = [one for one in known if one.kind != _UNFINISHED and _HASH.sub("", one.name) == short != one.name]
    if len(found) > 1:
        listed = ", ".join(f"{one.name} ({', '.join(filter(None, (one.precision, one.built[:10])))})" for one in found)
        raise ModelFolderError(f"{name}: several built models have this name", f"they are {listed}", "add the hash")
    return found[0] if found else None


def _described(folder: Path) -> BuiltModel:
    kinds = {_DECODER: BUILT_DECODER, _ENCODER: "built encoder"}
    kind = next((kind for file, kind in kinds.items() if (folder / file).is_file()), _UNFINISHED)
    if folder.name.startswith("."):
        kind = _UNFINISHED
    facts: dict[str, Any] = {}
    with suppress(GenaiError):  # a damaged record does not matter
        facts = json_object(file_text(_record(folder), StateError, StateError) or "{}", folder.name, StateError)
    source, precision = (text if isinstance(text := facts.get(key), str) else "" for key in ("source", "precision"))
    return BuiltModel(folder.name, kind, _iso(folder.stat().st_mtime), folder, source, precision)


def note_build(folder: Path, source: Path, precision: str) -> None:
    """Record the source and the precision of a model in models/. Other folders and errors are ignored."""
    if folder.parent == models_folder():
        with suppress(OSError):
            record = _record(folder)
            record.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = source.absolute()  # a link keeps its name, such as a file in Hugging Face's cache
            facts = {"source": str(path.parent.resolve() / path.name), "precision": precision}
            write_whole(record, json.dumps(facts).encode())


def remove_built(model: BuiltModel) -> int:
    """Remove a built model from the cache, and return its size in bytes. The folder disappears atomically.

    Raises:
        StateError: a process is building a model.
        ModelFolderError: the folder is not in the cache, or cannot be removed.
    """
    folder = model.folder
    if folder.parent != models_folder() or folder.is_symlink() or not folder.is_dir():
        raise ModelFolderError(
            f"{folder}: the folder was not removed", "it is not a model in the cache", "`genai list` lists the models"
        )
    with locked(folder.parent, wait=False) as free:
        if free is False:
            raise StateError(
                f"{folder.name} cannot be removed now",
                "another process is building a model in the same folder",
                "wait until that process has finished",
            )
        size = bytes_below(folder)
        hidden = hub_folder() / PARTIAL / f".removed-{secrets.token_hex(8)}"
        try:
            hidden.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.rename(hidden)
            shutil.rmtree(hidden)
        except OSError as error:
            raise ModelFolderError(
                f"{folder}: the folder was not removed", str(error), "check its permissions"
            ) from error
    forget_use(folder)
    with suppress(OSError):
        _record(folder).unlink(missing_ok=True)
    return size


def note_use(path: Path) -> None:
    """Record that a model is used now, if its path is in the cache. Errors are ignored."""
    with suppress(OSError, ValueError):
        if (entry := _entry(path)) is not None:
            mark = _mark(entry)
            mark.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            mark.touch()


def last_use(folder: Path) -> str:
    """Return the last use of a model's folder in the cache, ISO 8601 with the local UTC offset; "" = not used yet."""
    with suppress(OSError):
        return _iso(_mark(folder).stat().st_mtime)
    return ""


def forget_use(folder: Path) -> None:
    """Delete the record of a folder's last use."""
    with suppress(OSError):
        _mark(folder).unlink(missing_ok=True)


def _entry(path: Path) -> Path | None:
    """Return the folder in hub/ or models/ that contains a path; None for a path outside the cache."""
    for parent in (hub_folder(), models_folder()):
        if path.is_relative_to(parent) and path != parent:
            return parent / path.relative_to(parent).parts[0]
    return None


def _record(folder: Path) -> Path:
    return cache_root() / "built_from" / f"{folder.name}.json"


def _mark(folder: Path) -> Path:
    return cache_root() / "last_use" / f"{folder.parent.name}--{folder.name}"


def _iso(time: float) -> str:
    return datetime.fromtimestamp(time).astimezone().isoformat(timespec="seconds")
