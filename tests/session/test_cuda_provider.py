"""The CUDA provider over a host that plays a GPU, against onnxruntime on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import genai as ort
from genai import devices
from genai.errors import DeviceError
from genai.kernels.cuda.driver import CudaError
from genai.session.cuda_operators import TABLE
from tests.kernels.cuda.devices import GPU, IS_THERE, Device

CUDA = "CUDAExecutionProvider"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not IS_THERE, reason="kernels run on Linux through g++")]
# Largest difference beside the largest value, by type: onnxruntime computes halves in float32 and rounds each result.
TOLERANCE = {np.dtype(np.float32): 4e-6, np.dtype(np.float16): 3e-3}


class Counting(Device):
    """Counts what is asked of it; `most` bytes can be had, 0 = any number."""

    allocations: int = 0
    held: int = 0
    most: int = 0
    written: int = 0
    read: int = 0

    def zeros(self, nbytes: int) -> Any:
        if self.most and self.held + nbytes > self.most:
            raise MemoryError
        self.allocations += 1
        self.held += nbytes
        return super().zeros(nbytes)

    def write(self, target: Any, array: Any) -> None:
        self.written += 1
        super().write(target, array)

    def download(self, array: Any) -> Any:
        self.read += 1
        return super().download(array)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Counting:
    driver = Counting()
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

    def check(self, orders: Sequence[int], driver: Counting) -> None:
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
def test_functions_of_elements(gpu: Counting, dtype: Any) -> None:
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
def test_functions_of_two(gpu: Counting, dtype: Any) -> None:
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
        models.add("Mean", numbers(dtype=dtype), numbers(dtype=dtype, seed=1))
    logic = numbers(3, 5) > 0, numbers(5, seed=1) > 0
    for name in ("And", "Or", "Xor"):
        models.add(name, *logic)
    models.add("Not", logic[0])
    models.check(ORDERS, gpu)


@pytest.mark.parametrize("dtype", FLOATS)
def test_products(gpu: Counting, dtype: Any) -> None:
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
def test_rows(gpu: Counting, dtype: Any) -> None:
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
def test_reductions(gpu: Counting, dtype: Any) -> None:
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
    for name in names:
        models.add(name, numbers(3, 0, dtype=dtype), np.array([1], np.int64), known=(1,))
        models.add(name, numbers(0, 3, dtype=dtype), np.array([1], np.int64), known=(1,))
    models.add("ReduceSum", numbers(2, 3, dtype=dtype), np.zeros(0, np.int64), known=(1,), noop_with_empty_axes=1)
    models.check(ORDERS, gpu)


@pytest.mark.parametrize("dtype", [*FLOATS, np.int64, np.bool_])
def test_places(gpu: Counting, dtype: Any) -> None:
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
    models.add("GatherND", x, np.array([[0, 2], [1, -1]], np.int64))
    models.add("GatherND", x, np.array([[[2]], [[0]]], np.int64), batch_dims=1)
    models.add("GatherND", x, np.array([[1, 2, 3, 7]], np.int64))
    models.add("Pad", x, whole(0, 1, 0, 2, 0, 0, 1, 3), known=(1,))
    models.add("Pad", x, whole(1, -2, 2, 0), np.ones((), dtype), whole(0, -1), known=(1, 2, 3))
    models.check(ORDERS, gpu)


@pytest.mark.parametrize("dtype", FLOATS)
def test_windows(gpu: Counting, dtype: Any) -> None:
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


MODELS = Path(__file__).parent / "models"


@pytest.mark.parametrize("name", ["bert_legacy", "resnet_legacy", "vit_legacy", "convnext_dynamo", "distilbert_dynamo"])
@pytest.mark.parametrize("level", ["ORT_DISABLE_ALL", "ORT_ENABLE_ALL"])
def test_exported_models_are_one_part(gpu: Counting, name: str, level: str) -> None:
    """One transfer in, one out, nothing on the CPU; and the same in another order of threads."""
    path = MODELS / f"{name}.onnx"
    with np.load(path.with_suffix(".npz")) as arrays:
        feed = {key.removeprefix("input "): arrays[key] for key in arrays.files if key.startswith("input ")}
        wanted = {key.removeprefix("output "): arrays[key] for key in arrays.files if key.startswith("output ")}
    made = session(onnx.load(path), level=getattr(ort.GraphOptimizationLevel, level))
    assert len(parts(made)) == 1 and set(on_cpu(made)) <= {"Constant"}
    for order in (0, 3):
        gpu.order, gpu.written, gpu.read = order, 0, 0
        for value, expected in zip(made.run(list(wanted), feed), wanted.values(), strict=True):
            np.testing.assert_allclose(value, expected, rtol=1e-3, atol=1e-5)
    assert (gpu.written, gpu.read) == (1, 1)


@pytest.fixture
def network(make_model: Any) -> onnx.ModelProto:
    """y = relu(x w + b) v and z = relu(x w + b) + its tangents, for which there is no kernel."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"], name="first"), helper.make_node("Add", ["m", "b"], ["a"]),
        helper.make_node("Relu", ["a"], ["r"]), helper.make_node("Tan", ["r"], ["t"], name="tangent"),
        helper.make_node("MatMul", ["r", "v"], ["y"], name="last"), helper.make_node("Add", ["t", "r"], ["z"]),
    ]  # fmt: skip
    constants = {"w": numbers(7, 12), "b": numbers(12), "v": numbers(12, 5)}
    return make_model(
        nodes, {"x": (1, ["n", 7])}, {"y": (1, ["n", 5]), "z": (1, ["n", 12])}, constants, version=21
    )  # fmt: skip


