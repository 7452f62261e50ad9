"""Bad models and bad feeds: onnxruntime's class names, our three parts."""

from __future__ import annotations

import os

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import genai as ort


def has_three_parts(error: ort.GenaiError) -> bool:
    return bool(error.what and error.why and error.fix)


FEEDS = {
    "unknown name": ({"a": 0, "b": 0, "q": 0}, "InvalidArgument", "invalid input name: q"),
    "name instead": ({"x": 0, "b": 0}, "InvalidArgument", "invalid input name: x"),
    "missing": ({"a": 0}, "InvalidArgument", r"\['b'\]"),
    "empty": ({}, "InvalidArgument", "missing"),
    "double": ({"a": np.ones((2, 3)), "b": 0}, "InvalidArgument", r"tensor\(double\).*tensor\(float\)"),
    "integers": ({"a": np.ones((2, 3), np.int64), "b": 0}, "InvalidArgument", r"tensor\(int64\)"),
    "rank": ({"a": np.ones((1, 2, 3), np.float32), "b": 0}, "InvalidArgument", "Got: 3 Expected: 2"),
    "extent": ({"a": np.ones((2, 4), np.float32), "b": 0}, "InvalidArgument", "index: 1 Got: 4 Expected: 3"),
    "ragged list": ({"a": [[1.0], [1.0, 2.0]], "b": 0}, "InvalidArgument", "not an array"),
    "object": ({"a": object(), "b": 0}, "InvalidArgument", "object of type object"),
    "nothing": ({"a": None, "b": 0}, "InvalidArgument", "NoneType"),
    "text": ({"a": np.array([["x", "y", "z"]]), "b": 0}, "InvalidArgument", r"tensor\(string\)"),
    "not a dict": ([1, 2], "InvalidArgument", "list"),
    "unfitting shapes": ({"a": np.ones((5, 3), np.float32), "b": 0}, "Fail", "sum"),
}


@pytest.mark.parametrize(("feed", "kind", "message"), FEEDS.values(), ids=FEEDS)
def test_bad_feeds(add, ones, feed, kind, message):
    if isinstance(feed, dict):
        feed = {name: ones if isinstance(value, int) else value for name, value in feed.items()}
    with pytest.raises(getattr(ort, kind), match=message) as caught:
        add.run(None, feed)
    assert has_three_parts(caught.value)


def test_bytes_that_are_no_text(make_model):
    kind = (TensorProto.STRING, ["n"])
    session = ort.InferenceSession(make_model([helper.make_node("Identity", ["a"], ["b"])], {"a": kind}, {"b": kind}))
    for given in (np.array([b"\xff\xfe"]), np.array([b"\xff\xfe"], np.void), np.array([b"\xff"], object), [b"\xff"]):
        with pytest.raises(ort.InvalidArgument, match="'a' contains bytes that are not UTF-8") as caught:
            session.run(None, {"a": given})
        assert has_three_parts(caught.value)
    given = np.array([b"a\0b", "c", 1, None], object)
    assert session.run(None, {"a": given})[0].tolist() == ["a\0b", "c", "1", "None"]


def test_bad_output_name(add, ones):
    with pytest.raises(ort.InvalidArgument, match="invalid output name: zz"):
        add.run(["zz"], {"a": ones, "b": ones})


def _model(node: onnx.NodeProto, imports=(("", 20),), outputs=(("c", 1, ["N", 3]),), **inputs):
    given = inputs or {"a": (1, ["N", 3]), "b": (1, ["N", 3])}
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info(name, *kind) for name, kind in given.items()],
        [helper.make_tensor_value_info(*output) for output in outputs],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid(*i) for i in imports], ir_version=10)


