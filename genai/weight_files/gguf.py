"""Reader for GGUF files (llama.cpp): metadata by key, and memory-mapped tensors. Files are untrusted.

Every count and length is compared with the number of remaining bytes before memory is allocated, so reading a file
needs at most a few times the size of its header. Specification: docs/gguf.md of the ggml repository.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from genai.quant.ggml import GGML_TYPES, GgmlType

from ..common.reading import pointer_error, whole_file
from ..errors import InputError, ModelFolderError
from .tensor_files import TensorFiles

MAGIC = b"GGUF"
SUFFIX = ".gguf"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT, _MOST_ALIGNMENT = 32, 1 << 20
# Limits above the sizes of any real header: a token needs tens of bytes, a chat template thousands of bytes.
_MOST_KEYS, _MOST_TENSORS, _MOST_STRINGS = 1 << 16, 1 << 18, 1 << 22
_MOST_KEY, _MOST_NAME, _MOST_DIMS, _MOST_TEXT = 65535, 64, 4, 1 << 26
# Minimum sizes in bytes of the header's entries: lengths, a type, a value or an offset.
_LEAST_ENTRY, _LEAST_TENSOR = 8 + 4 + 1, 8 + 4 + 4 + 8
_MOST_PARTS = 4096

_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS: Final = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", _BOOL: "<B", 10: "<Q", 11: "<q", 12: "<d"
}  # fmt: skip
_FLOATS: Mapping[int, Any] = {0: np.float32, 1: np.float16, 28: np.float64, 30: ml_dtypes.bfloat16}
_FLOAT_NAMES = {0: "F32", 1: "F16", 28: "F64", 30: "BF16"}
# Types in current and past versions of ggml that do not hold weights or are not supported.
_OTHER_TYPES = {
    4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 31: "Q4_0_4_4",
    32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 41: "Q1_0", 42: "Q2_0",
}  # fmt: skip
_BLOCKS: Mapping[str, GgmlType] = {kind.name: kind for kind in GGML_TYPES.values()}
_PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True)
class GgufTensor:
    """The type, shape and location of a tensor.

    Attributes:
        kind: name of the tensor's type, such as "F16" or "Q4_K".
        dtype: dtype of the tensor's elements or blocks; see `quant.ggml`.
        shape: [..., rows, columns], with columns counted in weights.
        stored: the same shape, with columns counted in elements of `dtype`.
        first: offset of the first byte in the file.
        nbytes: size in bytes.
    """

    kind: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    stored: tuple[int, ...]
    first: int
    nbytes: int


class GgufFile:
    """One GGUF file. `GgufModel` joins the files of one model.

    Attributes:
        path: path of the file.
        metadata: values by key; arrays of numbers are NumPy arrays, arrays of strings are lists.
        tensors: tensors by name.

    Args:
        copied: True to read the whole file into memory, because truncating a mapped file kills the process that reads
            it.

    Raises:
        ModelFolderError: the file does not exist or cannot be read.
        InputError: the file is malformed.
        CacheCapacityError: there is not enough memory for a copy.
    """

    def __init__(self, path: Path, *, copied: bool = False) -> None:
        self.path = path
        try:
            size = path.stat().st_size
            self._bytes: NDArray[np.uint8] = np.empty(0, np.uint8)
            if size:
                whole = np.frombuffer(whole_file(path), np.uint8) if copied else np.memmap(path, np.uint8, "r")
                self._bytes = whole
        except (OSError, ValueError) as error:
            raise ModelFolderError(
                f"{path}: the file cannot be read", str(error), "check the path and the permissions of the GGUF file"
            ) from error
        cursor = _Cursor(path, self._bytes)
        tensor_count, key_count = _counts(cursor)
        self.metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = cursor.text(_MOST_KEY, "a key")
            if key in self.metadata:
                cursor.fail(f"key {key!r:.100} occurs twice")
            self.metadata[key] = cursor.value(cursor.number("<I"), key)
        self.tensors = _tensors(cursor, tensor_count, _alignment(cursor, self.metadata))

    def single(self, key: str, default: Any = None) -> Any:
        """Return a metadata value. Raise InputError if the value is an array."""
        value = self.metadata.get(key, default)
        if isinstance(value, np.ndarray | list):
            raise InputError(
                f"{self.path}: {key} is a list, {np.asarray(value[:9]).tolist()!r:.40}",
                "this key must have a single value",
                "convert the model again",
            )
        return value

    def read(self, name: str) -> NDArray[Any]:
        """Return a tensor of floats or blocks as a view of the file."""
        tensor = self.tensors[name]
        cut = self._bytes[tensor.first : tensor.first + tensor.nbytes]
        view: NDArray[Any] = cut.view(tensor.dtype).reshape(tensor.stored)
        return view


class _Cursor:
    """A sequential reader of a header, which never reads beyond the end of the file."""

    def __init__(self, path: Path, data: NDArray[np.uint8]) -> None:
        self.path, self._data, self.offset = path, memoryview(data.data), 0

    @property
    def left(self) -> int:
        return len(self._data) - self.offset

    def fail(self, why: str) -> NoReturn:
        raise InputError(
            f"{self.path} is not a valid GGUF file",
            f"at byte {self.offset}: {why}",
            "download or convert the file again",
        )

    def take(self, count: int, subject: str) -> memoryview:
        if count > self.left:
            self.fail(f"reading {subject} needs {count} bytes, but only {self.left} are left in the file")
        self.offset += count
        return self._data[self.offset - count : self.offset]

    def number(self, struct_format: str) -> Any:
        return struct.unpack(struct_format, self.take(struct.calcsize(struct_format), "a number"))[0]

    def count(self, least: int, most: int, subject: str) -> int:
        """Read a number of items, each of which needs at least `least` bytes."""
        number = int(self.number("<Q"))
        if number > most or number * least > self.left:
            self.fail(f"{number} {subject} exceed the remaining {self.left} bytes of the file, or the limit of {most}")
        return number

    def text(self, most: int, subject: str) -> str:
        raw = self.take(self.count(1, most, f"bytes of {subject}"), subject)
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError as error:
            self.fail(f"{subject} is not UTF-8: {error}")

    def value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._texts(1, key)[0]
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _NUMBERS:
            self.fail(f"key {key!r:.100} has a value of type {kind}, which GGUF does not define")
        number = self.number(_NUMBERS[kind])
        return bool(number) if kind == _BOOL else number

    def _array(self, key: str) -> Any:
        kind = self.number("<I")
        if kind == _STRING:
            count = self.count(8, _MOST_STRINGS, f"strings in {key!r:.100}")
            return self._texts(count, key)
        if kind not in _NUMBERS:
            self.fail(f"key {key!r:.100} has an array of type {kind}; only numbers and strings are supported")
        dtype = np.dtype(_NUMBERS[kind])
        count = self.count(dtype.itemsize, len(self._data), f"numbers in {key!r:.100}")
        return np.frombuffer(self.take(count * dtype.itemsize, key), dtype)

    def _texts(self, count: int, key: str) -> list[str]:
        """Read consecutive strings. Bytes that are not UTF-8 become surrogates."""
        data, offset, end, texts = self._data, self.offset, len(self._data), []
        for _ in range(count):
            first = offset + 8
            size = int.from_bytes(data[offset:first], "little")
            offset = first + size
            if offset > end or size > _MOST_TEXT:
                self.fail(
                    f"a string in {key!r:.100} has {size} bytes, but only {max(end - first, 0)} are left in the file"
                )
            texts.append(str(data[first:offset], "utf-8", "surrogateescape"))
        self.offset = offset
        return texts


def _counts(cursor: _Cursor) -> tuple[int, int]:
    """Read the magic bytes and the version, and return the numbers of tensors and keys."""
    if bytes(cursor.take(min(4, cursor.left), "the magic bytes")) != MAGIC:
        raise pointer_error(cursor.path, InputError) or InputError(
            f"{cursor.path} is not a GGUF file", "the file does not start with the bytes GGUF",
            "pass a file that llama.cpp's convert_hf_to_gguf.py or llama-quantize wrote",
        )  # fmt: skip
    version = int(cursor.number("<I"))
    if version not in _VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        why = f"the file has version {version}, but only versions {_VERSIONS[0]} and {_VERSIONS[1]} are supported"
        if swapped in _VERSIONS:
            why = f"the file is big-endian: its version is {swapped} with swapped bytes"
        raise InputError(
            f"{cursor.path}: unsupported GGUF file", why,
            "convert the model again with a current convert_hf_to_gguf.py, without --bigendian",
        )  # fmt: skip
    tensors = cursor.count(_LEAST_TENSOR, _MOST_TENSORS, "tensors")
    return tensors, cursor.count(_LEAST_ENTRY, _MOST_KEYS, "keys")


def _alignment(cursor: _Cursor, metadata: Mapping[str, Any]) -> int:
    value = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(value) is not int or not 8 <= value <= _MOST_ALIGNMENT or value & (value - 1):
        cursor.fail(f"general.alignment is {value!r:.40}, but must be a power of two from 8 to {_MOST_ALIGNMENT}")
    return value


def _tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, GgufTensor]:
    """Read the table of tensors. The data of the tensors follows the table, aligned and without overlaps."""
    entries: dict[str, tuple[Any, int]] = {}
    for _ in range(count):
        name = cursor.text(_MOST_NAME, "a tensor's name")
        if name in entries:
            cursor.fail(f"tensor {name!r} occurs twice")
        dims = int(cursor.number("<I"))
        if not 1 <= dims <= _MOST_DIMS:
            cursor.fail(f"tensor {name!r} has {dims} dimensions, but must have 1 to {_MOST_DIMS}")
        shape = tuple(int(cursor.number("<Q")) for _ in range(dims))[::-1]
        kind, offset = int(cursor.number("<I")), int(cursor.number("<Q"))
        if not all(shape) or math.prod(shape) > 1 << 48:
            cursor.fail(f"tensor {name!r} has the invalid shape {list(shape)}")
        if offset % alignment:
            cursor.fail(
                f"tensor {name!r} starts at byte {offset}, which is not a multiple of the alignment {alignment}"
            )
        entries[name] = (_sized(cursor, name, kind, shape), offset)
    begin = -(-cursor.offset // alignment) * alignment
    end, tensors = begin, {}
    for name, (sized, offset) in sorted(entries.items(), key=lambda item: item[1][1]):
        kind_name, dtype, stored, nbytes = sized
        first = begin + offset
        if first < end:
            cursor.fail(f"tensor {name!r} overlaps the preceding tensor, which ends at byte {end - begin}")
        end = first + nbytes
        if end > cursor.offset + cursor.left:
            cursor.fail(f"tensor {name!r} ends at byte {end}, beyond the end of the file")
        columns = stored[-1] * (_BLOCKS[kind_name].columns if kind_name in _BLOCKS else 1)
        tensors[name] = GgufTensor(kind_name, dtype, (*stored[:-1], columns), stored, first, nbytes)
    return {name: tensors[name] for name in entries}


def _sized(
    cursor: _Cursor, name: str, kind: int, shape: tuple[int, ...]
) -> tuple[str, np.dtype[Any], tuple[int, ...], int]:
    """Return the name of the type, the dtype, the shape in elements of that dtype, and the size in bytes."""
    if kind in _FLOATS:
        dtype = np.dtype(_FLOATS[kind])
        return _FLOAT_NAMES[kind], dtype, shape, math.prod(shape) * dtype.itemsize
    ggml_type = GGML_TYPES.get(kind)
    if ggml_type is None:
        known = ", ".join([*_FLOAT_NAMES.values(), *_BLOCKS])
        raise InputError(
            f"{cursor.path}: tensor {name!r} has the type {_OTHER_TYPES.get(kind, '')} ({kind})".replace("  ", " "),
            f"the supported types are {known}",
            "use another quantisation of the same model, such as Q4_K_M or Q8_0",
        )
    if shape[-1] % ggml_type.columns:
        cursor.fail(
            f"tensor {name!r} of type {ggml_type.name} has {shape[-1]} columns, not a multiple of {ggml_type.columns}"
        )
    stored = (*shape[:-1], shape[-1] // ggml_type.columns)
    return ggml_type.name, ggml_type.dtype, stored, math.prod(stored) * ggml_type.nbytes


class GgufModel(TensorFiles[GgufFile]):
    """The files of one model: tensors by name, and the metadata of the first file.

    Attributes:
        path: the path as the caller passed it.
        files: all files, in order.
        metadata: see GgufFile.

    Args:
        copied: see GgufFile.

    Raises:
        ModelFolderError: one of several files is missing.
        InputError: a file is malformed, or the files do not belong together.
    """

    def __init__(self, path: str | Path, *, copied: bool = False) -> None:
        super().__init__()
        self.path = Path(path)
        self.files = [GgufFile(part, copied=copied) for part in gguf_parts(self.path)]
        self.metadata = self.files[0].metadata
        for number, file in enumerate(self.files):
            stated = file.single("split.count", 1), file.single("split.no", 0)
            if stated != (len(self.files), number) and not (len(self.files) == 1 and stated[0] in (0, 1)):
                raise InputError(
                    f"{file.path}: split.no is {stated[1]!r:.20} and split.count is {stated[0]!r:.20} in the metadata",
                    f"by its name, the file has split.no = {number} and split.count = {len(self.files)}",
                    "rename the files to their original names",
                )
            self._add(file, "download the files again")

    @property
    def architecture(self) -> str:
        """The value of general.architecture, such as "llama"; raises InputError if the key is missing or malformed."""
        architecture = self.metadata.get("general.architecture")
        if not isinstance(architecture, str):
            raise InputError(
                f"{self.path}: general.architecture is {architecture!r:.40}",
                "this key is required to interpret the other keys",
                "convert the model again",
            )  # fmt: skip
        return architecture

    def info(self, name: str) -> GgufTensor:
        """Return the type and shape of a tensor."""
        return self._file_of[name].tensors[name]


def is_gguf(path: Path) -> bool:
    """Return True if a path is a GGUF file, by its name or by its first bytes."""
    try:
        if not path.is_file():
            return False
        if path.suffix.lower() == SUFFIX:
            return True
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def gguf_parts(path: Path) -> list[Path]:
    """Return all files of a model, given one of them (NAME-00001-of-00003.gguf). Other names belong to one file."""
    match = _PART_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    if not 1 <= int(match["number"]) <= count <= _MOST_PARTS:
        raise InputError(
            f"{path}: file {match['number']} of {match['count']} cannot exist", "the number is out of range",
            "rename the files to their original names",
        )  # fmt: skip
    parts = [path.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    if missing := [part.name for part in parts if not part.is_file()]:
        raise ModelFolderError(
            f"{path}: {len(missing)} of {count} files are missing, such as {missing[0]}",
            "each file contains a part of the model's tensors", "download all files to one folder",
        )  # fmt: skip
    return parts
