"""The CUDA provider over a host that plays a GPU, against onnxruntime on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import genai as ort
from genai.runtime import device as devices
from tests.kernels.cuda.host_driver import COMPILER, HostDriver

CUDA = "CUDAExecutionProvider"
pytestmark = pytest.mark.skipif(
    COMPILER is None or not sys.platform.startswith("linux"), reason="kernels run on Linux through g++"
)
# Largest difference beside the largest value, by type: onnxruntime computes halves in float32 and rounds each result.
TOLERANCE = {np.dtype(np.float32): 4e-6, np.dtype(np.float16): 3e-3}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> HostDriver:
    driver = HostDriver()
    monkeypatch.setattr(devices, "_gpus", {0: driver})
    return driver


def session(model: onnx.ModelProto, *, level: Any = None, **options: Any) -> ort.InferenceSession:
    chosen = ort.SessionOptions()
    chosen.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    if level is not None:
        chosen.graph_optimization_level = level
    return ort.InferenceSession(model, chosen, providers=[(CUDA, options)])


def parts(made: ort.InferenceSession) -> list[list[str]]:
    """Operators of each part on the GPU."""
    found = made.get_provider_graph_assignment_info()
    return [[node.op_type for node in part.get_nodes()] for part in found if part.ep_name == CUDA]


def on_cpu(made: ort.InferenceSession) -> list[str]:
    found = made.get_provider_graph_assignment_info()
    return [node.op_type for part in found if part.ep_name != CUDA for node in part.get_nodes()]


def by_onnxruntime(model: onnx.ModelProto, feed: dict[str, Any]) -> list[Any]:
    oracle = pytest.importorskip("onnxruntime")
    options = oracle.SessionOptions()
    options.log_severity_level = 3
    made = oracle.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(made.run(None, feed))


def agree(ours: Sequence[Any], theirs: Sequence[Any], names: Sequence[str]) -> None:
    for name, mine, wanted in zip(names, ours, theirs, strict=True):
        assert (mine.dtype, mine.shape) == (wanted.dtype, wanted.shape), name
        if mine.dtype.kind != "f":
            np.testing.assert_array_equal(mine, wanted, err_msg=name)
            continue
        np.testing.assert_array_equal(np.isnan(mine), np.isnan(wanted), err_msg=name)
        a, b = (np.nan_to_num(x.astype(np.float64), posinf=1e9, neginf=-1e9) for x in (mine, wanted))
        largest = np.abs(b).max(initial=1e-3)
        assert np.abs(a - b).max(initial=0) <= TOLERANCE[mine.dtype] * largest, name


class Models:
    """One model of many nodes that have nothing to do with each other: their kernels are compiled together."""

    def __init__(self, version: int = 21) -> None:
        self.version, self.nodes, self.feed, self.constants, self.outputs = version, [], {}, {}, []

    def add(
        self, op: str, *given: Any, outputs: int = 1, known: Sequence[int] = (), kinds: Any = None, domain: str = "",
        **attributes: Any,
    ) -> None:  # fmt: skip
        """A node; arrays are inputs of the model, those at `known` its constants, None is absent."""
        number, names = len(self.nodes), []
        for index, value in enumerate(given):
            name = "" if value is None else f"x{number}_{index}"
            names.append(name)
            if value is not None:
                (self.constants if index in known else self.feed)[name] = np.asarray(value)
        made = [f"{op}_{number}_{index}" for index in range(outputs)]
        self.nodes.append(helper.make_node(op, names, made, name=f"n{number}", domain=domain, **attributes))
        first = next(value for value in given if value is not None)
        kind = kinds or helper.np_dtype_to_tensor_dtype(np.asarray(first).dtype)
        self.outputs += [helper.make_tensor_value_info(name, kind, None) for name in made]

    def model(self) -> onnx.ModelProto:
        inputs = [
            helper.make_tensor_value_info(
                name,
                helper.np_dtype_to_tensor_dtype(value.dtype),
                [f"{name}_{axis}" for axis in range(value.ndim)],
            )
            for name, value in self.feed.items()
        ]
        constants = [numpy_helper.from_array(value, name) for name, value in self.constants.items()]
        graph = helper.make_graph(self.nodes, "g", inputs, self.outputs, constants)
        imports = [helper.make_opsetid("", self.version), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=imports, ir_version=10)

    def check(self, orders: Sequence[int], driver: HostDriver) -> None:
        model = self.model()
        theirs = by_onnxruntime(model, self.feed)
        made = session(model, level=ort.GraphOptimizationLevel.ORT_DISABLE_ALL)
        assert len(parts(made)) == 1 and on_cpu(made) == [], on_cpu(made)
        for order in orders:
            driver.order = order
            agree(made.run(None, self.feed), theirs, [value.name for value in self.outputs])


def numbers(*shape: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    drawn = np.random.default_rng([seed, *shape]).standard_normal(shape)
    return (drawn * (1 if np.dtype(dtype).kind == "f" else 9)).astype(dtype)


ORDERS = (0, 1, 5)
FLOATS = [np.float32, np.float16]


@pytest.mark.parametrize("dtype", FLOATS)
def test_functions_of_elements(gpu: HostDriver, dtype: Any) -> None:
    models, x = Models(), numbers(3, 7, dtype=dtype)
    for (
        name
    ) in "Abs Neg Sign Relu Exp Erf Tanh Sigmoid Floor Ceil Round Softplus Softsign HardSwish Sin Cos Mish".split():
        models.add(name, x)
    for name in ("Sqrt", "Log", "Reciprocal"):
        models.add(name, np.abs(x) + dtype(0.5))
    models.add("Elu", x, alpha=0.5)
    models.add("Selu", x)
    models.add("LeakyRelu", x, alpha=0.3)
    models.add("HardSigmoid", x, alpha=0.3)
    models.add("Gelu", x)
    models.add("Gelu", x, approximate="tanh")
    models.add("Gelu", x, domain="com.microsoft")
    models.add("FastGelu", x, numbers(7, dtype=dtype), domain="com.microsoft")
    models.add("BiasGelu", x, numbers(7, dtype=dtype), domain="com.microsoft")
    models.add("QuickGelu", x, domain="com.microsoft")
    models.add("Clip", x, dtype(-0.5), None, known=(1,))
    models.add("Clip", x, dtype(-0.5), dtype(0.25), known=(1, 2))
    models.add("IsNaN", np.where(x > 1, dtype(np.nan), x), kinds=TensorProto.BOOL)
    models.add("Relu", numbers(0, 4, dtype=dtype))
    models.add("Exp", numbers(dtype=dtype))
    models.add("Exp", numbers(2, 5, 512, dtype=dtype))
    for kind, target in (
        (TensorProto.FLOAT16, 1),
        (TensorProto.FLOAT, 2),
        (TensorProto.INT64, 3),
        (TensorProto.BOOL, 4),
    ):
        models.add("Cast", numbers(4, 9, dtype=dtype, seed=target), kinds=kind, to=kind)
    models.check(ORDERS, gpu)


@pytest.mark.parametrize("dtype", [*FLOATS, np.int32, np.int64])
def test_functions_of_two(gpu: HostDriver, dtype: Any) -> None:
    models = Models()
    shapes = [
        ((3, 7), (3, 7)),
        ((2, 3, 8), (8,)),
        ((2, 1, 4), (3, 1)),
        ((), (5,)),
        ((0, 3), (1, 3)),
        ((4, 1, 1), (1, 5, 6)),
    ]
    shapes.append(((2, 1, 3, 1, 2, 1, 2), (1, 2, 1, 3, 1, 2, 1)))
    for index, (a, b) in enumerate(shapes):
        for name in ("Add", "Mul") if index else ("Add", "Sub", "Mul", "Max", "Min"):
            models.add(name, numbers(*a, dtype=dtype), numbers(*b, dtype=dtype, seed=1))
        models.add("Div", numbers(*a, dtype=dtype), np.abs(numbers(*b, dtype=dtype, seed=1)) + dtype(1))
        for name in ("Equal", "Less", "GreaterOrEqual") if index < 2 else ():
            models.add(name, numbers(*a, dtype=dtype), numbers(*b, dtype=dtype), kinds=TensorProto.BOOL)
        condition = numbers(*b) > 0
        models.add("Where", condition, numbers(*a, dtype=dtype), numbers(*b, dtype=dtype, seed=1),
                   kinds=helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))  # fmt: skip
    if np.dtype(dtype).kind == "f":
        x = np.abs(numbers(3, 8, dtype=dtype)) + dtype(0.5)
        for exponent in (2, 0.5, 3, -1.5):
            models.add("Pow", x, dtype(exponent), known=(1,))
        models.add("Pow", x, numbers(8, dtype=dtype))
        models.add("PRelu", numbers(2, 3, 4, dtype=dtype), numbers(3, 1, dtype=dtype))
        models.add("Sum", x, numbers(8, dtype=dtype), numbers(3, 1, dtype=dtype))
        models.add("Mean", x, numbers(8, dtype=dtype))
    logic = numbers(3, 5) > 0, numbers(5, seed=1) > 0
    for name in ("And", "Or", "Xor"):
        models.add(name, *logic)
    models.add("Not", logic[0])
    models.check(ORDERS, gpu)


@pytest.mark.parametrize("dtype", FLOATS)
def test_products(gpu: HostDriver, dtype: Any) -> None:
    models = Models()
    shapes = [((5, 7), (7, 3)), ((2, 3, 9), (9, 17)), ((2, 1, 3, 8), (4, 8, 16)), ((7,), (7, 3)), ((2, 4, 7), (7,))]
    shapes += [((70, 33), (33, 130)), ((3, 0), (0, 4)), ((0, 3), (3, 4)), ((1, 40), (40, 8)), ((6, 6, 1), (6, 1, 6))]
    for a, b in shapes:
        models.add("MatMul", numbers(*a, dtype=dtype), numbers(*b, dtype=dtype))
    models.add("MatMul", numbers(5, 24, dtype=dtype), numbers(24, 40, dtype=dtype), known=(1,))
    for flip in range(4):
        a, b = numbers(*((9, 5), (5, 9))[flip % 2], dtype=dtype), numbers(*((9, 6), (6, 9))[flip // 2], dtype=dtype)
        turned = {"transA": 1 - flip % 2, "transB": flip // 2}
        models.add("Gemm", a, b, numbers(6, dtype=dtype), alpha=0.5, beta=2.0, **turned)
    models.add("Gemm", numbers(4, 8, dtype=dtype), numbers(8, 12, dtype=dtype), numbers(4, 1, dtype=dtype))
    models.add("Gemm", numbers(4, 8, dtype=dtype), numbers(8, 12, dtype=dtype))
    models.check(ORDERS, gpu)


@pytest.mark.parametrize("dtype", FLOATS)
def test_rows(gpu: HostDriver, dtype: Any) -> None:
    models = Models()
    for shape, axis in (((3, 7), -1), ((2, 5, 6), 1), ((2, 1100), 1), ((4, 3), 0), ((0, 3), -1)):
        models.add("Softmax", numbers(*shape, dtype=dtype), axis=axis)
        models.add("LogSoftmax", numbers(*shape, dtype=dtype), axis=axis)
    for shape, axis in (((3, 5, 24), -1), ((2, 3, 4, 5), 2), ((2, 1100), -1)):
        inner = shape[axis:]
        models.add("LayerNormalization", numbers(*shape, dtype=dtype), numbers(*inner, dtype=dtype),
                   numbers(*inner, dtype=dtype, seed=1), axis=axis)  # fmt: skip
    x, vectors = numbers(2, 3, 24, dtype=dtype), [numbers(24, dtype=dtype, seed=seed) for seed in range(3)]
    models.add("SkipLayerNormalization", x, numbers(2, 3, 24, dtype=dtype, seed=1), *vectors, domain="com.microsoft")
    models.add(
        "InstanceNormalization", numbers(2, 3, 5, 4, dtype=dtype), *(numbers(3, dtype=dtype, seed=i) for i in (1, 2))
    )
    statistics = [numbers(3, dtype=dtype, seed=i) for i in range(3)]
    models.add("BatchNormalization", numbers(2, 3, 5, 4, dtype=dtype), *statistics, np.abs(statistics[0]) + dtype(1),
               known=(1, 2, 3, 4))  # fmt: skip
    models.check(ORDERS, gpu)


@pytest.mark.parametrize("dtype", [*FLOATS, np.int64])
def test_reductions(gpu: HostDriver, dtype: Any) -> None:
    models = Models()
    names = ["ReduceSum", "ReduceMax", "ReduceMin", *(["ReduceMean"] if np.dtype(dtype).kind == "f" else [])]
    for shape, axes in (
        ((3, 40), [1]),
        ((40, 3), [0]),
        ((2, 3, 4, 5), [1, -1]),
        ((2, 3, 4, 5), [2, 3]),
        ((5, 9), None),
        ((3, 7), [1]),
    ):
        for name in names:
            given = () if axes is None else (np.array(axes, np.int64),)
            models.add(name, numbers(*shape, dtype=dtype), *given, known=(1,), keepdims=int(len(shape) % 2))
    models.add("ReduceSum", numbers(2, 3, dtype=dtype), np.zeros(0, np.int64), known=(1,), noop_with_empty_axes=1)
    models.check(ORDERS, gpu)


@pytest.mark.parametrize("dtype", [*FLOATS, np.int64, np.bool_])
def test_places(gpu: HostDriver, dtype: Any) -> None:
    models, x = Models(), numbers(2, 3, 4, 8, dtype=dtype)

    def whole(*given: int) -> np.ndarray:
        return np.array(given, np.int64)

    for shape in ((6, 32), (0, -1, 8), (-1,), (2, 3, 2, 16)):
        models.add("Reshape", x, whole(*shape), known=(1,))
    for order in ((0, 2, 1, 3), (3, 2, 1, 0), (0, 1, 3, 2)):
        models.add("Transpose", x, perm=order)
    models.add("Transpose", x)
    models.add("Unsqueeze", x, whole(0, -1), known=(1,))
    models.add("Squeeze", numbers(1, 3, 1, dtype=dtype), whole(-1), known=(1,))
    models.add("Squeeze", numbers(1, 3, 1, dtype=dtype))
    models.add("Flatten", x, axis=2)
    models.add("Identity", x)
    models.add("Expand", numbers(3, 1, dtype=dtype), whole(2, 1, 6), known=(1,))
    models.add("Concat", x, numbers(2, 3, 1, 8, dtype=dtype), numbers(2, 3, 0, 8, dtype=dtype), axis=-2)
    for start, end, axes, steps in (
        ((1,), (3,), (2,), (1,)),
        ((-1,), (-9,), (3,), (-2,)),
        ((0, 5), (9, 2), (0, 3), (1, 1)),
    ):
        models.add("Slice", x, whole(*start), whole(*end), whole(*axes), whole(*steps), known=(1, 2, 3, 4))
    models.add("Split", x, whole(1, 5, 2), axis=-1, outputs=3, known=(1,))
    models.add("Split", x, axis=3, outputs=3, num_outputs=3)
    models.add("Gather", x, np.array([[0, -1], [2, 1]], np.int64), axis=1)
    models.add("Gather", x, np.array([3, 0, 3], np.int32), axis=-1)
    models.add("Gather", x, np.array(1, np.int64))
    models.check(ORDERS, gpu)


@pytest.mark.parametrize("dtype", FLOATS)
def test_windows(gpu: HostDriver, dtype: Any) -> None:
    models = Models()
    cases: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
        ((2, 3, 9, 7), (5, 3, 3, 3), {"pads": [1, 1, 1, 1]}),
        ((1, 4, 8, 8), (6, 2, 3, 2), {"group": 2, "strides": [2, 1], "dilations": [1, 2]}),
        ((2, 4, 6, 5), (4, 1, 3, 3), {"group": 4, "pads": [1, 0, 2, 1]}),
        ((1, 3, 5, 5), (70, 3, 1, 1), {}),
        ((2, 3, 11), (4, 3, 3), {"auto_pad": "SAME_UPPER", "strides": [2]}),
        ((0, 3, 5, 5), (2, 3, 3, 3), {}),
    ]
    for image, weight, attributes in cases:
        bias = numbers(weight[0], dtype=dtype)
        models.add("Conv", numbers(*image, dtype=dtype), numbers(*weight, dtype=dtype, seed=1), bias, **attributes)
    models.add("Conv", numbers(1, 2, 6, 6, dtype=dtype), numbers(3, 2, 3, 3, dtype=dtype))
    x = numbers(2, 3, 9, 7, dtype=dtype)
    for name in ("MaxPool", "AveragePool"):
        models.add(name, x, kernel_shape=[3, 2], strides=[2, 2], pads=[1, 0, 1, 1])
        models.add(name, x, kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1)
        models.add(name, numbers(2, 3, 9, dtype=dtype), kernel_shape=[3])
    models.add("AveragePool", x, kernel_shape=[3, 3], pads=[1, 1, 1, 1], count_include_pad=1)
    models.add("GlobalAveragePool", x)
    models.add("GlobalMaxPool", x)
    models.check(ORDERS, gpu)
