"""ConvTranspose with constant kernels, which is one convolution, beside the sums of all kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from genai.errors import GenaiError
from genai.ops.convolution import packed_transposed
from genai.session.config import SessionConfig
from genai.session.session import Session

CASES = [
    ((1, 3, 5), (3, 4, 4), {"strides": [2], "pads": [1, 1]}),
    ((2, 3, 6), (3, 5, 16), {"strides": [8], "pads": [4, 4], "output_padding": [3]}),
    ((2, 5, 4, 6), (5, 18, 2, 2), {"strides": [2, 2]}),
    ((1, 4, 5, 3), (4, 3, 3, 5), {"strides": [2, 3], "pads": [1, 2, 0, 1]}),
    ((1, 4, 5, 3), (4, 3, 3, 3), {}),
    ((1, 2, 3, 3), (2, 3, 1, 1), {"strides": [2, 1], "output_padding": [1, 0]}),
    ((1, 2, 3, 4), (2, 3, 3, 3), {"strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    ((1, 2, 3, 4), (2, 3, 3, 3), {"strides": [2, 2], "output_shape": [9, 12]}),
    ((1, 2, 2, 3, 4), (2, 3, 2, 3, 2), {"strides": [2, 2, 1], "pads": [0, 1, 1, 1, 0, 0]}),
    ((1, 2, 5), (2, 3, 2), {"strides": [7]}),
    ((1, 4, 5, 3), (4, 3, 3, 3), {"group": 2}),
    ((1, 2, 5), (2, 3, 3), {"dilations": [2]}),
]


def model(x: tuple[int, ...], w: Any, b: Any, attributes: dict[str, Any], *, constant: bool) -> onnx.ModelProto:
    values = {"x": np.empty(x, np.float32), "w": w} | ({} if b is None else {"b": b})
    inputs = [helper.make_tensor_value_info(name, 1, value.shape) for name, value in values.items()]
    constants = [numpy_helper.from_array(value, name) for name, value in values.items() if name != "x"]
    outputs = [helper.make_tensor_value_info("y", 1, None)]
    nodes = [helper.make_node("ConvTranspose", list(values), ["y"], **attributes)]
    graph = helper.make_graph(nodes, "g", inputs[:1] if constant else inputs, outputs, constants if constant else [])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize(("x", "w", "attributes"), CASES)
@pytest.mark.parametrize("biased", [False, True])
def test_constant_kernels(x: Any, w: Any, attributes: Any, biased: bool, rng: np.random.Generator) -> None:
    weight = rng.standard_normal(w).astype(np.float32)
    outputs = w[1] * attributes.get("group", 1)
    bias = rng.standard_normal(outputs).astype(np.float32) if biased else None
    made = model(x, weight, bias, attributes, constant=True)
    packed, several = Session(made, SessionConfig(threads=1)), Session(made, SessionConfig(threads=2))
    plain = Session(model(x, weight, bias, attributes, constant=False))
    for _ in range(3):
        feed = {"x": rng.standard_normal(x).astype(np.float32)}
        found = packed.run(feed)["y"]
        expected = plain.run({**feed, "w": weight, **({} if bias is None else {"b": bias})})["y"]
        assert found.shape == expected.shape and found.dtype == expected.dtype
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
        assert several.run(feed)["y"].tobytes() == found.tobytes()


def test_what_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that zeros would make much larger, groups and dilations are computed as before."""
    found = []

    def packing(spec: Any) -> Any:
        found.append(packed_transposed(spec))
        return found[-1]

    monkeypatch.setattr("genai.ops.convolution.packed_transposed", packing)
    is_packed = []
    for x, w, attributes in [*CASES, ((1, 1, 2, 2), (1, 1, 2, 2), {"strides": [9, 9]})]:
        Session(model(x, np.ones(w, np.float32), None, attributes, constant=True))
        is_packed.append(found[-1] is not None)
    assert is_packed == [True] * 10 + [False] * 3


def test_other_inputs_are_refused() -> None:
    made = model((1, 3, 5), np.ones((2, 3, 3), np.float32), None, {}, constant=True)
    with pytest.raises(GenaiError, match=r"channels|shape"):
        Session(made).run({"x": np.ones((1, 3, 5), np.float32)})
