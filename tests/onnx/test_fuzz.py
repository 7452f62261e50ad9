"""Damaged models: for any change of bytes or fields, the result is a model or a typed error."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from onnx import TensorProto, numpy_helper

from genai.errors import GraphError
from genai.onnx.reader import read_model
from genai.onnx.writer import to_proto
from genai.optimize.base import Level, run_rewrites
from genai.optimize.constant_folding import fold_constants
from genai.optimize.shapes import infer_shapes
from genai.optimize.simplify import remove_dead_code, remove_identities
from tests.integrity import check_graph

RULES = (remove_identities, fold_constants, remove_dead_code)
MAX_MODEL_BYTES = 20_000
ODD_NUMBERS = (-1, 0, 1, 2, 3, -2, 7, 100, -100, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63), 10**6)


def use(source: bytes | onnx.ModelProto, *, rewrite: bool) -> bool:
    """Read a model and do everything that needs no kernel; False if it is rejected with a typed error."""
    try:
        model = read_model(source)
        for graph in model.graphs(functions=True):
            for tensor in graph.initializers.values():
                tensor.array()
        to_proto(model)
        if rewrite:
            infer_shapes(model)
            run_rewrites(model, RULES, Level.ALL)
            for graph in model.graphs(functions=True):
                check_graph(graph)
    except GraphError as error:
        assert error.what
        assert error.why
        return False
    return True


@pytest.fixture(scope="module")
def small_models(suite) -> list[onnx.ModelProto]:
    return [case.model for case in suite if case.model.ByteSize() < MAX_MODEL_BYTES]


def test_damaged_bytes(small_models):
    _damage_bytes(small_models, seed=1, count=5000)


@pytest.mark.slow
def test_many_damaged_bytes(small_models, draw):
    _damage_bytes(small_models, seed=draw.seed, count=draw.fewer(40_000, 4))


def test_damaged_fields(small_models):
    _damage_fields(small_models, seed=1, count=1500)


@pytest.mark.slow
def test_many_damaged_fields(small_models, draw):
    _damage_fields(small_models, seed=draw.seed, count=draw.fewer(60_000, 4))


def test_damaged_external_references(external_model):
    data, generator = external_model.read_bytes(), random.Random(5)
    num_read = 0
    for _ in range(500):
        external_model.write_bytes(_with_damaged_bytes(data, generator))
        try:
            read_model(external_model)
        except GraphError:
            continue
        num_read += 1
    assert 0 < num_read < 500


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=300))
def test_arbitrary_bytes(data):
    use(data, rewrite=False)


@settings(max_examples=200, deadline=None)
@given(
    dims=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=70),
    dtype=st.integers(-5, 40),
    raw=st.none() | st.binary(max_size=40),
    values=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=9),
)
def test_arbitrary_tensors(dims, dtype, raw, values):
    tensor = TensorProto(name="t", dims=dims, data_type=dtype, int32_data=values)
    if raw is not None:
        tensor.raw_data = raw
    model = onnx.helper.make_model(onnx.helper.make_graph([], "g", [], [], [tensor]), ir_version=10)
    if use(model, rewrite=False):
        array = read_model(model).graph.initializers["t"].array()
        assert array.size == math.prod(dims)


def _damage_bytes(models: list[onnx.ModelProto], seed: int, count: int) -> None:
    generator = random.Random(seed)
    sources = [model.SerializeToString() for model in models]
    results = [
        use(_with_damaged_bytes(generator.choice(sources), generator), rewrite=index % 3 == 0) for index in range(count)
    ]
    assert 0 < sum(results) < count


def _with_damaged_bytes(source: bytes, generator: random.Random) -> bytes:
    data = bytearray(source)
    for _ in range(generator.choice([1, 1, 2, 4, 16])):
        position, kind = generator.randrange(len(data)), generator.randrange(5)
        if kind == 0:
            data[position] = generator.randrange(256)
        elif kind == 1:
            data[position] ^= 1 << generator.randrange(8)
        elif kind == 2:
            del data[position:]
        elif kind == 3:
            del data[position : position + generator.randrange(1, 9)]
        else:
            start = generator.randrange(len(data))
            data[position:position] = data[start : start + generator.randrange(1, 40)]
        if not data:
            break
    return bytes(data)


def _damage_fields(models: list[onnx.ModelProto], seed: int, count: int) -> None:
    generator = random.Random(seed)
    results = []
    for _ in range(count):
        model = onnx.ModelProto()
        model.CopyFrom(generator.choice(models))
        for _ in range(generator.choice([1, 1, 2, 3])):
            _change_a_field(model, generator)
        results.append(use(model, rewrite=True))
    assert count / 4 < sum(results) < count


def _change_a_field(model: onnx.ModelProto, generator: random.Random) -> None:
    graph = model.graph
    changes: list[Callable[[], None]] = [
        lambda: setattr(model.opset_import[0], "version", generator.randrange(1, 29)),
        lambda: _change_input_type(generator.choice(graph.input), generator),
        lambda: _make_input_constant(graph, generator),
        lambda: _change_edges(generator.choice(graph.node), graph, generator),
        lambda: _change_attribute(generator.choice(graph.node), generator),
        lambda: _change_attribute(generator.choice(graph.node), generator),
    ]
    try:
        generator.choice(changes)()
    except (IndexError, ValueError):
        return  # There was nothing to change, or protobuf itself refuses the value.


def _change_input_type(value: onnx.ValueInfoProto, generator: random.Random) -> None:
    kind, dims = value.type.tensor_type, value.type.tensor_type.shape.dim
    choice = generator.randrange(6)
    if choice == 0:
        kind.elem_type = generator.randrange(1, 29)
    elif choice == 1:
        kind.ClearField("shape")
    elif choice == 2:
        generator.choice(dims).dim_value = generator.choice(ODD_NUMBERS)
    elif choice == 3:
        del dims[generator.randrange(len(dims))]
    elif choice == 4:
        dims.add().dim_value = generator.choice(ODD_NUMBERS)
    else:
        value.type.Clear()


def _make_input_constant(graph: onnx.GraphProto, generator: random.Random) -> None:
    value = generator.choice(graph.input)
    shape = generator.choice([(), (1,), (2,), (4,), (2, 2), (0,)])
    numbers = [number for number in ODD_NUMBERS if abs(number) < 2**31]
    dtype = generator.choice([np.int64, np.int32, np.float32])
    array = np.array([generator.choice(numbers) for _ in range(math.prod(shape))], dtype).reshape(shape)
    graph.initializer.append(numpy_helper.from_array(array, value.name))
    graph.input.remove(value)


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
        attribute.ints[generator.randrange(len(attribute.ints))] = generator.choice(ODD_NUMBERS)
        if generator.random() < 0.5:
            attribute.ints.append(generator.choice(ODD_NUMBERS))
    elif attribute.type == onnx.AttributeProto.INT:
        attribute.i = generator.choice(ODD_NUMBERS)
    elif attribute.type == onnx.AttributeProto.FLOAT:
        attribute.f = generator.choice([0, -1, 1e30, math.nan, math.inf])
    elif attribute.type == onnx.AttributeProto.STRING:
        attribute.s = generator.choice([b"", b"x", b"\xff\xfe", b"A" * 1000, attribute.s[:-1], b"VALID"])
    elif attribute.type == onnx.AttributeProto.TENSOR:
        attribute.t.data_type = generator.randrange(29)
