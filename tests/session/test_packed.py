"""Nodes whose constants are packed once: results against float64 NumPy, threads, what is kept, what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

import genai as ort

TERMS, COLUMNS = 130, 100
FLOAT = (TensorProto.FLOAT, None)


def session(model, threads=1):
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    return ort.InferenceSession(model, options)


@pytest.fixture
def rng():
    return np.random.default_rng(3)


@pytest.fixture
def build(make_model):
    def build(nodes, constants, inputs=None, outputs=("y",)):
        protos = [helper.make_node(op, given.split(), made.split(), **more) for op, given, made, more in nodes]
        inputs = inputs or {"x": (TensorProto.FLOAT, ["rows", TERMS])}
        return make_model(protos, inputs, dict.fromkeys(outputs, FLOAT), constants)

    return build


def floats(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("form", ["MatMul", "Gemm", "Gemm transposed", "biased", "activated"])
def test_float_products(build, rng, form):
    weight, bias = floats(rng, TERMS, COLUMNS), floats(rng, COLUMNS)
    nodes = {
        "MatMul": [("MatMul", "x w", "y", {})],
        "Gemm": [("Gemm", "x w b", "y", {})],
        "Gemm transposed": [("Gemm", "x w b", "y", {"transB": 1})],
        "biased": [("MatMul", "x w", "m", {}), ("Add", "m b", "y", {})],
        "activated": [("MatMul", "x w", "m", {}), ("Add", "m b", "s", {}), ("Relu", "s", "y", {})],
    }[form]
    constants = {"w": np.ascontiguousarray(weight.T) if form == "Gemm transposed" else weight}
    constants |= {} if form == "MatMul" else {"b": bias}
    model, x = build(nodes, constants), floats(rng, 37, TERMS)
    results = [session(model, threads).run(None, {"x": x})[0] for threads in (1, 2)]
    np.testing.assert_array_equal(*results)
    expected = x.astype(np.float64) @ weight + (0 if form == "MatMul" else bias)
    expected = np.maximum(expected, 0) if form == "activated" else expected
    np.testing.assert_allclose(results[0], expected, rtol=1e-4, atol=1e-4)
    alone = session(model).run(None, {"x": x[5:6]})[0]
    np.testing.assert_array_equal(alone, results[0][5:6])


def test_weights_are_not_kept_twice(build, rng):
    weight = floats(rng, TERMS, COLUMNS)
    made = session(build([("MatMul", "x w", "y", {})], {"w": weight}))
    assert not any(
        isinstance(value, np.ndarray) and value.shape == weight.shape for value in made._session.plan.initial
    )


def test_vectors_batches_and_nothing(build, rng):
    weight = floats(rng, TERMS, COLUMNS)
    for shape in ((TERMS,), (2, 3, TERMS), (0, TERMS)):
        model = build([("MatMul", "x w", "y", {})], {"w": weight}, {"x": (TensorProto.FLOAT, [None] * len(shape))})
        x = floats(rng, *shape)
        found = session(model).run(None, {"x": x})[0]
        assert found.shape == (*shape[:-1], COLUMNS)
        np.testing.assert_allclose(found, x.astype(np.float64) @ weight, rtol=1e-4, atol=1e-4)


def test_rows_of_another_width_are_refused(build, rng):
    inputs = {"x": (TensorProto.FLOAT, ["rows", "width"])}
    made = session(build([("MatMul", "x w", "y", {})], {"w": floats(rng, TERMS, COLUMNS)}, inputs))
    with pytest.raises(ort.Fail, match="cannot multiply"):
        made.run(None, {"x": np.zeros((2, 3), np.float32)})


@pytest.mark.parametrize("weight_type", [np.int8, np.uint8])
@pytest.mark.parametrize("per_column", [False, True])
def test_integer_products(build, rng, weight_type, per_column):
    info = np.iinfo(weight_type)
    weight = rng.integers(info.min, info.max + 1, (TERMS, COLUMNS)).astype(weight_type)
    zero = rng.integers(info.min, info.max + 1, COLUMNS if per_column else 1).astype(weight_type)
    x, x_zero = rng.integers(0, 256, (37, TERMS)).astype(np.uint8), np.uint8(200)
    constants = {"w": weight, "wz": zero if per_column else zero.reshape(()), "xz": x_zero}
    inputs = {"x": (TensorProto.UINT8, ["rows", TERMS])}
    nodes = [("MatMulInteger", "x w xz wz", "i", {}), ("Cast", "i", "y", {"to": 1})]
    found = session(build(nodes, constants, inputs)).run(None, {"x": x})[0]
    expected = (x.astype(np.int64) - 200) @ (weight.astype(np.int64) - zero)
    np.testing.assert_array_equal(found, expected.astype(np.float32))


@pytest.mark.parametrize("groups", [1, 8])
@pytest.mark.parametrize("computed", ["", "xs ys", "xz yz", "ws"])
def test_integer_convolutions(build, rng, groups, computed):
    kernels = rng.integers(-128, 128, (8, 8 // groups, 3, 3)).astype(np.int8)
    x = rng.integers(0, 256, (2, 8, 9, 9)).astype(np.uint8)
    constants = {
        "xs": np.float32(0.02), "xz": np.uint8(7), "w": kernels, "ws": rng.random(8).astype(np.float32) * 0.01,
        "wz": np.zeros(8, np.int8), "ys": np.float32(0.1), "yz": np.uint8(100),
        "b": rng.integers(-500, 500, 8).astype(np.int32),
    }  # fmt: skip
    nodes = [
        ("QLinearConv", "x xs xz w ws wz ys yz b", "q", {"pads": [1, 1, 1, 1], "group": groups}),
        ("Cast", "q", "y", {"to": 1}),
    ]
    given = {name: constants[name] for name in computed.split()}
    inputs = {"x": (TensorProto.UINT8, [2, 8, 9, 9])}
    for name, value in given.items():
        inputs[name] = helper.np_dtype_to_tensor_dtype(value.dtype), value.shape
    rest = {name: value for name, value in constants.items() if name not in given}
    found = session(build(nodes, rest, inputs)).run(None, {"x": x, **given})[0]
    padded = np.pad(x.astype(np.int64) - 7, [(0, 0), (0, 0), (1, 1), (1, 1)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
    if groups == 1:
        sums = np.einsum("nchwij,mcij->nmhw", windows, kernels.astype(np.int64))
    else:
        sums = np.einsum("nchwij,cij->nchw", windows, kernels[:, 0].astype(np.int64))
    factor = np.float32(0.02) * constants["ws"] / np.float32(0.1)
    scaled = (sums + constants["b"][:, None, None]).astype(np.float32) * factor[:, None, None]
    np.testing.assert_array_equal(found, np.clip(np.rint(scaled) + 100, 0, 255).astype(np.float32))
