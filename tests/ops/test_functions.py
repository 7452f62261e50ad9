"""Functions of arrays as operators: their parameters declare inputs and attributes."""

from __future__ import annotations

from functools import wraps
from typing import Any, Literal

import numpy as np
import pytest

import genai
from genai.ops.registry import Float32s, KernelError, Natural, NodeSpec, Positive, from_function


def spec_of(inputs: int, **attributes: Any) -> NodeSpec:
    names = tuple(f"x{i}" for i in range(inputs))
    return NodeSpec("", "Op", 1, attributes, names, ("y",), (None,) * inputs, None, {"threads": "those"})


def read(
    x: Any, y: Any = None, *, axis: int = -1, keep: bool = True, scale: float | None = None,
    sizes: tuple[int, ...] = (2,), mode: Literal["a", "b"] = "a", count: Positive = 1, rest: Natural = 0,
    weights: Float32s = (), threads: Any, spec: NodeSpec, made: str,
) -> Any:  # fmt: skip
    return [x, y, axis, keep, scale, sizes, mode, count, rest, weights.tolist(), threads, spec.op_type, made]


def call(inputs: list[Any], **attributes: Any) -> Any:
    kernel = from_function(read, made=lambda spec: f"from {len(spec.inputs)}")(spec_of(len(inputs), **attributes))
    return kernel(None, inputs)


def test_defaults_and_absent_inputs():
    assert call([1]) == ([1, None, -1, True, None, (2,), "a", 1, 0, [], "those", "Op", "from 1"],)


def test_attributes_take_the_types_of_parameters_and_unknown_ones_are_ignored():
    given = {"axis": 2, "keep": 0, "scale": 3, "sizes": [4, 5], "mode": "b", "count": 6, "weights": [0.5], "other": 1}
    (found,) = call([1, 2, 3], **given)
    assert found[:10] == [1, 2, 2, False, 3.0, (4, 5), "b", 6, 0, [0.5]]
    assert [type(value) for value in found[3:5]] == [bool, float]


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"mode": "c"}, "mode is 'c', but it must be one of a, b"),
        ({"count": 0}, "at least 1"),
        ({"rest": -1}, "at least 0"),
    ],
)
def test_values_outside_what_is_allowed_decline_the_node(attributes, message):
    with pytest.raises(KernelError, match=message):
        call([1], **attributes)


def test_a_tuple_is_several_results_and_a_list_is_one():
    both = from_function(lambda *values: tuple(values))(spec_of(2))
    assert both(None, [1, 2]) == (1, 2)
    assert from_function(lambda *values: list(values))(spec_of(2))(None, [1, 2]) == ([1, 2],)
    assert from_function(np.add)(spec_of(2))(None, [1, 2]) == (3,)


def test_what_wraps_a_function_has_inputs_of_its_own():
    @wraps(read)
    def wrapper(first: Any, second: Any, third: Any, **attributes: Any) -> Any:
        return first, second, third, attributes["axis"]

    kernel = from_function(wrapper, made=lambda spec: "")(spec_of(4, axis=5))
    assert kernel(None, [1, 2, 3, 4]) == (1, 2, 3, 5)


def test_a_missing_attribute_is_named():
    def needs(x: Any, *, axis: int) -> Any:
        return x

    with pytest.raises(ValueError, match="Op: the attribute 'axis' is missing"):
        from_function(needs)(spec_of(1))


def test_a_refused_attribute_in_a_session(one_node):
    x = np.ones(2, np.uint8)
    with pytest.raises(genai.GenaiError, match="BitShift") as caught:
        genai.InferenceSession(one_node("BitShift", {"x": x, "y": x}, direction="UP"))
    assert "direction is 'UP', but it must be one of LEFT, RIGHT" in caught.value.why
    assert caught.value.fix
