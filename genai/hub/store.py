"""Models that were pulled, in the cache: hub/NAME/ holds a record, the files as they came, and what was built of them.

hub/org--name/pulled.json      the record; a folder without one is no model
hub/org--name/name/…           the files, where they lay in the repository
hub/org--name/built/…          model folders that were built of them
hub/.partial/org--name/…       the same while files come; renamed when it is whole
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
_LONGEST = 120  # letters of a folder's name
_REMOVED = ".removed-"


@dataclass(frozen=True)
class PulledFile:
    """A file as it came: its path in the repository, its bytes, and their SHA-256."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class PulledModel:
    """A model in the cache.

    Attributes:
        name: what it is called: org/name[@revision][:part], or a URL.
        kind: "checkpoint", "gguf" or "onnx".
        root: where the model lies below `files_folder`: a folder, "" = that one; of GGUF, a file.
        source: the address of its page or file.
        revision: the commit; "" where there is none.
        license: as its model card names it; "" = it names none.
        pulled: when, in UTC, as ISO 8601.
        files: what came.
        folder: its folder in the cache.
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
        """Where the repository's files lie."""
        return self.folder / inner_name(self.name)

    @property
    def path(self) -> Path:
        """The checkpoint's or the model's folder, or the GGUF file."""
        return self.files_folder / self.root

    @property
    def built_folder(self) -> Path:
        """Where model folders are that were built of it."""
        return self.folder / BUILT

    def built(self) -> list[Path]:
        """Model folders that were built of it, the newest first."""
        folders = [folder for folder in _folders(self.built_folder) if (folder / _GENAI_CONFIG).is_file()]
        return sorted(folders, key=lambda folder: (folder / _GENAI_CONFIG).stat().st_mtime, reverse=True)

    def write(self, folder: Path) -> None:
        """Write its record into a folder."""
        facts = {key: value for key, value in vars(self).items() if key not in ("files", "folder")}
        facts["files"] = [vars(file) for file in self.files]
        (folder / RECORD).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def hub_folder() -> Path:
    """The cache's folder for models that are pulled."""
    return cache_root() / "hub"


def folder_name(name: str) -> str:
    """The folder of a model; different names have different ones."""
    plain = re.sub(r"^https?://", "", name).replace("/", "--").replace(":", "+")
    readable = re.sub(r"[^\w.@+-]", "_", plain)[-_LONGEST:].strip(".")
    repository = re.fullmatch(r"[\w.-]+(?:/[\w.-]+)?(?:@[\w.-]+)?(?::[\w.-]+)?", name) and "--" not in name
    return readable if repository and readable == plain else f"{readable}-{_short_hash(name)}"


def inner_name(name: str) -> str:
    """The folder of a model's files, after which chats call it: the name without its organisation."""
    last = name.split(":", 1)[0].split("@", 1)[0].rsplit("/", 1)[-1] if "://" not in name else "file"
    return last if is_safe(last) and last not in (RECORD, BUILT) else "files"


def partial_folder(name: str) -> Path:
    """Where a model's files gather until all are there."""
    return hub_folder() / PARTIAL / folder_name(name)


def find(name: str) -> PulledModel | None:
    """The model of that name, or the only one whose name ends in it; None if there is none.

    Raises:
        ModelFolderError: its record is damaged, or several models' names end in it.
    """
    exact = hub_folder() / folder_name(name)
    if (exact / RECORD).is_file():
        return read_record(exact)
    if "/" in re.split("[:@]", name, maxsplit=1)[0]:
        return None
    matches = [model for model in models() if name.lower() in (model.name.lower(), _without_org(model.name).lower())]
    if len(matches) > 1:
        names = ", ".join(model.name for model in matches)
        raise ModelFolderError(f"{name}: several models have this name", f"they are {names}", "give the whole name")
    return matches[0] if matches else None


