"""The calls of onnxruntime, one by one."""

from __future__ import annotations

import json
import os
import signal
import threading

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import genai as ort


def test_sources(add_model, saved, ones):
    for source in (add_model, add_model.SerializeToString(), saved, str(saved)):
        assert ort.InferenceSession(source).run(None, {"a": ones, "b": ones})[0].tolist() == (ones * 2).tolist()


def test_what_the_model_is(make_model):
    kind = (TensorProto.FLOAT, ["N", 3])
    model = make_model(
        [helper.make_node("Add", ["a", "w"], ["c"])], {"a": kind, "w": (TensorProto.FLOAT, [3])}, {"c": kind},
        {"w": np.ones(3, np.float32)}, producer_name="maker",
    )  # fmt: skip
    model.metadata_props.add(key="k", value="v")
    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    (argument,) = session.get_inputs()
    assert (argument.name, argument.type, argument.shape) == ("a", "tensor(float)", ["N", 3])
    assert [x.name for x in session.get_overridable_initializers()] == ["w"]
    assert [x.name for x in session.get_outputs()] == ["c"]
    meta = session.get_modelmeta()
    assert (meta.producer_name, meta.graph_name, meta.custom_metadata_map) == ("maker", "g", {"k": "v"})
    assert meta.version == 2**63 - 1
    assert session.get_providers() == ["CPUExecutionProvider"]
    assert session.get_provider_options() == {"CPUExecutionProvider": {}}
    a = np.zeros((1, 3), np.float32)
    assert session.run(["c"], {"a": a})[0].tolist() == [[1, 1, 1]]
    assert session.run(["c"], {"a": a, "w": np.full(3, 9, np.float32)})[0].tolist() == [[9, 9, 9]]


def test_inputs_of_many_kinds(add, ones):
    expected = (ones * 2).tolist()
    for value in (
        ones.tolist(),
        np.asfortranarray(ones),
        np.ones((2, 6), np.float32)[:, ::2],
        ones.astype(">f4"),
        ort.OrtValue.ortvalue_from_numpy(ones),
    ):
        assert add.run(None, {"a": value, "b": ones})[0].tolist() == expected
    assert add.run(None, {"a": ones[:0], "b": ones[:0]})[0].shape == (0, 3)


@pytest.mark.parametrize("level", ["ORT_DISABLE_ALL", "ORT_ENABLE_ALL"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (3,), (0,)])
def test_a_scalar_may_be_fed_with_any_shape(shape, level, make_model):
    """As in onnxruntime, which checks ranks only of inputs that are declared with one from 1 on."""
    model = make_model(
        [helper.make_node("Mul", ["x", "s"], ["p"]), helper.make_node("Identity", ["p"], ["y"])],
        {"x": (TensorProto.FLOAT, [1, 1]), "s": (TensorProto.FLOAT, [])}, {"y": (TensorProto.FLOAT, None)},
    )  # fmt: skip
    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    session = ort.InferenceSession(model, options)
    x, scale = np.full((1, 1), 3, np.float32), np.full(shape, 2, np.float32)
    (y,) = session.run(None, {"x": x, "s": scale})
    assert (y.shape, y.tolist()) == ((x * scale).shape, (x * scale).tolist())
    for wrong in (np.ones(1, np.float32), np.ones((), np.float32), np.ones((1, 1, 1), np.float32)):
        with pytest.raises(ort.InvalidArgument, match="invalid rank"):
            session.run(None, {"x": wrong, "s": scale})


def test_outputs_by_name(add, ones):
    assert len(add.run([], {"a": ones, "b": ones})) == 1
    assert len(add.run(["c", "c"], {"a": ones, "b": ones})) == 2


def test_results_are_the_callers_own(make_model, ones):
    kind = (TensorProto.FLOAT, [2, 3])
    nodes = [helper.make_node("Identity", ["a"], ["x"]), helper.make_node("Identity", ["w"], ["y"])]
    model = make_model(nodes, {"a": kind}, {"x": kind, "y": kind}, {"w": ones})
    session = ort.InferenceSession(model)
    x, y = session.run(None, {"a": ones})
    x[:] = y[:] = 7
    assert ones.max() == 1
    assert session.run(None, {"a": ones})[1].max() == 1


def test_run_with_ort_values_and_vectors(add, ones):
    value = ort.OrtValue.ortvalue_from_numpy(ones)
    (result,) = add.run_with_ort_values(["c"], {"a": value, "b": value})
    assert (result.shape(), result.data_type(), result.element_type()) == ([2, 3], "tensor(float)", 1)
    fetches = []
    add.run_with_ortvaluevector(ort.RunOptions(), ["a", "b"], [value, value], ["c"], fetches, [])
    assert fetches[0].numpy().tolist() == result.numpy().tolist()


