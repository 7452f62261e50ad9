"""Graphs of 16-bit floats are computed in float32, and rounded at outputs and explicit casts."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import genai
from genai.compat.onnxruntime.inference_session import InferenceSession
from genai.onnx.reader import read_model
from genai.optimize.halves import compute_halves_in_float32
from genai.optimize.shapes import infer_shapes
from genai.session.config import SessionConfig
from genai.session.session import Session

HALF, FLOAT, BRAIN = TensorProto.FLOAT16, TensorProto.FLOAT, TensorProto.BFLOAT16
NAME = compute_halves_in_float32.name
X = np.array([[0.1, -2.0, 300.0], [1.5, 60000.0, -0.3]], np.float16)


def node(op, inputs, output, **attributes):
    return helper.make_node(op, list(inputs), [output], **attributes)


def rewritten(model):
    read = read_model(model)
    infer_shapes(read)
    assert compute_halves_in_float32.apply(read) == 1
    infer_shapes(read)
    assert compute_halves_in_float32.apply(read) == 0
    return [one.op_type for one in read.graph.nodes]


def test_only_the_ends_are_halves(make_model):
    """x * 2 overflows float16, but x * 2 / 4 does not; the old way rounds every result."""
    nodes = [node("Mul", "xw", "m"), node("Div", "md", "y"), node("Exp", "y", "z")]
    constants = {"w": np.float16([2]), "d": np.float16([4])}
    model = make_model(nodes, {"x": (HALF, [2, 3])}, {"y": (HALF, [2, 3]), "z": (HALF, [2, 3])}, constants)
    assert rewritten(model) == ["Cast", "Mul", "Div", "Exp", "Cast", "Cast"]
    found = Session(model).run({"x": X})
    assert found["y"].dtype == np.float16
    np.testing.assert_array_equal(found["y"], (X.astype(np.float32) / 2).astype(np.float16))
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(found["z"], np.exp(X.astype(np.float32) / 2).astype(np.float16), rtol=1e-3)
    old = Session(model, SessionConfig(disabled_rules=frozenset({NAME}))).run({"x": X})
    assert np.isinf(old["y"][1, 1]) and found["y"][1, 1] == 30000


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
@pytest.mark.parametrize("size", [100, 1 << 15])
def test_constants_keep_their_values(make_model, size, dtype):
    """Small constants are converted by NumPy, large ones of float16 by a compiled kernel."""
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    weight = np.random.default_rng(2).standard_normal(size).astype(kind)
    model = make_model([node("Mul", "xw", "y")], {"x": (dtype, [size])}, {"y": (dtype, [size])}, {"w": weight})
    read = read_model(model)
    infer_shapes(read)
    assert compute_halves_in_float32.apply(read) == 1
    np.testing.assert_array_equal(read.graph.constant("w"), weight.astype(np.float32))


def test_explicit_casts_still_round(make_model):
    nodes = [node("Cast", "x", "h", to=HALF), node("Add", "hh", "s"), node("Cast", "s", "y", to=FLOAT)]
    model = make_model(nodes, {"x": (FLOAT, [2])}, {"y": (FLOAT, [2])})
    assert rewritten(model) == ["Cast", "Cast", "Add", "Cast"]
    x = np.float32([1 / 3, 60001])
    np.testing.assert_array_equal(Session(model).run({"x": x})["y"], 2 * x.astype(np.float16).astype(np.float32))


def test_branches_and_their_constants(make_model):
    kind = helper.make_tensor_value_info("r", HALF, [2, 3])
    one = helper.make_tensor("one", HALF, [1], np.float16([1]))
    bodies = {
        key: helper.make_graph([node(op, ["x", "one"], "r")], key, [], [kind], [one])
        for key, op in (("then_branch", "Add"), ("else_branch", "Sub"))
    }
    inputs = {"x": (HALF, [2, 3]), "flag": (TensorProto.BOOL, [])}
    model = make_model([node("If", ["flag"], "y", **bodies)], inputs, {"y": (HALF, [2, 3])})
    for flag, sign in ((True, 1), (False, -1)):
        found = Session(model).run({"x": X, "flag": np.array(flag)})["y"]
        np.testing.assert_array_equal(found, X + np.float16(sign))


@pytest.mark.parametrize("kind", [HALF, BRAIN])
def test_types_of_attributes_and_products(make_model, kind):
    """ConstantOfShape's value is 16 bits wide, and EyeLike's type is an attribute."""
    value = helper.make_tensor("v", kind, [1], [0.5])
    nodes = [
        node("ConstantOfShape", "n", "c", value=value), node("EyeLike", "x", "e", dtype=kind),
        node("MatMul", "xc", "p"), node("Add", "pe", "y"),
    ]  # fmt: skip
    model = make_model(nodes, {"x": (kind, [3, 3])}, {"y": (kind, [3, 3])}, {"n": np.array([3, 3])})
    x = np.arange(9).reshape(3, 3).astype(helper.tensor_dtype_to_np_dtype(kind))
    found = InferenceSession(model).run(None, {"x": x})[0]
    assert found.dtype == x.dtype
    expected = x.astype(np.float32) @ np.full((3, 3), 0.5, np.float32) + np.eye(3)
    np.testing.assert_allclose(found.astype(np.float32), expected, rtol=1e-2)


def unchanged(make_model, case):
    x, y = {"x": (HALF, [2])}, {"y": (HALF, [2])}
    if case == "bits":
        return make_model(
            [node("BitCast", "x", "b", to=TensorProto.INT16), node("BitCast", "b", "y", to=HALF)], x, y, version=26
        )
    if case == "default of an input":
        return make_model([node("Add", "xw", "y")], {**x, "w": (HALF, [2])}, y, {"w": np.float16([1, 2])})
    if case == "sequence":
        nodes = [node("SequenceConstruct", "xx", "s"), node("SequenceAt", "si", "y")]
        return make_model(nodes, x, y, {"i": np.array(0)})
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("d", 1)]
    body = helper.make_function("d", "Own", "x", "y", [node("Neg", "x", "y")], imports[:1])
    return make_model([node("Own", "x", "y", domain="d")], x, y, imports=imports, functions=[body])


@pytest.mark.parametrize("case", ["bits", "default of an input", "sequence", "function"])
def test_what_stays_as_it_is(make_model, case):
    model = unchanged(make_model, case)
    read = read_model(model)
    infer_shapes(read)
    assert compute_halves_in_float32.apply(read) == 0
    found = Session(model).run({"x": np.float16([1, 2])})["y"]
    assert found.dtype == np.float16 and found.shape == (2,)


def test_a_registered_operator_gets_halves(make_model):
    seen = []

    @genai.register_op("", "Mish", 18)
    def mish(x):
        seen.append(x.dtype)
        return x

    try:
        Session(make_model([node("Mish", "x", "y")], {"x": (HALF, [2])}, {"y": (HALF, [2])})).run({"x": X[0, :2]})
    finally:
        from genai.ops import registry

        registry._ENTRIES["", "Mish"].pop(0)
    assert seen == [np.float16]


def test_a_provider_gets_halves(make_model, monkeypatch):
    """The rule is left out if another provider than the CPU may compute nodes."""
    from genai.session import prepare

    rules = []
    run = prepare.run_rewrites
    monkeypatch.setattr(
        prepare, "run_rewrites", lambda model, used, level: rules.append(used) or run(model, used, level)
    )
    monkeypatch.setattr(prepare, "hand_over", lambda *_, **__: prepare_nothing())
    model = make_model([node("Neg", "x", "y")], {"x": (HALF, [2])}, {"y": (HALF, [2])})
    for providers in ((), (("Other", {}),)):
        prepare.prepare(model, SessionConfig(providers=providers))
    assert [compute_halves_in_float32 in used for used in rules[1::2]] == [True, False]


def prepare_nothing():
    from genai.session.execution_providers import Divided

    return Divided({}, [], frozenset())


def test_models_are_valid_after_the_rewrite(make_model, tmp_path):
    nodes = [node("Relu", "x", "r"), node("Add", "rr", "y")]
    model = make_model(nodes, {"x": (HALF, ["N", 3])}, {"y": (HALF, ["N", 3])})
    Session(model, SessionConfig(optimized_path=tmp_path / "m.onnx"))
    onnx.checker.check_model(str(tmp_path / "m.onnx"), full_check=True)
