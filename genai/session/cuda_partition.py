"""CUDAExecutionProvider: runs the parts of a graph that have GPU kernels on a GPU.

Shapes are computed on the host from the shapes of a run's inputs, once for all runs with the same shapes. Values that
depend only on shapes and constants are never copied to the device.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.kernels.cuda.arrays.device import ArrayDevice, ArrayProgram, DeviceConstants, Status, taken_in
from genai.kernels.cuda.arrays.launches import SCALARS, Array, ArrayError, Recorder
from genai.kernels.cuda.arrays.memory import DeviceFull, DeviceTensor
from genai.ops.registry import KernelError, evaluated, find_kernel

from ..devices import open_gpu
from ..errors import ArgumentError, NodeError, OptionError, OutOfMemoryError, whole_number
from ..onnx.ir import Graph, Node, OnnxModel
from ..onnx.node import NEW_EACH_TIME, STANDARD_DOMAINS
from ..onnx.types import TensorType
from .cuda_operators import TABLE, VIEWS, Given, NodeCall, Seen, element_name, takes
from .partition import CUDA_PROVIDER

# The maximum number of cached programs per part; each program is for one combination of input shapes.
_PROGRAMS = 16
_SHAPES = frozenset({("", "Shape"), ("", "Size")})
# Options that concern only onnxruntime's own implementation.
_WITHOUT_EFFECT = frozenset(
    "arena_extend_strategy cudnn_conv1d_pad_to_nc1d cudnn_conv_algo_search cudnn_conv_use_max_workspace "
    "do_copy_in_default_stream prefer_nhwc sdpa_kernel tunable_op_enable tunable_op_max_tuning_duration_ms "
    "tunable_op_tuning_enable use_ep_level_unified_stream use_tf32".split()
)


class CudaProvider:
    """The provider for NVIDIA GPUs; see `Taker`.

    Args:
        device_id: index of the GPU.
        gpu_mem_limit: maximum device memory for values and constants, in bytes; 0 = no limit.
        more: options that concern only onnxruntime's own implementation; they are ignored.

    Raises:
        OptionError: an option is unknown, or cannot be supported.
        NoDevice: the GPU does not exist or cannot be used.
    """

    keeps_values = True

    def __init__(self, device_id: Any = 0, gpu_mem_limit: Any = 0, **more: Any) -> None:
        unknown = sorted(set(more) - _WITHOUT_EFFECT)
        if unknown:
            raise OptionError(
                f"{CUDA_PROVIDER} does not support {', '.join(unknown)}",
                "the supported options are device_id and gpu_mem_limit",
                "remove all other options",
            )
        index, limit = _number("device_id", device_id), _number("gpu_mem_limit", gpu_mem_limit)
        self._device = ArrayDevice(open_gpu(index), 0 if limit >= 2**63 - 1 else limit)
        self.on_host: frozenset[str] = frozenset()

    def taken(self, model: OnnxModel) -> Collection[Node]:
        """Return the nodes that have kernels, and the nodes that the host computes from shapes for those kernels."""
        graph, known = model.graph, set[str]()
        graph.topological_sort()
        found: list[Node] = []
        for node in graph.nodes:
            if graph.constant_tensor(node.output(0)) is not None or model.function(node) is not None:
                continue
            version = _version(model, node)
            if follows_from_shapes(graph, node, version, known):
                known.update(filter(None, node.outputs))
                found.append(node)
            elif takes(_seen(graph, node, version, known)):
                found.append(node)
        self.on_host = frozenset(known)
        return found if any(_launches(node, known) for node in found) else []

    def compile(self, part: OnnxModel, stays: Sequence[bool]) -> CudaPart:
        """Compile a part of the graph. Its constants are uploaded when the device first needs them."""
        return CudaPart(self._device, part, self.on_host, stays)


def _number(name: str, value: Any) -> int:
    number = whole_number(value) if isinstance(value, str) else value
    if isinstance(number, int | np.integer) and not isinstance(number, bool) and 0 <= number < 2**64:
        return int(number)
    shown = f"{value!r:.80}" if isinstance(value, str) else f"a {type(value).__name__}"
    raise OptionError(
        f"{CUDA_PROVIDER}: {name} is {shown}",
        "the value must be a whole number from 0 to 2^64 - 1",
        "pass a whole number, such as 0",
    )


def _launches(node: Node, known: Collection[str]) -> bool:
    return node.key in TABLE and node.key not in VIEWS and node.output(0) not in known


def _version(model: OnnxModel, node: Node) -> int:
    return model.opset_version(node.domain) or 1


def follows_from_shapes(graph: Graph, node: Node, version: int, known: Collection[str]) -> bool:
    """Return True if the host can compute a node from shapes and constants only."""
    if node.key in _SHAPES:
        return graph.type_of(node.input(0)) is None or isinstance(graph.type_of(node.input(0)), TensorType)
    if node.domain not in STANDARD_DOMAINS or node.op_type in NEW_EACH_TIME or node.subgraphs():
        return False
    given = [name for name in node.inputs if name]
    entry = find_kernel("", node.op_type, version)
    made = [element_name(graph.type_of(name)) for name in node.outputs if name]
    if not given or entry is None or entry.source != "ours" or not all(name in SCALARS for name in made):
        return False
    return all(name in known or graph.constant_tensor(name) is not None for name in given)


def _seen(graph: Graph, node: Node, version: int, known: Collection[str]) -> Seen:
    def kind(name: str) -> TensorType | None:
        found = graph.type_of(name) if name else None
        return found if isinstance(found, TensorType) else None

    has = [bool(name) and (name in known or graph.constant_tensor(name) is not None) for name in node.inputs]
    return Seen(node, version, [kind(name) for name in node.inputs], has, [kind(name) for name in node.outputs])


class CudaPart:
    """A compiled part of a graph. A call takes the inputs of a run and returns its results, in order.

    Args:
        known: names of values that depend only on shapes and constants; if such values are inputs, they are part of the
            key of a program.
        stays: per result, True if it remains in device memory.
    """

    def __init__(self, device: ArrayDevice, part: OnnxModel, known: Collection[str], stays: Sequence[bool]) -> None:
        self._device, self._part, self._stays = device, part, stays
        graph = part.graph
        graph.topological_sort()
        self._versions = {node: _version(part, node) for node in graph.nodes}
        self._values = {name: tensor.array() for name, tensor in graph.initializers.items()}
        self._values |= {
            node.output(0): tensor.array()
            for node in graph.nodes
            if (tensor := graph.constant_tensor(node.output(0))) is not None
        }
        self._inputs = [value.name for value in graph.inputs]
        self._as_values = [name in known for name in self._inputs]
        self._nodes = [node for node in graph.nodes if node.output(0) not in self._values]
        self._on_host = {node for node in self._nodes if any(name in known for name in node.outputs if name)}
        self._constants = DeviceConstants(device)
        self._uploaded: dict[str, Array] = {}
        self._programs: OrderedDict[Any, ArrayProgram] = OrderedDict()

    def __call__(self, values: list[Any]) -> list[Any]:
        """Run the part and return its results.

        Raises:
            NodeError: shapes do not fit a node; the message names the node.
            ArgumentError: an index is out of range.
            OutOfMemoryError: the device's memory is insufficient.
        """
        values = [self._here(value) for value in values]
        try:
            return list(self._program(values).run(values))
        except DeviceFull as error:
            nodes = f"{len(self._nodes)} nodes starting at {self._nodes[0].op_type} {self._nodes[0].name!r}"
            raise OutOfMemoryError(
                f"out of memory on the GPU while running {nodes}: {error}",
                f"the inputs were {', '.join(f'{x.dtype}{list(x.shape)}' for x in values)}",
                f"use a smaller batch or shorter inputs, raise gpu_mem_limit if it is set, or omit {CUDA_PROVIDER}",
            ) from None

    def _here(self, value: Any) -> Any:
        """Move a value from another GPU to the host, and convert a NumPy number to an array without axes."""
        if isinstance(value, np.generic):
            return np.asarray(value)
        elsewhere = isinstance(value, DeviceTensor) and value.region.driver is not self._device.driver
        return value.numpy() if elsewhere else value

    def _program(self, values: Sequence[Any]) -> ArrayProgram:
        key = tuple(
            (value.shape, value.dtype, np.asarray(value).tobytes() if whole else b"")
            for value, whole in zip(values, self._as_values, strict=True)
        )
        with self._device.lock:
            program = self._programs.pop(key, None) or self._record(values)
            self._programs[key] = program
            while len(self._programs) > _PROGRAMS:
                self._programs.popitem(last=False)
        return program

    def _record(self, values: Sequence[Any]) -> ArrayProgram:
        constants = DeviceConstants(self._device, self._constants)
        to = Recorder(constants)
        status = Status(to, _outside)
        found: dict[str, Given] = dict(self._values)
        inputs: list[Array | None] = []
        for name, value, whole in zip(self._inputs, values, self._as_values, strict=True):
            inputs.append(None if whole else taken_in(value.shape, value.dtype))
            found[name] = value if whole else inputs[-1]

        def upload(name: str, value: NDArray[Any]) -> Array:
            return self._constant(to, found, name, value)

        for node in self._nodes:
            given = [found[name] if name else None for name in node.inputs]
            found.update(zip(node.outputs, self._results(to, node, given, upload, status), strict=False))
        results = [found[value.name] for value in self._part.graph.outputs]
        on_host = [not stays for stays in self._stays]
        return ArrayProgram(self._device, to, constants, status, inputs, results, on_host)  # type: ignore[arg-type]

    def _results(
        self, to: Recorder, node: Node, given: Sequence[Given], upload: Callable[[str, NDArray[Any]], Array],
        status: Status,
    ) -> Sequence[Given]:  # fmt: skip
        try:
            if node.key in _SHAPES:
                return [_shape(node, given[0])]
            if node in self._on_host:
                return [np.asarray(value) for value in evaluated(node, self._versions[node], given)]
            call = NodeCall(to, node, self._versions[node], given, upload, status)
            made = TABLE[node.key][1](call)
            return made if isinstance(made, list) else [made]
        except (ArrayError, KernelError, IndexError, ValueError) as error:
            shapes = ", ".join("none" if x is None else f"{x.dtype}{list(x.shape)}" for x in given)
            raise NodeError(
                f"{node.op_type} {node.name!r} failed: {error!s:.300}",
                f"the node's inputs were {shapes or 'none'} ({type(error).__name__})",
                "check the types and shapes of the inputs",
            ) from error

    def _constant(self, to: Recorder, found: Mapping[str, Given], name: str, value: NDArray[Any]) -> Array:
        """Upload a constant of the graph once for all programs, and any other value for this program only."""
        if name not in self._values and "\0" not in name:
            return to.constant(value)
        if name not in self._uploaded:
            block = self._constants(value)
            self._uploaded[name] = Array(value.shape, value.dtype, taken_in(value.shape, value.dtype).strides, block)
        return self._uploaded[name]


def _outside(text: str) -> ArgumentError:
    return ArgumentError(
        text, "an index into an axis of n elements must be from -n to n - 1", "correct the indices in the inputs"
    )


def _shape(node: Node, value: Given) -> NDArray[np.int64]:
    assert value is not None
    if node.op_type == "Size":
        return np.asarray(int(np.prod(value.shape, dtype=np.int64)), np.int64)
    end = node.attribute("end", None)
    return np.asarray(value.shape[node.integer("start", 0) : end if end is None else int(end)], np.int64)
