"""Types of ONNX values: element types, shapes, and container types."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Any, TypeAlias

import numpy as np
from onnx import helper

from ..errors import GraphError

Dim: TypeAlias = int | str | None
"""A dimension: a size, a symbol, or None if unknown."""

Shape: TypeAlias = tuple[Dim, ...]


def broadcast_dims(first: Shape, second: Shape) -> Shape:
    """Broadcast two shapes; dimensions that cannot be determined are None."""
    axes = max(len(first), len(second))
    pairs = zip((*[1] * (axes - len(first)), *first), (*[1] * (axes - len(second)), *second), strict=True)
    return tuple(_broadcast_dim(*pair) for pair in pairs)


def _broadcast_dim(first: Dim, second: Dim) -> Dim:
    if first == second or second == 1:
        return first
    if first == 1:
        return second
    # A known size above 1 is the result, because the other side must be 1 or equal to it.
    return next((dim for dim in (first, second) if isinstance(dim, int)), None)


class DataType(IntEnum):
    """Element types, numbered as in ONNX's TensorProto.DataType."""

    UNDEFINED = 0
    FLOAT = 1
    UINT8 = 2
    INT8 = 3
    UINT16 = 4
    INT16 = 5
    INT32 = 6
    INT64 = 7
    STRING = 8
    BOOL = 9
    FLOAT16 = 10
    DOUBLE = 11
    UINT32 = 12
    UINT64 = 13
    COMPLEX64 = 14
    COMPLEX128 = 15
    BFLOAT16 = 16
    FLOAT8E4M3FN = 17
    FLOAT8E4M3FNUZ = 18
    FLOAT8E5M2 = 19
    FLOAT8E5M2FNUZ = 20
    UINT4 = 21
    INT4 = 22
    FLOAT4E2M1 = 23
    FLOAT8E8M0 = 24
    UINT2 = 25
    INT2 = 26
    FLOAT6E2M3 = 27
    FLOAT6E3M2 = 28

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The NumPy element type (from ml_dtypes if NumPy does not have it); object for strings."""
        dtype = _numpy_dtypes().get(self)
        if dtype is None:
            raise GraphError(
                "the element type UNDEFINED has no values",
                "a tensor needs one of ONNX's element types",
                "export the model again, or declare the value's type",
            )
        return dtype

    @property
    def bits(self) -> int:
        """The number of bits per element in ONNX's raw layout; 0 for STRING and UNDEFINED, which have no raw layout."""
        if self in _NO_BITS:
            return 0
        return _SUB_BYTE_BITS.get(self) or self.numpy_dtype.itemsize * 8

    @property
    def is_sub_byte(self) -> bool:
        """True if several elements share a byte in the raw layout."""
        return self in _SUB_BYTE_BITS

    @classmethod
    def from_numpy(cls, dtype: Any) -> DataType:
        """Return the element type for a NumPy dtype; for text, bytes and object arrays, STRING.

        Raises:
            GraphError: ONNX has no element type for the dtype.
        """
        dtype = np.dtype(dtype)
        if dtype.kind in "OUST":
            return cls.STRING
        data_type = _data_types().get(dtype.newbyteorder("="))
        if data_type is None:
            raise GraphError(
                f"NumPy dtype {dtype} is not an ONNX element type",
                "ONNX tensors hold booleans, integers, floats, complex numbers and strings",
                "convert the array with .astype first",
            )
        return data_type

    @property
    def onnx_name(self) -> str:
        """The name that ONNX type strings use, such as `float16` in `tensor(float16)`."""
        return self.name.lower()


_NO_BITS = frozenset({DataType.UNDEFINED, DataType.STRING})
_SUB_BYTE_BITS = {
    **dict.fromkeys((DataType.UINT2, DataType.INT2), 2),
    **dict.fromkeys((DataType.UINT4, DataType.INT4, DataType.FLOAT4E2M1), 4),
    **dict.fromkeys((DataType.FLOAT6E2M3, DataType.FLOAT6E3M2), 6),
}


