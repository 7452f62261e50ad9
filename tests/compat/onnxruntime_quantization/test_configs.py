"""`quantize` with configurations, and preparation."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper

import genai
import genai.compat.onnxruntime_quantization as q
from genai.compat.onnxruntime_quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig

from .conftest import Feeds, apart, images, make, op_types, run_here


def test_static_and_dynamic_configurations(small_path, tmp_path):
    q.quantize(small_path, tmp_path / "a", q.StaticQuantConfig(Feeds(images(2)), per_channel=True))
    q.quantize_static(small_path, tmp_path / "b", Feeds(images(2)), per_channel=True)
    q.quantize(small_path, tmp_path / "c", q.DynamicQuantConfig(weight_type=q.QuantType.QUInt8))
    q.quantize_dynamic(small_path, tmp_path / "d", weight_type=q.QuantType.QUInt8)
    for one, other in ("ab", "cd"):
        assert (tmp_path / one).read_bytes() == (tmp_path / other).read_bytes()
    q.quantize(small_path, tmp_path / "e", DefaultWeightOnlyQuantConfig(block_size=16))
    assert "MatMulNBits" in op_types(tmp_path / "e")


def test_a_configuration_for_everything(small, tmp_path):
    def is_last(model: onnx.ModelProto, node: onnx.NodeProto) -> bool:
        return node.output[0] == model.graph.output[0].name

    config = q.get_qdq_config(
        small, Feeds(images(2)), nodes_to_exclude=is_last, per_channel=True, calibrate_args={"symmetric": True}
    )
    assert config.nodes_to_exclude == ["matmul"]
    assert config.extra_options["CalibTensorRangeSymmetric"]
    q.quantize(small, tmp_path / "q.onnx", config)
    assert op_types(tmp_path / "q.onnx")[-1] == "MatMul"
    feed = images(1, seed=9)[0]
    assert apart(run_here(tmp_path / "q.onnx", feed), run_here(small, feed)) < 0.05


def test_preparation_joins_what_is_one(tmp_path):
    """Batch norms go into convolutions, constants are folded, types are known, and results are the same."""
    node, random = helper.make_node, np.random.default_rng(0)
    model = make(
        [
            node("Constant", [], ["two"], value_float=2.0),
            node("Mul", ["two", "scale"], ["w2"], name="constant"),
            node("Conv", ["x", "w2"], ["c"], name="conv", pads=[1] * 4),
            node("BatchNormalization", ["c", "g", "b", "m", "v"], ["n"], name="norm"),
            node("Identity", ["n"], ["y"], name="same"),
        ],
        {
            "scale": random.standard_normal((4, 3, 3, 3), np.float32),
            **{name: random.uniform(0.5, 1.5, 4).astype(np.float32) for name in "gbmv"},
        },
        {"x": (1, ["N", 3, 8, 8])},
        {"y": (1, None)},
    )
    q.quant_pre_process(model, tmp_path / "p.onnx")
    assert op_types(tmp_path / "p.onnx") == ["Conv"]
    feed = images(1)[0]
    assert apart(run_here(tmp_path / "p.onnx", feed), run_here(model, feed)) < 1e-6
    q.quant_pre_process(input_model_path=model, output_model_path=tmp_path / "k.onnx", skip_optimization=True)
    assert "BatchNormalization" in op_types(tmp_path / "k.onnx")
    assert any(value.name == "c" for value in onnx.load(tmp_path / "k.onnx").graph.value_info)
    q.quant_pre_process(
        model,
        tmp_path / "e.onnx",
        save_as_external_data=True,
        external_data_location="w",
        external_data_size_threshold=0,
    )
    assert (tmp_path / "w").exists()
    assert apart(run_here(tmp_path / "e.onnx", feed), run_here(model, feed)) < 1e-6


def test_external_data(small, small_path, tmp_path):
    """Weights beside the model, read and written."""
    source = tmp_path / "source.onnx"
    onnx.save_model(onnx.load(small_path), source, save_as_external_data=True, location="weights", size_threshold=0)
    q.quantize_static(source, tmp_path / "q.onnx", Feeds(images(2)), use_external_data_format=True)
    assert (tmp_path / "q.onnx.data").exists()
    q.quantize_dynamic(source, tmp_path / "d.onnx")
    feed = images(1, seed=9)[0]
    for name in ("q.onnx", "d.onnx"):
        assert apart(run_here(tmp_path / name, feed), run_here(small, feed)) < 0.05


def test_subgraphs(tmp_path):
    """Products inside a branch, only where they are asked for."""
    branch = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["inner"], name="product")],
        "branch",
        [],
        [helper.make_tensor_value_info("inner", 1, [2, 4])],
        [onnx.numpy_helper.from_array(np.eye(4, dtype=np.float32), "w")],
    )
    same = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["other"])],
        "same",
        [],
        [helper.make_tensor_value_info("other", 1, [2, 4])],
    )
    model = make(
        [helper.make_node("If", ["flag"], ["y"], then_branch=branch, else_branch=same, name="choice")],
        {}, {"x": (1, [2, 4]), "flag": (9, [])}, {"y": (1, [2, 4])},
    )  # fmt: skip
    with pytest.raises(Exception, match="nothing in the model"):
        q.quantize_dynamic(model, tmp_path / "q.onnx")
    q.quantize_dynamic(model, tmp_path / "q.onnx", extra_options={"EnableSubgraph": True})
    feed = {"x": np.arange(8, dtype=np.float32).reshape(2, 4), "flag": np.asarray(True)}
    assert apart(run_here(tmp_path / "q.onnx", feed), feed["x"]) < 0.01
    inner = onnx.load(tmp_path / "q.onnx").graph.node[0].attribute[1].g
    assert (
        "MatMulInteger"
        in [node.op_type for one in onnx.load(tmp_path / "q.onnx").graph.node[0].attribute for node in one.g.node]
        and inner
    )


def test_products_of_two_activations(tmp_path):
    model = make(
        [helper.make_node("MatMul", ["a", "b"], ["y"], name="product")],
        {}, {"a": (1, [3, 8]), "b": (1, [8, 5])}, {"y": (1, [3, 5])},
    )  # fmt: skip
    q.quantize_dynamic(model, tmp_path / "q.onnx", extra_options={"MatMulConstBOnly": False})
    random = np.random.default_rng(0)
    feed = {"a": random.standard_normal((3, 8), np.float32), "b": random.standard_normal((8, 5), np.float32)}
    assert apart(run_here(tmp_path / "q.onnx", feed), run_here(model, feed)) < 0.02


def test_what_one_file_cannot_hold(small_path, tmp_path, monkeypatch):
    from genai.quantize.onnx_graph import writing

    monkeypatch.setattr(writing, "MAX_PROTOBUF_BYTES", 50)
    with pytest.raises(genai.GraphError, match="use_external_data_format=True"):
        q.quantize_dynamic(small_path, tmp_path / "q.onnx")
    assert not list(tmp_path.iterdir())
    q.quantize_dynamic(small_path, tmp_path / "q.onnx", use_external_data_format=True)


@pytest.mark.slow
def test_more_than_two_gigabytes_of_weights(tmp_path):
    """The weights are mapped, a part of them is float32 at a time, and the result fits one file."""
    import resource

    side, layers = 8192, 9  # 2.4 GB of zeros, which take no place on the disk
    with (tmp_path / "weights").open("wb") as file:
        file.truncate(4 * side * side * layers)
    names = [f"w{layer}" for layer in range(layers)]
    values = ["x", *(f"h{layer}" for layer in range(layers - 1)), "y"]
    nodes = [
        helper.make_node("MatMul", [values[i], name], [values[i + 1]], name=f"n{i}") for i, name in enumerate(names)
    ]
    model = make(nodes, {}, {"x": (1, [1, side])}, {"y": (1, [1, side])})
    for layer, name in enumerate(names):
        tensor = model.graph.initializer.add(name=name, data_type=1, dims=[side, side])
        tensor.data_location = onnx.TensorProto.EXTERNAL
        entries = {"location": "weights", "offset": str(4 * side * side * layer), "length": str(4 * side * side)}
        for key, value in entries.items():
            tensor.external_data.add(key=key, value=value)
    onnx.save(model, tmp_path / "model.onnx")
    q.quantize_dynamic(tmp_path / "model.onnx", tmp_path / "q.onnx")
    assert (tmp_path / "q.onnx").stat().st_size < 1.01 * side * side * layers
    assert op_types(tmp_path / "q.onnx").count("MatMulInteger") == layers
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 6_000_000  # kilobytes
