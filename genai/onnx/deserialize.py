"""Conversion of protobuf messages to IR objects. Every protobuf field is read once, because each access copies it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias, TypeVar

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto

from ..common.reading import MOST_DIMENSIONS, is_addressable
from ..errors import GraphError, malformed
from . import ir
from .external_data import ExternalData
from .node import OURS
from .own_functions import are_own
from .storage import FieldStorage, RawStorage, Storage, StringStorage, packed_size
from .type_protos import data_type, decode_type, text
from .types import AttributeType, DataType, Type

RawData: TypeAlias = Mapping[int, NDArray[np.uint8]]
"""Raw data of initializers by their index."""
K = TypeVar("K")
T = TypeVar("T")

# The protobuf field that holds an attribute's value, per type: first single values, then lists.
_SINGLE_FIELDS = {
    AttributeType.FLOAT: "f",
    AttributeType.INT: "i",
    AttributeType.STRING: "s",
    AttributeType.TENSOR: "t",
    AttributeType.GRAPH: "g",
    AttributeType.SPARSE_TENSOR: "sparse_tensor",
    AttributeType.TYPE_PROTO: "tp",
}
_LIST_FIELDS = {kind: kind.name.lower() for kind in AttributeType if kind and kind not in _SINGLE_FIELDS}
VALUE_FIELDS = _SINGLE_FIELDS | _LIST_FIELDS
# Per type: the field, True for single values, and the method that converts a value, None if it is stored as it is.
_METHODS = {"TENSOR": "tensor", "GRAPH": "graph", "SPARSE_TENSOR": "sparse_tensor", "TYPE_PROTO": "type_proto"}
_FIELDS = {kind: (field, kind in _SINGLE_FIELDS, _METHODS.get(kind.element)) for kind, field in VALUE_FIELDS.items()}

# A complex128 element. The product of a shape with this size must be addressable.
_LARGEST_ELEMENT_BYTES = 16

# The typed field that holds a tensor's elements, and the element type; other types are stored as codes in int32_data.
_ELEMENT_FIELDS: dict[DataType, tuple[str, type[np.generic]]] = {
    DataType.FLOAT: ("float_data", np.float32),
    DataType.COMPLEX64: ("float_data", np.float32),
    DataType.DOUBLE: ("double_data", np.float64),
    DataType.COMPLEX128: ("double_data", np.float64),
    DataType.INT64: ("int64_data", np.int64),
    DataType.UINT32: ("uint64_data", np.uint64),
    DataType.UINT64: ("uint64_data", np.uint64),
}


class Deserializer:
    """Converts the messages of one model to IR objects, and locates its external data.

    Args:
        raw: raw data of the main graph's initializers that was cut out of the messages, by initializer index.
    """

    def __init__(self, external: ExternalData, ir_version: int, raw: RawData | None = None) -> None:
        self._external = external
        self._ir_version = ir_version
        self._raw = raw or {}

    def model(self, proto: onnx.ModelProto) -> ir.OnnxModel:
        functions = [self.function(item) for item in proto.functions]
        if are_own(proto.functions):
            for function in functions:
                function.known = function.domain == OURS
        return ir.OnnxModel(
            self.graph(proto.graph, self._raw),
            self._ir_version,
            opset_imports(proto.opset_import),
            text(proto.producer_name),
            text(proto.producer_version),
            text(proto.domain),
            proto.model_version,
            text(proto.doc_string),
            _unique("function", ((item.key, item) for item in functions)),
            properties(proto.metadata_props),
            [self.training_info(item) for item in proto.training_info],
            list(proto.configuration),
        )

    def graph(self, proto: onnx.GraphProto, raw: RawData | None = None) -> ir.Graph:
        tensors = [self.tensor(item, (raw or {}).get(number)) for number, item in enumerate(proto.initializer)]
        sparse = [self.sparse_tensor(item) for item in proto.sparse_initializer]
        annotations = [
            ir.QuantizationAnnotation(text(item.tensor_name), properties(item.quant_parameter_tensor_names))
            for item in proto.quantization_annotation
        ]
        return ir.Graph(
            text(proto.name),
            [value(item) for item in proto.input],
            [value(item) for item in proto.output],
            [self.node(item) for item in proto.node],
            _unique("initializer", ((item.name, item) for item in tensors)),
            {item.name: item for item in sparse},
            {item.name: item for item in map(value, proto.value_info)},
            text(proto.doc_string),
            properties(proto.metadata_props),
            annotations,
            overridable_initializers=self._ir_version >= 4,
        )

    def function(self, proto: onnx.FunctionProto) -> ir.Function:
        defaults = [self.attribute(item) for item in proto.attribute_proto]
        body = ir.Graph(
            inputs=[ir.Value(text(name)) for name in proto.input],
            outputs=[ir.Value(text(name)) for name in proto.output],
            nodes=[self.node(item) for item in proto.node],
            values={item.name: item for item in map(value, proto.value_info)},
        )
        return ir.Function(
            text(proto.name),
            body,
            text(proto.domain),
            text(proto.overload),
            [text(name) for name in proto.attribute],
            {item.name: item for item in defaults},
            opset_imports(proto.opset_import),
            text(proto.doc_string),
            properties(proto.metadata_props),
        )

    def training_info(self, proto: onnx.TrainingInfoProto) -> ir.TrainingInfo:
        return ir.TrainingInfo(
            self.graph(proto.initialization) if proto.HasField("initialization") else None,
            self.graph(proto.algorithm) if proto.HasField("algorithm") else None,
            [(text(item.key), text(item.value)) for item in proto.initialization_binding],
            [(text(item.key), text(item.value)) for item in proto.update_binding],
        )

    def node(self, proto: onnx.NodeProto) -> ir.Node:
        op_type = text(proto.op_type)
        attributes = [self.attribute(item) for item in proto.attribute]
        return ir.Node(
            op_type,
            _texts(proto.input),
            _texts(proto.output),
            text(proto.domain),
            text(proto.name),
            _unique(f"attribute of {op_type}", ((item.name, item) for item in attributes)) if attributes else {},
            text(proto.overload),
            text(proto.doc_string),
            properties(proto.metadata_props),
            list(proto.device_configurations),
        )

    def attribute(self, proto: onnx.AttributeProto) -> ir.Attribute:
        name, reference = text(proto.name), text(proto.ref_attr_name)
        kind = AttributeType(proto.type)
        if kind is AttributeType.UNDEFINED and not reference:
            kind = _attribute_type_by_field(proto)
        value = None if reference else self._attribute_value(proto, kind)
        return ir.Attribute(name, kind, value, reference, text(proto.doc_string))

    def _attribute_value(self, proto: onnx.AttributeProto, kind: AttributeType) -> Any:
        field, is_single, method = _FIELDS[kind]
        value: Any = getattr(proto, field)
        # The methods are not stored in this object: the cycle would keep the mapped files until garbage is collected.
        decode = None if method is None else getattr(self, method)
        if is_single:
            return decode(value) if decode else value
        return [decode(item) for item in value] if decode else list(value)

    def type_proto(self, proto: onnx.TypeProto) -> Type | None:
        return decode_type(proto)

    def sparse_tensor(self, proto: onnx.SparseTensorProto) -> ir.SparseTensor:
        values, indices = self.tensor(proto.values), self.tensor(proto.indices)
        return ir.SparseTensor(values, indices, _checked_shape(values.name, proto.dims))

    def tensor(self, proto: TensorProto, raw: bytes | NDArray[np.uint8] | None = None) -> ir.OnnxTensor:
        """Convert a tensor; `raw` is its raw data if the data was cut out of the message."""
        name = text(proto.name)
        dtype = data_type(proto.data_type, f"tensor {name!r}")
        if dtype is DataType.UNDEFINED:
            raise GraphError(
                f"tensor {name!r} has no element type",
                "the type is needed to read the elements",
                "export the model again",
            )
        shape = _checked_shape(name, proto.dims)
        segment = (proto.segment.begin, proto.segment.end) if proto.HasField("segment") else None
        storage = self._storage(proto, name, dtype, math.prod(shape), segment is None, raw)
        doc, metadata = text(proto.doc_string), properties(proto.metadata_props)
        return ir.OnnxTensor(name, dtype, shape, storage, doc, metadata, segment)

    def _storage(
        self,
        proto: TensorProto,
        name: str,
        dtype: DataType,
        count: int,
        whole: bool,
        raw: bytes | NDArray[np.uint8] | None,
    ) -> Storage:
        external = proto.data_location == TensorProto.EXTERNAL
        if dtype is DataType.STRING:
            if external or proto.HasField("raw_data"):
                raise malformed(
                    f"string tensor {name!r} has raw or external data",
                    "strings have no fixed size and must be in string_data",
                )
            strings = tuple(proto.string_data)
            _check_count(name, "strings", len(strings), count)
            return StringStorage(strings)
        if external:
            return self._external.storage(name, properties(proto.external_data), packed_size(count, dtype.bits))
        if proto.HasField("raw_data"):
            raw = proto.raw_data if raw is None else raw
            if whole:
                _check_count(name, "bytes", len(raw), packed_size(count, dtype.bits))
            return RawStorage(np.frombuffer(raw, np.uint8))
        field, element = _ELEMENT_FIELDS.get(dtype, ("int32_data", np.int32))
        values = np.array(getattr(proto, field), dtype=element)
        if whole:
            is_complex = dtype in (DataType.COMPLEX64, DataType.COMPLEX128)
            needed = packed_size(count, dtype.bits) if dtype.bits in (2, 4) else 2 * count if is_complex else count
            _check_count(name, field, values.size, needed)
        return FieldStorage(field, values)


def value(proto: onnx.ValueInfoProto) -> ir.Value:
    """Convert a value and its type."""
    known = decode_type(proto.type) if proto.HasField("type") else None
    return ir.Value(text(proto.name), known, text(proto.doc_string), properties(proto.metadata_props))


def _texts(values: Iterable[Any]) -> list[str]:
    """Return string fields as `text` does. Models have many names, so only invalid ones cost a call."""
    names = list(values)
    for name in names:
        if type(name) is not str:
            text(name)
    return names


def properties(entries: Iterable[onnx.StringStringEntryProto]) -> dict[str, str]:
    """Return key-value entries as a dictionary; if a key occurs more than once, its last entry wins."""
    return {text(entry.key): text(entry.value) for entry in entries} if entries else {}


def opset_imports(entries: Iterable[Any]) -> dict[str, int]:
    """Return operator set versions per domain."""
    imports = {text(entry.domain): entry.version for entry in entries}
    for domain, version in imports.items():
        if version < 1:
            raise malformed(
                f"the model imports version {version} of operator set {domain or 'ai.onnx'!r}",
                "operator set versions start at 1",
            )
    return imports


def _attribute_type_by_field(proto: onnx.AttributeProto) -> AttributeType:
    for kind, field in VALUE_FIELDS.items():
        present = proto.HasField(field) if kind in _SINGLE_FIELDS else len(getattr(proto, field)) > 0
        if present:
            return kind
    raise malformed(
        f"attribute {proto.name!r:.80} has neither a type nor a value",
        "an attribute without a type must hold exactly one value",
    )


def _checked_shape(name: str, dims: Iterable[int]) -> tuple[int, ...]:
    """Return a shape that NumPy can address, so that later uses of the tensor do not fail."""
    shape = tuple(dims)
    if not is_addressable(shape, _LARGEST_ELEMENT_BYTES):
        raise malformed(
            f"tensor {name!r} has the shape {list(shape)!r:.200}",
            f"sizes must not be negative, at most {MOST_DIMENSIONS} in number, and their product must be addressable",
        )
    return shape


def _check_count(name: str, unit: str, count: int, needed: int) -> None:
    if count != needed:
        raise GraphError(
            f"tensor {name!r} holds {count} {unit}, but its shape and type need {needed}",
            "the file is damaged or was written incorrectly",
            "export or download the model again",
        )


def _unique(subject: str, items: Iterable[tuple[K, T]]) -> dict[K, T]:
    """Return items by name, or functions by key. Raises GraphError if a name or key occurs twice."""
    by_key: dict[K, T] = {}
    for key, item in items:
        if key in by_key:
            name = "::".join(key) if isinstance(key, tuple) else key
            raise malformed(f"{subject} {name!r} occurs twice", "names must be unique in their scope")
        by_key[key] = item
    return by_key