MODELS = {
    "unknown operator": (_model(helper.make_node("Frobnicate", ["a"], ["c"])), "NotImplemented", "Frobnicate"),
    "unknown domain": (
        _model(helper.make_node("Foo", ["a"], ["c"], domain="my.dom"), (("", 20), ("my.dom", 1))),
        "NotImplemented",
        "my.dom::Foo",
    ),
    "dangling input": (_model(helper.make_node("Add", ["a", "zz"], ["c"])), "InvalidGraph", "zz"),
    "mixed types": (
        _model(helper.make_node("Add", ["a", "b"], ["c"]), a=(1, [3]), b=(7, [3])),
        "InvalidGraph",
        "float and int64",
    ),
    "opset of the future": (_model(helper.make_node("Add", ["a", "b"], ["c"]), (("", 99),)), "InvalidGraph", "99"),
    "attribute that does not exist": (_model(helper.make_node("Relu", ["a"], ["c"], foo=1)), "InvalidGraph", "foo"),
    "domain not imported": (
        _model(helper.make_node("Foo", ["a"], ["c"], domain="my.dom")),
        "InvalidGraph",
        "my.dom",
    ),
}


@pytest.mark.parametrize(("model", "kind", "message"), MODELS.values(), ids=MODELS)
def test_bad_models(model, kind, message):
    with pytest.raises(getattr(ort, kind), match=message) as caught:
        ort.InferenceSession(model.SerializeToString())
    assert has_three_parts(caught.value)


def test_bad_sources(tmp_path):
    junk, empty = tmp_path / "junk.onnx", tmp_path / "empty.onnx"
    junk.write_bytes(b"not a model at all")
    empty.write_bytes(b"")
    for source, kind in (
        (tmp_path / "nope.onnx", ort.NoSuchFile),
        (junk, ort.InvalidProtobuf),
        (empty, ort.InvalidProtobuf),
        (b"", ort.InvalidProtobuf),
        (b"junk", ort.InvalidProtobuf),
        (tmp_path, ort.NoSuchFile),
    ):
        with pytest.raises(kind) as caught:
            ort.InferenceSession(source)
        assert has_three_parts(caught.value)
    for source in (None, 3, [b""]):
        with pytest.raises(TypeError, match="unable to load"):
            ort.InferenceSession(source)


def test_external_data_must_exist(add_model):
    model = onnx.ModelProto()
    model.CopyFrom(add_model)
    tensor = model.graph.initializer.add(name="w", dims=[2], data_type=TensorProto.FLOAT, data_location=1)
    tensor.external_data.add(key="location", value="nofile.bin")
    with pytest.raises(ort.Fail, match=r"nofile\.bin"):
        ort.InferenceSession(model.SerializeToString())


@pytest.mark.parametrize(("kind", "length", "message"), [
    ("folder", "12", "is a folder"), ("pipe", "12", "is a pipe"), ("absent", "12", "is missing"),
    ("file", str(2**62), f"stores {2**62} bytes"), ("file", "9" * 50, "of 50 digits"), ("file", "-1", "length '-1'"),
])  # fmt: skip
def test_external_data_that_is_no_file(kind, length, message, make_model, tmp_path):
    model = make_model(
        [helper.make_node("Add", ["x", "w"], ["y"])], {"x": (1, [3])}, {"y": (1, [3])}, {"w": np.zeros(3, np.float32)}
    )
    weight, path = model.graph.initializer[0], tmp_path / "weights"
    weight.ClearField("raw_data")
    weight.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", "weights"), ("offset", "0"), ("length", length)):
        weight.external_data.add(key=key, value=value)
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "file":
        path.write_bytes(bytes(12))
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ort.GenaiError, match=message) as caught:
        ort.InferenceSession(tmp_path / "m.onnx")
    assert caught.value.why and caught.value.fix


def test_newer_ir(add_model):
    model = onnx.ModelProto()
    model.CopyFrom(add_model)
    model.ir_version = 99
    with pytest.raises(ort.InvalidGraph, match="99"):
        ort.InferenceSession(model)