@pytest.mark.parametrize("level", list(ort.GraphOptimizationLevel))
def test_what_has_no_kernel_runs_on_the_cpu_between_two_parts(
    gpu: Counting, network: onnx.ModelProto, level: Any
) -> None:
    made = session(network, level=level)
    assert on_cpu(made) == ["Tan"] and len(parts(made)) == 2
    assert parts(made)[0][-1] == "Identity"  # one name for the CPU, one for the second part
    for rows in (3, 5, 3):
        feed = {"x": numbers(rows, 7)}
        agree(made.run(None, feed), by_onnxruntime(network, feed), ["y", "z"])


def test_a_value_of_both_worlds_crosses_once(gpu: Counting, network: onnx.ModelProto) -> None:
    made = session(network)
    made.run(None, {"x": numbers(3, 7)})
    gpu.written = gpu.read = 0
    made.run(["y"], {"x": numbers(3, 7)})
    # In: x, then the tangents. Out: the middle for them, then y (z stays where it is).
    assert (gpu.written, gpu.read) == (2, 2)


def test_runs_of_the_same_shapes_allocate_nothing(gpu: Counting, network: onnx.ModelProto) -> None:
    made, feed = session(network), {"x": numbers(6, 7)}
    made.run(None, feed)
    before = gpu.allocations
    results = [made.run(None, {"x": numbers(6, 7, seed=seed)}) for seed in range(3)]
    assert gpu.allocations == before
    agree(results[2], by_onnxruntime(network, {"x": numbers(6, 7, seed=2)}), ["y", "z"])