def test_io_binding(add, ones):
    binding = add.io_binding()
    binding.bind_cpu_input("a", ones)
    binding.bind_ortvalue_input("b", ort.OrtValue.ortvalue_from_numpy(ones))
    binding.bind_output("c")
    add.run_with_iobinding(binding)
    assert binding.copy_outputs_to_cpu()[0].tolist() == (ones * 2).tolist()
    target = np.zeros((2, 3), np.float32)
    binding.clear_binding_outputs()
    binding.bind_output("c", "cpu", 0, np.float32, [2, 3], target.ctypes.data)
    source = np.full((2, 3), 4, np.float32)
    binding.bind_input("a", "cpu", 0, np.float32, [2, 3], source.ctypes.data)
    add.run_with_iobinding(binding)
    assert target.tolist() == (source + ones).tolist()
    assert binding.get_outputs()[0].numpy().ctypes.data == target.ctypes.data
    binding.clear_binding_inputs()
    with pytest.raises(ort.InvalidArgument, match="missing"):
        add.run_with_iobinding(binding)


def test_run_async(add, ones):
    done, seen = threading.Event(), []

    def callback(results, user_data, error):
        seen.append((results, user_data, error, threading.current_thread()))
        done.set()

    add.run_async(["c"], {"a": ones, "b": ones}, callback, "mine")
    assert done.wait(10)
    results, user_data, error, thread = seen[0]
    assert (results[0].tolist(), user_data, error) == ((ones * 2).tolist(), "mine", "")
    assert thread is not threading.current_thread()
    done.clear()
    add.run_async(["c"], {"a": ones, "b": np.ones((5, 3), np.float32)}, callback, None)
    assert done.wait(10)
    assert "sum" in seen[1][2]


def test_dlpack_shares_memory(ones):
    value = ort.OrtValue.from_dlpack(ones)
    assert value.data_ptr() == ones.ctypes.data
    assert np.from_dlpack(value).ctypes.data == ones.ctypes.data
    value.update_inplace(ones * 3)
    assert ones.max() == 3


def test_ort_values_of_other_types():
    bits = np.array([0x3F80, 0x4000], np.uint16)
    value = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, TensorProto.BFLOAT16)
    assert value.data_type() == "tensor(bfloat16)"
    assert value.numpy().astype(np.float32).tolist() == [1, 2]
    assert ort.OrtValue.ortvalue_from_shape_and_type([2, 3], np.int64).tensor_size_in_bytes() == 48
    assert not ort.OrtValue(None).has_value()
    assert ort.OrtValue([np.ones(2)]).is_tensor_sequence()


def test_sessions_are_shared_by_threads(add):
    def work(number):
        a = np.full((50, 3), number, np.float32)
        wrong.extend(number for _ in range(200) if add.run(None, {"a": a, "b": a})[0].max() != 2 * number)

    wrong: list[int] = []
    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_terminate_stops_a_run(make_model):
    body = helper.make_graph(
        [helper.make_node("Identity", ["cond"], ["more"]), helper.make_node("Sin", ["x"], ["y"])],
        "body",
        [helper.make_tensor_value_info(*value) for value in (("i", 7, []), ("cond", 9, []), ("x", 1, [1]))],
        [helper.make_tensor_value_info("more", 9, []), helper.make_tensor_value_info("y", 1, [1])],
    )  # fmt: skip
    model = make_model(
        [helper.make_node("Loop", ["", "go", "a"], ["z"], body=body)], {"a": (1, [1]), "go": (9, [])}, {"z": (1, [1])}
    )
    session, options = ort.InferenceSession(model), ort.RunOptions()
    threading.Timer(0.2, lambda: setattr(options, "terminate", True)).start()
    with pytest.raises(ort.Fail, match="stopped"):
        session.run(None, {"a": np.ones(1, np.float32), "go": np.array(True)}, options)


def test_ctrl_c_ends_a_run(make_model):
    """An endless loop in the main thread ends, and the session goes on working."""
    body = helper.make_graph(
        [helper.make_node("Identity", ["cond"], ["more"]), helper.make_node("Sin", ["x"], ["y"])],
        "body",
        [helper.make_tensor_value_info(*value) for value in (("i", 7, []), ("cond", 9, []), ("x", 1, [1]))],
        [helper.make_tensor_value_info("more", 9, []), helper.make_tensor_value_info("y", 1, [1])],
    )
    loop = helper.make_node("Loop", ["m", "", "a"], ["z"], body=body)
    session = ort.InferenceSession(make_model([loop], {"a": (1, [1]), "m": (7, [])}, {"z": (1, [1])}))
    a = np.ones(1, np.float32)
    with pytest.raises(KeyboardInterrupt):
        threading.Timer(0.2, lambda: signal.raise_signal(signal.SIGINT)).start()
        session.run(None, {"a": a, "m": np.array(2**60)})
    assert session.run(None, {"a": a, "m": np.array(1)})[0][0] == np.sin(a)[0]