@cache
def _numpy_dtypes() -> dict[DataType, np.dtype[Any]]:
    known = [kind for kind in map(DataType, helper.get_all_tensor_dtypes()) if kind is not DataType.UNDEFINED]
    return {kind: np.dtype(helper.tensor_dtype_to_np_dtype(kind)) for kind in known}


@cache
def _data_types() -> dict[np.dtype[Any], DataType]:
    return {dtype: data_type for data_type, dtype in _numpy_dtypes().items()}


class AttributeType(IntEnum):
    """Kinds of node attribute, numbered as in ONNX's AttributeProto.AttributeType."""

    UNDEFINED = 0
    FLOAT = 1
    INT = 2
    STRING = 3
    TENSOR = 4
    GRAPH = 5
    FLOATS = 6
    INTS = 7
    STRINGS = 8
    TENSORS = 9
    GRAPHS = 10
    SPARSE_TENSOR = 11
    SPARSE_TENSORS = 12
    TYPE_PROTO = 13
    TYPE_PROTOS = 14

    @property
    def element(self) -> str:
        """The kind of a single value, or of the values in a list: GRAPH for both GRAPH and GRAPHS."""
        return self.name.removesuffix("S")


@dataclass(frozen=True)
class _ArrayType:
    """The fields that dense and sparse tensor types share.

    Attributes:
        dtype: element type.
        shape: dimensions, or None if not even the rank is known.
        dim_denotations: meaning of each dimension (ONNX "denotation"), or () if the model has none.
        denotation: meaning of the whole value, such as "IMAGE".
    """

    dtype: DataType
    shape: Shape | None = None
    dim_denotations: tuple[str, ...] = ()
    denotation: str = ""

    @property
    def rank(self) -> int | None:
        """The number of dimensions, or None if unknown."""
        return None if self.shape is None else len(self.shape)

    @property
    def num_elements(self) -> int | None:
        """The number of elements, or None if a dimension is not a known integer."""
        if self.shape is None:
            return None
        extents = [dim for dim in self.shape if isinstance(dim, int) and dim >= 0]
        return math.prod(extents) if len(extents) == len(self.shape) else None


@dataclass(frozen=True)
class TensorType(_ArrayType):
    """A dense tensor."""

    def __str__(self) -> str:
        return f"tensor({self.dtype.onnx_name})"


@dataclass(frozen=True)
class SparseTensorType(_ArrayType):
    """A sparse tensor."""

    def __str__(self) -> str:
        return f"sparse_tensor({self.dtype.onnx_name})"


@dataclass(frozen=True)
class SequenceType:
    """A list of values of one type."""

    element: Type | None = None
    denotation: str = ""

    def __str__(self) -> str:
        return f"seq({self.element})"


@dataclass(frozen=True)
class OptionalType:
    """A value that may be absent."""

    element: Type | None = None
    denotation: str = ""

    def __str__(self) -> str:
        return f"optional({self.element})"


@dataclass(frozen=True)
class MapType:
    """A dictionary that maps keys (integers or strings) to values."""

    key: DataType = DataType.UNDEFINED
    value: Type | None = None
    denotation: str = ""

    def __str__(self) -> str:
        return f"map({self.key.onnx_name},{self.value})"


@dataclass(frozen=True)
class OpaqueType:
    """A type that only its own domain defines."""

    domain: str = ""
    name: str = ""
    denotation: str = ""

    def __str__(self) -> str:
        return f"opaque({self.domain},{self.name})"


Type: TypeAlias = TensorType | SparseTensorType | SequenceType | OptionalType | MapType | OpaqueType

ArrayTypes = TensorType | SparseTensorType
"""The types that have an element type and a shape, for isinstance."""


@dataclass(frozen=True)
class ShapeValue:
    """The dimensions in an integer tensor that a shape computation produces.

    Attributes:
        dims: the elements in row-major order.
        axes: the tensor's own shape; None = a vector.
    """

    dims: Shape
    axes: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's own shape."""
        return (len(self.dims),) if self.axes is None else self.axes
