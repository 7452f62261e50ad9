"""Options of sessions and runs: optimised models on disk, dimensions, entries, initializers, profiles, threads."""

from __future__ import annotations

import json
import os

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

CPU = "CPUExecutionProvider"
FILE = "session.optimized_model_external_initializers_file_name"
LEAST = "session.optimized_model_external_initializers_min_size_in_bytes"


@pytest.fixture
def dense(make_model):
    """Y = X @ W + B, with a large matrix and a small vector."""
    constants = {"W": np.arange(4096, dtype=np.float32).reshape(64, 64) / 4096, "B": np.arange(64, dtype=np.float32)}
    nodes = [helper.make_node("MatMul", ["X", "W"], ["P"]), helper.make_node("Add", ["P", "B"], ["Y"])]
    return make_model(nodes, {"X": (1, [1, 64])}, {"Y": (1, [1, 64])}, constants)


def written(ort, path, weights="", least=0):
    """Options that write the optimised model, and its weights apart."""
    options = ort.SessionOptions()
    options.log_severity_level, options.logid = 1, path.name
    options.optimized_model_filepath = str(path)
    if weights:
        options.add_session_config_entry(FILE, weights)
        options.add_session_config_entry(LEAST, str(least))
    return options


def results(ort, source):
    x = np.ones((1, 64), np.float32)
    return ort.InferenceSession(source, providers=[CPU]).run(None, {"X": x})[0]


def test_model_serialization(ort, dense, tmp_path):
    path = tmp_path / "optimised.onnx"
    ort.InferenceSession(dense.SerializeToString(), written(ort, path), providers=[CPU])
    np.testing.assert_allclose(results(ort, path), results(ort, dense.SerializeToString()), rtol=1e-5)


