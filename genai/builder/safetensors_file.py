"""One safetensors file: its header checked entry by entry, its tensors memory-mapped.

Format: https://github.com/huggingface/safetensors#format (8 bytes of header length, JSON, then the bytes of tensors).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ..errors import InputError

# The format's own limit.
_MAX_HEADER = 100_000_000
_DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


class SafetensorsFile:
    """Tensors by name; reading one maps its bytes and copies nothing.

    Raises:
        InputError: the file cannot be read, or its header is malformed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                size = path.stat().st_size
                entries, self._start = _read_header(path, file, size)
        except OSError as error:
            raise InputError(f"{path}: cannot be read", str(error), "check the file and its permissions") from error
        entries.pop("__metadata__", None)
        self.tensors = {name: _checked(path, name, entry, size - self._start) for name, entry in entries.items()}
        _check_places(path, self.tensors, size - self._start)
        # An empty file cannot be mapped, and a file of the header alone holds empty tensors only.
        self._bytes = np.memmap(path, np.uint8, "r", self._start) if size > self._start else np.empty(0, np.uint8)

    def read(self, name: str) -> NDArray[Any]:
        """A tensor as a view of the file."""
        dtype, shape, start, end = self.tensors[name]
        view: NDArray[Any] = self._bytes[start:end].view(dtype).reshape(shape)
        return view


TensorEntry = tuple[np.dtype[Any], tuple[int, ...], int, int]


def _read_header(path: Path, file: Any, size: int) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(_MAX_HEADER, size - 8):
        raise _malformed(path, f"its header would take {length} of the file's {size} bytes")
    try:
        header = json.loads(file.read(length), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise _malformed(path, f"its header is not sound JSON: {error}") from error
    if not isinstance(header, dict):
        raise _malformed(path, f"its header is a {type(header).__name__}, expected an object")
    return header, 8 + length


def _checked(path: Path, name: str, entry: Any, size: int) -> TensorEntry:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise _malformed(path, f"the entry of {name!r} lacks dtype, shape or data_offsets")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise _malformed(path, f"the entry of {name!r} has shape {shape!r} and data_offsets {offsets!r}")
    if entry["dtype"] not in _DTYPES:
        raise _malformed(path, f"{name!r} has type {entry['dtype']!r}; known are {', '.join(_DTYPES)}")
    dtype: np.dtype[Any] = np.dtype(_DTYPES[entry["dtype"]])
    start, end = offsets
    if end > size or end - start != math.prod(shape) * dtype.itemsize:
        raise _malformed(path, f"{name!r} {entry['dtype']} {shape} lies at bytes {start} to {end} of {size}")
    return dtype, tuple(shape), start, end


def _check_places(path: Path, tensors: dict[str, TensorEntry], size: int) -> None:
    """Tensors lie one behind the other, without gaps, up to the end, as the format demands."""
    end, before = 0, "the header"
    for start, stop, name in sorted((start, stop, name) for name, (_, _, start, stop) in tensors.items()):
        if start != end:
            raise _malformed(path, f"{name!r} begins at byte {start}, {before!r} ends at {end}")
        end, before = stop, name
    if end != size:
        raise _malformed(path, f"the last tensor ends at byte {end} of {size}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it names {next(name for name in names if names.count(name) > 1)!r} twice")
    return entries


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _malformed(path: Path, why: str) -> InputError:
    return InputError(f"{path.name} is not a sound safetensors file", why, "download or export the checkpoint again")
