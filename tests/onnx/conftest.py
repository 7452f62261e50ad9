"""Fixtures for the graph tests: ONNX's backend suite, its reference evaluator, and small models."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from google.protobuf.descriptor import FieldDescriptor
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from tests.drawing import Draw

SUITE_KINDS = ("node", "simple", "pytorch-converted", "pytorch-operator", "real")
RANDOM_OPS = {"Bernoulli", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial"}


@dataclass(frozen=True)
class SuiteCase:
    """One model of ONNX's backend suite; `inputs` returns its first set of inputs, or None if the suite has none."""

    name: str
    model: onnx.ModelProto
    inputs: Callable[[], list[Any] | None]

    @property
    def is_random(self) -> bool:
        text = str(self.model)
        return any(f'"{op}"' in text for op in RANDOM_OPS) or "training_mode" in text


@pytest.fixture(scope="session")
def suite() -> list[SuiteCase]:
    """All models of the backend suite that need no download."""
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Making some node cases divides by zero.
        cases = [_suite_case(case) for kind in SUITE_KINDS for case in load_model_tests(kind=kind)]
    assert len(cases) > 1700
    return cases


@pytest.fixture(scope="session")
def drawn_cases(suite: list[SuiteCase], draw: Draw) -> list[SuiteCase]:
    """A sixth of the suite, drawn by the commit, for tests that take long."""
    chosen = draw.part((case.name for case in suite), 6)
    return [case for case in suite if case.name in chosen]


def _suite_case(case: Any) -> SuiteCase:
    if case.model is not None:
        return SuiteCase(case.name, case.model, lambda: [_as_array(item) for item in case.data_sets[0][0]])
    if case.model_dir is not None:
        model = onnx.load(Path(case.model_dir) / "model.onnx")
        return SuiteCase(case.name, model, lambda: _stored_inputs(model, Path(case.model_dir)))
    # The "real" models' addresses are paths inside the onnx package; their inputs are made by the runner.
    model = onnx.load(Path(onnx.__file__).parent.parent / case.url)
    return SuiteCase(case.name, model, lambda: _ones(model))


def _as_array(item: Any) -> Any:
    return numpy_helper.to_array(item) if isinstance(item, TensorProto) else item


def _stored_inputs(model: onnx.ModelProto, folder: Path) -> list[Any] | None:
    inputs: list[Any] = []
    for index in range(len(list((folder / "test_data_set_0").glob("input_*.pb")))):
        data = (folder / "test_data_set_0" / f"input_{index}.pb").read_bytes()
        kind = model.graph.input[index].type.WhichOneof("value")
        if kind == "sequence_type":
            inputs.append(numpy_helper.to_list(onnx.SequenceProto.FromString(data)))
        elif kind == "optional_type":
            inputs.append(numpy_helper.to_optional(onnx.OptionalProto.FromString(data)))
        else:
            inputs.append(numpy_helper.to_array(TensorProto.FromString(data)))
    return inputs


