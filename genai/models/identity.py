"""Identification of the files that a model was loaded from, for cached data that outlives the process."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from ..errors import ModelFolderError

# A larger file is identified by its size and samples of its contents, because reading gigabytes would take seconds.
_WHOLE = 2**26
_PIECES, _PIECE_BYTES = 256, 2**16


class LoadedFiles:
    """The contents of the files that one model was loaded from, as hashes that are taken while the files are open.

    A path can name another file later, because files are replaced by renaming. Therefore, nothing about a loaded model
    is derived from the contents that its paths have after loading.

    Args:
        folder: the model folder.
        in_memory: files in memory that replace files in the folder.
    """

    def __init__(self, folder: Path, in_memory: Mapping[str, bytes]) -> None:
        self._folder, self._listed = folder, Path(os.path.realpath(folder))  # the working folder may change later
        self._in_memory = {name: _hash_of(content) for name, content in in_memory.items()}
        self._read: dict[str, bytes] = {}
        self._stamps: dict[str, tuple[int, ...]] = {}

    def note(self, path: Path, file: BinaryIO) -> None:
        """Record the contents of an open file that the model is read from.

        Raises:
            ModelFolderError: the model was read before from a file of this name with other contents.
        """
        name, stamp = self._name(path), _stamp(file)
        if self._stamps.get(name) == stamp:
            return
        content = _content(file)
        if self._read.setdefault(name, content) != content:
            raise _replaced(path)
        self._stamps[name] = stamp

    def check(self) -> None:
        """Raise ModelFolderError unless the paths still name files with the contents that were loaded."""
        for name in self._read:
            path = self._folder / name
            try:
                with path.open("rb") as file:
                    self.note(path, file)
            except OSError as error:
                raise _replaced(path) from error

    def as_loaded(self, in_memory: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return the files in memory that the model was loaded with; raise ModelFolderError if they were changed."""
        for name, content in self._in_memory.items():
            if name not in in_memory or _hash_of(in_memory[name]) != content:
                raise _replaced(Path(name))
        return {name: in_memory[name] for name in self._in_memory}

    def identity(self) -> str:
        """Return the SHA-256 of the names, sizes and contents (256 samples above 64 MiB) of graphs and weights.

        The files are those that were loaded, and all other .onnx and .data files of the folder. Those do not affect the
        model, but they are part of the identity in files that earlier versions wrote.
        """
        found = {**self._read, **self._in_memory}
        for path in _graphs_and_weights(self._listed):
            if path.name not in found:
                with suppress(OSError), path.open("rb") as file:
                    found[path.name] = _content(file)
        return hashlib.sha256(b"".join(f"{name}\0".encode() + found[name] for name in sorted(found))).hexdigest()

    def _name(self, path: Path) -> str:
        return Path(os.path.relpath(path, self._folder)).as_posix()


def _graphs_and_weights(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.suffix in (".onnx", ".data") and path.is_file()]
    except OSError:  # the folder was deleted after the model was loaded
        return []


def _hash_of(content: bytes) -> bytes:
    return f"{len(content)}\0".encode() + hashlib.sha256(content).digest()


def _stamp(file: BinaryIO) -> tuple[int, ...]:
    facts = os.fstat(file.fileno())
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns


def _content(file: BinaryIO) -> bytes:
    size = os.fstat(file.fileno()).st_size
    digest = hashlib.sha256(f"{size}\0".encode())
    file.seek(0)
    if size <= _WHOLE:
        while piece := file.read(2**20):
            digest.update(piece)
    else:
        for index in range(_PIECES):
            file.seek((size - _PIECE_BYTES) * index // (_PIECES - 1))
            digest.update(file.read(_PIECE_BYTES))
    return digest.digest()


def _replaced(path: Path) -> ModelFolderError:
    return ModelFolderError(
        f"{path} was replaced after the model was loaded",
        "the loaded model and the file now have different weights or graphs",
        "load the model again",
    )
