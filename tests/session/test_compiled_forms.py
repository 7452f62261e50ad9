"""Sessions compute float32 values in compiled kernels, which give NumPy's results in all forms of an operator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from genai.errors import ArgumentError
from genai.onnx.reader import read_model
from genai.ops.registry import evaluated
from genai.session.config import SessionConfig
from genai.session.session import Session

RNG = np.random.default_rng(0)
PLANES, VECTORS = (2, 6, 5, 9), {"s": (6,), "t": (6,)}
# Operator, shapes of the inputs, attributes, and integer constants.
FORMS: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    *((op, {"x": PLANES}, {}, {"axes": axes}) for op in ("ReduceMean", "ReduceMax", "ReduceL2")
      for axes in ([-1], [3, 2], [1], [0, 1, 2, 3])),
    ("ReduceSum", {"x": PLANES}, {"keepdims": 0}, {"axes": [2, 3]}),
    ("ReduceMin", {"x": (7,)}, {"keepdims": 0}, {}),
    ("ReduceSumSquare", {"x": PLANES}, {"noop_with_empty_axes": 1}, {}),
    ("GlobalAveragePool", {"x": PLANES}, {}, {}),
    ("GlobalMaxPool", {"x": PLANES}, {}, {}),
    ("MaxPool", {"x": (2, 3, 11, 13)}, {"kernel_shape": [5, 4], "strides": [2, 3], "pads": [2, 1, 4, 3]}, {}),
    ("MaxPool", {"x": (1, 2, 9, 9)}, {"kernel_shape": [5, 5], "strides": [1, 1], "pads": [2, 2, 2, 2]}, {}),
    ("InstanceNormalization", {"x": PLANES, **VECTORS}, {}, {}),
    ("GroupNormalization", {"x": PLANES, **VECTORS}, {"num_groups": 3}, {}),
    ("BatchNormalization", {"x": PLANES, **VECTORS, "m": (6,), "v": (6,)}, {}, {}),
    ("BatchNormalization", {"x": (3, 6), **VECTORS, "m": (6,), "v": (6,)}, {}, {}),
    ("Elu", {"x": (40,)}, {"alpha": 0.5}, {}),
    ("Mul", {"x": (1, 64, 10, 10), "y": (64, 1, 1)}, {}, {}),
    ("Sub", {"x": (70,), "y": (1, 99, 70)}, {}, {}),
    ("Add", {"x": (3, 64, 10, 10), "y": (64, 1, 1)}, {}, {}),
    ("GatherElements", {"x": (3, 4, 7)}, {"axis": -1}, {"i": RNG.integers(-7, 7, (3, 4, 2)).tolist()}),
    ("GatherElements", {"x": (3, 4, 7)}, {"axis": 1}, {"i": RNG.integers(-4, 4, (3, 2, 7)).tolist()}),
]  # fmt: skip


@pytest.mark.parametrize(
    "op, shapes, attributes, constants", FORMS, ids=lambda value: value if isinstance(value, str) else ""
)
@pytest.mark.parametrize("fixed", [False, True], ids=["computed", "constant"])
def test_forms(op: str, shapes: Any, attributes: Any, constants: Any, fixed: bool, make_model: Any) -> None:
    arrays = {name: np.abs(RNG.standard_normal(shape)).astype(np.float32) - 0.5 for name, shape in shapes.items()}
    if "v" in arrays:
        arrays["v"] = np.abs(arrays["v"]) + 1
    numbers = {name: np.array(value, np.int64) for name, value in constants.items()}
    node = helper.make_node(op, [*shapes, *constants], ["out"], **attributes)
    given = {name: arrays[name] for name in (["x"] if fixed else shapes)}
    known = {name: array for name, array in arrays.items() if name not in given} | numbers
    kinds = {name: (TensorProto.FLOAT, array.shape) for name, array in given.items()}
    model = make_model([node], kinds, {"out": (TensorProto.FLOAT, None)}, known, version=21)
    found = [Session(model, SessionConfig(threads=threads)).run(given)["out"] for threads in (1, 2)]
    (expected, *_) = evaluated(read_model(model).graph.nodes[0], 21, [*arrays.values(), *numbers.values()])
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_allclose(found[0], expected, rtol=2e-5, atol=2e-6)
    assert found[0].shape == expected.shape


def test_gather_outside_of_a_row_names_the_index(make_model: Any) -> None:
    node = helper.make_node("GatherElements", ["x", "i"], ["out"], axis=1)
    kinds = {"x": (TensorProto.FLOAT, (2, 3)), "i": (TensorProto.INT64, (2, 2))}
    session = Session(make_model([node], kinds, {"out": (TensorProto.FLOAT, None)}))
    with pytest.raises(ArgumentError, match=r"index 3 must be within the inclusive range \[-3, 2\]"):
        session.run({"x": np.ones((2, 3), np.float32), "i": np.array([[0, 1], [2, 3]])})


@pytest.mark.parametrize("mode", ["constant", "reflect", "edge", "wrap"])
@pytest.mark.parametrize("shape, pads", [((3, 5), ((1, 2), (0, 3))), ((4,), ((2, 0),)), ((9, 700), ((3, 1), (5, 5)))])
def test_pads_as_in_numpy(shape: Any, pads: Any, mode: Any, make_model: Any) -> None:
    """Results of up to 4,096 elements are computed in another way than larger ones."""
    x = RNG.standard_normal(shape).astype(np.float32)
    ends = np.array([*(before for before, _ in pads), *(after for _, after in pads)])
    node = helper.make_node("Pad", ["x", "pads"], ["out"], mode=mode)
    kinds = {"x": (TensorProto.FLOAT, shape)}
    session = Session(make_model([node], kinds, {"out": (TensorProto.FLOAT, None)}, {"pads": ends}))
    np.testing.assert_array_equal(session.run({"x": x})["out"], np.pad(x, pads, mode=mode))
