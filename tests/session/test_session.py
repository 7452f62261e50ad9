"""The session below onnxruntime's names: settings, results by name, observers, and errors of its own."""

from __future__ import annotations

import platform
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

import genai
from genai import errors
from genai.compat.onnxruntime.errors import renamed
from genai.onnx.types import DataType
from genai.optimize.base import Level
from genai.session.config import SessionConfig
from genai.session.loop import OpCall
from genai.session.running import Profiler
from genai.session.session import Session


def test_what_it_says_of_a_model(add_model):
    session = Session(add_model)
    assert [(value.name, str(value.type), value.type.shape) for value in session.inputs] == [
        ("a", "tensor(float)", ("N", 3)), ("b", "tensor(float)", ("N", 3)),
    ]  # fmt: skip
    assert [value.type.dtype for value in session.outputs] == [DataType.FLOAT] and not session.overridable
    assert session.header.graph.name == "g" and not session.header.graph.nodes
    assert session.providers == [] and session.assignment == [] and session.profiler is None


def test_results_by_name(make_model, ones):
    nodes = [helper.make_node("Neg", ["a"], ["b"]), helper.make_node("Abs", ["b"], ["c"])]
    session = Session(make_model(nodes, {"a": (1, [2, 3])}, {"b": (1, [2, 3]), "c": (1, [2, 3])}))
    assert list(session.run({"a": ones})) == ["b", "c"]
    assert session.run({"a": ones.tolist()}, ["c"])["c"].tolist() == ones.tolist()
    with pytest.raises(errors.ArgumentError, match="invalid output name: d") as caught:
        session.run({"a": ones}, ["d"])
    assert type(caught.value) is errors.ArgumentError


def test_observing(make_model, ones):
    nodes = [helper.make_node("Neg", ["a"], ["n"]), helper.make_node("Abs", ["n"], ["c"])]
    session = Session(make_model(nodes, {"a": (1, [2, 3])}, {"c": (1, [2, 3])}), SessionConfig(level=Level.NONE))
    seen = []
    session.observe({"a": ones}, lambda name, value: seen.append((name, float(value.sum()))))
    assert seen == [("a", 6), ("n", -6), ("c", 6)]
    with pytest.raises(errors.RunStopped):
        session.observe({"a": ones}, lambda name, value: None, stop=lambda: len(seen) > 2)


def test_settings(make_model, ones):
    model = make_model(
        [helper.make_node("Add", ["a", "w"], ["c"])], {"a": (1, ["N", 3])}, {"c": (1, ["N", 3])},
        {"w": np.ones(3, np.float32)},
    )  # fmt: skip
    config = SessionConfig(threads=1, dims={"N": 2}, initializers={"w": np.full(3, 5, np.float32)}, profile_prefix="p")
    session = Session(model, config)
    assert session.inputs[0].type.shape == (2, 3)
    assert session.run({"a": ones})["c"].tolist() == (ones + 5).tolist()
    assert session.profiler is not None and sum(calls for calls, _ in session.profiler.totals().values()) == 1
    for wrong in ({"threads": -1}, {"max_value_bytes": -1}, {"dims": {"N": -2}}):
        with pytest.raises(errors.OptionError, match="cannot be negative"):
            SessionConfig(**wrong)


def test_loading_is_cancelled(add_model):
    answers = iter([False, True])
    with pytest.raises(errors.LoadCancelledError):
        Session(add_model, SessionConfig(is_cancelled=lambda: next(answers)))


def test_its_errors_are_its_own(make_model, add_model, ones, tmp_path):
    product = make_model([helper.make_node("MatMul", ["a", "a"], ["c"])], {"a": (1, None)}, {"c": (1, None)})
    gather = make_model(
        [helper.make_node("Gather", ["a", "i"], ["c"])], {"a": (1, None), "i": (7, [1])}, {"c": (1, None)}
    )
    unknown = make_model([helper.make_node("Frobnicate", ["a"], ["c"])], {"a": (1, None)}, {"c": (1, None)})
    for kind, action in {
        errors.NodeError: lambda: Session(product).run({"a": ones}),
        errors.ArgumentError: lambda: Session(gather).run({"a": ones, "i": np.array([9])}),
        errors.UnsupportedOpError: lambda: Session(unknown),
        errors.ModelFolderError: lambda: Session(tmp_path / "absent.onnx"),
        errors.ProtobufError: lambda: Session(b"junk"),
        errors.SourceTypeError: lambda: Session(3),
        errors.ProviderError: lambda: Session(add_model, SessionConfig(providers=[("Nobody", {})])),
        errors.RunStopped: lambda: Session(product).run({"a": ones}, stop=lambda: True),
    }.items():
        with pytest.raises(kind) as caught:
            action()
        assert type(caught.value) is kind and caught.value.what and caught.value.why and caught.value.fix


