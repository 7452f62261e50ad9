"""Files of clients, in a folder that only the user of the server can read.

The names of files on the disk are identifiers that the server creates. The names that clients give are only stored.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from ..common.atomic_files import replacing
from ..errors import OptionError, RequestError
from .keys import Key

_ID = re.compile(r"(file|batch)[-_][0-9a-f]{24}\Z")
_MOST_FILES = 1000
"""The maximum number of files of a key."""

Entry = dict[str, Any]


def open_folder(path: Path) -> Path:
    """Return a folder that only this user can read, which is created if it does not exist.

    Raises:
        OptionError: the folder cannot be created, or others can read it.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        others = stat.S_IMODE(path.stat().st_mode) & 0o077 if os.name == "posix" else 0
    except OSError as error:
        raise OptionError(
            f"batch_dir = {str(path)!r:.200}", f"the folder cannot be used: {error.strerror}", "choose another folder"
        ) from error
    if others:
        raise OptionError(
            f"batch_dir = {str(path)!r:.200}", "other users can read the folder, which holds requests and replies",
            f"run chmod 700 {path}, or choose another folder",
        )  # fmt: skip
    return path


def owner_of(key: Key) -> str:
    """Return the name that a key has in stored entries: a hash, so that renamed keys keep their files."""
    return hashlib.sha256(b"genai files " + key.digest).hexdigest()[:32] if key.digest else ""


class Entries:
    """Descriptions of files or batches as JSON, one file each.

    Args:
        folder: the folder.
        kind: "file" or "batch", for messages.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        self._folder, self._kind = open_folder(folder), kind
        self._known: dict[str, Entry] = {}
        for path in folder.glob("*.json"):
            with suppress(ValueError, OSError):
                entry = json.loads(path.read_text(encoding="utf-8"))
                if isinstance(entry, dict) and entry.get("id") == path.stem and _ID.match(path.stem):
                    self._known[path.stem] = entry

    def find(self, identifier: str, owner: str) -> Entry:
        """Return an entry of an owner. Raise RequestError if there is none."""
        entry = self._known.get(identifier)
        if entry is None or entry["owner"] != owner:
            raise RequestError(
                404, f"there is no {self._kind} {identifier!r:.80}", "it was deleted, or another key owns it",
                f"list your entries with GET /v1/{'files' if self._kind == 'file' else 'batches'}", code="not_found",
            )  # fmt: skip
        return entry

    def get(self, identifier: str) -> Entry | None:
        """Return an entry, or None."""
        return self._known.get(identifier)

    def all(self, keeps: Callable[[Entry], bool], *, newest_first: bool = True) -> list[Entry]:
        """Return the entries that a function accepts, by the time of their creation."""
        found = [entry for entry in [*self._known.values()] if keeps(entry)]
        return sorted(found, key=lambda entry: (entry["created_at"], entry["id"]), reverse=newest_first)

    def write(self, entry: Entry) -> None:
        """Store an entry."""
        self._known[entry["id"]] = entry
        with replacing(self._folder / f"{entry['id']}.json") as file:
            file.write(json.dumps(entry).encode())

    def delete(self, identifier: str) -> None:
        """Delete an entry."""
        (self._folder / f"{identifier}.json").unlink(missing_ok=True)
        self._known.pop(identifier, None)


class FileStore:
    """The files of all keys.

    Args:
        folder: the folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.entries = Entries(folder, "file")

    def path(self, identifier: str) -> Path:
        """Return the path of a file's content."""
        if not _ID.match(identifier):
            raise ValueError(identifier)
        return self._folder / f"{identifier}.data"

    def add(
        self, owner: str, filename: str, purpose: str, write: Callable[[BinaryIO], None], identifier: str | None = None
    ) -> Entry:
        """Store a file. The entry is written after the content, so that every listed file is whole.

        Raises:
            RequestError: the owner has too many files.
        """
        own = self.entries.all(lambda entry: entry["owner"] == owner)
        if identifier is None and len(own) >= _MOST_FILES:
            raise RequestError(
                400, f"there are {len(own):,} files", "this is the limit", "delete files with DELETE /v1/files/ID",
                code="too_many_files",
            )  # fmt: skip
        identifier = identifier or f"file-{secrets.token_hex(12)}"
        path = self.path(identifier)
        with replacing(path) as file:
            write(file)
        entry = {
            "id": identifier, "object": "file", "bytes": path.stat().st_size, "created_at": int(time.time()),
            "filename": filename, "purpose": purpose, "status": "processed", "owner": owner,
        }  # fmt: skip
        self.entries.write(entry)
        return entry

    def delete(self, identifier: str) -> None:
        """Delete a file."""
        self.entries.delete(identifier)
        self.path(identifier).unlink(missing_ok=True)