def test_values_bound_on_the_gpu_stay_there(gpu: Counting, network: onnx.ModelProto) -> None:
    made, x = session(network), numbers(4, 7)
    binding, value = made.io_binding(), ort.OrtValue.ortvalue_from_numpy(x, "cuda", 0)
    assert (value.device_name(), value.shape(), value.data_type(), value.element_type()) == (
        "cuda",
        [4, 7],
        "tensor(float)",
        1,
    )
    into = ort.OrtValue.ortvalue_from_shape_and_type([4, 12], np.float32, "cuda", 0)
    binding.bind_ortvalue_input("x", value)
    binding.bind_output("y", "cuda", 0)
    binding.bind_ortvalue_output("z", into)
    made.run_with_iobinding(binding)
    gpu.written = gpu.read = 0
    made.run_with_iobinding(binding)
    assert (gpu.written, gpu.read) == (1, 1)  # for the tangents alone
    first, second = binding.get_outputs()
    assert first.device_name() == "cuda" and second is into
    kept = first.numpy()
    agree([kept, into.numpy()], by_onnxruntime(network, {"x": x}), ["y", "z"])
    value.update_inplace(numbers(4, 7, seed=1))
    made.run_with_iobinding(binding)
    np.testing.assert_array_equal(first.numpy(), kept)  # a later run does not write into it
    agree(binding.copy_outputs_to_cpu(), by_onnxruntime(network, {"x": numbers(4, 7, seed=1)}), ["y", "z"])


def test_memory_bound_by_address(gpu: Counting, network: onnx.ModelProto) -> None:
    made, x = session(network), ort.OrtValue.ortvalue_from_numpy(numbers(2, 7), "cuda", 0)
    y = ort.OrtValue.ortvalue_from_shape_and_type([2, 5], np.float32, "cuda", 0)
    binding = made.io_binding()
    binding.bind_input("x", "cuda", 0, np.float32, [2, 7], x.data_ptr())
    binding.bind_output("y", "cuda", 0, np.float32, [2, 5], y.data_ptr())
    binding.synchronize_inputs()
    made.run_with_iobinding(binding)
    agree([y.numpy()], by_onnxruntime(network, {"x": numbers(2, 7)})[:1], ["y"])
    with pytest.raises(ort.InputError, match=r"float32\[2, 5\] cannot replace float32\[3, 5\]"):
        binding.bind_output("y", "cuda", 0, np.float32, [3, 5], y.data_ptr())
        made.run_with_iobinding(binding)


def test_values_on_the_gpu_for_the_cpu_and_back(gpu: Counting, add_model: onnx.ModelProto) -> None:
    """Where the CPU reads an input it is copied; results go where they are wanted."""
    plain = ort.InferenceSession(add_model)
    a, b = numbers(2, 3), numbers(2, 3, seed=1)
    value = ort.OrtValue.ortvalue_from_numpy(a, "cuda", 0)
    np.testing.assert_array_equal(plain.run(None, {"a": value, "b": b})[0], a + b)
    binding = plain.io_binding()
    binding.bind_ortvalue_input("a", value)
    binding.bind_cpu_input("b", b)
    binding.bind_output("c", "cuda")
    plain.run_with_iobinding(binding)
    assert binding.get_outputs()[0].device_name() == "cuda"
    np.testing.assert_array_equal(binding.get_outputs()[0].numpy(), a + b)
    there = ort.OrtValue.ortvalue_from_shape_and_type([2, 3], np.float32)
    ort.copy_tensors([value], [there])
    np.testing.assert_array_equal(there.numpy(), a)
    with pytest.raises(ort.InputError, match="text cannot be stored on a GPU"):
        ort.OrtValue.ortvalue_from_numpy(np.array(["a"], object), "cuda", 0)


@pytest.mark.skipif(bool(GPU), reason="NumPy reads no memory of a GPU")
def test_dlpack(gpu: Counting, network: onnx.ModelProto) -> None:
    """On this host the memory of a GPU is NumPy's."""
    x = ort.OrtValue.ortvalue_from_numpy(numbers(3, 7), "cuda", 0)
    shared = np.from_dlpack(x)
    assert shared.ctypes.data == x.data_ptr()
    made = session(network)
    binding = made.io_binding()
    binding.bind_ortvalue_input("x", x)
    binding.bind_output("y", "cuda")
    made.run_with_iobinding(binding)
    y = np.from_dlpack(binding.get_outputs()[0])
    copy = y.copy()
    binding.clear_binding_outputs()
    x.update_inplace(numbers(3, 7, seed=1))
    made.run(None, {"x": x})  # must not write into what was lent
    np.testing.assert_array_equal(y, copy)