def test_options_are_obeyed(add_model, tmp_path, make_model, ones):
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.intra_op_num_threads = 1
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    options.add_free_dimension_override_by_name("N", 2)
    options.add_session_config_entry("session.anything", "1")
    assert options.get_session_config_entry("session.anything") == "1"
    session = ort.InferenceSession(add_model, options)
    assert session.get_inputs()[0].shape == [2, 3]
    onnx.checker.check_model(onnx.load(tmp_path / "optimised.onnx"))
    with pytest.raises(ort.InvalidArgument, match="Got: 4 Expected: 2"):
        session.run(None, {"a": np.ones((4, 3), np.float32), "b": ones})
    with_weight = make_model(
        [helper.make_node("Add", ["a", "w"], ["c"])], {"a": (1, [3])}, {"c": (1, [3])}, {"w": np.ones(3, np.float32)}
    )
    options = ort.SessionOptions()
    options.add_initializer("w", ort.OrtValue.ortvalue_from_numpy(np.full(3, 5, np.float32)))
    assert ort.InferenceSession(with_weight, options).run(None, {"a": ones[0]})[0].tolist() == [6, 6, 6]


def test_profiling_writes_a_trace(add_model, ones, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ort.SessionOptions()
    options.enable_profiling = True
    options.profile_file_prefix = "trace_"
    session = ort.InferenceSession(add_model, options)
    assert session.get_profiling_start_time_ns() > 0
    session.run(None, {"a": ones, "b": ones})
    path = session.end_profiling()
    assert path.startswith("trace__")  # onnxruntime adds "_" to the prefix
    events = json.loads((tmp_path / path).read_text())
    assert [event["args"] for event in events if event["cat"] == "Node"] == [{"op_name": "Add"}]
    phases = [event for event in events if event["cat"] == "Session"]
    assert [event["name"] for event in phases] == ["model_loading_array", "session_initialization", "model_run"]
    assert all(event["ts"] >= 0 and event["dur"] > 0 for event in phases)
    assert session.end_profiling() == ""


def test_custom_operator(make_model):
    @ort.register_op("test.custom", "Scaled", shape_rule=lambda node: [node.inputs[0]])
    def scaled(x, *, factor=1.0):
        return x * np.float32(factor)

    imports = [helper.make_opsetid("", 20), helper.make_opsetid("test.custom", 1)]
    node = helper.make_node("Scaled", ["a"], ["b"], domain="test.custom", factor=3.0)
    model = make_model([node], {"a": (1, [2])}, {"b": (1, [2])}, imports=imports)
    assert ort.InferenceSession(model).run(None, {"a": np.ones(2, np.float32)})[0].tolist() == [3, 3]

    @ort.register_op("test.custom", "Scaled")
    def replaced(x, *, factor=1.0):
        return x + np.float32(factor)

    assert ort.InferenceSession(model).run(None, {"a": np.ones(2, np.float32)})[0].tolist() == [4, 4]
    wrong = helper.make_node("Scaled", ["a"], ["b"], domain="test.custom", other=3.0)
    with pytest.raises(ort.NotImplemented, match="other"):
        ort.InferenceSession(make_model([wrong], {"a": (1, [2])}, {"b": (1, [2])}, imports=imports))


def test_module_functions():
    assert ort.get_available_providers() == ["CPUExecutionProvider"]
    assert ort.get_device() == "CPU"
    assert ort.get_version_string() == ort.__version__
    ort.set_default_logger_severity(3)
    with pytest.raises(ort.GenaiError, match="severity"):
        ort.set_default_logger_severity(9)


def test_unavailable_providers_are_warned_about(add_model):
    with pytest.warns(UserWarning, match="CUDAExecutionProvider"):
        session = ort.InferenceSession(
            add_model, providers=[("CUDAExecutionProvider", {"device_id": 0}), "CPUExecutionProvider"]
        )
    assert session.get_providers() == ["CPUExecutionProvider"]


@pytest.mark.parametrize("number", [-1, "abc", None, 0.5, "9" * 5000])
def test_options_of_a_provider_are_judged_alike_where_it_is_not_there(add_model, number):
    with pytest.raises(ort.EPFail, match="device_id"):
        ort.InferenceSession(add_model, providers=[("CUDAExecutionProvider", {"device_id": number})])


def test_devices_that_there_are_not(add_model):
    binding = ort.InferenceSession(add_model).io_binding()
    with pytest.raises(ort.GenaiError, match="device 'foo' number 0") as raised:
        binding.bind_output("c", "foo")
    assert "an NVIDIA GPU" in raised.value.why and "'cuda'" in raised.value.fix
    with pytest.raises(ort.GenaiError, match="cannot hold values") as raised:
        ort.OrtValue.ortvalue_from_numpy(np.ones(2, np.float32), "cuda", 9)
    assert "device 'cpu' and number 0" in raised.value.fix and "--device" not in raised.value.fix


def test_a_data_file_that_shrinks_while_the_session_is_used(make_model, tmp_path):
    """A table that is read from the mapped file: a typed error, not a signal that ends the process."""
    table = np.arange(2**20, dtype=np.float32).reshape(-1, 4)
    model = make_model(
        [helper.make_node("Gather", ["table", "ids"], ["rows"])],
        {"ids": (TensorProto.INT64, ["N"])},
        {"rows": (TensorProto.FLOAT, ["N", 4])},
        {"table": table},
    )
    path = tmp_path / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="table.data", size_threshold=0)
    session = ort.InferenceSession(path)
    ids = np.array([1, 2**18 - 1])
    np.testing.assert_array_equal(session.run(None, {"ids": ids})[0], table[ids])
    os.truncate(tmp_path / "table.data", 0)
    with pytest.raises(ort.GenaiError, match=r"table\.data was changed"):
        session.run(None, {"ids": ids})


