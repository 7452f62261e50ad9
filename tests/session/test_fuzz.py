"""Damaged models and odd inputs: the answer is a result or a typed error, never a crash or a hang."""

from __future__ import annotations

import math
import random
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

import genai as ort

ODD = (-1, 0, 1, 2, 3, -2, 7, 100, -100, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63), 10**6)
MAX_MODEL_BYTES = 20_000
SECONDS_PER_MODEL = 20
# Training operators drop elements at random; a Loop may be told to run for ever, which only a stop word ends.
LEFT_OUT = ("Loop",)


class TookTooLong(Exception):
    """Not a GenaiError, so it fails the test."""


@pytest.fixture(scope="module")
def cases() -> list[tuple[onnx.ModelProto, list[Any]]]:
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = load_model_tests(kind="node")
    return [
        (case.model, [_array(value) for value in case.data_sets[0][0]])
        for case in found
        if case.model.ByteSize() < MAX_MODEL_BYTES
        and not any(node.op_type in LEFT_OUT for node in case.model.graph.node)
    ]


def _array(value: Any) -> Any:
    return numpy_helper.to_array(value) if isinstance(value, TensorProto) else value


@pytest.fixture(autouse=True)
def alarm() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TookTooLong

    before = signal.signal(signal.SIGALRM, stop)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def use(model: onnx.ModelProto | bytes, values: list[Any], generator: random.Random) -> bool:
    """Load and run; False if a typed error says no."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.max_value_bytes", str(1 << 24))
    options.graph_optimization_level = generator.choice(list(ort.GraphOptimizationLevel))
    signal.alarm(SECONDS_PER_MODEL)
    try:
        session = ort.InferenceSession(model, options)
        feed = {a.name: value for a, value in zip(session.get_inputs(), values, strict=False)}
        session.run(None, feed)
    except ort.GenaiError as error:
        assert error.what
        assert error.why
        assert error.fix
        return False
    finally:
        signal.alarm(0)
    return True


def damaged(model: onnx.ModelProto, generator: random.Random) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    changes: list[Callable[[], Any]] = [
        lambda: setattr(copy.opset_import[0], "version", generator.randrange(1, 29)),
        lambda: _change_type(generator.choice(graph.input), generator),
        lambda: _change_edges(generator.choice(graph.node), graph, generator),
        lambda: _change_attribute(generator.choice(graph.node), generator),
        lambda: _change_attribute(generator.choice(graph.node), generator),
        lambda: setattr(generator.choice(graph.node), "op_type", generator.choice(graph.node).op_type + "s"),
    ]
    for _ in range(generator.choice([1, 1, 2, 3])):
        try:
            generator.choice(changes)()
        except (IndexError, ValueError):
            continue  # There was nothing to change, or protobuf itself refuses the value.
    return copy


def _change_type(value: onnx.ValueInfoProto, generator: random.Random) -> None:
    kind = value.type.tensor_type
    choice = generator.randrange(4)
    if choice == 0:
        kind.elem_type = generator.randrange(1, 29)
    elif choice == 1:
        kind.ClearField("shape")
    elif choice == 2:
        generator.choice(kind.shape.dim).dim_value = generator.choice(ODD)
    else:
        value.type.Clear()


def _change_edges(node: onnx.NodeProto, graph: onnx.GraphProto, generator: random.Random) -> None:
    names = ["", *(value.name for value in graph.input), *node.input]
    choice = generator.randrange(5)
    if choice == 0:
        node.input[generator.randrange(len(node.input))] = generator.choice(names)
    elif choice == 1:
        del node.input[generator.randrange(len(node.input))]
    elif choice == 2:
        node.input.append(generator.choice(names))
    elif choice == 3:
        node.output.append(f"extra_{generator.random()}")
    else:
        node.output[generator.randrange(len(node.output))] = ""


def _change_attribute(node: onnx.NodeProto, generator: random.Random) -> None:
    attribute = generator.choice(node.attribute)
    if generator.random() < 0.1:
        node.attribute.remove(attribute)
    elif attribute.ints:
        attribute.ints[generator.randrange(len(attribute.ints))] = generator.choice(ODD)
        if generator.random() < 0.5:
            attribute.ints.append(generator.choice(ODD))
    elif attribute.type == onnx.AttributeProto.INT:
        attribute.i = generator.choice(ODD)
    elif attribute.type == onnx.AttributeProto.FLOAT:
        attribute.f = generator.choice([0, -1, 1e30, math.nan, math.inf])
    elif attribute.type == onnx.AttributeProto.STRING:
        attribute.s = generator.choice([b"", b"x", b"\xff\xfe", b"A" * 1000, attribute.s[:-1], b"VALID"])
    elif attribute.type == onnx.AttributeProto.TENSOR:
        attribute.t.data_type = generator.randrange(29)


def odd_values(values: list[Any], generator: random.Random) -> list[Any]:
    """The case's inputs, some of them with other numbers or shapes."""
    return [_odd_value(value, generator) if generator.random() < 0.5 else value for value in values]


def _odd_value(value: Any, generator: random.Random) -> Any:
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iuf":
        return value
    choice = generator.randrange(4)
    if choice == 0:
        changed = np.array(value)
        numbers = [number for number in ODD if np.can_cast(np.min_scalar_type(number), value.dtype)]
        if changed.size and numbers:
            changed.reshape(-1)[generator.randrange(changed.size)] = generator.choice(numbers)
        return changed
    if choice == 1:
        return value[..., :0] if value.ndim else value
    if choice == 2:
        return value.reshape(-1)
    return np.repeat(value[None], 2, axis=0)


def _fuzz(cases: list[tuple[onnx.ModelProto, list[Any]]], seed: int, count: int) -> list[bool]:
    generator = random.Random(seed)
    results = []
    for _ in range(count):
        model, values = generator.choice(cases)
        if generator.random() < 0.7:
            model = damaged(model, generator)
        results.append(use(model, odd_values(values, generator), generator))
    return results


def test_damaged_models_and_inputs(cases):
    results = _fuzz(cases, seed=1, count=500)
    assert 0 < sum(results) < len(results)


@pytest.mark.slow
def test_a_minute_of_damage(cases, draw):
    """Or a quarter of that, with numbers that the commit draws."""
    for seed in range(draw.seed, draw.seed + draw.fewer(12, 4)):
        print("seed", seed)
        _fuzz(cases, seed, 500)


@pytest.mark.fuzz
def test_ten_minutes_of_damage(cases):
    _fuzz_for(cases, seconds=600, seed=random.randrange(10**9))


def _fuzz_for(cases: list[tuple[onnx.ModelProto, list[Any]]], seconds: float, seed: int) -> None:
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        print("seed", seed)
        _fuzz(cases, seed, 500)
        seed += 1
