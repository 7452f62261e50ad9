"""Memory-mapped tensors of a safetensors file."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, deserialize, safe_open

from ..common.reading import MOST_DIMENSIONS, is_addressable, pointer_error, whole_file
from ..errors import InputError

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
    """The tensors of a safetensors file by name. Reading a tensor maps its bytes without a copy.

    The safetensors library reads the header and checks that the tensors are contiguous and end at the end of the file.
    The library is not used to read tensors, because it would copy them. If two tensors had the same name, the library
    would keep only the second.

    Raises:
        InputError: the file cannot be read, its header is malformed, or a tensor has an unsupported type.
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
                    dtype = _dtype(path, name, kind, shape)
                    end += math.prod(shape) * dtype.itemsize
                    self.tensors[name] = dtype, shape, start, end
            with path.open("rb") as header:
                json.loads(header.read(first)[8:], object_pairs_hook=lambda pairs: _each_once(path, pairs))
        except OSError as error:
            raise InputError(
                f"{path}: the file cannot be read", str(error), "check the file and its permissions"
            ) from error
        except SafetensorError as error:
            raise _malformed(path, str(error)) from error
        # An empty range cannot be mapped; a file that ends with its header has only empty tensors.
        self._bytes = np.memmap(path, np.uint8, "r", first) if end else np.empty(0, np.uint8)

    def read(self, name: str) -> NDArray[Any]:
        """Return a tensor as a view of the file."""
        dtype, shape, start, end = self.tensors[name]
        view: NDArray[Any] = self._bytes[start:end].view(dtype).reshape(shape)
        return view


def read_safetensors(path: Path) -> dict[str, NDArray[Any]]:
    """Read all tensors of a small file into memory, because truncating a mapped file kills the process that reads it.

    Raises:
        InputError: see SafetensorsFile.
        CacheCapacityError: there is not enough memory.
    """
    try:
        data = whole_file(path)
        tensors: list[tuple[str, dict[str, Any]]] = deserialize(data)  # type: ignore[no-untyped-call]
    except OSError as error:
        raise InputError(
            f"{path}: the file cannot be read", str(error), "check the file and its permissions"
        ) from error
    except SafetensorError as error:
        raise _malformed(path, str(error)) from error
    json.loads(
        data[8 : 8 + int.from_bytes(data[:8], "little")], object_pairs_hook=lambda pairs: _each_once(path, pairs)
    )
    return {
        name: np.frombuffer(tensor["data"], _dtype(path, name, tensor["dtype"], tensor["shape"])).reshape(
            tensor["shape"]
        )
        for name, tensor in sorted(tensors, key=lambda item: item[0])  # the library's order varies between calls
    }


def _dtype(path: Path, name: str, kind: str, shape: Sequence[int]) -> np.dtype[Any]:
    """Return the dtype of a tensor. Raise InputError if NumPy cannot represent the type or the shape."""
    if kind not in _DTYPES:
        raise _malformed(path, f"{name!r:.200} has type {kind!r}; the supported types are {', '.join(_DTYPES)}")
    dtype: np.dtype[Any] = np.dtype(_DTYPES[kind])
    if not is_addressable(shape, dtype.itemsize):
        limit = f"at most {MOST_DIMENSIONS} sizes are supported, and their product must be addressable"
        raise _malformed(path, f"{name!r:.200} has the shape {list(shape)!r:.200}; {limit}")
    return dtype


def _each_once(path: Path, pairs: list[tuple[str, Any]]) -> None:
    """Raise InputError if a name occurs twice in an object of the header."""
    if len({name for name, _ in pairs}) < len(pairs):
        name = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise _malformed(path, f"{name!r:.200} occurs twice in the header")


def _malformed(path: Path, why: str) -> InputError:
    return pointer_error(path, InputError) or InputError(
        f"{path} is not a valid safetensors file", why, "download or save the file again"
    )
