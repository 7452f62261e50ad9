"""ConvTranspose with constant kernels, which are packed, beside computed kernels."""

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
    ((1, 2, 5), (2, 3, 3), {"dilations": [2]}),
    ((1, 2, 5, 20), (2, 3, 3, 3), {"dilations": [2, 3], "strides": [3, 2], "pads": [1, 2, 3, 1]}),
    ((1, 1, 2, 2), (1, 1, 2, 2), {"strides": [9, 9]}),
    ((0, 3, 5), (3, 4, 4), {"strides": [2]}),
    ((1, 4, 5, 3), (4, 3, 3, 3), {"group": 2}),
    ((2, 4, 5, 3), (4, 2, 3, 2), {"group": 4, "strides": [2, 2], "output_padding": [1, 1]}),
]


def model(x: tuple[Any, ...], w: Any, b: Any, attributes: dict[str, Any], *, constant: bool) -> onnx.ModelProto:
    shapes = {"x": x, "w": w.shape} | ({} if b is None else {"b": b.shape})
    inputs = [helper.make_tensor_value_info(name, 1, shape) for name, shape in shapes.items()]
    constants = [numpy_helper.from_array(value, name) for name, value in (("w", w), ("b", b)) if name in shapes]
    outputs = [helper.make_tensor_value_info("y", 1, None)]
    nodes = [helper.make_node("ConvTranspose", list(shapes), ["y"], **attributes)]
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


@pytest.mark.parametrize("extents", [(1, 1), (4, 4), (9, 25), (20, 30)])
def test_images_do_not_depend_on_their_batch(extents: Any, rng: np.random.Generator) -> None:
    """Small images are multiplied together."""
    weight, bias = rng.standard_normal((20, 9, 4, 4)).astype(np.float32), rng.standard_normal(9).astype(np.float32)
    made = model(("N", 20, *extents), weight, bias, {"strides": [2, 2], "pads": [1, 1, 1, 1]}, constant=True)
    session = Session(made)
    x = rng.standard_normal((7, 20, *extents)).astype(np.float32)
    found = session.run({"x": x})["y"]
    for image in range(7):
        assert session.run({"x": x[image : image + 1]})["y"].tobytes() == found[image].tobytes()


def test_what_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels in groups are not packed."""
    found = []

    def packing(spec: Any) -> Any:
        found.append(packed_transposed(spec))
        return found[-1]

    monkeypatch.setattr("genai.ops.convolution.packed_transposed", packing)
    for x, w, attributes in CASES:
        Session(model(x, np.ones(w, np.float32), None, attributes, constant=True))
        assert (found[-1] is not None) is ("group" not in attributes)


def sums(x: Any, weight: Any, attributes: dict[str, Any]) -> Any:
    """The definition of a transposed convolution: each element adds its kernel."""
    rank, groups = x.ndim - 2, attributes.get("group", 1)
    steps, gaps = (attributes.get(name, [1] * rank) for name in ("strides", "dilations"))
    pads, extra = attributes.get("pads", [0] * 2 * rank), attributes.get("output_padding", [0] * rank)
    axes = list(zip(x.shape[2:], steps, gaps, weight.shape[2:], extra, strict=True))
    full = [(n - 1) * step + gap * (taps - 1) + 1 + more for n, step, gap, taps, more in axes]
    result = np.zeros((len(x), weight.shape[1] * groups, *full))
    inputs, outputs = len(weight) // groups, weight.shape[1]
    for image, channel, *place in np.ndindex(x.shape):
        first = channel // inputs * outputs
        for tap in np.ndindex(weight.shape[2:]):
            at = (i * step + t * gap for i, step, t, gap in zip(place, steps, tap, gaps, strict=True))
            product = x[(image, channel, *place)] * weight[(channel, slice(None), *tap)]
            result[(image, slice(first, first + outputs), *at)] += product
    kept = (slice(a, size - b) for size, a, b in zip(full, pads[:rank], pads[rank:], strict=True))
    return result[(slice(None), slice(None), *kept)]


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize(
    ("x", "w", "attributes"),
    [case for case in CASES if not {"auto_pad", "output_shape"} & {*case[2]}] + [
        ((1, 1, 9), (1, 1, 3), {"strides": [2], "pads": [1, 1], "output_padding": [1]}),
        ((1, 1, 9), (1, 1, 5), {"strides": [3]}),
    ],
)  # fmt: skip
def test_numbers_that_are_not_finite_stay_in_their_windows(x, w, attributes, constant, rng) -> None:
    weight, values = rng.standard_normal(w).astype(np.float32), rng.standard_normal(x).astype(np.float32)
    if values.size:
        values.reshape(-1)[values.size // 2] = np.nan
        values.reshape(-1)[values.size // 3] = np.inf
    feed = {"x": values} | ({} if constant else {"w": weight})
    found = Session(model(x, weight, None, attributes, constant=constant)).run(feed)["y"]
    np.testing.assert_allclose(found, sums(values, weight, attributes), rtol=1e-5, atol=1e-5)


def test_other_inputs_are_refused() -> None:
    made = model((1, 3, 5), np.ones((2, 3, 3), np.float32), None, {}, constant=True)
    with pytest.raises(GenaiError, match=r"channels|shape"):
        Session(made).run({"x": np.ones((1, 3, 5), np.float32)})
