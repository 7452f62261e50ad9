"""Sessions: how they are made, what they say of themselves, and what runs take and give."""

from __future__ import annotations

import importlib
import os
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

import genai

CPU = "CPUExecutionProvider"


@pytest.fixture(scope="session")
def columns(make_model):
    """Y = X [rows, 2] @ [[1], [2]], with rows fixed or free."""

    def made(rows):
        weights = {"W": np.array([[1], [2]], np.float32)}
        nodes = [helper.make_node("MatMul", ["X", "W"], ["Y"])]
        return make_model(nodes, {"X": (1, [rows, 2])}, {"Y": (1, [rows, 1])}, weights)

    return made


@pytest.fixture(scope="session")
def strings(make_model):
    kind = (TensorProto.STRING, [2, 2])
    return make_model([helper.make_node("Identity", ["input:0"], ["output:0"])], {"input:0": kind}, {"output:0": kind})


@pytest.fixture(scope="session")
def conjunction(make_model):
    """Its inputs in an order that is not that of the alphabet."""
    kind = (TensorProto.BOOL, [2, 2])
    nodes = [helper.make_node("And", ["second", "first"], ["both"])]
    return make_model(nodes, {"second": kind, "first": kind}, {"both": kind})


def test_get_version_string(ort):
    assert ort.get_version_string()


def test_get_build_info(ort):
    assert "Build Info" in ort.get_build_info()


def test_run_device(ort):
    assert "CPU" in ort.get_device()


def test_enabling_and_disabling_telemetry(ort):
    ort.disable_telemetry_events()
    if ort.__name__ == "genai":  # there it would begin to send
        ort.enable_telemetry_events()


def test_get_providers(ort, product):
    assert CPU in ort.get_available_providers()
    assert ort.get_all_providers()[-1] == CPU
    session = ort.InferenceSession(product.SerializeToString(), providers=ort.get_available_providers())
    assert CPU in session.get_providers()


def test_session_providers(opened, product):
    assert opened(product).get_providers() == [CPU]


def test_set_providers(opened, product):
    session = opened(product)
    session.set_providers([CPU])
    assert session.get_providers() == [CPU]


def test_invalid_set_providers(opened, product, errors):
    session = opened(product)
    with pytest.raises(errors, match="InvalidProvider"):
        session.set_providers(["InvalidProvider"])


@pytest.mark.parametrize(
    ("providers", "options"),
    [
        (3, None), ([3], None), ([CPU], 3), ([CPU], ["no dict"]), ([CPU, CPU], [{"1": "2"}]),
        ([(CPU, {"1": "2"})], [{"3": "4"}]), ([(CPU, "no dict")], None),
    ],
)  # fmt: skip
def test_check_and_normalize_provider_args(ort, product, providers, options):
    """What is refused; there a session then goes on with the processor alone, so that its own check is asked."""
    with pytest.raises(ValueError) as caught:
        if ort.__name__ == "genai":
            ort.InferenceSession(product.SerializeToString(), None, providers, options)
        else:
            ort.capi.onnxruntime_inference_collection.check_and_normalize_provider_args(providers, options, [CPU])
    assert ort.__name__ == "onnxruntime" or (caught.value.why and caught.value.fix)


def test_check_and_normalize_provider_args_accepted(ort, product, x):
    source = product.SerializeToString()
    for providers, options in (
        (None, None), ([], None), ((CPU,), None), ([(CPU, {})], None), ([CPU], ({},)),
    ):  # fmt: skip
        session = ort.InferenceSession(source, None, providers, options)
        assert session.get_providers() == [CPU]
        assert session.run(None, {"X": x})[0].tolist() == (x * x).tolist()
    with pytest.warns(UserWarning, match="CPUExecutionProvider"):
        assert ort.InferenceSession(source, None, [CPU, CPU]).get_providers() == [CPU]