PRODUCT = helper.make_node("MatMul", ["a", "b"], ["c"], name="product")
RANGE = helper.make_node("Range", ["a", "b", "d"], ["c"])
RUNS = {
    "shapes that cannot be multiplied": (
        _model(PRODUCT, outputs=[("c", 1, None)], a=(1, [2, 3]), b=(1, [4, 5])),
        {"a": np.ones((2, 3), np.float32), "b": np.ones((4, 5), np.float32)},
        "Fail",
        "product",
    ),
    "gather out of range": (
        _model(helper.make_node("Gather", ["a", "b"], ["c"]), outputs=[("c", 1, None)], a=(1, [2]), b=(7, [1])),
        {"a": np.ones(2, np.float32), "b": np.array([5])},
        "InvalidArgument",
        "5",
    ),
    "reshape impossible": (
        _model(helper.make_node("Reshape", ["a", "b"], ["c"]), outputs=[("c", 1, None)], a=(1, [None]), b=(7, [1])),
        {"a": np.ones(4, np.float32), "b": np.array([3])},
        "Fail",
        "reshape",
    ),
    "absurd size": (
        _model(helper.make_node("ConstantOfShape", ["a"], ["c"]), outputs=[("c", 1, None)], a=(7, [2])),
        {"a": np.array([2**40, 2**20])},
        "Fail",
        "the limit is",
    ),
    "absurd expansion": (
        _model(helper.make_node("Expand", ["a", "b"], ["c"]), outputs=[("c", 1, None)], a=(1, [1]), b=(7, [1])),
        {"a": np.ones(1, np.float32), "b": np.array([2**50])},
        "Fail",
        "the limit is",
    ),
    "endless range": (
        _model(RANGE, outputs=[("c", 1, None)], a=(1, []), b=(1, []), d=(1, [])),
        {"a": np.float32(0), "b": np.float32(1), "d": np.float32(1e-30)},
        "Fail",
        "the limit is|no end",
    ),
}


@pytest.mark.parametrize(("model", "feed", "kind", "message"), RUNS.values(), ids=RUNS)
def test_failing_runs(model, feed, kind, message):
    with pytest.raises(getattr(ort, kind), match=message) as caught:
        ort.InferenceSession(model).run(None, feed)
    assert has_three_parts(caught.value)


WRONG_ATTRIBUTES = [
    *[(op, attributes) for op in ("MaxPool", "AveragePool", "LpPool") for attributes in (
        {"kernel_shape": [0, 2]}, {"kernel_shape": [2, 2], "strides": [0, 1]},
        {"kernel_shape": [2, 2], "pads": [-1, 0, 0, 0]},
        {"kernel_shape": [2, 2], "dilations": [0, 1]}, {"kernel_shape": 2},
    )],
    *[(op, attributes) for op in ("Conv", "ConvTranspose") for attributes in (
        {"strides": [0, 0]}, {"strides": [-1, 1]}, {"dilations": [0, 1]}, {"group": 0}, {"group": -1},
        {"kernel_shape": [0, 3]}, {"strides": "a"}, {"strides": 1.5}, {"auto_pad": 1}, {"pads": [-1, 0, 0, 0]},
    )],
    ("ConvTranspose", {"output_padding": [-1, 0]}), ("ConvTranspose", {"output_shape": [-1, 0]}),
    *[(op, {"blocksize": size}) for op in ("DepthToSpace", "SpaceToDepth") for size in (0, -1, 2.0)],
    *[("Softmax", {"axis": axis}) for axis in ("a", 1.0, [1])], ("LRN", {"size": 0}), ("LRN", {"size": -3}),
    ("Cast", {"to": 99}), ("Cast", {"to": -1}), ("Cast", {"to": "a"}), ("Transpose", {"perm": "ab"}),
    ("Shape", {"start": "a"}),
    ("LeakyRelu", {"alpha": 1}), ("LeakyRelu", {"alpha": "x"}), ("Elu", {"alpha": [1.0]}), ("Trilu", {"upper": "a"}),
    ("Dropout", {"seed": "a"}), ("EyeLike", {"dtype": 99}), ("Multinomial", {"sample_size": -1}),
    ("Flatten", {"axis": "1"}),
]  # fmt: skip


