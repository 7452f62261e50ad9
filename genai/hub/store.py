"""The cache of pulled models. hub/NAME/ holds a record, the downloaded files, and the model folders built from them.

hub/org--name/pulled.json      the record; a folder without a record is not a model
hub/org--name/name/…           the files, at their paths in the repository
hub/org--name/built/…          model folders that were built from them
hub/.partial/org--name/…       the same during the download; renamed when it is complete
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from genai.kernels.cpu.jit.kernel_cache import cache_root

from ..common.locks import locked
from ..common.reading import file_text, json_object
from ..errors import ModelFolderError, StateError
from .choosing import CHECKPOINT, GGUF, ONNX
from .listing import is_safe

RECORD, BUILT, PARTIAL = "pulled.json", "built", ".partial"
_GENAI_CONFIG = "genai_config.json"
_LONGEST = 120  # characters of a folder's name
_REMOVED = ".removed-"


@dataclass(frozen=True)
class PulledFile:
    """A downloaded file: its path in the repository, its size in bytes, and its SHA-256."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class PulledModel:
    """A model in the cache.

    Attributes:
        name: name in the cache: org/name[@revision][:part], or a URL.
        kind: "checkpoint", "gguf" or "onnx".
        root: path of the model in `files_folder`: a folder ("" = `files_folder` itself) or, for GGUF, a file.
        source: URL of the model's page or file.
        revision: commit; "" if there is none.
        license: licence that the model card names; "" = none.
        pulled: time of the download, ISO 8601 with the local UTC offset.
        files: downloaded files.
        folder: folder in the cache.
    """

    name: str
    kind: str
    root: str
    source: str
    revision: str
    license: str
    pulled: str
    files: tuple[PulledFile, ...]
    folder: Path = field(compare=False)

    @property
    def files_folder(self) -> Path:
        """The folder of the repository's files."""
        return self.folder / inner_name(self.name)

    @property
    def path(self) -> Path:
        """The checkpoint's or the model's folder, or the GGUF file."""
        return self.files_folder / self.root

    @property
    def built_folder(self) -> Path:
        """The folder that holds the model folders built from this model."""
        return self.folder / BUILT

    def built(self) -> list[Path]:
        """Return the model folders that were built from this model, the newest first."""
        folders = [folder for folder in folders_in(self.built_folder) if (folder / _GENAI_CONFIG).is_file()]
        return sorted(folders, key=lambda folder: (folder / _GENAI_CONFIG).stat().st_mtime, reverse=True)

    def write(self, folder: Path) -> None:
        """Write the model's record to a folder."""
        facts = {key: value for key, value in vars(self).items() if key not in ("files", "folder")}
        facts["files"] = [vars(file) for file in self.files]
        (folder / RECORD).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def hub_folder() -> Path:
    """Return the cache folder of pulled models."""
    return cache_root() / "hub"


def folder_name(name: str) -> str:
    """Return the folder name of a model; different names have different folders."""
    plain = re.sub(r"^https?://", "", name).replace("/", "--").replace(":", "+")
    readable = re.sub(r"[^\w.@+-]", "_", plain)[-_LONGEST:].strip(".")
    repository = re.fullmatch(r"[\w.-]+(?:/[\w.-]+)?(?:@[\w.-]+)?(?::[\w.-]+)?", name) and "--" not in name
    return readable if repository and readable == plain else f"{readable}-{_short_hash(name)}"


def inner_name(name: str) -> str:
    """Return the folder name of a model's files, which chats display: the name without the organisation."""
    last = name.split(":", 1)[0].split("@", 1)[0].rsplit("/", 1)[-1] if "://" not in name else "file"
    return last if is_safe(last) and last not in (RECORD, BUILT) else "files"


def partial_folder(name: str) -> Path:
    """Return the folder in which a model's files are collected until they are complete."""
    return hub_folder() / PARTIAL / folder_name(name)


def find(name: str) -> PulledModel | None:
    """Return the model with this name, or the only model with this name in any organisation; None if there is none.

    Raises:
        ModelFolderError: if the model's record is damaged, or several models match.
    """
    exact = hub_folder() / folder_name(name)
    if (exact / RECORD).is_file():
        return read_record(exact)
    if "/" in re.split("[:@]", name, maxsplit=1)[0]:
        return None
    matches = [model for model in models() if name.lower() in (model.name.lower(), _without_org(model.name).lower())]
    if len(matches) > 1:
        names = ", ".join(model.name for model in matches)
        raise ModelFolderError(
            f"{name}: several models have this name", f"the models are {names}", "use the full name of one model"
        )
    return matches[0] if matches else None


def _without_org(name: str) -> str:
    return name.rsplit("/", 1)[-1] if "://" in name else name.split("/", 1)[-1]