def test_what_nobody_foresaw_is_an_error_too(add, add_model, ones, monkeypatch):
    def fail(*given):
        raise KeyError("surprise")

    session = Session(add_model)
    monkeypatch.setattr(session, "checked", fail)
    with pytest.raises(errors.InternalError, match="cannot be run") as caught:
        session.run({"a": ones, "b": ones})
    assert isinstance(caught.value.__cause__, KeyError) and "surprise" in caught.value.why
    monkeypatch.setattr("genai.session.session.prepare", fail)
    with pytest.raises(errors.InternalError, match="cannot be loaded"):
        Session(add_model)
    with pytest.raises(genai.InvalidArgument, match="InferenceSession cannot take"):
        genai.InferenceSession(add_model)


@pytest.mark.parametrize("loading", [False, True])
@pytest.mark.parametrize("name", [
    "ArgumentError InvalidArgument", "NodeError Fail", "ProviderError EPFail", "OutOfMemoryError RuntimeException",
    "ExternalDataError ExternalDataFail", "ModelFolderError NoSuchFile", "UnsupportedOpError NotImplemented",
    "UnsupportedModelError Fail", "ProtobufError InvalidProtobuf", "GraphError InvalidGraph", "InputError InputError",
    "OptionError OptionError", "SourceTypeError SourceTypeError", "DeviceError DeviceError",
])  # fmt: skip
def test_onnxruntimes_names(name, loading):
    """Parts stay as they are; what other functions raise too gets another name only where a model is loaded."""
    ours, theirs = (getattr(genai, one) for one in name.split())
    always = ours in (
        errors.ArgumentError, errors.NodeError, errors.ProviderError, errors.OutOfMemoryError, errors.ExternalDataError
    )  # fmt: skip
    error = ours("what", "why", "fix")
    found = renamed(error, loading=loading)
    assert type(found) is (theirs if always or loading else ours)
    assert (found.what, found.why, found.fix) == ("what", "why", "fix")
    assert theirs is genai.Fail or issubclass(theirs, ours)


def test_warnings_point_at_the_caller(make_model, ones):
    model = make_model([helper.make_node("Relu", ["a"], ["c"])], {"a": (1, None)}, {"c": (1, [9, 9])})
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        Session(model).run({"a": ones})
        genai.InferenceSession(model).run(None, {"a": ones})
        genai.InferenceSession(model, providers=["XnnpackExecutionProvider"])
    assert [warning.filename for warning in seen] == [__file__] * 3


A, B = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(4, dtype=np.float32)
FIRST = np.array(0)
RAGGED = helper.make_node("SequenceConstruct", ["a", "b"], ["s"])
PICKED = helper.make_node("SequenceAt", ["s", "first"], ["picked"])


def sequence_info(name, kind=1):
    return helper.make_tensor_sequence_value_info(name, kind, None)


def info(name, kind=1, shape=None):
    return helper.make_tensor_value_info(name, kind, shape)


def nested(name: str) -> onnx.NodeProto:
    """A node whose body makes the sequence: y = a, or [a, a] for Loop and Scan."""
    if name == "If":
        split = helper.make_node("SplitToSequence", ["a", "sizes"], ["parts"], axis=1)
        joined = helper.make_node("ConcatFromSequence", ["parts"], ["joined"], axis=1)
        branches = {
            "then_branch": helper.make_graph([RAGGED, PICKED], "then", [], [info("picked")]),
            "else_branch": helper.make_graph([split, joined], "else", [], [info("joined")]),
        }
        return helper.make_node("If", ["flag"], ["y"], **branches)
    if name == "Loop":
        body = helper.make_graph(
            [RAGGED, PICKED, helper.make_node("Identity", ["go"], ["on"])],
            "body",
            [info("turn", 7, []), info("go", 9, [])],
            [info("on", 9, []), info("picked")],
        )
        return helper.make_node("Loop", ["turns", ""], ["y"], body=body)
    body = helper.make_graph(
        [RAGGED, PICKED, helper.make_node("Add", ["picked", "row"], ["sum"])],
        "body",
        [info("row", 1, [])],
        [info("sum", 1, [2, 3])],
    )
    return helper.make_node("Scan", ["rows"], ["y"], body=body, num_scan_inputs=1)


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("name", ["If", "Loop", "Scan"])
def test_constant_sequences_of_unlike_shapes_in_bodies(make_model, name, flag):
    model = make_model(
        [nested(name)], {"flag": (9, []), "turns": (7, []), "rows": (1, [2])}, {"y": (1, None)},
        {"a": A, "b": B, "first": FIRST, "sizes": np.array([1, 2])},
    )  # fmt: skip
    feed = {"flag": np.array(flag), "turns": np.array(2), "rows": np.zeros(2, np.float32)}
    for level in (Level.NONE, Level.ALL):
        found = Session(model, SessionConfig(level=level)).run(feed)["y"]
        np.testing.assert_array_equal(found, A if name == "If" else np.stack([A, A]))