@pytest.mark.parametrize(("op_type", "attributes"), WRONG_ATTRIBUTES)
def test_attributes_that_cannot_be(op_type, attributes, make_model):
    """Types are those of the operator's definition, counts and sizes large enough, before any kernel sees them."""
    inputs = ["x", "w"] if op_type.startswith("Conv") else ["x"]
    node = helper.make_node(op_type, inputs, ["y"], name="it", **attributes)
    kinds = {"x": (TensorProto.FLOAT, [1, 4, 4, 4]), "w": (TensorProto.FLOAT, [4, 4, 3, 3])}
    model = make_model([node], {name: kinds[name] for name in inputs}, {"y": (TensorProto.FLOAT, None)})
    wrong = list(attributes)[-1]
    with pytest.raises(ort.InvalidGraph, match=f"node 'it' .{op_type}.*: its attribute '{wrong}' is ") as caught:
        ort.InferenceSession(model)
    value = attributes[wrong]
    assert str(value) in caught.value.what
    assert caught.value.why.startswith("by the operator's definition, the attribute ")
    onnxruntime = pytest.importorskip("onnxruntime")
    if (op_type, attributes) not in ((("ConvTranspose"), {"pads": [-1, 0, 0, 0]}),):
        with pytest.raises(
            Exception, match=r"ONNXRuntimeError|Exception"
        ):  # it refuses them too, at once or when it runs
            peer = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
            peer.run(None, {name: np.ones(kinds[name][1], np.float32) for name in inputs})


def test_wrong_declared_output(make_model, ones):
    node = helper.make_node("Relu", ["a"], ["c"])
    session = ort.InferenceSession(make_model([node], {"a": (1, None)}, {"c": (1, [9, 9])}))
    with pytest.warns(UserWarning, match=r"\[2, 3\].*\[9, 9\]"):
        session.run(None, {"a": ones})


def test_bad_options(add_model):
    options = ort.SessionOptions()
    for name, value in (
        ("graph_optimization_level", 17),
        ("intra_op_num_threads", -1),
        ("enable_profiling", "yes"),
        ("nonsense", 1),
    ):
        with pytest.raises(ort.GenaiError):
            setattr(options, name, value)
    with pytest.raises(ort.GenaiError, match="register_op"):
        options.register_custom_ops_library("x.so")
    options.add_initializer("nope", ort.OrtValue.ortvalue_from_numpy(np.ones(1, np.float32)))
    with pytest.raises(ort.InvalidArgument, match="nope"):
        ort.InferenceSession(add_model, options)
    with pytest.raises(ort.InvalidArgument, match="provider"):
        ort.InferenceSession(add_model, providers=[3])
    with pytest.raises(ort.InvalidArgument, match="provider_options"):
        ort.InferenceSession(add_model, providers=["CPUExecutionProvider"], provider_options=[{}, {}])
    with pytest.raises(ort.InvalidArgument, match="speed"):
        ort.InferenceSession(add_model, speed="fast")


BOTH_OPTIONS = ("SessionOptions", "RunOptions")