def models() -> list[PulledModel]:
    """Return all pulled models, sorted by name. Models with damaged records are skipped; see `unfinished`."""
    records = []
    for folder in folders_in(hub_folder()):
        with suppress(ModelFolderError):
            if (folder / RECORD).is_file():
                records.append(read_record(folder))
    return sorted(records, key=lambda model: model.name.lower())


def unfinished() -> list[Path]:
    """Return the folders of unfinished pulls, and of models with unreadable records."""
    lost = []
    for folder in folders_in(hub_folder()):
        try:
            read_record(folder)
        except ModelFolderError:
            lost.append(folder)
    return folders_in(hub_folder() / PARTIAL) + lost


def read_record(folder: Path) -> PulledModel:
    """Return the model in a folder in the cache. Raises ModelFolderError if its record is missing or damaged."""
    text = file_text(folder / RECORD, ModelFolderError, ModelFolderError)
    facts = json_object(text or "", folder / RECORD, ModelFolderError)
    names = ("name", "kind", "root", "source", "revision", "license", "pulled")
    sound = all(isinstance(facts.get(name), str) for name in names) and isinstance(facts.get("files"), list)
    if not sound or not _is_believable(facts) or folder_name(facts["name"]) != folder.name:
        raise ModelFolderError(
            f"{folder / RECORD}: the record is damaged",
            "the record does not match the model in this folder",
            f"run `genai rm {folder.name}`, then pull the model again",
        )
    files = tuple(PulledFile(one["path"], one["size"], one["sha256"]) for one in facts["files"])
    return PulledModel(**{name: facts[name] for name in names}, files=files, folder=folder)


def _is_believable(facts: dict[str, Any]) -> bool:
    def is_file(entry: Any) -> bool:
        kinds = {"path": str, "size": int, "sha256": str}
        return isinstance(entry, dict) and all(isinstance(entry.get(key), kind) for key, kind in kinds.items())

    paths = [entry["path"] for entry in facts["files"] if is_file(entry)]
    inside = len(paths) == len(facts["files"]) and all(is_safe(path) for path in (*paths, facts["root"]) if path)
    return inside and facts["kind"] in (CHECKPOINT, GGUF, ONNX)


def remove(folder: Path) -> None:
    """Remove a model's folder, or an unfinished pull. The folder disappears atomically, and nothing else is touched.

    Raises:
        StateError: if a process is pulling or building the model.
        ModelFolderError: if the folder is not in the cache, or cannot be removed.
    """
    hub = hub_folder()
    if folder.parent not in (hub, hub / PARTIAL) or folder.is_symlink() or not folder.is_dir():
        raise ModelFolderError(
            f"{folder}: the folder was not removed", "it is not a model in the cache", "`genai list` lists the models"
        )
    built = folder / BUILT if (folder / BUILT).is_dir() else folder
    with locked(folder, wait=False) as free, locked(built, wait=False) as also_free:
        if False in (free, also_free if built != folder else None):
            raise StateError(
                f"{folder.name} is in use",
                "another process is pulling or building it",
                "wait until that process has finished",
            )
        hidden = hub / PARTIAL / f"{_REMOVED}{secrets.token_hex(8)}"
        try:
            hidden.parent.mkdir(exist_ok=True)
            folder.rename(hidden)
            shutil.rmtree(hidden, onerror=_unless_gone)
        except OSError as error:
            raise ModelFolderError(
                f"{folder}: the folder was not removed", str(error), "check its permissions"
            ) from error


def _unless_gone(_: object, path: str, caught: Any) -> None:
    """Ignore paths that no longer exist because another process is finishing the same removal; raise other errors."""
    if not isinstance(caught[1], FileNotFoundError):
        raise caught[1]


def remove_leftovers() -> None:
    """Finish removals that were interrupted."""
    for folder in folders_in(hub_folder() / PARTIAL, hidden=True):
        if folder.name.startswith(_REMOVED):
            shutil.rmtree(folder, ignore_errors=True)


def bytes_below(folder: Path) -> int:
    """Return the total size of a folder's files in bytes."""
    total = 0
    for directory, _, names in os.walk(folder):  # os.walk skips folders that another process removes meanwhile
        for path in map(Path(directory).joinpath, names):
            with suppress(OSError):
                if path.is_file() and not path.is_symlink():
                    total += path.stat().st_size
    return total


def now() -> str:
    """Return the current time in the format of a record."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def folders_in(parent: Path, *, hidden: bool = False) -> list[Path]:
    """Return the folders in a folder, sorted; without links and, unless `hidden` is set, without hidden folders."""
    try:
        return sorted(one for one in _entries(parent) if hidden or not one.name.startswith("."))
    except OSError:
        return []


def _entries(parent: Path) -> Iterator[Path]:
    return (one for one in parent.iterdir() if one.is_dir() and not one.is_symlink())


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
