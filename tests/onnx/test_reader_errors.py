"""Invalid models raise a typed, three-part error, never a traceback from a library."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from genai.errors import GenaiError, GraphError, ModelFolderError
from genai.onnx.reader import read_model


def refused(source, kind=GraphError) -> GenaiError:
    with pytest.raises(kind) as error:
        read_model(source)
    assert error.value.what
    assert error.value.why
    assert error.value.fix
    return error.value


@pytest.fixture
def relu(make_model) -> onnx.ModelProto:
    return make_model(
        [helper.make_node("Relu", ["x"], ["y"])], {"x": (TensorProto.FLOAT, [2])}, {"y": (TensorProto.FLOAT, [2])}
    )


def zip_bytes() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("model.onnx", b"nothing")
    return buffer.getvalue()


NOT_MODELS = {
    "empty": b"",
    "text": b"This is a README, not a model.\n" * 20,
    "json": b'{"ir_version": 10, "graph": {}}',
    "zip": zip_bytes(),
    "zeros": bytes(1000),
    "random": np.random.default_rng(0).bytes(5000),
    "git_lfs_pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 12\n",
    "another_message": TensorProto(dims=[2], data_type=1, float_data=[1, 2], name="t").SerializeToString(),
    "only_a_version": onnx.ModelProto(ir_version=10).SerializeToString(),
}


@pytest.mark.parametrize("name", NOT_MODELS)
def test_bytes_that_are_no_model(name):
    error = refused(NOT_MODELS[name])
    assert "not an ONNX model" in error.what


@pytest.mark.parametrize("name", NOT_MODELS)
def test_files_that_are_no_model(name, tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(NOT_MODELS[name])
    assert str(path) in refused(path).what


def test_every_truncation_is_refused(relu):
    data = relu.SerializeToString()
    for length in range(len(data)):
        # A cut between two fields can leave a whole message that lacks an operator set or a graph.
        refused(data[:length])


@pytest.mark.skipif(not Path("/dev/null").exists(), reason="this system has no /dev/null")
def test_a_device():
    assert "device" in refused("/dev/null", ModelFolderError).why


def test_missing_file(tmp_path):
    assert "absent.onnx" in refused(tmp_path / "absent.onnx", ModelFolderError).what
    refused(str(tmp_path / "absent.onnx"), ModelFolderError)


@pytest.mark.parametrize("path", ["a\0b.onnx", "x" * 5000])
def test_impossible_paths(path):
    refused(path, ModelFolderError)


def test_a_folder(tmp_path):
    assert "folder" in refused(tmp_path, ModelFolderError).why


def test_a_pipe_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "pipe.onnx")
    refused(tmp_path / "pipe.onnx", ModelFolderError)


def test_a_file_that_may_not_be_read(tmp_path, relu, monkeypatch):
    path = tmp_path / "model.onnx"
    path.write_bytes(relu.SerializeToString())

    def refuse(self, *args, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    assert "Permission denied" in refused(path, ModelFolderError).what


def test_a_file_that_is_too_large(tmp_path):
    path = tmp_path / "large.onnx"
    with path.open("wb") as file:
        file.truncate(2**31)
    assert "2 GiB" in refused(path).what


@pytest.mark.parametrize("source", [None, 5, ["model.onnx"]])
def test_sources_of_the_wrong_type(source):
    assert type(source).__name__ in refused(source).what


@pytest.mark.parametrize("version", [0, -1])
def test_impossible_ir_versions(relu, version):
    relu.ir_version = version
    refused(relu)


def test_an_ir_version_newer_than_the_onnx_package(relu):
    relu.ir_version = onnx.IR_VERSION + 1
    assert "update the onnx package" in refused(relu).fix


def test_no_operator_set(relu):
    del relu.opset_import[:]
    refused(relu)


def test_impossible_operator_set_version(relu):
    relu.opset_import[0].version = 0
    refused(relu)


def test_two_versions_of_one_operator_set(relu):
    relu.opset_import.add(domain="ai.onnx", version=7)
    refused(relu)


def edit(relu: onnx.ModelProto, **changes) -> onnx.ModelProto:
    node = relu.graph.node[0]
    for name, value in changes.items():
        setattr(node, name, value)
    return relu


def test_a_node_without_operator(relu):
    assert "no operator" in refused(edit(relu, op_type="")).what


def test_an_undefined_input(relu):
    relu.graph.node[0].input[0] = "nowhere"
    assert "'nowhere'" in refused(relu).what


def test_an_undefined_output(relu):
    relu.graph.output[0].name = "nowhere"
    assert "'nowhere'" in refused(relu).what


def test_a_value_defined_twice(relu):
    relu.graph.node.add(op_type="Neg", input=["x"], output=["y"])
    assert "'y'" in refused(relu).what


def test_a_node_that_redefines_an_input(relu):
    relu.graph.node.add(op_type="Neg", input=["y"], output=["x"])
    refused(relu)


def test_two_inputs_of_one_name(relu):
    relu.graph.input.append(relu.graph.input[0])
    refused(relu)


def test_two_initializers_of_one_name(relu):
    for _ in range(2):
        relu.graph.initializer.add(name="w", data_type=1, dims=[0])
    assert "twice" in refused(relu).what


def test_a_dense_and_a_sparse_initializer_of_one_name(relu):
    relu.graph.initializer.add(name="w", data_type=1, dims=[0])
    sparse = relu.graph.sparse_initializer.add(dims=[3])
    sparse.values.CopyFrom(TensorProto(name="w", data_type=1, dims=[0]))
    sparse.indices.CopyFrom(TensorProto(data_type=7, dims=[0]))
    refused(relu)


def test_two_attributes_of_one_name(relu):
    for _ in range(2):
        relu.graph.node[0].attribute.add(name="alpha", type=onnx.AttributeProto.INT)
    refused(relu)


def test_an_attribute_with_nothing_in_it(relu):
    relu.graph.node[0].attribute.add(name="alpha")
    refused(relu)


def test_a_cycle(make_model):
    nodes = [helper.make_node("Add", ["x", "b"], ["a"]), helper.make_node("Neg", ["a"], ["b"])]
    kind = (TensorProto.FLOAT, [1])
    assert "cycle" in refused(make_model(nodes, {"x": kind}, {"b": kind})).what


def test_a_cycle_through_a_subgraph(make_model):
    body = helper.make_graph(
        [helper.make_node("Neg", ["later"], ["inner"])], "body", [], [helper.make_empty_tensor_value_info("inner")]
    )
    nodes = [
        helper.make_node("If", ["flag"], ["y"], then_branch=body, else_branch=body),
        helper.make_node("Relu", ["y"], ["later"]),
    ]
    model = make_model(nodes, {"flag": (TensorProto.BOOL, [])}, {"later": (TensorProto.FLOAT, None)})
    assert "cycle" in refused(model).what


def test_nodes_in_the_wrong_order_are_sorted(make_model):
    nodes = [helper.make_node("Neg", ["a"], ["b"]), helper.make_node("Relu", ["x"], ["a"])]
    kind = (TensorProto.FLOAT, [1])
    model = read_model(make_model(nodes, {"x": kind}, {"b": kind}))
    assert [node.op_type for node in model.graph.nodes] == ["Relu", "Neg"]


@pytest.mark.parametrize("chain", [["f"], ["f", "g"], ["f", "g", "h"]], ids=len)
def test_functions_that_call_themselves(make_model, chain):
    following = [*chain[1:], chain[0]]
    functions = [
        helper.make_function(
            "own",
            name,
            ["x"],
            ["y"],
            [helper.make_node(called, ["x"], ["y"], domain="own")],
            [helper.make_opsetid("own", 1)],
        )
        for name, called in zip(chain, following, strict=True)
    ]
    kind = (TensorProto.FLOAT, [1])
    node = helper.make_node("f", ["x"], ["y"], domain="own")
    model = make_model([node], {"x": kind}, {"y": kind}, functions=functions, domains={"own": 1})
    assert "calls itself" in refused(model).what


def test_two_functions_of_one_name(make_model, relu):
    function = helper.make_function("own", "f", ["x"], ["y"], [helper.make_node("Relu", ["x"], ["y"])], [])
    relu.functions.extend([function, function])
    refused(relu)


@pytest.mark.parametrize(
    "tensor",
    [
        TensorProto(data_type=0, dims=[1]),
        TensorProto(data_type=99, dims=[1]),
        TensorProto(data_type=1, dims=[-1]),
        TensorProto(data_type=1, dims=[3], raw_data=b"12345678"),
        TensorProto(data_type=1, dims=[3], float_data=[1.0]),
        TensorProto(data_type=1, dims=[1]),
        TensorProto(data_type=1, dims=[2**31, 2**31, 2**31]),
        TensorProto(data_type=1, dims=[0, 2**62]),
        TensorProto(data_type=1, dims=[0] * 65),
        TensorProto(data_type=22, dims=[3], raw_data=b"123"),
        TensorProto(data_type=8, dims=[2], string_data=[b"one"]),
        TensorProto(data_type=8, dims=[1], raw_data=b"one"),
    ],
    ids=lambda tensor: str(tensor).replace("\n", " ")[:60],
)
def test_tensors_whose_data_do_not_fit(relu, tensor):
    tensor.name = "w"
    relu.graph.initializer.append(tensor)
    assert "'w'" in refused(relu).what


def test_an_unknown_element_type_of_a_value(relu):
    relu.graph.input[0].type.tensor_type.elem_type = 77
    assert "77" in refused(relu).what


def test_a_name_that_is_not_text(relu):
    relu.graph.name = "marker"
    data = relu.SerializeToString().replace(b"marker", b"mar\xffer")
    assert "UTF-8" in refused(data).what


def test_subgraphs_nested_without_end():
    proto = onnx.ModelProto(ir_version=10, opset_import=[helper.make_opsetid("", 20)])
    graph = proto.graph
    for _ in range(3000):
        attribute = graph.node.add(op_type="If", input=[""], output=["y"]).attribute.add(
            name="then_branch", type=onnx.AttributeProto.GRAPH
        )
        graph = attribute.g
    graph.node.add(op_type="Relu", output=["y"])
    assert "nests" in refused(proto).what