def _ones(model: onnx.ModelProto) -> list[Any]:
    constants = {tensor.name for tensor in model.graph.initializer}
    shapes = [
        [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in model.graph.input
        if value.name not in constants
    ]
    return [np.linspace(0, 1, math.prod(shape), dtype=np.float32).reshape(shape) for shape in shapes]


@pytest.fixture(scope="session")
def run_reference() -> Callable[[onnx.ModelProto, Sequence[Any]], list[Any]]:
    """Runs a model with ONNX's reference evaluator, on inputs in the order of the graph's inputs."""

    def run(model: onnx.ModelProto, inputs: Sequence[Any]) -> list[Any]:
        names = [value.name for value in model.graph.input]
        with np.errstate(all="ignore"):
            return list(ReferenceEvaluator(model).run(None, dict(zip(names, inputs, strict=False))))

    return run


@pytest.fixture(scope="session")
def same_values() -> Callable[[Any, Any], bool]:
    """Return True if two outputs are bitwise equal: arrays, lists, dictionaries or None."""

    def same(first: Any, second: Any) -> bool:
        if isinstance(first, list | tuple):
            return isinstance(second, list | tuple) and len(first) == len(second) and all(map(same, first, second))
        if isinstance(first, dict) or first is None:
            return type(first) is type(second) and first == second
        first, second = np.asarray(first), np.asarray(second)
        if first.dtype != second.dtype or first.shape != second.shape:
            return False
        return first.tolist() == second.tolist() if first.dtype == object else first.tobytes() == second.tobytes()

    return same


@pytest.fixture(scope="session")
def normalised() -> Callable[[onnx.ModelProto], bytes]:
    """Return a message as bytes without the fields that hold their default, which protobuf may encode or omit."""

    def normalise(message: onnx.ModelProto) -> bytes:
        copy = type(message)()
        copy.CopyFrom(message)
        _drop_empty(copy)
        return copy.SerializeToString(deterministic=True)

    return normalise


def _drop_empty(message: Any) -> None:
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for item in value if field.is_repeated else [value]:
                _drop_empty(item)
        elif not field.is_repeated and (
            (field.type == FieldDescriptor.TYPE_STRING and value == "")
            or (field.name == "model_version" and value == 0)
        ):
            message.ClearField(field.name)


@pytest.fixture
def make_model() -> Callable[..., onnx.ModelProto]:
    """Builds a model from nodes, {input: (type, shape)}, {output: (type, shape)} and {initializer: array}."""

    def make(
        nodes: Sequence[onnx.NodeProto],
        inputs: dict[str, tuple[int, Any]],
        outputs: dict[str, tuple[int, Any]],
        initializers: dict[str, np.ndarray] | None = None,
        *,
        opset: int = 20,
        ir_version: int = 10,
        functions: Sequence[onnx.FunctionProto] = (),
        domains: dict[str, int] | None = None,
    ) -> onnx.ModelProto:
        graph = helper.make_graph(
            list(nodes),
            "graph",
            [helper.make_tensor_value_info(name, *kind) for name, kind in inputs.items()],
            [helper.make_tensor_value_info(name, *kind) for name, kind in outputs.items()],
            [numpy_helper.from_array(array, name) for name, array in (initializers or {}).items()],
        )
        imports = {"": opset, **(domains or {})}
        return helper.make_model(
            graph,
            ir_version=ir_version,
            functions=functions,
            opset_imports=[helper.make_opsetid(*entry) for entry in imports.items()],
        )

    return make


@pytest.fixture
def if_model(make_model: Callable[..., onnx.ModelProto]) -> onnx.ModelProto:
    """y = If(flag): then a + w, else b * w; the branches capture a = Relu(x), b = Neg(x) and the initializer w."""
    then_branch = helper.make_graph(
        [helper.make_node("Add", ["a", "w"], ["then_sum"]), helper.make_node("Identity", ["then_sum"], ["then_out"])],
        "then_graph",
        [],
        [helper.make_tensor_value_info("then_out", TensorProto.FLOAT, [2])],
    )
    else_branch = helper.make_graph(
        [helper.make_node("Mul", ["b", "w"], ["else_out"])],
        "else_graph",
        [],
        [helper.make_tensor_value_info("else_out", TensorProto.FLOAT, [2])],
    )
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("Neg", ["x"], ["b"]),
        helper.make_node("If", ["flag"], ["y"], then_branch=then_branch, else_branch=else_branch),
    ]
    return make_model(
        nodes,
        {"x": (TensorProto.FLOAT, [2]), "flag": (TensorProto.BOOL, [])},
        {"y": (TensorProto.FLOAT, [2])},
        {"w": np.array([2, 3], np.float32)},
    )


@pytest.fixture
def external_model(tmp_path: Path) -> Iterator[Path]:
    """Path of a model y = x @ w + b whose w (float32 [64, 32]) and odd-offset b (float32 [32]) are external."""
    weight = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)
    bias = np.arange(32, dtype=np.float32)
    (tmp_path / "weights.bin").write_bytes(b"\x07" * 3 + bias.tobytes() + weight.tobytes())
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["product"]), helper.make_node("Add", ["product", "b"], ["y"])],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 32])],
        [_external("b", [32], 3, 128), _external("w", [64, 32], 131, weight.nbytes)],
    )
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)])
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    yield path


def _external(name: str, dims: list[int], offset: int, length: int) -> TensorProto:
    tensor = TensorProto(name=name, dims=dims, data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
    for key, value in {"location": "weights.bin", "offset": offset, "length": length}.items():
        entry = tensor.external_data.add()
        entry.key, entry.value = key, str(value)
    return tensor