def test_shapes_that_are_computed_in_the_graph(gpu: Counting, make_model: Any) -> None:
    """Reshape to sizes from Shape, and a mask that follows from shapes alone, stay on the GPU."""
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]), helper.make_node("Gather", ["s", "one"], ["n"]),
        helper.make_node("Concat", ["minus", "n", "two"], ["wanted"], axis=0),
        helper.make_node("Reshape", ["x", "wanted"], ["r"]), helper.make_node("Expand", ["half", "wanted2"], ["mask"]),
        helper.make_node("Concat", ["n", "two"], ["wanted2"], axis=0), helper.make_node("Add", ["r", "mask"], ["y"]),
    ]  # fmt: skip
    constants = {
        "one": np.array([1]), "minus": np.array([-1]), "two": np.array([2]), "half": np.array(0.5, np.float32),
    }  # fmt: skip
    model = make_model(nodes, {"x": (1, ["a", "b"])}, {"y": (1, None)}, constants, version=17)
    made = session(model)
    assert len(parts(made)) == 1 and on_cpu(made) == []
    for shape in ((4, 3), (2, 5), (0, 2)):
        agree(made.run(None, {"x": numbers(*shape)}), by_onnxruntime(model, {"x": numbers(*shape)}), ["y"])


def test_a_shape_of_an_earlier_part_is_known_to_a_later_one(gpu: Counting, make_model: Any) -> None:
    """Also where the CPU reads it, too."""
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]), helper.make_node("Exp", ["x"], ["e"]),
        helper.make_node("Tile", ["e", "s"], ["w"]), helper.make_node("Tan", ["e"], ["t"]),
        helper.make_node("Neg", ["t"], ["n"]), helper.make_node("Expand", ["n", "s"], ["r"]),
        helper.make_node("Sqrt", ["e"], ["q"]), helper.make_node("Add", ["r", "q"], ["y"]),
    ]  # fmt: skip
    model = make_model(nodes, {"x": (1, ["a", "b"])}, {"y": (1, None), "w": (1, None)}, version=17)
    made = session(model)
    assert sorted(on_cpu(made)) == ["Tan", "Tile"] and len(parts(made)) == 2
    for shape in ((2, 3), (1, 2)):
        agree(made.run(None, {"x": numbers(*shape)}), by_onnxruntime(model, {"x": numbers(*shape)}), ["y", "w"])


def test_a_shape_that_depends_on_data_leaves_the_node_to_the_cpu(gpu: Counting, make_model: Any) -> None:
    nodes = [helper.make_node("Reshape", ["x", "s"], ["r"]), helper.make_node("Exp", ["r"], ["y"])]
    model = make_model(nodes, {"x": (1, ["a"]), "s": (7, [2])}, {"y": (1, None)}, version=17)
    made = session(model)
    assert on_cpu(made) == ["Reshape"] and parts(made) == [["Exp"]]
    feed = {"x": numbers(6), "s": np.array([2, -1])}
    agree(made.run(None, feed), by_onnxruntime(model, feed), ["y"])


def test_nothing_worth_the_way_stays_on_the_cpu(gpu: Counting, make_model: Any) -> None:
    nodes = [helper.make_node("Shape", ["x"], ["s"]), helper.make_node("Identity", ["x"], ["y"])]
    model = make_model(nodes, {"x": (1, ["a"])}, {"y": (1, ["a"]), "s": (7, [1])})
    assert parts(session(model)) == []


def test_an_index_outside(gpu: Counting, make_model: Any) -> None:
    nodes = [helper.make_node("Gather", ["w", "i"], ["g"], name="table"), helper.make_node("Exp", ["g"], ["y"])]
    model = make_model(nodes, {"i": (7, ["n"])}, {"y": (1, None)}, {"w": numbers(5, 4)})
    made = session(model)
    for bad in (5, -6):
        with pytest.raises(ort.InvalidArgument, match="Gather 'table': an index is out of the range 0 to 4"):
            made.run(None, {"i": np.array([0, bad])})
    agree(made.run(None, {"i": np.array([0, -1])}), by_onnxruntime(model, {"i": np.array([0, -1])}), ["y"])
    assert made.get_providers()[0] == CUDA


