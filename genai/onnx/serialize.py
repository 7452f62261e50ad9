"""Conversion of IR objects to protobuf messages, the inverse of `deserialize`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import onnx
from onnx import TensorProto

from .deserialize import VALUE_FIELDS
from .ir import Attribute, Function, Graph, Node, OnnxModel, OnnxTensor, SparseTensor, TrainingInfo, Value, make_node
from .storage import ExternalStorage, FieldStorage, StringStorage
from .type_protos import encode_type


class Serializer:
    """Converts IR objects to messages. Subclasses determine where the elements of a tensor are stored."""

    def model(self, model: OnnxModel) -> onnx.ModelProto:
        proto = onnx.ModelProto(ir_version=_written_ir_version(model))
        _fill_text(
            proto,
            producer_name=model.producer_name,
            producer_version=model.producer_version,
            domain=model.domain,
            doc_string=model.doc_string,
        )
        if model.model_version:
            proto.model_version = model.model_version
        proto.opset_import.extend(itertools.starmap(onnx.helper.make_opsetid, model.opset_imports.items()))
        self.fill_graph(proto.graph, model.graph)
        fill_properties(proto.metadata_props, model.metadata)
        proto.functions.extend(self.function(function) for function in model.functions.values())
        proto.training_info.extend(map(self.training_info, model.training_info))
        proto.configuration.extend(model.device_configurations)
        return proto

    def graph(self, graph: Graph) -> onnx.GraphProto:
        proto = onnx.GraphProto()
        self.fill_graph(proto, graph)
        return proto

    def fill_graph(self, proto: onnx.GraphProto, graph: Graph) -> None:
        proto.SetInParent()
        _fill_text(proto, name=graph.name, doc_string=graph.doc_string)
        proto.input.extend(map(encode_value, graph.inputs))
        proto.output.extend(map(encode_value, graph.outputs))
        proto.node.extend(map(self.node, graph.nodes))
        proto.initializer.extend(map(self.tensor, graph.initializers.values()))
        proto.sparse_initializer.extend(map(self.sparse_tensor, graph.sparse_initializers.values()))
        proto.value_info.extend(map(encode_value, graph.values.values()))
        fill_properties(proto.metadata_props, graph.metadata)
        for annotation in graph.quantization_annotation:
            item = proto.quantization_annotation.add()
            _fill_text(item, tensor_name=annotation.tensor_name)
            fill_properties(item.quant_parameter_tensor_names, annotation.parameters)

    def function(self, function: Function) -> onnx.FunctionProto:
        proto = onnx.FunctionProto(
            name=function.name, input=function.inputs, output=function.outputs, attribute=function.attributes
        )
        _fill_text(proto, domain=function.domain, overload=function.overload, doc_string=function.doc_string)
        proto.attribute_proto.extend(map(self.attribute, function.attribute_defaults.values()))
        proto.opset_import.extend(itertools.starmap(onnx.helper.make_opsetid, function.opset_imports.items()))
        constants = [make_node("Constant", [], [t.name], value=t) for t in function.body.initializers.values()]
        proto.node.extend(map(self.node, [*constants, *function.body.nodes]))
        proto.value_info.extend(map(encode_value, function.body.values.values()))
        fill_properties(proto.metadata_props, function.metadata)
        return proto

    def training_info(self, info: TrainingInfo) -> onnx.TrainingInfoProto:
        proto = onnx.TrainingInfoProto()
        if info.initialization is not None:
            self.fill_graph(proto.initialization, info.initialization)
        if info.algorithm is not None:
            self.fill_graph(proto.algorithm, info.algorithm)
        fill_properties(proto.initialization_binding, info.initialization_binding)
        fill_properties(proto.update_binding, info.update_binding)
        return proto

    def node(self, node: Node) -> onnx.NodeProto:
        proto = onnx.NodeProto(input=node.inputs, output=node.outputs, op_type=node.op_type)
        _fill_text(proto, name=node.name, domain=node.domain, overload=node.overload, doc_string=node.doc_string)
        proto.attribute.extend(map(self.attribute, node.attributes.values()))
        fill_properties(proto.metadata_props, node.metadata)
        proto.device_configurations.extend(node.device_configurations)
        return proto

    def attribute(self, attribute: Attribute) -> onnx.AttributeProto:
        proto = onnx.AttributeProto(name=attribute.name)
        # The type stubs use a separate enum, with the same numbers as AttributeType.
        proto.type = attribute.type  # type: ignore[assignment]
        _fill_text(proto, ref_attr_name=attribute.ref_attr_name, doc_string=attribute.doc_string)
        if attribute.value is not None:
            self._fill_value(proto, attribute)
        return proto

    def _fill_value(self, proto: onnx.AttributeProto, attribute: Attribute) -> None:
        encode: Any = {
            "TENSOR": self.tensor,
            "GRAPH": self.graph,
            "SPARSE_TENSOR": self.sparse_tensor,
            "TYPE_PROTO": encode_type,
        }.get(attribute.type.element)
        field, value = VALUE_FIELDS[attribute.type], attribute.value
        if isinstance(value, list):
            getattr(proto, field).extend(map(encode, value) if encode else value)
        elif encode:
            getattr(proto, field).CopyFrom(encode(value))
        else:
            setattr(proto, field, value)

    def sparse_tensor(self, sparse: SparseTensor) -> onnx.SparseTensorProto:
        return onnx.SparseTensorProto(
            values=self.tensor(sparse.values), indices=self.tensor(sparse.indices), dims=sparse.shape
        )

    def tensor(self, tensor: OnnxTensor) -> TensorProto:
        proto = TensorProto(dims=tensor.shape, data_type=tensor.dtype)
        _fill_text(proto, name=tensor.name, doc_string=tensor.doc_string)
        if tensor.segment is not None:
            proto.segment.begin, proto.segment.end = tensor.segment
        self._fill_elements(proto, tensor)
        fill_properties(proto.metadata_props, tensor.metadata)
        return proto

    def external(self, tensor: OnnxTensor) -> Mapping[str, str] | None:
        """Return the entries that locate a tensor's elements in another file, or None to store them inline."""
        return tensor.storage.entries if isinstance(tensor.storage, ExternalStorage) else None

    def _fill_elements(self, proto: TensorProto, tensor: OnnxTensor) -> None:
        """Store the elements as they were read: in their typed field, inline, or as a reference to their file."""
        storage, entries = tensor.storage, self.external(tensor)
        if entries is not None:
            proto.data_location = TensorProto.EXTERNAL
            fill_properties(proto.external_data, entries)
        elif isinstance(storage, StringStorage):
            proto.string_data.extend(storage.strings)
        elif isinstance(storage, FieldStorage):
            getattr(proto, storage.field).extend(storage.values.tolist())
        else:
            proto.raw_data = tensor.raw().tobytes()


