"""A Hugging Face checkpoint folder: config.json, and safetensors files read through memory maps."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, ModelFolderError
from ..folder_errors import not_a_folder
from .hf_config import HFConfig

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Formats that may run code when they are opened, or that other tools read.
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder looks like a Hugging Face checkpoint, and not like a model folder of ours."""
    return (folder / CONFIG).is_file() and not (folder / "genai_config.json").exists()


class Checkpoint(Mapping[str, NDArray[Any]]):
    """Tensors by their names in the files; each look-up maps memory and copies nothing.

    Attributes:
        folder: where it lies. config: config.json, with generation_config.json's special tokens.

    Raises:
        ModelFolderError: a file is missing. InputError: a file is malformed.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        has_more = (self.folder / GENERATION_CONFIG).is_file()
        generation = read_json(self.folder, GENERATION_CONFIG) if has_more else {}
        self.config = HFConfig(read_json(self.folder, CONFIG), generation)
        self._files = [SafetensorsFile(path) for path in _tensor_files(self.folder)]
        self._places: dict[str, SafetensorsFile] = {}
        for file in self._files:
            for name in file.tensors:
                if name in self._places:
                    raise InputError(
                        f"tensor {name!r} is in {self._places[name].path.name} and in {file.path.name}",
                        "there is no telling which of them counts",
                        "download the checkpoint again",
                    )
                self._places[name] = file

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._places[name].read(name)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, from the header alone."""
        return self._places[name].tensors[name][1]


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object from a file; ModelFolderError if there is no such file, InputError if it is no JSON object."""
    path = folder / name
    if not folder.is_dir():
        raise not_a_folder(folder)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelFolderError(
            f"{folder}: no readable {name}",
            str(error),
            f"give a folder downloaded from Hugging Face, with {name} and *.safetensors",
        ) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: is not JSON", str(error), "download the file again") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: holds a {type(value).__name__}", "an object is expected", "download the file again")
    return value


def _tensor_files(folder: Path) -> list[Path]:
    if (folder / SINGLE).is_file():  # first, as transformers does where a folder has both
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        return _shards(folder)
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise ModelFolderError(
            f"{folder}: the weights are in {pickles[0]}, which is a pickle",
            "opening a pickle runs whatever code it holds, so it is never opened here",
            "get the checkpoint as safetensors (most have both), or convert it with the tool you trust",
        )
    raise ModelFolderError(
        f"{folder}: no {SINGLE} and no {INDEX}",
        "the weights are read from safetensors files",
        "download the checkpoint whole",
    )


def _shards(folder: Path) -> list[Path]:
    places = read_json(folder, INDEX).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise InputError(f"{INDEX} has no weight_map", "it says which file holds which tensor", "download it again")
    shards = []
    for name in sorted(set(places.values())):
        if Path(name).name != name or "\\" in name or name in ("", ".", ".."):
            raise InputError(
                f"{INDEX} names the file {name!r}", "shards lie beside the index, nowhere else", "download it again"
            )
        shards.append(folder / name)
    if missing := [path.name for path in shards if not path.is_file()]:
        raise ModelFolderError(
            f"{folder}: {len(missing)} of {len(shards)} shards are missing: {', '.join(missing[:3])}",
            f"{INDEX} names them",
            "finish the download",
        )
    return shards


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

    Format: https://github.com/huggingface/safetensors#format (8 bytes of header length, JSON, then the tensors' bytes).

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
        self.tensors = {name: _checked_entry(path, name, entry, size - self._start) for name, entry in entries.items()}
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


def _checked_entry(path: Path, name: str, entry: Any, size: int) -> TensorEntry:
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