# What onnxruntime refuses: numbers for levels and modes, levels of logging that it has not, numbers of 64 bits.
@pytest.mark.parametrize(("owner", "name", "value"), [
    *[("SessionOptions", name, value) for name in ("graph_optimization_level", "execution_mode", "execution_order")
      for value in (0, 99, "ORT_ENABLE_ALL", None)],
    *[(owner, "log_severity_level", value) for owner in BOTH_OPTIONS for value in (-2, 5, 9, 2**40, "1")],
    *[(owner, "log_verbosity_level", value) for owner in BOTH_OPTIONS for value in (2**31, 1.5, None)],
    *[(owner, "logid", value) for owner in BOTH_OPTIONS for value in (1, None)],
    ("SessionOptions", "inter_op_num_threads", 2**31), ("SessionOptions", "profile_file_prefix", 3),
    ("SessionOptions", "use_deterministic_compute", "no"), ("RunOptions", "terminate", "yes"),
    ("RunOptions", "only_execute_path_to_fetches", b"1"),
])  # fmt: skip
def test_options_that_onnxruntime_refuses(owner, name, value):
    options = getattr(ort, owner)()
    before = getattr(options, name)
    with pytest.raises(ort.OptionError, match=f"{owner}.{name}") as caught:
        setattr(options, name, value)
    assert caught.value.what and caught.value.why and caught.value.fix
    assert getattr(options, name) is before


@pytest.mark.parametrize("owner", ["SessionOptions", "RunOptions"])
def test_options_that_onnxruntime_converts(owner):
    options = getattr(ort, owner)()
    for name, value, found in (
        ("log_severity_level", np.int64(4), 4), ("log_severity_level", -1, -1), ("log_verbosity_level", -5, -5),
        ("logid", b"x", "x"), ("terminate" if owner == "RunOptions" else "enable_profiling", 1, True),
        ("terminate" if owner == "RunOptions" else "enable_profiling", None, False),
    ):  # fmt: skip
        setattr(options, name, value)
        assert getattr(options, name) == found
        assert type(getattr(options, name)) is type(found)


def test_a_binding_without_outputs(add, ones):
    binding = add.io_binding()
    binding.bind_cpu_input("a", ones)
    binding.bind_cpu_input("b", ones)
    with pytest.raises(ort.InvalidArgument, match="at least one output"):
        add.run_with_iobinding(binding)


def test_bad_bindings(add, ones):
    binding = add.io_binding()
    for call in (
        lambda: binding.bind_cpu_input("zz", ones),
        lambda: binding.bind_output("zz"),
        lambda: binding.bind_output("c", "cuda"),
        lambda: binding.bind_output("c", "cpu", 0, None, None, 4096),
    ):
        with pytest.raises(ort.GenaiError):
            call()
    binding.bind_cpu_input("a", ones)
    binding.bind_cpu_input("b", ones)
    binding.bind_ortvalue_output("c", ort.OrtValue.ortvalue_from_numpy(np.zeros((5, 3), np.float32)))
    with pytest.raises(ort.GenaiError, match="cannot replace"):
        add.run_with_iobinding(binding)


@pytest.mark.parametrize(
    ("text", "feed", "message"),
    [
        ("(float[A, B, C, D] x) => (float[E, F, G, H] y) { y = DepthToSpace<blocksize = 3>(x) }", {},
         "4 channels cannot be divided into blocks of 3 x 3"),
        ("(float[A, B, C, D] x) => (float[E, F, G, H] y) { y = SpaceToDepth<blocksize = 3>(x) }", {},
         "an image of 2 x 6 cannot be divided into blocks of 3 x 3"),
        ("(float[A, B, C, D] x, float[4] s) => (float[E, F, G, H] y) { y = Resize(x, , s) }",
         {"s": [1, 1, np.nan, 2]}, r"the scales \[1.0, 1.0, nan, 2.0\] are not finite"),
        ("(float[A, B, C, D] x, float[1, 4] r, int64[1] i) => (float[E, F, G, H] y) { y = RoiAlign(x, r, i) }",
         {"r": [[0, 0, np.inf, 4]], "i": np.array([0])}, r"region 0 is \[0.0, 0.0, inf, 4.0\], which is not finite"),
    ],
)  # fmt: skip
def test_values_that_no_image_fits(text, feed, message):
    session = ort.InferenceSession(onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 18]> g {text}'))
    given = {name: np.asarray(value, None if name == "i" else np.float32) for name, value in feed.items()}
    with pytest.raises(ort.Fail, match=message):
        session.run(None, {"x": np.ones((1, 4, 2, 6), np.float32), **given})
