"""Identification of a model's files, for cached data that outlives the process."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

# A larger file is identified by its size and samples of its contents, because reading gigabytes would take seconds.
_WHOLE = 2**26
_PIECES, _PIECE_BYTES = 256, 2**16


def model_identity(folder: Path, model_data: Mapping[str, bytes]) -> str:
    """Return the SHA-256 of the names, sizes and contents (256 samples above 64 MiB) of a folder's graphs and weights.

    Args:
        folder: the model folder.
        model_data: files in memory that replace files of the folder.
    """
    digest = hashlib.sha256()
    names = {path.name for path in folder.iterdir() if path.suffix in (".onnx", ".data") and path.is_file()}
    for name in sorted(names | set(model_data)):
        if name in model_data:
            content = model_data[name]
            digest.update(f"{name}\0{len(content)}\0".encode() + hashlib.sha256(content).digest())
        else:
            digest.update(f"{name}\0".encode() + _content(folder / name))
    return digest.hexdigest()


def _content(path: Path) -> bytes:
    size = path.stat().st_size
    digest = hashlib.sha256(f"{size}\0".encode())
    with path.open("rb") as file:
        if size <= _WHOLE:
            while piece := file.read(2**20):
                digest.update(piece)
        else:
            for index in range(_PIECES):
                file.seek((size - _PIECE_BYTES) * index // (_PIECES - 1))
                digest.update(file.read(_PIECE_BYTES))
    return digest.digest()
