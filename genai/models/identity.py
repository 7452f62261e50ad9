"""What tells a model's files from those of others: for keys and values that outlive the process."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

# Larger files are known by their size and by pieces from all over: reading gigabytes would take seconds.
_WHOLE = 2**26
_PIECES, _PIECE_BYTES = 256, 2**16


def model_identity(folder: Path, model_data: Mapping[str, bytes]) -> str:
    """SHA-256 over the graphs and weights of a folder: names, sizes, and content; of files above 64 MiB, 256 pieces.

    Args:
        model_data: files that memory holds in place of the folder's.
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
