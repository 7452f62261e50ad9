"""Gradient nodes: against finite differences, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

import genai as ort

KIND = (11, [3])


def node(op, inputs, output):
    return helper.make_node(op, inputs.split(), [output])


def gradient(inputs="a b", outputs=("da", "db"), **attributes):
    named = {"xs": ["a", "b"], "y": "y", **attributes}
    return helper.make_node("Gradient", inputs.split(), list(outputs), domain="ai.onnx.preview.training", **named)


FUNCTIONS = {
    "sum": [node("Add", "a b", "y")],
    "product twice": [node("Mul", "a b", "p"), node("Mul", "p a", "y")],
    "quotient": [node("Div", "a b", "q"), node("Sub", "q b", "y")],
    "functions": [node("Sin", "a", "s"), node("Cos", "b", "c"), node("Mul", "s c", "m"), node("Exp", "m", "y")],
    "logarithm": [node("Log", "a", "l"), node("Neg", "l", "n"), node("Identity", "n", "y")],
}


@pytest.fixture
def build(make_model):
    def build(nodes, inputs="ab", kind=KIND):
        imports = [helper.make_opsetid("", 20), helper.make_opsetid("ai.onnx.preview.training", 1)]
        outputs = dict.fromkeys(["da", "db"], (kind[0], None))
        return make_model(nodes, dict.fromkeys(inputs, kind), {"y": (kind[0], None), **outputs}, imports=imports)

    return build


@pytest.mark.parametrize("name", FUNCTIONS)
def test_against_differences(build, name):
    session = ort.InferenceSession(build([*FUNCTIONS[name], gradient()]))
    feed = {"a": np.array([0.5, 1.5, 2.0]), "b": np.array([1.0, 0.7, 3.0])}
    _, *found = session.run(None, feed)
    for which, value in zip("ab", found, strict=True):
        step = 1e-6
        up, down = ({**feed, which: feed[which] + change} for change in (step, -step))
        expected = (session.run(["y"], up)[0] - session.run(["y"], down)[0]) / (2 * step)
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-8)


def test_at_another_place(build):
    """The inputs of the node need not be the tensors that xs names."""
    model = build([node("Mul", "a b", "y"), gradient("c d")], "abcd")
    feed = {name: np.full(3, float(index)) for index, name in enumerate("abcd", 1)}
    assert [x.tolist() for x in ort.InferenceSession(model).run(["da", "db"], feed)] == [[4] * 3, [3] * 3]


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([node("Mul", "a b", "y"), gradient("a b", ("da", "db"), xs=["a"])], "1 tensors but has 2 inputs"),
        ([node("Mul", "a b", "y"), gradient(y="z")], "does not depend on"),
        ([node("Mul", "a b", "p"), node("Erf", "p", "y"), gradient()], "gradient of Erf"),
        (
            [node("ReduceSum", "b", "r"), node("Mul", "a r", "y"), gradient()],
            "gradient of (ReduceSum|Mul)",
        ),
    ],
)
def test_refused(build, nodes, message):
    with pytest.raises(ort.GenaiError, match=message):
        ort.InferenceSession(build(nodes))


def test_operands_of_two_shapes_are_refused(make_model):
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("ai.onnx.preview.training", 1)]
    kinds = {"a": (11, [3]), "b": (11, [1])}
    model = make_model(
        [node("Mul", "a b", "y"), gradient()], kinds, dict.fromkeys(["da", "db"], (11, None)), imports=imports
    )
    with pytest.raises(ort.NotImplemented, match="shapes"):
        ort.InferenceSession(model)