def _without_org(name: str) -> str:
    return name.rsplit("/", 1)[-1] if "://" in name else name.split("/", 1)[-1]


def models() -> list[PulledModel]:
    """All models that were pulled, by name. Records that are damaged are left out; see `damaged`."""
    records = []
    for folder in _folders(hub_folder()):
        with suppress(ModelFolderError):
            if (folder / RECORD).is_file():
                records.append(read_record(folder))
    return sorted(records, key=lambda model: model.name.lower())


def unfinished() -> list[Path]:
    """Folders of pulls that did not come to their end, and of models whose record cannot be read."""
    lost = []
    for folder in _folders(hub_folder()):
        try:
            read_record(folder)
        except ModelFolderError:
            lost.append(folder)
    return _folders(hub_folder() / PARTIAL) + lost


def read_record(folder: Path) -> PulledModel:
    """The model in a folder of the cache. Raises ModelFolderError: its record is missing or damaged."""
    text = file_text(folder / RECORD, ModelFolderError, ModelFolderError)
    facts = json_object(text or "", folder / RECORD, ModelFolderError)
    names = ("name", "kind", "root", "source", "revision", "license", "pulled")
    sound = all(isinstance(facts.get(name), str) for name in names) and isinstance(facts.get("files"), list)
    if not sound or not _is_believable(facts) or folder_name(facts["name"]) != folder.name:
        raise ModelFolderError(
            f"{folder / RECORD}: is damaged",
            "it does not describe the model in this folder",
            f"`genai rm {folder.name}` removes it; then pull it again",
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
    """Remove a model's folder, or what a pull left unfinished; it is out of sight at once, and nothing else is touched.

    Raises:
        StateError: a pull into it is going on. ModelFolderError: it is no folder of the cache, or cannot be removed.
    """
    hub = hub_folder()
    if folder.parent not in (hub, hub / PARTIAL) or folder.is_symlink() or not folder.is_dir():
        raise ModelFolderError(f"{folder}: not removed", "it is no model's folder in the cache", "see `genai list`")
    built = folder / BUILT if (folder / BUILT).is_dir() else folder
    with locked(folder, wait=False) as free, locked(built, wait=False) as also_free:
        if False in (free, also_free if built != folder else None):
            raise StateError(f"{folder.name} is in use", "another process pulls or builds it", "wait until that ends")
        hidden = hub / PARTIAL / f"{_REMOVED}{secrets.token_hex(8)}"
        try:
            hidden.parent.mkdir(exist_ok=True)
            folder.rename(hidden)
            shutil.rmtree(hidden, onerror=_unless_gone)
        except OSError as error:
            raise ModelFolderError(f"{folder}: not removed", str(error), "check its permissions") from error


def _unless_gone(_: object, path: str, caught: Any) -> None:
    """What cannot be removed because it is not there, as another process finishes this removal, is removed."""
    if not isinstance(caught[1], FileNotFoundError):
        raise caught[1]


def remove_leftovers() -> None:
    """Finish removals that were interrupted."""
    for folder in _folders(hub_folder() / PARTIAL, hidden=True):
        if folder.name.startswith(_REMOVED):
            shutil.rmtree(folder, ignore_errors=True)


def bytes_below(folder: Path) -> int:
    """What a folder takes on the disk."""
    total = 0
    for directory, _, names in os.walk(folder):  # which leaves out what another process removes meanwhile
        for path in map(Path(directory).joinpath, names):
            with suppress(OSError):
                if path.is_file() and not path.is_symlink():
                    total += path.stat().st_size
    return total


def now() -> str:
    """The time for a record."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def _folders(parent: Path, *, hidden: bool = False) -> list[Path]:
    try:
        return sorted(one for one in _entries(parent) if hidden or not one.name.startswith("."))
    except OSError:
        return []


def _entries(parent: Path) -> Iterator[Path]:
    return (one for one in parent.iterdir() if one.is_dir() and not one.is_symlink())


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