def test_constant_sequences_of_unlike_shapes(make_model, ones):
    words = np.array([["u"], ["v"]], object)
    nodes = [
        RAGGED,
        helper.make_node("SequenceInsert", ["s", "b", "first"], ["longer"]),
        helper.make_node("SequenceErase", ["longer", "last"], ["shorter"]),
        helper.make_node("SequenceConstruct", ["words", "word"], ["texts"]),
        helper.make_node("SplitToSequence", ["b", "sizes"], ["parts"]),
        helper.make_node("Optional", ["s"], ["maybe"]),
        helper.make_node("OptionalGetElement", ["maybe"], ["there"]),
        helper.make_node("Identity", ["x"], ["y"]),
    ]
    expected = {
        "s": [A, B], "longer": [B, A, B], "shorter": [B, A], "texts": [words, words[0]], "parts": [B[:1], B[1:]],
        "there": [A, B],
    }  # fmt: skip
    constants = {
        "a": A, "b": B, "words": words, "word": words[0], "first": FIRST, "last": np.array(-1),
        "sizes": np.array([1, 3]),
    }  # fmt: skip
    model = make_model(nodes, {"x": (1, [2, 3])}, {"y": (1, [2, 3])}, constants)
    model.graph.output.extend(sequence_info(name, 8 if name == "texts" else 1) for name in expected)
    for level in (Level.NONE, Level.ALL):
        found = Session(model, SessionConfig(level=level)).run({"x": ones})
        for name, arrays in expected.items():
            assert [array.tolist() for array in found[name]] == [array.tolist() for array in arrays], name


@pytest.mark.parametrize("level", [Level.NONE, Level.ALL])
def test_results_share_no_memory_with_constants_and_inputs(make_model, ones, level):
    """Nor do the elements of a sequence."""
    nodes = [
        helper.make_node("Add", ["a", "a"], ["twice"]),
        helper.make_node("SequenceConstruct", ["twice", "b"], ["s"]),
        helper.make_node("Identity", ["x"], ["y"]),
        helper.make_node("Identity", ["given"], ["same"]),
    ]
    model = make_model(nodes, {"x": (1, [2, 3])}, {"y": (1, [2, 3]), "twice": (1, [2, 3])}, {"a": A, "b": B})
    model.graph.input.append(sequence_info("given"))
    model.graph.output.extend([sequence_info("s"), sequence_info("same")])
    session = Session(model, SessionConfig(level=level))
    feed = {"x": ones, "given": [np.ones(3, np.float32), np.ones(2, np.float32)]}
    for _ in range(2):
        found = session.run(feed)
        assert found["twice"].tolist() == (A * 2).tolist()
        assert [array.tolist() for array in found["s"]] == [(A * 2).tolist(), B.tolist()]
        assert [array.tolist() for array in found["same"]] == [[1, 1, 1], [1, 1]]
        for array in (found["twice"], found["y"], *found["s"], *found["same"]):
            array[...] = 7


def test_totals_exclude_the_time_to_compile() -> None:
    profiler, op = Profiler("p"), OpCall("node", "Add", np.add, (), (), (), ())
    profiler.record(op, 1_000, 9_000, compile_ns=7_000)
    profiler.record(op, 10_000, 12_000)
    assert profiler.totals() == {"Add": (2, 3_000)}


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or platform.machine() != "x86_64", reason="elsewhere, processes load numba"
)
def test_a_session_on_the_cpu_does_not_load_what_it_does_not_use() -> None:
    """Modules of other devices and of NumPy's random numbers and masked arrays take megabytes."""
    model = Path(__file__).with_name("models") / "forest_pipeline.onnx"
    code = f"import sys, genai; genai.InferenceSession({str(model)!r}); print(*sys.modules)"
    for _ in range(2):  # the first process may compile kernels
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    unwanted = {"genai.session.cuda_operators", "numpy.random", "numpy.ma", "numba", "html"}
    assert not unwanted & set(result.stdout.split())


def test_sessions_do_not_import_the_kernels_of_decoders(make_model, tmp_path):
    """Their import would take as long as the rest of a small session, and several megabytes."""
    nodes = [
        helper.make_node("Gather", ["x", "rows"], ["g"]),
        helper.make_node("MatMul", ["g", "w"], ["p"]),
        helper.make_node("Softmax", ["p"], ["y"]),
    ]
    constants = {"rows": np.array([1, 0]), "w": np.ones((32, 16), np.float32)}
    onnx.save(make_model(nodes, {"x": (1, [2, 32])}, {"y": (1, [2, 16])}, constants), tmp_path / "model.onnx")
    code = (
        "import sys, genai, numpy as np\n"
        f"session = genai.InferenceSession({str(tmp_path / 'model.onnx')!r})\n"
        "session.run(None, {'x': np.ones((2, 32), np.float32)})\n"
        "parts = ('cpu.attention', 'cpu.executor', 'cpu.linear.calls', 'cpu.moe', 'cpu.sampling', 'ir', 'reference')\n"
        "print([part for part in parts if f'genai.kernels.{part}' in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
