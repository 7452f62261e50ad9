"""Conversion of value types to and from protobuf."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from onnx import TypeProto

from ..errors import GraphError
from . import types

# The type class for each field of a TypeProto.
_ARRAYS: dict[str, type[types.TensorType] | type[types.SparseTensorType]] = {
    "tensor_type": types.TensorType,
    "sparse_tensor_type": types.SparseTensorType,
}
_CONTAINERS: dict[str, type[types.SequenceType] | type[types.OptionalType]] = {
    "sequence_type": types.SequenceType,
    "optional_type": types.OptionalType,
}


# Longer messages are not kept, so that no model occupies memory after its session is gone.
_LONGEST_KEPT = 512
# A look-up takes a fifth of the time of DataType(number).
_DATA_TYPES = {int(kind): kind for kind in types.DataType}


def text(value: Any, subject: str = "a name") -> str:
    """Return a protobuf string field. Raises GraphError for bytes: protobuf returns bytes for invalid UTF-8."""
    if isinstance(value, str):
        return value
    raise GraphError(
        f"{subject} is not UTF-8 text: {value!r:.80}",
        "ONNX names and documentation are UTF-8; the file is damaged or was written incorrectly",
        "export or download the model again",
    )


def data_type(number: int, where: str) -> types.DataType:
    """Return the element type with the given number. Raises GraphError if ONNX has no such element type."""
    try:
        return _DATA_TYPES[number]
    except KeyError:
        raise GraphError(
            f"{where} has the element type {number}",
            f"element types range from 0 to {max(types.DataType)}; the file is damaged or newer than this package",
            "export the model again, or update onnx-genai-toolkit",
        ) from None


def decode_type(proto: TypeProto) -> types.Type | None:
    """Convert a message to a type, or to None if the message does not specify a kind.

    Types cannot be changed, so equal messages, of which models contain many, are converted once.
    """
    message = proto.SerializeToString()
    return _decoded(message) if len(message) <= _LONGEST_KEPT else _decoded.__wrapped__(message)


@lru_cache(maxsize=1024)
def _decoded(message: bytes) -> types.Type | None:
    proto = TypeProto.FromString(message)
    kind = proto.WhichOneof("value")
    denotation = text(proto.denotation)
    if kind in _ARRAYS:
        return _ARRAYS[kind](*_array_fields(getattr(proto, kind)), denotation)
    if kind in _CONTAINERS:
        content = getattr(proto, kind)
        return _CONTAINERS[kind](decode_type(content.elem_type) if content.HasField("elem_type") else None, denotation)
    if kind == "map_type":
        entry = proto.map_type
        value = decode_type(entry.value_type) if entry.HasField("value_type") else None
        return types.MapType(data_type(entry.key_type, "a map's key"), value, denotation)
    if kind == "opaque_type":
        return types.OpaqueType(text(proto.opaque_type.domain), text(proto.opaque_type.name), denotation)
    return None


def encode_type(value: types.Type | None) -> TypeProto:
    """Convert a type to protobuf; None becomes an empty message."""
    proto = TypeProto()
    if isinstance(value, types.TensorType):
        _fill_array(proto.tensor_type, value)
    elif isinstance(value, types.SparseTensorType):
        _fill_array(proto.sparse_tensor_type, value)
    elif isinstance(value, types.SequenceType | types.OptionalType):
        content: Any = proto.sequence_type if isinstance(value, types.SequenceType) else proto.optional_type
        content.SetInParent()
        if value.element is not None:
            content.elem_type.CopyFrom(encode_type(value.element))
    elif isinstance(value, types.MapType):
        proto.map_type.key_type = value.key
        if value.value is not None:
            proto.map_type.value_type.CopyFrom(encode_type(value.value))
    elif value is not None:
        proto.opaque_type.SetInParent()
        proto.opaque_type.domain = value.domain
        proto.opaque_type.name = value.name
    if value is not None and value.denotation:
        proto.denotation = value.denotation
    return proto


def _fill_array(proto: TypeProto.Tensor | TypeProto.SparseTensor, value: types.ArrayTypes) -> None:
    proto.elem_type = value.dtype
    if value.shape is None:
        return
    proto.shape.SetInParent()  # also without dimensions
    denotations = value.dim_denotations or ("",) * len(value.shape)
    for extent, denotation in zip(value.shape, denotations, strict=True):
        dim = proto.shape.dim.add()
        if isinstance(extent, int):
            dim.dim_value = extent
        elif extent is not None:
            dim.dim_param = extent
        if denotation:
            dim.denotation = denotation


def _array_fields(
    proto: TypeProto.Tensor | TypeProto.SparseTensor,
) -> tuple[types.DataType, types.Shape | None, tuple[str, ...]]:
    dtype = data_type(proto.elem_type, "a value")
    if not proto.HasField("shape"):
        return dtype, None, ()
    dims = proto.shape.dim
    shape = tuple([_dim(dim) for dim in dims])
    denotations = tuple([text(dim.denotation) for dim in dims])
    return dtype, shape, denotations if any(denotations) else ()


def _dim(proto: Any) -> types.Dim:
    """Return a size, a symbol, or None; exporters write negative numbers for unknown sizes."""
    if proto.HasField("dim_value"):
        return proto.dim_value if proto.dim_value >= 0 else None
    return text(proto.dim_param) or None