@pytest.mark.parametrize(
    "folder",
    [
        pytest.param("", id="test_model_serialization_with_external_initializers"),
        pytest.param("inside", id="test_model_serialization_with_external_initializers_to_directory"),
    ],
)
def test_weights_beside_the_written_model(ort, dense, tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / folder / "optimised.onnx"
    path.parent.mkdir(exist_ok=True)
    ort.InferenceSession(dense.SerializeToString(), written(ort, path, "weights.bin", 1000), providers=[CPU])
    assert (path.parent / "weights.bin").stat().st_size >= 64 * 64 * 4
    np.testing.assert_allclose(results(ort, path), results(ort, dense.SerializeToString()), rtol=1e-5)


@pytest.mark.parametrize(
    "folder",
    [
        pytest.param("", id="test_model_serialization_with_original_external_initializers_to_current_directory"),
        pytest.param("inside", id="test_model_serialization_with_original_external_initializers_to_directory"),
    ],
)
def test_weights_that_already_lie_apart(ort, dense, tmp_path, monkeypatch, folder):
    """A model whose weights lie apart is written with its weights apart, read, and written once more."""
    expected = results(ort, dense.SerializeToString())
    monkeypatch.chdir(tmp_path)
    first = tmp_path / "given.onnx"
    onnx.save(dense, first, save_as_external_data=True, location="given.bin", size_threshold=0)
    source = first
    for turn in ("once", "twice"):
        path = tmp_path / folder / f"{turn}.onnx"
        path.parent.mkdir(exist_ok=True)
        ort.InferenceSession(source, written(ort, path, f"{turn}.bin", 10), providers=[CPU])
        assert (path.parent / f"{turn}.bin").is_file()
        source = path
    first.unlink()
    (tmp_path / "given.bin").unlink()
    (source.parent / "once.onnx").unlink()
    (source.parent / "once.bin").unlink()
    np.testing.assert_allclose(results(ort, source), expected, rtol=1e-5)


@pytest.fixture
def profiled(ort):
    options = ort.SessionOptions()
    options.enable_profiling = True
    return options


def test_profiler_with_session_options(profiled, opened, product, x, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    session = opened(product, profiled)
    session.run([], {"X": x})
    path = session.end_profiling()
    assert os.path.basename(path).startswith("onnxruntime_profile_")  # noqa: PTH119
    events = json.loads((tmp_path / path).read_text())
    assert events
    timed = [event for event in events if event.get("ph") == "X"]
    assert any(event["args"].get("op_name") == "Mul" for event in timed)
    for event in timed:
        assert {"pid", "dur", "ts", "ph", "name", "args"} <= event.keys()


def test_profiler_get_start_time_ns(ort, opened, product, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    starts = []
    for _ in range(3):
        options = ort.SessionOptions()
        options.enable_profiling = True
        session = opened(product, options)
        starts.append(session.get_profiling_start_time_ns())
        session.end_profiling()
    assert 0 < starts[0] <= starts[1] <= starts[2]


def test_graph_optimization_level(ort, opened, product, x):
    options, levels = ort.SessionOptions(), ort.GraphOptimizationLevel
    assert options.graph_optimization_level == levels.ORT_ENABLE_ALL
    for level in (levels.ORT_DISABLE_ALL, levels.ORT_ENABLE_BASIC, levels.ORT_ENABLE_EXTENDED):
        options.graph_optimization_level = level
        assert options.graph_optimization_level == level
        assert opened(product, options).run(None, {"X": x})[0].tolist() == (x * x).tolist()


def test_ort_execution_mode(ort):
    options = ort.SessionOptions()
    assert options.execution_mode == ort.ExecutionMode.ORT_SEQUENTIAL
    options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
    assert options.execution_mode == ort.ExecutionMode.ORT_PARALLEL


@pytest.fixture
def free(make_model):
    """y = |x| with two free dimensions, which have names and denotations."""
    model = make_model([helper.make_node("Abs", ["x"], ["y"])], {"x": (1, ["One", "Two", 5])}, {"y": (1, None)})
    dims = model.graph.input[0].type.tensor_type.shape.dim
    dims[0].denotation, dims[1].denotation = "DATA_BATCH", "DATA_CHANNEL"
    return model


def test_session_options_add_free_dimension_override_by_denotation(ort, opened, free):
    options = ort.SessionOptions()
    options.add_free_dimension_override_by_denotation("DATA_BATCH", 3)
    options.add_free_dimension_override_by_denotation("DATA_CHANNEL", 5)
    assert opened(free, options).get_inputs()[0].shape == [3, 5, 5]


def test_session_options_add_free_dimension_override_by_name(ort, opened, free):
    options = ort.SessionOptions()
    options.add_free_dimension_override_by_name("One", 4)
    options.add_free_dimension_override_by_name("Two", 6)
    assert opened(free, options).get_inputs()[0].shape == [4, 6, 5]


def test_session_options_add_config_entry(ort):
    options = ort.SessionOptions()
    options.add_session_config_entry("key", "value")
    assert options.get_session_config_entry("key") == "value"


def test_invalid_session_options_config_entry(ort, errors):
    with pytest.raises(errors, match="no_such_key"):
        ort.SessionOptions().get_session_config_entry("no_such_key")


def test_session_options_add_initializer(ort, opened, product, x):
    options = ort.SessionOptions()
    other = ort.OrtValue.ortvalue_from_numpy(np.full((3, 2), 2, np.float32))
    options.add_initializer("W", other)
    assert opened(product, options).run(["Y"], {"X": x})[0].tolist() == (x * 2).tolist()


@pytest.fixture
def absent(make_model):
    """A model that adds what stands in a file that does not exist."""
    model = make_model([helper.make_node("Add", ["x", "w"], ["y"])], {"x": (7, [4])}, {"y": (7, [4])})
    tensor = model.graph.initializer.add(name="w", data_type=TensorProto.INT64, dims=[4])
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "absent.bin"), ("offset", "0"), ("length", "32")):
        tensor.external_data.add(key=key, value=value)
    return model


ABSENT = np.array([0, 0, 1, 1])


def test_session_options_add_external_initializers(ort, absent, tmp_path):
    path, value = tmp_path / "model.onnx", ort.OrtValue.ortvalue_from_numpy(ABSENT)
    path.write_bytes(absent.SerializeToString())
    options = ort.SessionOptions()
    options.add_external_initializers(["w"], [value])
    session = ort.InferenceSession(path, options, providers=[CPU])
    assert session.run(None, {"x": np.arange(4)})[0].tolist() == [0, 1, 3, 4]


def test_session_options_add_external_initializers_from_files_in_memory(ort, absent, tmp_path):
    path, content = tmp_path / "model.onnx", ABSENT.tobytes()
    path.write_bytes(absent.SerializeToString())
    options = ort.SessionOptions()
    options.add_external_initializers_from_files_in_memory(["absent.bin"], [content], [len(content)])
    session = ort.InferenceSession(path, options, providers=[CPU])
    assert session.run(None, {"x": np.arange(4)})[0].tolist() == [0, 1, 3, 4]


def test_memory_arena_shrinkage(ort, opened, product, x):
    options, key = ort.RunOptions(), "memory.enable_memory_arena_shrinkage"
    options.add_run_config_entry(key, "cpu:0")
    assert options.get_run_config_entry(key) == "cpu:0"
    assert opened(product).run([], {"X": x}, options)[0].tolist() == (x * x).tolist()


def test_global_threadpool(ort, dense):
    """Only here: onnxruntime's pool is for good once it is made, and would reach other tests."""
    if ort.__name__ == "onnxruntime":
        pytest.skip("it cannot be taken back")
    from genai.compat.onnxruntime import module

    before = module.global_threads()
    try:
        ort.set_global_thread_pool_sizes(2, 2)
        options = ort.SessionOptions()
        options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.use_per_session_threads = False
        session = ort.InferenceSession(dense.SerializeToString(), options, providers=[CPU])
        x = np.ones((1, 64), np.float32)
        np.testing.assert_allclose(session.run(None, {"X": x})[0], results(ort, dense.SerializeToString()), rtol=1e-5)
    finally:
        ort.set_global_thread_pool_sizes(before, 0)