def test_shapes_that_do_not_fit_name_the_node(gpu: Counting, make_model: Any) -> None:
    nodes = [helper.make_node("MatMul", ["a", "b"], ["m"], name="product"), helper.make_node("Exp", ["m"], ["y"])]
    made = session(make_model(nodes, {"a": (1, None), "b": (1, None)}, {"y": (1, None)}))
    with pytest.raises(ort.Fail, match=r"MatMul 'product' failed: shapes \[2, 3\] and \[4, 5\]") as caught:
        made.run(None, {"a": numbers(2, 3), "b": numbers(4, 5)})
    assert "float32[2, 3], float32[4, 5]" in caught.value.why
    assert made.run(None, {"a": numbers(2, 3), "b": numbers(3, 1)})[0].shape == (2, 1)


def test_too_little_memory_says_what_to_shrink(gpu: Counting, network: onnx.ModelProto) -> None:
    made = session(network, gpu_mem_limit=1 << 16)
    feed = {"x": numbers(4, 7)}
    with pytest.raises(ort.RuntimeException, match=r"out of memory on the GPU while running \d nodes") as caught:
        made.run(None, {"x": numbers(1 << 13, 7)})
    assert "float32[8192, 7]" in caught.value.why and "smaller batch" in caught.value.fix
    agree(made.run(None, feed), by_onnxruntime(network, feed), ["y", "z"])
    gpu.most = gpu.held
    with pytest.raises(ort.RuntimeException, match="out of memory on the GPU"):
        session(network).run(None, feed)


def wanting(gpu: Counting, network: onnx.ModelProto) -> list[Any]:
    """Calls that want memory of a GPU without a run of the provider."""
    on_cpu, elsewhere = ort.InferenceSession(network), Elsewhere()
    binding = on_cpu.io_binding()
    binding.bind_cpu_input("x", numbers(4, 7))
    for value in on_cpu.get_outputs():
        binding.bind_output(value.name, "cuda")
    return [
        lambda: ort.OrtValue.ortvalue_from_numpy(numbers(1 << 10), "cuda", 0),
        lambda: ort.OrtValue.ortvalue_from_shape_and_type([1 << 10], np.float32, "cuda", 0),
        lambda: on_cpu.create_ortvalue_from_shape_and_type([1 << 10], np.float32, "cuda", 0),
        lambda: on_cpu.run_with_iobinding(binding),
        lambda: ort.OrtValue.from_dlpack(elsewhere),
        lambda: binding.bind_ortvalue_input("x", elsewhere),
        lambda: on_cpu.run(None, {"x": elsewhere}),
    ]


