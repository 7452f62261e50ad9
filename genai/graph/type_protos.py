"""Types and values' types to and from protobuf."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from onnx import TensorShapeProto, TypeProto

from ..errors import GraphError
from .types import (
    DataType,
    Dim,
    MapType,
    OpaqueType,
    OptionalType,
    SequenceType,
    Shape,
    SparseTensorType,
    TensorType,
    Type,
)


def text(value: Any, what: str = "a name") -> str:
    """A protobuf string field, which comes as bytes where it is not UTF-8.

    Raises:
        GraphError: if it is not UTF-8.
    """
    if isinstance(value, str):
        return value
    raise GraphError(
        f"{what} is not UTF-8 text: {value!r:.80}",
        "ONNX names and documentation are UTF-8; the file is damaged or was written wrongly",
        "export or download the model again",
    )


def data_type(number: int, where: str) -> DataType:
    """An element type by its number.

    Raises:
        GraphError: if there is no such type.
    """
    try:
        return DataType(number)
    except ValueError:
        raise GraphError(
            f"{where} has the element type {number}",
            f"element types go from {min(DataType)} to {max(DataType)}; the file is damaged or newer than this package",
            "export the model again, or update onnx-genai-toolkit",
        ) from None


def decode_type(proto: TypeProto) -> Type | None:
    """A type, or None where the message says nothing of its kind."""
    kind = proto.WhichOneof("value")
    denotation = text(proto.denotation)
    if kind == "tensor_type":
        return TensorType(*_array_fields(proto.tensor_type), denotation)
    if kind == "sparse_tensor_type":
        return SparseTensorType(*_array_fields(proto.sparse_tensor_type), denotation)
    if kind == "sequence_type":
        return SequenceType(_element(proto.sequence_type), denotation)
    if kind == "optional_type":
        return OptionalType(_element(proto.optional_type), denotation)
    if kind == "map_type":
        entry = proto.map_type
        value = decode_type(entry.value_type) if entry.HasField("value_type") else None
        return MapType(data_type(entry.key_type, "a map's key"), value, denotation)
    if kind == "opaque_type":
        return OpaqueType(text(proto.opaque_type.domain), text(proto.opaque_type.name), denotation)
    return None


def encode_type(value: Type | None) -> TypeProto:
    """A type as protobuf; None gives an empty message."""
    proto = TypeProto()
    if value is None:
        return proto
    if value.denotation:
        proto.denotation = value.denotation
    if isinstance(value, TensorType):
        proto.tensor_type.SetInParent()
        _fill_array(proto.tensor_type, value)
    elif isinstance(value, SparseTensorType):
        proto.sparse_tensor_type.SetInParent()
        _fill_array(proto.sparse_tensor_type, value)
    elif isinstance(value, SequenceType):
        proto.sequence_type.SetInParent()
        _fill_element(proto.sequence_type, value.element)
    elif isinstance(value, OptionalType):
        proto.optional_type.SetInParent()
        _fill_element(proto.optional_type, value.element)
    elif isinstance(value, MapType):
        proto.map_type.key_type = value.key
        if value.value is not None:
            proto.map_type.value_type.CopyFrom(encode_type(value.value))
    else:
        proto.opaque_type.SetInParent()
        proto.opaque_type.domain = value.domain
        proto.opaque_type.name = value.name
    return proto


def _array_fields(
    proto: TypeProto.Tensor | TypeProto.SparseTensor,
) -> tuple[DataType, Shape | None, tuple[str, ...]]:
    dtype = data_type(proto.elem_type, "a value")
    if not proto.HasField("shape"):
        return dtype, None, ()
    dims = proto.shape.dim
    denotations = tuple(text(dim.denotation) for dim in dims)
    return dtype, tuple(_decode_dim(dim) for dim in dims), denotations if any(denotations) else ()


def _decode_dim(dim: TensorShapeProto.Dimension) -> Dim:
    kind = dim.WhichOneof("value")
    if kind == "dim_value":
        return dim.dim_value
    return (text(dim.dim_param) or None) if kind == "dim_param" else None


def _fill_array(proto: TypeProto.Tensor | TypeProto.SparseTensor, value: TensorType | SparseTensorType) -> None:
    proto.elem_type = value.dtype
    if value.shape is None:
        return
    proto.shape.SetInParent()
    denotations: Iterable[str] = value.dim_denotations or ("",) * len(value.shape)
    for extent, denotation in zip(value.shape, denotations, strict=True):
        dim = proto.shape.dim.add()
        if isinstance(extent, int):
            dim.dim_value = extent
        elif extent is not None:
            dim.dim_param = extent
        if denotation:
            dim.denotation = denotation


def _element(proto: TypeProto.Sequence | TypeProto.Optional) -> Type | None:
    return decode_type(proto.elem_type) if proto.HasField("elem_type") else None


def _fill_element(proto: TypeProto.Sequence | TypeProto.Optional, element: Type | None) -> None:
    if element is not None:
        proto.elem_type.CopyFrom(encode_type(element))