def test_deserialization_from_path_object(ort, product, tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(product.SerializeToString())
    for source in (path, str(path)):
        assert ort.InferenceSession(source, providers=[CPU]).get_inputs()[0].name == "X"


def test_run_model(opened, product, x):
    session = opened(product)
    (given,), (result,) = session.get_inputs(), session.get_outputs()
    assert (given.name, given.shape, given.type) == ("X", [3, 2], "tensor(float)")
    assert (result.name, result.shape) == ("Y", [3, 2])
    for about in (session.get_input_memory_infos(), session.get_output_memory_infos()):
        assert len(about) == 1 and about[0] is not None
    assert len(session.get_input_epdevices()) == 1, "None where no native provider's device holds the input"
    np.testing.assert_allclose(session.run(["Y"], {"X": x})[0], x * x)


def test_run_model_from_bytes(ort, product, x):
    session = ort.InferenceSession(product.SerializeToString(), providers=[CPU])
    np.testing.assert_allclose(session.run(["Y"], {"X": x})[0], x * x)


def test_run_base_model(ort, opened, make_model):
    """Factors of rank 2 beside the weights, which may be given and otherwise are zeros."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["plain"]),
        helper.make_node("MatMul", ["x", "a"], ["low"]),
        helper.make_node("MatMul", ["low", "b"], ["more"]),
        helper.make_node("Add", ["plain", "more"], ["y"]),
    ]
    constants = {
        "w": np.arange(16, dtype=np.float32).reshape(4, 4),
        "a": np.zeros((4, 2), np.float32),
        "b": np.zeros((2, 4), np.float32),
    }
    inputs = {"x": (1, [4, 4]), "a": (1, [4, 2]), "b": (1, [2, 4])}
    session = opened(make_model(nodes, inputs, {"y": (1, [4, 4])}, constants))
    x = np.ones((4, 4), np.float32)
    assert session.run(None, {"x": x}, ort.RunOptions())[0][0].tolist() == [24, 28, 32, 36]
    factors = {"a": np.ones((4, 2), np.float32), "b": np.ones((2, 4), np.float32)}
    assert session.run(None, {"x": x, **factors})[0][0].tolist() == [32, 36, 40, 44]


def test_run_async(ort, opened, product, x):
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    done, seen, mine = threading.Event(), [], object()

    def callback(results, data, error):
        seen.append((results, data, error))
        done.set()

    opened(product, options).run_async(["Y"], {"X": x}, callback, mine)
    assert done.wait(10)
    ((results, data, error),) = seen
    assert data is mine and error == ""
    np.testing.assert_allclose(results[0], x * x)


def test_run_model2(opened, columns, x):
    session = opened(columns(3))
    assert (session.get_inputs()[0].shape, session.get_outputs()[0].shape) == ([3, 2], [3, 1])
    assert session.run(["Y"], {"X": x})[0].tolist() == [[5], [11], [17]]


def test_run_model2_contiguous(opened, columns, x):
    """Arrays whose rows do not lie one after another."""
    session = opened(columns(3))
    for view in (x[:, ::-1][:, [1, 0]], np.asfortranarray(x), np.repeat(x, 2, axis=0)[::2], x[::-1][::-1]):
        assert session.run(None, {"X": view})[0].tolist() == [[5], [11], [17]]


def test_run_model_symbolic_input(opened, columns, x):
    session = opened(columns("rows"))
    assert (session.get_inputs()[0].shape, session.get_outputs()[0].shape) == (["rows", 2], ["rows", 1])
    assert session.run(None, {"X": x})[0].tolist() == [[5], [11], [17]]
    assert session.run(None, {"X": x[:1]})[0].tolist() == [[5]]


def test_run_model_multiple_threads(ort, opened, product, x):
    options = ort.SessionOptions()
    options.log_verbosity_level, options.logid = 1, "several threads"
    session, right = opened(product, options), []

    def work(name):
        mine = ort.RunOptions()
        mine.logid = name
        right.extend(np.array_equal(session.run([], {"X": x}, run_options=mine)[0], x * x) for _ in range(20))

    threads = [threading.Thread(target=work, args=(f"thread {number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 80


def test_run_model_with_optional_sequence_input(opened, make_model):
    kind = helper.make_optional_type_proto(
        helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, [5]))
    )
    model = make_model([helper.make_node("Identity", ["x"], ["y"])], {}, {}, version=16)
    model.graph.input.append(helper.make_value_info("x", kind))
    model.graph.output.append(helper.make_value_info("y", kind))
    x = [np.arange(1, 6, dtype=np.float32)]
    (y,) = opened(model).run(["y"], {"x": x})
    assert [item.tolist() for item in y] == [x[0].tolist()]


def test_list_as_input(opened, product, x):
    assert opened(product).run([], {"X": x.tolist()})[0].tolist() == (x * x).tolist()


def test_boolean_inputs(opened, conjunction):
    session = opened(conjunction)
    assert [(item.name, item.type, item.shape) for item in session.get_inputs()] == [
        ("second", "tensor(bool)", [2, 2]),
        ("first", "tensor(bool)", [2, 2]),
    ], "in the order of the model"
    feed = {"first": np.array([[True, False], [True, False]]), "second": np.array([[True, True], [False, False]])}
    (both,) = session.run(None, feed)
    assert both.dtype == bool and both.tolist() == [[True, False], [False, False]]


@pytest.mark.parametrize(
    "words",
    [
        pytest.param([["this", "is"], ["identity", "test"]], id="test_string_list_as_input"),
        pytest.param(np.array([["this", "is"], ["identity", "test"]]), id="test_string_input1"),
        pytest.param(np.array([["Olá", "你好"], ["여보세요", "hello"]]), id="test_string_input2"),
        pytest.param(np.array([[b"this", b"is"], [b"identity", b"test"]]), id="test_input_bytes"),
        pytest.param(np.array([["this", "is"], ["identity", "test"]], object), id="test_input_object"),
        pytest.param(np.array([[b"must", b"have"], [b"same", b"size"]], np.void), id="test_input_void"),
    ],
)
def test_strings(opened, strings, words):
    session = opened(strings)
    (given,), (result,) = session.get_inputs(), session.get_outputs()
    assert (given.type, given.shape, result.type, result.shape) == ("tensor(string)", [2, 2]) * 2
    expected = [[word if isinstance(word, str) else bytes(word).decode() for word in row] for row in words]
    (y,) = session.run([result.name], {given.name: words})
    if isinstance(words, np.ndarray) and words.dtype.kind == "S":  # there, full elements run into the next one
        y = y.astype("S8").astype(str)
    assert y.tolist() == expected


def test_raise_wrong_num_inputs(opened, conjunction):
    with pytest.raises(
        ValueError, match=r"equired inputs \(\['second'\]\) are missing from input feed \(\['first'\]\)"
    ):
        opened(conjunction).run([], {"first": np.ones((2, 2), bool)})


def test_model_meta(opened, make_model):
    model = make_model([helper.make_node("Abs", ["x"], ["y"])], {"x": (1, [1])}, {"y": (1, [1])}, producer_name="maker")
    model.graph.name, model.domain, model.model_version = "net", "org.example", 3
    model.doc_string, model.graph.doc_string = "about the model", "about the graph"
    model.metadata_props.add(key="k", value="v")
    meta = opened(model).get_modelmeta()
    assert (meta.producer_name, meta.graph_name, meta.domain, meta.version) == ("maker", "net", "org.example", 3)
    assert (meta.description, meta.graph_description) == ("about the model", "about the graph")
    assert meta.custom_metadata_map == {"k": "v"}


def test_sequence_length(opened, make_model, x):
    model = make_model([helper.make_node("SequenceLength", ["X"], ["Y"])], {}, {"Y": (TensorProto.INT64, [])})
    model.graph.input.append(helper.make_tensor_sequence_value_info("X", TensorProto.FLOAT, [3, 2]))
    session = opened(model)
    assert (session.get_inputs()[0].type, session.get_outputs()[0].type) == ("seq(tensor(float))", "tensor(int64)")
    assert session.run(None, {"X": [x, x]})[0] == 2


def test_sequence_construct(opened, make_model):
    kind = (TensorProto.INT64, [2, 3])
    nodes = [helper.make_node("SequenceConstruct", ["one", "two"], ["both"])]
    model = make_model(nodes, {"one": kind, "two": kind}, {})
    model.graph.output.append(helper.make_tensor_sequence_value_info("both", TensorProto.INT64, [2, 3]))
    session, one = opened(model), np.arange(6).reshape(2, 3)
    assert session.get_outputs()[0].type == "seq(tensor(int64))"
    (both,) = session.run(None, {"one": one, "two": one + 1})
    assert [item.tolist() for item in both] == [one.tolist(), (one + 1).tolist()]


def test_sequence_insert(ort, opened, make_model):
    model = make_model([helper.make_node("SequenceInsert", ["before", "tensor"], ["after"])], {}, {})
    model.graph.input.append(helper.make_tensor_sequence_value_info("before", TensorProto.INT64, None))
    model.graph.input.append(helper.make_tensor_value_info("tensor", TensorProto.INT64, [2, 3]))
    model.graph.output.append(helper.make_tensor_sequence_value_info("after", TensorProto.INT64, None))
    options = ort.SessionOptions()
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    session, tensor = opened(model, options), np.arange(6).reshape(2, 3)
    assert [item.type for item in session.get_inputs()] == ["seq(tensor(int64))", "tensor(int64)"]
    assert [item.tolist() for item in session.run(None, {"tensor": tensor, "before": []})[0]] == [tensor.tolist()]


def test_run_output_does_not_alias_input_passthrough(ort, opened, make_model):
    """An input that is an output as well: results are the caller's own, whatever runs come later."""
    kind = (1, [1, 2])
    nodes = [helper.make_node("Add", ["x", "ten"], ["more"])]
    model = make_model(nodes, {"x": kind}, {"more": kind, "x": kind}, {"ten": np.float32(10)})
    options = ort.SessionOptions()
    for level in ("ORT_DISABLE_ALL", "ORT_ENABLE_ALL"):
        options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
        session, kept = opened(model, options), []
        for number in range(7):
            x = np.full((1, 2), number, np.float32)
            kept.append(session.run(None, {"x": x}))
            assert not np.shares_memory(kept[-1][1], x)
            x[:] = -1
        assert [[value[0, 0] for value in run] for run in kept] == [[number + 10, number] for number in range(7)]


def test_run_session_owned_output_is_zero_copy(ort, opened, make_model):
    """What a kernel wrote is what the caller gets: there an array over the session's memory, here the very array."""
    kind = (1, ["n"])
    session = opened(make_model([helper.make_node("Add", ["x", "x"], ["y"])], {"x": kind}, {"y": kind}))
    x = np.ones(2**20, np.float32)
    session.run(None, {"x": x})
    tracemalloc.start()
    (y,) = session.run(None, {"x": x})
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1.5 * y.nbytes
    assert ort.__name__ == "genai" or y.base is not None


def test_allocation_plan_works_with_only_execute_path_to_fetches_option(ort, opened, make_model):
    """Two values of one size, of which a run needs only one."""
    kind = (1, [10])
    nodes = [
        helper.make_node("Add", ["a", "b"], ["sum"]), helper.make_node("Sub", ["a", "b"], ["difference"]),
        helper.make_node("Neg", ["sum"], ["p"]), helper.make_node("Neg", ["difference"], ["q"]),
    ]  # fmt: skip
    session = opened(make_model(nodes, {"a": kind, "b": kind}, {"p": kind, "q": kind}))
    options = ort.RunOptions()
    options.only_execute_path_to_fetches = True
    a, b = np.arange(10, dtype=np.float32), np.ones(10, np.float32)
    for name, expected in (("p", -(a + b)), ("q", -(a - b)), ("p", -(a + b))):
        (got,) = session.run([name], {"a": a, "b": b}, options)
        assert got.tolist() == expected.tolist()


def test_3_level_control_flow_ops_graph(opened, make_model):
    """Branches in branches, the innermost of which read inputs of the whole model; an optional one is not there."""

    def branch(name, nodes, result):
        return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(result, 1, [1, 2])])

    def choice(condition, result, yes, no):
        return helper.make_node("If", [condition], [result], then_branch=yes, else_branch=no)

    given = branch(
        "given",
        [helper.make_node("OptionalGetElement", ["x1"], ["e"]), helper.make_node("Add", ["e", "x2"], ["u"])],
        "u",
    )
    third = branch("third", [helper.make_node("Add", ["x3", "x2"], ["v"])], "v")
    second = branch("second", [helper.make_node("Neg", ["x2"], ["w"])], "w")
    inner = branch(
        "inner",
        [
            helper.make_node("GreaterOrEqual", ["x3", "zero"], ["ge"]),
            helper.make_node("Squeeze", ["ge"], ["positive"]),
            choice("positive", "z", third, second),
        ],
        "z",
    )
    nodes = [helper.make_node("OptionalHasElement", ["x1"], ["has"]), choice("has", "y", given, inner)]
    constants = {"zero": np.zeros(1, np.float32)}
    model = make_model(nodes, {"x2": (1, [1, 2]), "x3": (1, [1])}, {"y": (1, [1, 2])}, constants, version=15)
    optional = helper.make_optional_type_proto(helper.make_tensor_type_proto(1, [1, 2]))
    model.graph.input.insert(0, helper.make_value_info("x1", optional))
    session, x2 = opened(model), np.ones((1, 2), np.float32)
    for x1, x3, expected in ((None, -1, -1), (None, 4, 5), (x2 * 2, -1, 3)):
        feed = {"x1": x1, "x2": x2, "x3": np.array([x3], np.float32)}
        assert session.run(["y"], feed)[0].tolist() == [[expected] * 2]


