"""A Hugging Face checkpoint folder: config.json, and safetensors files read through memory maps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from ..errors import InputError, ModelFolderError
from ..model.folders import folder_json, readable
from .hf_config import HFConfig

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Formats that may run code when they are opened, or that other tools read.
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder looks like a Hugging Face checkpoint, and not like a model folder of ours."""
    with readable(folder):
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
    fix = f"give a folder downloaded from Hugging Face, with {name} and *.safetensors"
    return folder_json(
        folder, name, InputError, lambda place: ModelFolderError(f"{place}: no {name}", "there is no such file", fix)
    )


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


TensorEntry = tuple[np.dtype[Any], tuple[int, ...], int, int]


class SafetensorsFile:
    """Tensors by name; reading one maps its bytes and copies nothing.

    The safetensors library reads the header, and checks that the tensors lie one behind the other, without gaps, up to
    the file's end. Its own way to read one would copy it.

    Raises:
        InputError: the file cannot be read, its header is malformed, or a tensor is of a type that is not known here.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, TensorEntry] = {}
        end = 0
        try:
            with path.open("rb") as header:
                first = 8 + int.from_bytes(header.read(8), "little")
            with safe_open(path, "numpy") as file:
                for name in file.offset_keys():
                    tensor, start = file.get_slice(name), end
                    kind, shape = tensor.get_dtype(), tuple(tensor.get_shape())
                    if kind not in _DTYPES:
                        raise _malformed(path, f"{name!r} has type {kind!r}; known are {', '.join(_DTYPES)}")
                    dtype = np.dtype(_DTYPES[kind])
                    end += math.prod(shape) * dtype.itemsize
                    self.tensors[name] = dtype, shape, start, end
        except OSError as error:
            raise InputError(f"{path}: cannot be read", str(error), "check the file and its permissions") from error
        except SafetensorError as error:
            raise _malformed(path, str(error)) from error
        # An empty file cannot be mapped, and a file of the header alone holds empty tensors only.
        self._bytes = np.memmap(path, np.uint8, "r", first) if end else np.empty(0, np.uint8)

    def read(self, name: str) -> NDArray[Any]:
        """A tensor as a view of the file."""
        dtype, shape, start, end = self.tensors[name]
        view: NDArray[Any] = self._bytes[start:end].view(dtype).reshape(shape)
        return view


def _malformed(path: Path, why: str) -> InputError:
    return InputError(f"{path.name} is not a sound safetensors file", why, "download or export the checkpoint again")
