"""Cases of onnxruntime's own tests that speak of adapters."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper

import genai as ort


def test_adater_export_read(tmp_path):
    """The versions and both parameters come back as they were written."""
    path = tmp_path / "test_adapter.onnx_adapter"
    values = {
        "param_1": np.arange(8, dtype=np.float32).reshape(2, 4),
        "param_2": np.array([1, 2, 3, 4, 5, 6, 7, 8], np.int64).reshape(2, 4),
    }
    written = ort.AdapterFormat()
    written.set_adapter_version(1)
    written.set_model_version(2)
    written.set_parameters({name: ort.OrtValue.ortvalue_from_numpy(value) for name, value in values.items()})
    written.export_adapter(path)
    read = ort.AdapterFormat.read_adapter(path)
    assert (read.get_adapter_version(), read.get_model_version()) == (1, 2)
    found = read.get_parameters()
    assert found.keys() == values.keys()
    for name, value in found.items():
        assert value.is_tensor()
        np.testing.assert_array_equal(value.numpy(), values[name])


def test_run_with_adapter(tmp_path):
    """Two parameters with defaults, which an adapter replaces."""
    model, adapter = tmp_path / "m.onnx", tmp_path / "a.onnx_adapter"
    sizes = {"lora_param_a": [4, 4], "lora_param_b": [4, 4]}
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in sizes.items()]
    defaults = [helper.make_tensor(name, TensorProto.FLOAT, shape, [0.0] * 16) for name, shape in sizes.items()]
    nodes = [
        helper.make_node("Add", ["input_x", "lora_param_a"], ["sum"]),
        helper.make_node("MatMul", ["sum", "lora_param_b"], ["output"]),
    ]
    x = helper.make_tensor_value_info("input_x", TensorProto.FLOAT, [4, 4])
    y = helper.make_tensor_value_info("output", TensorProto.FLOAT, [4, 4])
    graph = helper.make_graph(nodes, "g", [x, *inputs], [y], defaults)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), model)
    rng = np.random.default_rng(0)
    given = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in sizes.items()}
    made = ort.AdapterFormat()
    made.set_parameters({name: ort.OrtValue.ortvalue_from_numpy(value) for name, value in given.items()})
    made.export_adapter(adapter)
    loaded = ort.LoraAdapter()
    loaded.Load(adapter)
    options = ort.RunOptions()
    options.add_active_adapter(loaded)
    session = ort.InferenceSession(model)
    feed = {"input_x": np.ones((4, 4), np.float32)}
    (found,) = session.run(None, feed, options)
    np.testing.assert_allclose(found, (1 + given["lora_param_a"]) @ given["lora_param_b"], rtol=1e-5)
    np.testing.assert_array_equal(session.run(None, feed)[0], np.zeros((4, 4)))