LOOP = helper.make_graph(
    [helper.make_node("Identity", ["go"], ["on"]), helper.make_node("Exp", ["x"], ["y"], name="within")],
    "body",
    [helper.make_tensor_value_info(*item) for item in (("turn", 7, []), ("go", 9, []), ("x", 1, [3]))],
    [helper.make_tensor_value_info(*item) for item in (("on", 9, []), ("y", 1, [3]))],
)


@pytest.mark.parametrize("kind", ["Loop", "If", "Scan", "function"])
def test_profiles_contain_the_operators_of_bodies(kind, make_model, tmp_path, monkeypatch):
    """A whole model can be in the body of a node."""
    monkeypatch.chdir(tmp_path)
    more = {}
    if kind == "Loop":
        node = helper.make_node("Loop", ["n", "", "a"], ["c"], body=LOOP)
    elif kind == "If":
        branches = {
            name: helper.make_graph(
                [helper.make_node("Exp", ["a"], [name])], name, [], [helper.make_tensor_value_info(name, 1, [3])]
            )
            for name in ("then_branch", "else_branch")
        }
        node = helper.make_node("If", ["flag"], ["c"], **branches)
    elif kind == "Scan":
        values = [helper.make_tensor_value_info(name, 1, []) for name in "xy"]
        body = helper.make_graph([helper.make_node("Exp", ["x"], ["y"])], "body", values[:1], values[1:])
        node = helper.make_node("Scan", ["a"], ["c"], body=body, num_scan_inputs=1)
    else:
        imports = [helper.make_opsetid("", 20), helper.make_opsetid("own", 1)]
        function = helper.make_function("own", "Own", ["x"], ["y"], [helper.make_node("Exp", ["x"], ["y"])], imports)
        node, more = helper.make_node("Own", ["a"], ["c"], domain="own"), {"functions": [function], "imports": imports}
    inputs = {"a": (1, [3]), "n": (7, []), "flag": (9, [])}
    options = ort.SessionOptions()
    options.enable_profiling = True
    model = make_model([node], inputs, {"c": (1, [3])}, **more)
    feed = {"a": np.zeros(3, np.float32), "n": np.array(2), "flag": np.array(True)}
    ort.InferenceSession(model).run(None, feed)  # other threads may compile kernels, whose time is not in the totals
    session = ort.InferenceSession(model, options)
    results = session.run(None, feed)
    calls = {"Loop": 2, "If": 1, "Scan": 3, "function": 1}[kind]
    totals = session.profile_totals()
    assert totals["Exp"][0] == calls
    if kind in totals:
        assert totals[kind][1] >= totals["Exp"][1]
    events = json.loads((tmp_path / session.end_profiling()).read_text())
    assert sum(event["args"].get("op_name") == "Exp" for event in events) == calls
    assert session.run(None, feed)[0].tolist() == results[0].tolist()  # without the profiler