class EmbeddingEncoder(Serializer):
    """Stores every tensor inside the message."""

    def external(self, tensor: OnnxTensor) -> None:
        return None


def encode_value(value: Value) -> onnx.ValueInfoProto:
    """Convert a value and its type."""
    proto = onnx.ValueInfoProto(name=value.name)
    if value.type is not None:
        proto.type.CopyFrom(encode_type(value.type))
    _fill_text(proto, doc_string=value.doc_string)
    fill_properties(proto.metadata_props, value.metadata)
    return proto


def fill_properties(target: Any, entries: Mapping[str, str] | Iterable[tuple[str, str]]) -> None:
    """Add key-value entries to a repeated field."""
    pairs = entries.items() if isinstance(entries, Mapping) else entries
    target.extend(onnx.StringStringEntryProto(key=key, value=value) for key, value in pairs)


def _fill_text(proto: Any, **fields: str) -> None:
    for name, value in fields.items():
        if value:
            setattr(proto, name, value)


def _written_ir_version(model: OnnxModel) -> int:
    """Return the model's IR version, or 4 if an initializer is not an input, which versions before 4 do not allow."""
    if model.ir_version >= 4:
        return model.ir_version
    for graph in model.graphs():
        if graph.initializers.keys() - {value.name for value in graph.inputs}:
            return 4
    return model.ir_version
