"""Writing models: inside one file or with external data, complete or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from genai.errors import GraphError, ModelFolderError, OptionError
from genai.onnx import writer
from genai.onnx.ir import Graph, OnnxModel, OnnxTensor
from genai.onnx.reader import read_model
from genai.onnx.writer import to_proto, write_model


def model_of(*tensors: OnnxTensor) -> OnnxModel:
    return OnnxModel(Graph("g", initializers={tensor.name: tensor for tensor in tensors}), 10, {"": 20})


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_one_file_holds_what_was_external(external_model, tmp_path, run_reference):
    path = tmp_path / "out.onnx"
    write_model(read_model(external_model), path)
    written = onnx.load(path, load_external_data=False)
    assert [tensor.HasField("raw_data") for tensor in written.graph.initializer] == [True, True]
    x = np.ones((2, 64), np.float32)
    np.testing.assert_array_equal(run_reference(written, [x])[0], run_reference(onnx.load(external_model), [x])[0])


def test_external_data_go_beside_the_model(external_model, tmp_path):
    path = tmp_path / "out.onnx"
    write_model(read_model(external_model), path, external_data="out.data", size_threshold=1024)
    written = onnx.load(path, load_external_data=False)
    bias, weight = written.graph.initializer
    assert bias.HasField("raw_data")
    assert weight.data_location == TensorProto.EXTERNAL
    assert int({entry.key: entry.value for entry in weight.external_data}["offset"]) % 4096 == 0
    loaded = onnx.load(path)
    for old, new in zip(onnx.load(external_model).graph.initializer, loaded.graph.initializer, strict=True):
        np.testing.assert_array_equal(numpy_helper.to_array(new), numpy_helper.to_array(old))
    onnx.checker.check_model(str(path))
    assert read_model(path).graph.initializers["w"].is_external


def test_every_kind_of_tensor_goes_out_and_comes_back(tmp_path):
    tensors = [
        OnnxTensor.from_array("strings", np.array(["a" * 50] * 50)),
        OnnxTensor.from_array("int4", np.arange(101) % 8, onnx_type(TensorProto.INT4)),
        OnnxTensor.from_array("floats", np.arange(7, dtype=np.float64)),
        OnnxTensor.from_array("empty", np.zeros((0, 3), np.float32)),
    ]
    path = tmp_path / "out.onnx"
    write_model(model_of(*tensors), path, external_data="out.data", size_threshold=0)
    back = read_model(path).graph.initializers
    assert [tensor.is_external for tensor in back.values()] == [False, True, True, True]
    for tensor in tensors:
        assert back[tensor.name].array().tolist() == tensor.array().tolist()


def onnx_type(number: int):
    from genai.onnx.ir import DataType

    return DataType(number)


def test_a_shared_storage_is_written_once(tmp_path):
    tensor = OnnxTensor.from_array("a", np.zeros(10_000, np.float32))
    write_model(model_of(tensor, tensor.renamed("b")), tmp_path / "m.onnx", external_data="m.data")
    assert (tmp_path / "m.data").stat().st_size == 40_000


def test_large_constants_in_nodes_and_subgraphs_are_external_too(if_model, tmp_path):
    big = numpy_helper.from_array(np.arange(1000, dtype=np.float32), "big")
    branch = if_model.graph.node[2].attribute[0].g
    branch.initializer.append(big)
    branch.node.append(helper.make_node("Constant", [], ["c"], value=big))
    write_model(read_model(if_model), tmp_path / "m.onnx", external_data="m.data")
    inner = read_model(tmp_path / "m.onnx").graph.nodes[2].attribute(if_model.graph.node[2].attribute[0].name)
    assert inner.initializers["big"].is_external
    assert inner.constant("c")[999] == 999


def test_writing_over_the_files_that_are_mapped(external_model):
    model = read_model(external_model)
    write_model(model, external_model, external_data="weights.bin", size_threshold=0)
    assert model.graph.initializers["w"].array()[63, 31] == 2047
    again = read_model(external_model)
    assert again.graph.initializers["w"].array()[63, 31] == 2047
    assert again.graph.initializers["b"].array()[31] == 31
    assert files(external_model.parent) == {"model.onnx", "weights.bin"}


def test_new_files_have_ordinary_permissions(tmp_path):
    mask = os.umask(0o022)
    try:
        write_model(model_of(), tmp_path / "m.onnx")
    finally:
        os.umask(mask)
    assert (tmp_path / "m.onnx").stat().st_mode & 0o777 == 0o644


def test_the_mode_of_a_replaced_file_stays(tmp_path):
    path = tmp_path / "m.onnx"
    path.touch()
    path.chmod(0o600)
    write_model(model_of(), path)
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("external_data", [None, "m.data"])
def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch, external_data):
    path = tmp_path / "m.onnx"
    path.write_bytes(b"old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ModelFolderError, match="No space left") as error:
        write_model(model_of(OnnxTensor.from_array("w", np.zeros(1000))), path, external_data=external_data)
    assert error.value.why
    assert error.value.fix
    assert files(tmp_path) == {"m.onnx"}
    assert path.read_bytes() == b"old"


def test_a_missing_folder(tmp_path):
    with pytest.raises(ModelFolderError):
        write_model(model_of(), tmp_path / "absent" / "m.onnx")


@pytest.mark.parametrize("name", ["", "sub/m.data", "../m.data", "/m.data", "m.onnx", ".."])
def test_names_of_data_files(tmp_path, name):
    with pytest.raises(OptionError):
        write_model(model_of(), tmp_path / "m.onnx", external_data=name)
    assert files(tmp_path) == set()


def test_a_negative_threshold(tmp_path):
    with pytest.raises(OptionError):
        write_model(model_of(), tmp_path / "m.onnx", external_data="d", size_threshold=-1)


def test_a_model_too_large_for_one_file(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "MAX_PROTOBUF_BYTES", 1000)
    with pytest.raises(GraphError, match="2 GiB") as error:
        write_model(model_of(OnnxTensor.from_array("w", np.zeros(1000))), tmp_path / "m.onnx")
    assert "external_data=" in error.value.fix
    assert files(tmp_path) == set()


def test_an_initializer_beside_the_inputs_raises_an_old_ir_version(make_model):
    kind = (TensorProto.FLOAT, [1])
    proto = make_model([helper.make_node("Relu", ["x"], ["y"])], {"x": kind}, {"y": kind}, ir_version=3)
    model = read_model(proto)
    assert to_proto(model).ir_version == 3
    model.graph.add_initializer(OnnxTensor.from_array("w", np.zeros(1, np.float32)))
    written = to_proto(model)
    assert written.ir_version == 4
    onnx.checker.check_model(written)


def test_constants_of_functions_become_nodes(make_model, run_reference):
    function = helper.make_function(
        "own", "AddTwo", ["x"], ["y"], [helper.make_node("Add", ["x", "two"], ["y"])], [helper.make_opsetid("", 20)]
    )
    constant = helper.make_node("Constant", [], ["two"], value=numpy_helper.from_array(np.float32(2)))
    function.node.insert(0, constant)
    kind = (TensorProto.FLOAT, [1])
    proto = make_model(
        [helper.make_node("AddTwo", ["x"], ["y"], domain="own")],
        {"x": kind},
        {"y": kind},
        functions=[function],
        domains={"own": 1},
    )
    model = read_model(proto)
    body = model.functions["own", "AddTwo", ""].body
    body.add_initializer(OnnxTensor.from_array("two", np.array(2, np.float32)))
    body.remove_nodes([body.nodes[0]])
    written = to_proto(model)
    assert [node.op_type for node in written.functions[0].node] == ["Constant", "Add"]
    np.testing.assert_array_equal(run_reference(written, [np.array([1], np.float32)])[0], [3])