@pytest.mark.parametrize(
    ("data", "is_inside"),
    [
        pytest.param("blobs/weights", True, id="test_symlink_model_and_data_under_same_directory"),
        pytest.param("blobs/data/weights", True, id="test_symlink_with_data_in_model_sub_dir"),
        pytest.param("elsewhere/weights", False, id="test_symlink_with_data_not_in_model_sub_dir"),
    ],
)
def test_symlinks(ort, make_model, tmp_path, data, is_inside):
    """A folder of links into another one, as download caches lay models out: data must lie beside the real model."""
    tensor = helper.make_tensor("w", TensorProto.FLOAT, [10], np.zeros(10))
    tensor.ClearField("float_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "data.bin"), ("offset", "0"), ("length", "40")):
        tensor.external_data.add(key=key, value=value)
    nodes = [helper.make_node("Constant", [], ["c"], value=tensor), helper.make_node("Add", ["x", "c"], ["y"])]
    model = make_model(nodes, {"x": (1, [10])}, {"y": (1, [10])})
    shown, real = tmp_path / "snapshots" / "version", tmp_path / "blobs" / "model"
    for path in (shown / "x", real, tmp_path / data):
        path.parent.mkdir(parents=True, exist_ok=True)
    real.write_bytes(model.SerializeToString())
    (tmp_path / data).write_bytes(np.arange(10, dtype=np.float32).tobytes())
    for name, target in (("model.onnx", real), ("data.bin", tmp_path / data)):
        (shown / name).symlink_to(Path(os.path.relpath(target, shown)))
    if not is_inside:
        with pytest.raises(Exception, match=r"outside|validation failed"):
            ort.InferenceSession(shown / "model.onnx", providers=[CPU])
        return
    session = ort.InferenceSession(shown / "model.onnx", providers=[CPU])
    assert session.run(None, {"x": np.zeros(10, np.float32)})[0].tolist() == list(range(10))


@pytest.fixture
def backend(ort):
    """The module of ONNX's interface for backends."""
    return importlib.import_module("genai.compat.onnxruntime.backend" if ort is genai else "onnxruntime.backend")


def test_run_model_backend(backend, product, x):
    """testRunModel of the backend: a model that was prepared runs on an array, or a list of them."""
    model = product.SerializeToString()
    for inputs in (x, [x]):
        (found,) = backend.prepare(model, device="CPU").run(inputs)
        np.testing.assert_array_equal(found, x * x)
    prepared = backend.prepare(model)
    assert backend.prepare(prepared) is prepared
    np.testing.assert_array_equal(backend.run(model, x)[0], x * x)
    assert backend.supports_device("CPU") and not backend.supports_device("no device")


def test_what_the_backend_refuses(product, x):
    module = importlib.import_module("genai.compat.onnxruntime.backend")
    for call in (
        lambda: module.prepare(product, device="no device"),
        lambda: module.prepare(product, intra_op_threads=1),
        lambda: module.prepare(product).run([x, x]),
        lambda: module.prepare(product).run(x, add_run_config_entry="x"),
        lambda: module.SessionBackend.run_node(None, None),
    ):
        with pytest.raises(genai.GenaiError) as caught:
            call()
        assert caught.value.why and caught.value.fix
    options = {"intra_op_num_threads": 1, "enable_profiling": False}
    np.testing.assert_array_equal(module.run_model(product, {"X": x}, **options)[0], x * x)


RECORDS = "session.record_ep_graph_assignment_info"


def test_get_graph_provider_assignment_info(ort, opened, make_model):
    """Nodes of branches too; each is a subgraph of its own on the CPU."""
    kind = (TensorProto.FLOAT, [3])
    projections = {
        f"{name}_branch": helper.make_graph(
            [helper.make_node(op_type, ["m"], [name], name=name)],
            name,
            [],
            [helper.make_tensor_value_info(name, *kind)],
        )
        for name, op_type in (("then", "Neg"), ("else", "Abs"))
    }
    nodes = [
        helper.make_node("Add", ["a", "b"], ["s"], name="sum"),
        helper.make_node("Mul", ["s", "b"], ["m"], name="product"),
        helper.make_node("If", ["c"], ["y"], name="choice", **projections),
    ]
    model = make_model(nodes, {"a": kind, "b": kind, "c": (TensorProto.BOOL, [])}, {"y": kind}, version=18)
    options = ort.SessionOptions()
    options.add_session_config_entry(RECORDS, "1")
    found = opened(model, options).get_provider_graph_assignment_info()
    assert {subgraph.ep_name for subgraph in found} == {"CPUExecutionProvider"}
    described = [[(node.name, node.domain, node.op_type) for node in subgraph.get_nodes()] for subgraph in found]
    expected = [("sum", "Add"), ("product", "Mul"), ("choice", "If"), ("then", "Neg"), ("else", "Abs")]
    assert sorted(described) == sorted([[(name, "", op_type)] for name, op_type in expected])


@pytest.mark.parametrize("entry", [None, "0"])
def test_get_graph_provider_assignment_info_not_enabled(ort, opened, product, errors, entry):
    options = ort.SessionOptions()
    if entry is not None:
        options.add_session_config_entry(RECORDS, entry)
    with pytest.raises(errors, match=RECORDS):
        opened(product, options).get_provider_graph_assignment_info()