def test_profiles_name_the_source(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ort.SessionOptions()
    options.enable_profiling = True
    session = ort.InferenceSession(saved, options)
    assert json.loads((tmp_path / session.end_profiling()).read_text())[0]["name"] == "model_loading_uri"


@pytest.fixture
def weights_beside(make_model, tmp_path):
    """The bytes of a model whose weight w, 3 everywhere, is in tmp_path/w.data."""
    model = make_model(
        [helper.make_node("Add", ["a", "w"], ["c"])], {"a": (1, [64])}, {"c": (1, [64])},
        {"w": np.full(64, 3, np.float32)},
    )  # fmt: skip
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="w.data", size_threshold=0)
    return (tmp_path / "m.onnx").read_bytes()


def test_bytes_with_weights_in_the_current_folder(weights_beside, tmp_path, monkeypatch):
    """As in onnxruntime, which has no other folder either."""
    monkeypatch.chdir(tmp_path)
    feed = {"a": np.ones(64, np.float32)}
    for source in (weights_beside, onnx.load(tmp_path / "m.onnx", load_external_data=False)):
        assert ort.InferenceSession(source).run(None, feed)[0].tolist() == [4] * 64
    theirs = pytest.importorskip("onnxruntime").InferenceSession(weights_beside, providers=["CPUExecutionProvider"])
    assert theirs.run(None, feed)[0].tolist() == [4] * 64
    contents = np.full(64, 5, np.float32).tobytes()
    options = ort.SessionOptions()
    options.add_external_initializers_from_files_in_memory(["w.data"], [contents], [len(contents)])
    assert ort.InferenceSession(weights_beside, options).run(None, feed)[0].tolist() == [6] * 64
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(ort.Fail, match=r"w\.data"):
        ort.InferenceSession(weights_beside)


@pytest.mark.parametrize("names", [["ConstantFolding", "GeluFusion"], ("fuse_gelu",), {"GeluFusionL2"}])
def test_disabled_optimizers(names, make_model, tmp_path):
    nodes = [
        helper.make_node("Div", ["a", "root"], ["scaled"]), helper.make_node("Erf", ["scaled"], ["error"]),
        helper.make_node("Add", ["error", "one"], ["more"]), helper.make_node("Mul", ["a", "more"], ["double"]),
        helper.make_node("Mul", ["double", "half"], ["c"]),
    ]  # fmt: skip
    constants = {"root": np.float32(np.sqrt(2)), "one": np.float32(1), "half": np.float32(0.5)}
    model = make_model(nodes, {"a": (1, [8])}, {"c": (1, [8])}, {k: np.asarray(v) for k, v in constants.items()})
    x, results = np.linspace(-2, 2, 8, dtype=np.float32), []
    for disabled in (None, [], ["NoSuchOptimizer"], names):
        options = ort.SessionOptions()
        options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
        session = ort.InferenceSession(model, options, disabled_optimizers=disabled)
        written = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
        assert ("Erf" in written) == (disabled == names)
        results.append(session.run(None, {"a": x})[0])
    np.testing.assert_allclose(results, np.stack([results[0]] * 4), rtol=1e-5, atol=1e-6)


def test_disabled_constant_folding(make_model, tmp_path):
    nodes = [helper.make_node("Neg", ["w"], ["n"]), helper.make_node("Add", ["a", "n"], ["c"])]
    model = make_model(nodes, {"a": (1, [2])}, {"c": (1, [2])}, {"w": np.array([1, 2], np.float32)})
    for disabled in (None, ["ConstantFolding"]):
        options = ort.SessionOptions()
        options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
        session = ort.InferenceSession(model, options, disabled_optimizers=disabled)
        written = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
        assert written == (["Neg", "Add"] if disabled else ["Add"])
        np.testing.assert_array_equal(session.run(None, {"a": np.ones(2, np.float32)})[0], [0, -1])


@pytest.mark.parametrize("wrong", ["GeluFusion", [3], 3])
def test_disabled_optimizers_that_are_no_names(wrong, add_model):
    with pytest.raises(ort.GenaiError, match="disabled_optimizers is") as caught:
        ort.InferenceSession(add_model, disabled_optimizers=wrong)
    assert caught.value.fix == "pass a list, such as ['GeluFusion']"


def test_the_fallback_can_be_disabled_at_once(add_model):
    assert ort.InferenceSession(add_model)._session.falls_back
    assert not ort.InferenceSession(add_model, enable_fallback=0)._session.falls_back
    with pytest.raises(ort.InvalidArgument, match="takes no other"):
        ort.InferenceSession(add_model, other=1)