class Elsewhere:
    """An array of another library in the GPU's memory."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, **_: Any) -> Any:
        raise AssertionError("the driver refuses before")


@pytest.mark.parametrize("number", range(7))
def test_values_that_find_no_memory_on_the_gpu(
    gpu: Counting, network: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """No argument is to blame, as in a run of the provider; a GPU that fails is none, either."""
    call = wanting(gpu, network)[number]

    def fails(error: Exception) -> Any:
        def method(*_: Any) -> Any:
            raise error

        return method

    for name in ("zeros", "adopt"):
        monkeypatch.setattr(gpu, name, fails(MemoryError("as CuPy says it")))
    with pytest.raises(ort.RuntimeException, match="out of memory in ") as caught:
        call()
    assert caught.value.why and "delete values" in caught.value.fix
    for name in ("zeros", "adopt"):
        monkeypatch.setattr(gpu, name, fails(CudaError("cudaErrorLaunchFailure")))
    with pytest.raises(DeviceError, match="the GPU failed in ") as failed:
        call()
    assert "cudaErrorLaunchFailure" in failed.value.why and "genai doctor" in failed.value.fix


def test_how_much_memory_was_wanted(gpu: Counting) -> None:
    gpu.most = gpu.held + (1 << 10)
    with pytest.raises(ort.RuntimeException, match=f"4096 bytes requested, .* free on {gpu.name}"):
        ort.OrtValue.ortvalue_from_numpy(numbers(1 << 10), "cuda", 0)
    assert ort.OrtValue.ortvalue_from_numpy(numbers(1 << 8), "cuda", 0).shape() == [256]


def test_values_that_find_no_memory_on_the_host() -> None:
    with pytest.raises(ort.RuntimeException, match=r"out of memory in OrtValue\.ortvalue_from_shape_and_type"):
        ort.OrtValue.ortvalue_from_shape_and_type([1 << 55], np.float32)


def test_options(gpu: Counting, network: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch) -> None:
    session(network, device_id="0", cudnn_conv_algo_search="DEFAULT", arena_extend_strategy="kNextPowerOfTwo")
    with pytest.raises(ort.EPFail) as caught:
        session(network, enable_cuda_graph="1")
    assert "CUDAExecutionProvider does not support enable_cuda_graph" in caught.value.why
    with pytest.raises(ort.EPFail):
        session(network, device_id=999)


def test_where_there_is_no_gpu(network: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_gpus", {})
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert ort.get_available_providers()[-1] == "CPUExecutionProvider" and CUDA not in ort.get_available_providers()
    assert ort.get_device() == "CPU"
    with pytest.warns(UserWarning, match=f"Specified provider '{CUDA}' is not in available provider names"):
        made = ort.InferenceSession(network, providers=[CUDA])
    assert made.get_providers() == ["CPUExecutionProvider"]
    with pytest.raises(DeviceError, match="device 'cuda' number 0") as caught:
        ort.OrtValue.ortvalue_from_numpy(numbers(2), "cuda", 0)
    assert "CuPy is not installed" in caught.value.why


def test_where_there_is_one(gpu: Counting) -> None:
    assert ort.get_available_providers()[0] == CUDA and ort.get_device() == "GPU"
    device = ort.OrtDevice.make("cuda", 0)
    assert (device.device_type(), device.device_id(), device.device_vendor_id()) == (1, 0, 0x10DE)


def test_the_page_names_the_operators_that_have_kernels() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reference" / "session-options.md").read_text(encoding="utf-8")
    table = text.partition("\n### Operators on a GPU\n")[2].partition("\n## ")[0]
    for domain, title in (("", "ONNX"), ("com.microsoft", "`com.microsoft`")):
        names = table.partition(f"\n| {title} | ")[2].partition(" |\n")[0]
        assert sorted(names.split(", ")) == sorted(name for own, name in TABLE if own == domain)


def test_many_threads_use_one_session(gpu: Counting, network: onnx.ModelProto) -> None:
    made = session(network)
    feeds = [{"x": numbers(1 + seed % 3, 7, seed=seed)} for seed in range(12)]
    wanted = [made.run(None, feed) for feed in feeds]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda feed: made.run(None, feed), feeds))
    for mine, expected in zip(found, wanted, strict=True):
        for a, b in zip(mine, expected, strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_device_that_is_lost_leaves_the_cpu(gpu: Counting, network: onnx.ModelProto, monkeypatch: Any) -> None:
    made, feed = session(network), {"x": numbers(2, 7)}
    value = ort.OrtValue.ortvalue_from_numpy(feed["x"], "cuda", 0)

    def lost(*_: Any) -> None:
        raise RuntimeError("cudaErrorIllegalAddress")

    monkeypatch.setattr(gpu, "launch", lost)
    with pytest.warns(UserWarning, match=r"cudaErrorIllegalAddress.*the CPU alone"):
        results = made.run(None, {"x": value})
    agree(results, by_onnxruntime(network, feed), ["y", "z"])
    assert made.get_providers() == ["CPUExecutionProvider"]
    agree(made.run(None, {"x": value}), results, ["y", "z"])
