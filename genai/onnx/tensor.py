"""Constant tensors of a graph, read from their storage on demand."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import GraphError, malformed
from .storage import ArrayStorage, ComputedStorage, ExternalStorage, Storage, StringStorage, packed_size
from .types import DataType, SparseTensorType, TensorType

# The maximum size of a sparse constant that is converted to a dense array.
MAX_DENSE_BYTES = 1 << 31


@dataclass(frozen=True, eq=False)
class OnnxTensor:
    """A constant: a name, an element type, a shape and a storage. Immutable; to rename a constant, use `renamed`.

    Attributes:
        name: name; "" for unnamed tensors in attributes.
        storage: storage of the elements; see `array` and `raw`.
        segment: (begin, end) if this is one part of a tensor split over several messages (ONNX "segment").
    """

    name: str
    dtype: DataType
    shape: tuple[int, ...]
    storage: Storage
    doc_string: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    segment: tuple[int, int] | None = None

    @classmethod
    def from_array(cls, name: str, array: ArrayLike, dtype: DataType | None = None) -> OnnxTensor:
        """Return a tensor over an array. The array is copied only if its type, byte order or layout must change.

        Args:
            array: any array; do not change it afterwards. Text and bytes are stored as STRING.
            dtype: element type to store; values are cast to it. Default: the array's own type.

        Raises:
            GraphError: ONNX has no such element type.
        """
        values = np.asarray(array)
        data_type = DataType.from_numpy(values.dtype) if dtype is None else DataType(dtype)
        if data_type is DataType.STRING:
            return cls(name, data_type, values.shape, StringStorage(_encoded(values)))
        values = values.astype(data_type.numpy_dtype, order="C", copy=False)
        return cls(name, data_type, values.shape, ArrayStorage(values))

    @classmethod
    def computed(
        cls, name: str, dtype: DataType, shape: tuple[int, ...], make: Callable[[], NDArray[Any]]
    ) -> OnnxTensor:
        """Return a tensor whose elements `make` computes each time that they are needed and no array holds them."""
        return cls(name, dtype, shape, ComputedStorage(make))

    @property
    def num_elements(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size in bytes in ONNX's raw layout (sub-byte elements packed); for strings, the sum of their lengths."""
        if isinstance(self.storage, StringStorage):
            return sum(map(len, self.storage.strings))
        return packed_size(self.num_elements, self.dtype.bits)

    @property
    def is_external(self) -> bool:
        """True if the elements are in a separate file."""
        return isinstance(self.storage, ExternalStorage)

    @property
    def type(self) -> TensorType:
        """The type of this constant as a value."""
        return TensorType(self.dtype, self.shape)

    def array(self) -> NDArray[Any]:
        """Return the elements as a read-only array of `shape` and `dtype.numpy_dtype`.

        For inline bytes, mapped files (at any alignment: see `flags.aligned`) and arrays, the result is a view, not a
        copy. Sub-byte elements are unpacked to one per byte, and typed fields of other widths are converted. Strings
        are returned as an object array of str, or of bytes if they are not UTF-8.

        Raises:
            GraphError: this tensor is only a segment of a larger tensor.
        """
        if self.segment is not None:
            raise GraphError(
                f"tensor {self.name!r} holds only the segment {self.segment} of its elements",
                "tensors split into segments cannot be used",
                "store the tensor whole, or as external data",
            )
        view = self.storage.elements(self.dtype, self.num_elements).reshape(self.shape).view()
        view.flags.writeable = False
        return view

    def raw(self) -> NDArray[np.uint8]:
        """Return the elements in ONNX's raw layout, flat uint8: a view for inline bytes and mapped files.

        Raises:
            GraphError: the tensor contains strings, which have no raw layout.
        """
        if self.dtype is DataType.STRING:
            raise GraphError(
                f"string tensor {self.name!r} has no raw layout", "its elements have no fixed size", "use array()"
            )
        return self.storage.raw(self.dtype, self.num_elements)

    def renamed(self, name: str) -> OnnxTensor:
        """Return the same constant under another name; the storage is shared."""
        return replace(self, name=name)

    def release_pages(self) -> None:
        """Release the mapped pages until the next access. Views remain valid; other storages have no pages."""
        if isinstance(self.storage, ExternalStorage):
            self.storage.release_pages()

    def __repr__(self) -> str:
        return f"Tensor({self.name!r}, {self.dtype.name}, {list(self.shape)}, {type(self.storage).__name__})"


@dataclass(frozen=True, eq=False)
class SparseTensor:
    """A constant, stored as its non-zero elements.

    Attributes:
        values: non-zero elements [num_nonzero]; the name of this tensor is the constant's name.
        indices: int64 [num_nonzero, rank], or [num_nonzero] linear positions, ascending.
        shape: shape of the dense tensor.
    """

    values: OnnxTensor
    indices: OnnxTensor
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """The name of the value that this constant defines."""
        return self.values.name

    @property
    def type(self) -> SparseTensorType:
        """The type of this constant as a value."""
        return SparseTensorType(self.values.dtype, self.shape)

    def array(self) -> NDArray[Any]:
        """Return the dense array. Nodes receive this form because no standard operator reads sparse constants.

        Raises:
            GraphError: an index is outside the shape, or the dense form would take more than 2 GiB.
        """
        values, indices = self.values.array(), self.indices.array()
        if math.prod(self.shape) * values.dtype.itemsize > MAX_DENSE_BYTES:
            raise GraphError(
                f"sparse constant {self.name!r} of shape {list(self.shape)} is too large to be converted to dense",
                f"the dense form takes more than {MAX_DENSE_BYTES} bytes",
                "export the model without sparse constants",
            )
        dense = np.zeros(math.prod(self.shape), values.dtype)
        try:
            if indices.ndim == 2:
                indices = np.ravel_multi_index(tuple(indices.T), self.shape)
            dense[indices] = values.reshape(-1)
        except (ValueError, IndexError, TypeError) as error:
            raise malformed(
                f"sparse constant {self.name!r} has indices that do not fit its shape {list(self.shape)}", str(error)
            ) from error
        return dense.reshape(self.shape)


def _encoded(values: NDArray[Any]) -> tuple[bytes, ...]:
    encoded: list[bytes] = []
    for value in values.reshape(-1).tolist():
        if not isinstance(value, str | bytes):
            raise GraphError(
                f"an object array holds {value!r} of type {type(value).__name__}",
                "object arrays become string tensors, so every element must be str or bytes",
                "convert the array to a numeric dtype, or its elements to str",
            )
        encoded.append(value.encode() if isinstance(value, str) else value)
    return tuple(encoded)
