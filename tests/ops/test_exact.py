"""Integer products through float BLAS are exact, even for the largest possible sums."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

import genai as ort
from genai.ops.casting import requantized
from genai.ops.integer_products import BLOCK, exact_runs


def weights(kind, terms, outputs):
    if kind == "extreme":
        return np.full((terms, outputs), -128, np.int8)
    if kind == "zero but for one":
        found = np.zeros((terms, outputs), np.int8)
        found[:, -1] = 127
        return found
    return np.random.default_rng(0).integers(-128, 128, (terms, outputs)).astype(np.int8)


KINDS = ("random", "extreme", "zero but for one")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("terms", [1, 255, 256, 257, 1000, 4608])
def test_runs_stay_exact(kind, terms):
    magnitudes = np.abs(weights(kind, terms, 3).astype(np.float32))
    for known in (None, magnitudes):
        runs = exact_runs(terms, known)
        assert np.concatenate([np.arange(terms)[run] for run in runs]).tolist() == list(range(terms))
        bound = 255 * (magnitudes if known is not None else np.full((terms, 1), 255.0))
        assert all(bound[run].sum(axis=0).max() < 2**24 for run in runs)
    assert len(exact_runs(4 * BLOCK, np.ones((4 * BLOCK, 2)))) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("constant", [True, False])
def test_products(make_node, kind, constant):
    b = weights(kind, 1500, 5)
    a = np.full((3, 1500), 255, np.uint8)
    a[1] = np.random.default_rng(1).integers(0, 256, 1500)
    expected = a.astype(np.int64) @ b.astype(np.int64)
    assert np.array_equal(make_node("MatMulInteger", {"a": a, "b": b}, constant), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions(make_node, kind, constant, groups):
    x = np.random.default_rng(1).integers(200, 256, (1, 128, 5, 5)).astype(np.uint8)
    w = weights(kind, 128 // groups * 9, 4).T.reshape(4, 128 // groups, 3, 3).copy()
    windows = np.lib.stride_tricks.sliding_window_view(x.astype(np.int64), (3, 3), axis=(2, 3))
    parts = np.split(windows, groups, axis=1), np.split(w.astype(np.int64), groups)
    expected = np.concatenate([np.einsum("ncijkl,mckl->nmij", a, b) for a, b in zip(*parts, strict=True)], axis=1)
    assert np.array_equal(make_node("ConvInteger", {"a": x, "b": w}, constant, group=groups), expected)


@pytest.fixture
def make_node():
    """Run one node of two 8-bit operands, with a constant or computed second operand."""

    def run(op, values, constant, **attributes):
        kinds = {name: helper.np_dtype_to_tensor_dtype(value.dtype) for name, value in values.items()}
        given = ["a"] if constant else ["a", "b"]
        graph = helper.make_graph(
            [helper.make_node(op, ["a", "b"], ["y"], **attributes)],
            "g",
            [helper.make_tensor_value_info(name, kinds[name], values[name].shape) for name in given],
            [helper.make_tensor_value_info("y", 6, None)],
            [helper.make_tensor("b", kinds["b"], values["b"].shape, values["b"])] if constant else [],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
        return ort.InferenceSession(model).run(None, {name: values[name] for name in given})[0]

    return run


def test_sums_are_scaled_in_float32():
    """The product is -174.500004, which float32 rounds to a tie; onnxruntime and the compiled kernels give 29."""
    total, factor = np.array([-349389], np.int32), np.float32(0.0004994433)
    assert requantized(total, factor, np.uint8(203), np.dtype(np.uint8)).tolist() == [29]
