"""Operators of small models: repeated runs are a single program and agree with onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from genai.errors import ArgumentError
from genai.session.config import SessionConfig
from genai.session.session import Session

RNG = np.random.default_rng(8)
ML = "ai.onnx.ml"


def _model(nodes: list[Any], width: int, outputs: dict[str, int], constants: dict[str, Any] | None = None) -> Any:
    graph = helper.make_graph(
        nodes, "small", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", width])],
        [helper.make_tensor_value_info(name, kind, None) for name, kind in outputs.items()],
        [numpy_helper.from_array(value, name) for name, value in (constants or {}).items()],
    )  # fmt: skip
    sets = [helper.make_opsetid("", 17), helper.make_opsetid(ML, 3)]
    return helper.make_model(graph, opset_imports=sets, ir_version=8)


def _theirs(model: Any, x: Any) -> list[Any]:
    runtime = pytest.importorskip("onnxruntime")
    return runtime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": x})


def _agrees(model: Any, x: Any, *, is_single: bool = True, rtol: float = 2e-5) -> None:
    """Compare six runs, of one and of two threads, with onnxruntime; rows alone give the same bits."""
    expected = _theirs(model, x)
    firsts = []
    for threads in (1, 2):
        session = Session(model, SessionConfig(threads=threads))
        runs = [list(session.run({"x": x}).values()) for _ in range(6)]
        for ours, theirs in zip(runs[0], expected, strict=True):
            assert np.asarray(ours).shape == np.asarray(theirs).shape
            if np.asarray(theirs).dtype.kind == "f":
                np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=2e-6)
            else:
                np.testing.assert_array_equal(ours, theirs)
        for run in runs[1:]:
            assert all(a.tobytes() == b.tobytes() for a, b in zip(run, runs[0], strict=True))
        if is_single and threads == 1:
            (form,) = session._repeated._forms.values()
            assert [op.op_type for op in form.calls] == ["Joined"]
            assert not any(op.kernel._is_wrong for op in form.calls)
        firsts.append(runs[0])
        alone = list(session.run({"x": x[-1:]}).values())
        assert all(a.tobytes() == b[-1:].tobytes() for a, b in zip(alone, runs[0], strict=True))
    assert all(a.tobytes() == b.tobytes() for a, b in zip(*firsts, strict=True))


def _numbers(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.oracle
@pytest.mark.parametrize("rows", [1, 5, 200])
@pytest.mark.parametrize("transform", ["NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO"])
@pytest.mark.parametrize("classes, scores", [(3, 3), (2, 2), (20, 20), (2, 1)])
@pytest.mark.parametrize("strings", [False, True])
def test_linear_classifiers(classes: int, scores: int, transform: str, rows: int, strings: bool) -> None:
    if scores == 1 and transform.startswith("SOFTMAX"):
        pytest.skip("softmax of one score is not a binary classifier")
    names: dict[str, Any] = {"classlabels_ints": [7 * n - 3 for n in range(classes)]}
    if strings:
        names = {"classlabels_strings": [f"class {n}" for n in range(classes)]}
    node = helper.make_node(
        "LinearClassifier", ["x"], ["label", "scores"], domain=ML, coefficients=_numbers(scores * 9).tolist(),
        intercepts=_numbers(scores).tolist(), post_transform=transform, multi_class=int(scores > 1), **names,
    )  # fmt: skip
    kind = TensorProto.STRING if strings else TensorProto.INT64
    model = _model([node], 9, {"label": kind, "scores": TensorProto.FLOAT})
    if strings:
        theirs, x = None, _numbers(rows, 9)
        theirs = _theirs(model, x)
        session = Session(model, SessionConfig(threads=1))
        for _ in range(5):
            labels, found = session.run({"x": x}).values()
            assert labels.tolist() == list(theirs[0])
            np.testing.assert_allclose(found, theirs[1], rtol=2e-5, atol=2e-6)
    else:
        _agrees(model, _numbers(rows, 9), is_single=transform != "SOFTMAX_ZERO")


@pytest.mark.oracle
@pytest.mark.parametrize("rows", [1, 6, 200])
@pytest.mark.parametrize("targets", [1, 3, 33])
def test_linear_regressors(targets: int, rows: int) -> None:
    node = helper.make_node(
        "LinearRegressor", ["x"], ["y"], domain=ML, coefficients=_numbers(targets * 17).tolist(), targets=targets,
        intercepts=_numbers(targets).tolist(),
    )  # fmt: skip
    _agrees(_model([node], 17, {"y": TensorProto.FLOAT}), _numbers(rows, 17))


@pytest.mark.oracle
@pytest.mark.parametrize("rows", [1, 6, 200])
@pytest.mark.parametrize("norm", ["MAX", "L1", "L2"])
def test_scaled_and_normalized_rows(norm: str, rows: int) -> None:
    width = 19
    nodes = [
        helper.make_node(
            "Scaler", ["x"], ["y"], domain=ML, offset=_numbers(width).tolist(), scale=_numbers(width).tolist()
        ),
        helper.make_node("Abs", ["y"], ["positive"]),  # onnxruntime divides by the largest magnitude
        helper.make_node("Normalizer", ["positive"], ["z"], domain=ML, norm=norm),
        helper.make_node("ArgMax", ["z"], ["largest"], axis=1, keepdims=0),
        helper.make_node("ArgMin", ["z"], ["least"], axis=-1, keepdims=1),
    ]
    outputs = {"z": TensorProto.FLOAT, "largest": TensorProto.INT64, "least": TensorProto.INT64}
    _agrees(_model(nodes, width, outputs), _numbers(rows, width))


@pytest.mark.oracle
@pytest.mark.parametrize("rows", [1, 6, 200])
@pytest.mark.parametrize("addend", [(), (1,), (5,), (1, 5), (1, 1)])
@pytest.mark.parametrize("alpha, transposed", [(1.0, 0), (-2.0, 1)])
def test_small_products(alpha: float, transposed: int, addend: tuple[int, ...], rows: int) -> None:
    constants = {"w": _numbers(*((5, 18) if transposed else (18, 5))), "c": _numbers(*addend), "v": _numbers(5, 31)}
    nodes = [
        helper.make_node("Gemm", ["x", "w", "c"], ["y"], alpha=alpha, transB=transposed),
        helper.make_node("Sum", ["y", "c"], ["z"]),
        helper.make_node("MatMul", ["z", "v"], ["out"]),
        helper.make_node("ReduceMax", ["out"], ["most"], axes=[1]),
        helper.make_node("Less", ["out", "most"], ["less"]),
    ]
    outputs = {"out": TensorProto.FLOAT, "less": TensorProto.BOOL}
    _agrees(_model(nodes, 18, outputs, constants), _numbers(rows, 18), is_single=rows < 100, rtol=1e-4)


def test_an_addend_for_each_row() -> None:
    nodes = [
        helper.make_node("ReduceSumSquare", ["x"], ["squares"], axes=[1]),
        helper.make_node("Gemm", ["x", "w", "squares"], ["y"], alpha=-2.0),
    ]
    w, x = _numbers(4, 3), _numbers(7, 4)
    session = Session(_model(nodes, 4, {"y": TensorProto.FLOAT}, {"w": w}), SessionConfig(threads=1))
    for _ in range(5):
        expected = -2 * x @ w + np.square(x).sum(axis=1, keepdims=True)
        np.testing.assert_allclose(session.run({"x": x})["y"], expected, rtol=1e-5, atol=1e-5)


def test_extremes_of_nan_and_ties() -> None:
    nodes = [
        helper.make_node("ArgMax", ["x"], ["most"], axis=1, keepdims=0),
        helper.make_node("ArgMin", ["x"], ["least"], axis=1, keepdims=0),
    ]
    session = Session(_model(nodes, 4, {"most": TensorProto.INT64, "least": TensorProto.INT64}))
    nan, inf = np.nan, np.inf
    x = np.array([[1, 2, 2, 1], [nan, 1, 2, nan], [3, nan, 9, nan], [-inf, -inf, -inf, -inf]], np.float32)
    for _ in range(5):
        found = session.run({"x": x})
        assert found["most"].tolist() == x.argmax(axis=1).tolist()
        assert found["least"].tolist() == x.argmin(axis=1).tolist()


def test_columns_that_depend_on_the_input() -> None:
    """Also in a program, an index that is too large is an error that names the operator and the indices."""
    nodes = [
        helper.make_node("ArgMax", ["x"], ["largest"], axis=1, keepdims=0),
        helper.make_node("ArrayFeatureExtractor", ["table", "largest"], ["y"], domain=ML),
    ]
    model = _model(nodes, 4, {"y": TensorProto.INT64}, {"table": np.array([10, 20, 30])})
    session = Session(model, SessionConfig(threads=1))
    for _ in range(6):
        assert session.run({"x": np.array([[0, 0, 1, 0], [0, 1, 0, 0]], np.float32)})["y"].tolist() == [[30, 20]]
        with pytest.raises(ArgumentError, match=r"ArrayFeatureExtractor: indices range from 0 to 3"):
            session.run({"x": np.array([[0, 0, 0, 1], [1, 0, 0, 0]], np.float32)})


def test_maps_do_not_divide_a_program() -> None:
    nodes = [
        helper.make_node("Softmax", ["x"], ["p"], axis=1),
        helper.make_node("ZipMap", ["p"], ["map"], domain=ML, classlabels_int64s=[4, 5, 6]),
        helper.make_node("ArgMax", ["p"], ["largest"], axis=1, keepdims=0),
    ]
    model = _model(nodes, 3, {"largest": TensorProto.INT64})
    kind = helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    model.graph.output.append(onnx.helper.make_value_info("map", helper.make_sequence_type_proto(kind)))
    session = Session(model, SessionConfig(threads=1))
    for _ in range(6):
        x = _numbers(2, 3)
        found = session.run({"x": x})
        assert found["largest"].tolist() == x.argmax(axis=1).tolist()
        assert [list(row) for row in found["map"]] == [[4, 5, 6]] * 2
        assert [max(row, key=row.get) - 4 for row in found["map"]] == found["largest"].tolist()
    (form,) = session._repeated._forms.values()
    assert [op.op_type for op in form.calls] == ["Joined", "ZipMap"]
