"""model.onnx.data: tensors written one after the other, a chunk at a time."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

# Readers map the file into memory: tensors start at a cache line, large ones at a page.
_SMALL_ALIGNMENT = 64
_LARGE_ALIGNMENT = 4096
_LARGE_BYTES = 1 << 20

_DATA_TYPES = {
    np.dtype(np.float32): onnx.TensorProto.FLOAT,
    np.dtype(np.float16): onnx.TensorProto.FLOAT16,
    np.dtype(np.uint8): onnx.TensorProto.UINT8,
}


class DataFile:
    """An external-data file of an ONNX model, open for appending tensors."""

    def __init__(self, path: Path) -> None:
        self._location = path.name
        self._file = path.open("wb")

    def __enter__(self) -> DataFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def append(
        self, name: str, dims: tuple[int, ...], dtype: type[np.generic], chunks: Iterable[NDArray[Any]]
    ) -> onnx.TensorProto:
        """Write a tensor whose elements, in row-major order, are those of the chunks; return its description.

        Raises:
            ValueError: the chunks are not of this type, or not as many elements as `dims` says.
            OSError: the file cannot take them.
        """
        element = np.dtype(dtype)
        length = element.itemsize * int(np.prod(dims, dtype=np.int64))
        offset = self._align(length)
        for chunk in chunks:
            if chunk.dtype != element:
                raise ValueError(f"a chunk of {name} is {chunk.dtype}, expected {element}")
            self._file.write(np.ascontiguousarray(chunk).data)
        written = self._file.tell() - offset
        if written != length:
            raise ValueError(f"{name} {list(dims)} takes {length} bytes, but its chunks hold {written}")
        return self._described(name, dims, element, offset, length)

    def _align(self, length: int) -> int:
        alignment = _LARGE_ALIGNMENT if length >= _LARGE_BYTES else _SMALL_ALIGNMENT
        self._file.write(bytes(-self._file.tell() % alignment))
        return self._file.tell()

    def _described(
        self, name: str, dims: tuple[int, ...], element: np.dtype[Any], offset: int, length: int
    ) -> onnx.TensorProto:
        tensor = onnx.TensorProto(
            name=name, dims=dims, data_type=_DATA_TYPES[element], data_location=onnx.TensorProto.EXTERNAL
        )
        for key, value in (("location", self._location), ("offset", offset), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))
        return tensor
