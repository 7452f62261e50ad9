"""The IR holds the whole ONNX format: a model that uses every field of every message round-trips unchanged."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.text_format import Parse
from onnx import TensorProto, helper, numpy_helper

from genai.onnx.ir import AttributeType, DataType, OnnxTensor, SparseTensor
from genai.onnx.reader import read_model
from genai.onnx.types import MapType, OpaqueType, OptionalType, SequenceType, SparseTensorType, TensorType
from genai.onnx.writer import to_proto

# An EXTERNAL `data_location` excludes the typed fields, so the external-data tests cover two fields.
COVERED_ELSEWHERE = {"TensorProto.external_data", "TensorProto.data_location"}

MODEL = """
ir_version: 11 producer_name: "maker" producer_version: "1.2" domain: "org.example" model_version: 7 doc_string: "doc"
opset_import { domain: "" version: 20 } opset_import { domain: "org.example" version: 2 }
metadata_props { key: "author" value: "someone" } metadata_props { key: "empty" value: "" }
configuration { name: "two" num_devices: 2 device: "cpu:0" device: "cpu:1" }
graph {
  name: "main" doc_string: "graph doc"
  metadata_props { key: "k" value: "v" }
  input {
    name: "image" doc_string: "in" metadata_props { key: "layout" value: "NCHW" }
    type {
      denotation: "IMAGE"
      tensor_type {
        elem_type: 1
        shape {
          dim { dim_param: "batch" denotation: "DATA_BATCH" } dim { dim_value: 3 denotation: "DATA_CHANNEL" }
          dim { } dim { dim_value: 0 }
        }
      }
    }
  }
  input { name: "sparse" type { sparse_tensor_type { elem_type: 11 shape { dim { dim_value: 5 } } } } }
  input { name: "list" type { denotation: "d" sequence_type { elem_type { tensor_type { elem_type: 8 } } } } }
  input {
    name: "maybe"
    type { optional_type { elem_type { sequence_type { elem_type { tensor_type { elem_type: 7 shape { } } } } } } }
  }
  input { name: "table" type { map_type { key_type: 7 value_type { tensor_type { elem_type: 1 } } } } }
  input { name: "secret" type { opaque_type { domain: "org.example" name: "Key" } } }
  input { name: "untyped" }
  initializer {
    name: "part" dims: 4 data_type: 1 float_data: 1 float_data: 2 segment { begin: 0 end: 2 } doc_string: "half"
    metadata_props { key: "a" value: "b" }
  }
  sparse_initializer {
    values { name: "few" dims: 2 data_type: 1 float_data: 5 float_data: 6 }
    indices { name: "few_indices" dims: 2 data_type: 7 int64_data: 1 int64_data: 3 } dims: 9
  }
  quantization_annotation {
    tensor_name: "image" quant_parameter_tensor_names { key: "SCALE_TENSOR" value: "part" }
  }
  value_info { name: "out" type { tensor_type { elem_type: 16 } } }
  node {
    input: "image" input: "" input: "sparse" output: "out" output: "" name: "node" op_type: "Thing"
    domain: "org.example" overload: "second" doc_string: "node doc" metadata_props { key: "scope" value: "layer0" }
    device_configurations {
      configuration_id: "two" pipeline_stage: 0
      sharding_spec {
        tensor_name: "image" device: 0 device: -1
        index_to_device_group_map { key: -1 value: 0 value: 1 }
        sharded_dim { axis: 1 simple_sharding { dim_value: 3 num_shards: 2 } }
        sharded_dim { axis: 0 simple_sharding { dim_param: "batch" num_shards: 2 } simple_sharding { num_shards: 1 } }
      }
    }
    attribute { name: "f" type: FLOAT f: 0.1 doc_string: "attribute doc" }
    attribute { name: "i" type: INT i: -3 }
    attribute { name: "s" type: STRING s: "text \\377" }
    attribute { name: "t" type: TENSOR t { dims: 1 data_type: 7 int64_data: -9 } }
    attribute { name: "g" type: GRAPH g { name: "inner" output { name: "image" } } }
    attribute { name: "tp" type: TYPE_PROTO tp { tensor_type { elem_type: 1 } } }
    attribute {
      name: "sp" type: SPARSE_TENSOR
      sparse_tensor {
        values { dims: 1 data_type: 11 double_data: 2.5 }
        indices { dims: 1 dims: 2 data_type: 7 int64_data: 0 int64_data: 1 }
        dims: 2 dims: 2
      }
    }
    attribute { name: "floats" type: FLOATS floats: 1 floats: 2.5 }
    attribute { name: "ints" type: INTS ints: 1 ints: -2 }
    attribute { name: "strings" type: STRINGS strings: "a" strings: "" }
    attribute {
      name: "tensors" type: TENSORS
      tensors { data_type: 13 uint64_data: 8 } tensors { data_type: 8 string_data: "x" }
    }
    attribute { name: "graphs" type: GRAPHS graphs { name: "one" } graphs { name: "two" } }
    attribute {
      name: "sps" type: SPARSE_TENSORS
      sparse_tensors { values { data_type: 1 dims: 0 } indices { data_type: 7 dims: 0 } dims: 3 }
    }
    attribute { name: "tps" type: TYPE_PROTOS type_protos { tensor_type { elem_type: 6 } } type_protos { } }
    attribute { name: "none" type: INTS }
  }
  output { name: "out" type { tensor_type { elem_type: 16 shape { dim { dim_param: "batch" } } } } }
}
training_info {
  initialization { name: "init" } algorithm { name: "step" }
  initialization_binding { key: "w" value: "w0" } update_binding { key: "w" value: "w1" }
}
functions {
  name: "Thing" domain: "org.example" overload: "second" doc_string: "function doc"
  input: "x" input: "skip" output: "y" attribute: "free" metadata_props { key: "k" value: "v" }
  attribute_proto { name: "given" type: FLOAT f: 2 }
  opset_import { domain: "" version: 19 }
  value_info { name: "x" type { tensor_type { elem_type: 1 } } }
  node { input: "x" output: "y" op_type: "LeakyRelu" attribute { name: "alpha" type: FLOAT ref_attr_name: "given" } }
}
"""


@pytest.fixture
def proto() -> onnx.ModelProto:
    model = Parse(MODEL, onnx.ModelProto())
    raw = model.graph.initializer.add()
    raw.CopyFrom(numpy_helper.from_array(np.arange(3, dtype=np.int16), "raw"))
    codes = model.graph.initializer.add(name="codes", data_type=TensorProto.BFLOAT16, dims=[2])
    codes.int32_data.extend([0x3F80, 0xC000])
    return model


def test_every_field_of_the_format_comes_back(proto, normalised):
    assert normalised(to_proto(read_model(proto))) == normalised(proto)


def test_every_field_survives_a_copy(proto, normalised):
    assert normalised(to_proto(read_model(proto).copy())) == normalised(proto)


def test_the_model_above_uses_every_field_of_the_format(proto):
    """Fails when a newer onnx package adds a field that the IR may not hold."""
    used: set[str] = set()
    _note_fields(proto, used)
    assert _all_fields(onnx.ModelProto.DESCRIPTOR) - used - COVERED_ELSEWHERE == set()


def test_enumerations_are_those_of_the_format():
    assert {(entry.name, entry.value) for entry in DataType} >= set(TensorProto.DataType.items())
    assert {(entry.name, entry.value) for entry in AttributeType} == set(onnx.AttributeProto.AttributeType.items())


def test_values_have_python_types(proto):
    model = read_model(proto)
    graph = model.graph
    types = {value.name: value.type for value in graph.inputs}
    assert types["image"] == TensorType(
        DataType.FLOAT, ("batch", 3, None, 0), ("DATA_BATCH", "DATA_CHANNEL", "", ""), "IMAGE"
    )
    assert types["sparse"] == SparseTensorType(DataType.DOUBLE, (5,))
    assert types["list"] == SequenceType(TensorType(DataType.STRING), "d")
    assert types["maybe"] == OptionalType(SequenceType(TensorType(DataType.INT64, ())))
    assert types["table"] == MapType(DataType.INT64, TensorType(DataType.FLOAT))
    assert types["secret"] == OpaqueType("org.example", "Key")
    assert types["untyped"] is None
    assert graph.sparse_initializers["few"].shape == (9,)
    assert model.functions["org.example", "Thing", "second"].attribute_defaults["given"].value == 2.0
    assert model.function(graph.nodes[0]) is model.functions["org.example", "Thing", "second"]


def test_attributes_have_python_values(proto):
    node = read_model(proto).graph.nodes[0]
    assert node.attribute("i") == -3
    assert node.attribute("f") == pytest.approx(0.1)
    assert node.attributes["s"].value == b"text \xff"
    assert node.attribute("s") == node.attributes["s"].text == "text \udcff"
    assert node.attribute("strings") == ["a", ""]
    assert node.attributes["strings"].value == [b"a", b""]
    assert node.attribute("none") == []
    assert node.attribute("absent", 5) == 5
    assert isinstance(node.attribute("t"), OnnxTensor)
    assert isinstance(node.attribute("sp"), SparseTensor)
    assert [graph.name for graph in node.subgraphs()] == ["inner", "one", "two"]
    assert node.attribute("tps") == [TensorType(DataType.INT32), None]


def test_an_attribute_without_a_type_takes_that_of_its_value():
    node = helper.make_node("Relu", ["x"], ["y"])
    node.attribute.add(name="count").i = 4
    model = helper.make_model(helper.make_graph([node], "g", [helper.make_empty_tensor_value_info("x")], []))
    attribute = read_model(model).graph.nodes[0].attributes["count"]
    assert (attribute.type, attribute.value) == (AttributeType.INT, 4)


def test_the_domain_is_normalised_for_lookups_only():
    node = helper.make_node("Relu", ["x"], ["y"], domain="ai.onnx")
    graph = helper.make_graph([node], "g", [helper.make_empty_tensor_value_info("x")], [])
    model = read_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("ai.onnx", 19)]))
    assert model.graph.nodes[0].domain == "ai.onnx"
    assert model.graph.nodes[0].key == ("", "Relu")
    assert model.opset_version("") == model.opset_version("ai.onnx") == 19
    assert model.opset_version("com.microsoft") is None
    assert to_proto(model).opset_import[0].domain == "ai.onnx"


def _note_fields(message: Any, used: set[str]) -> None:
    for field, value in message.ListFields():
        used.add(_label(field))
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for item in value if field.is_repeated else [value]:
                _note_fields(item, used)


def _all_fields(descriptor: Descriptor, seen: set[str] | None = None) -> set[str]:
    seen = set() if seen is None else seen
    if descriptor.full_name in seen:
        return set()
    seen.add(descriptor.full_name)
    fields = set()
    for field in descriptor.fields:
        fields.add(_label(field))
        if field.message_type is not None:
            fields |= _all_fields(field.message_type, seen)
    return fields


def _label(field: FieldDescriptor) -> str:
    return f"{field.containing_type.name}.{field.name}"
