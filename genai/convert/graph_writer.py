"""Writers for a decoder's graph, with the names of onnxruntime-genai's builder, and for its tensor file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from ..onnx.node import OURS
from ..onnx.own_functions import own_functions
from ..ops.weight_nodes import WeightNode
from .options import ExportOptions
from .spec import DecoderSpec
from .weights import Chunks, Weights

Dims = Sequence[int | str]

IR_VERSION = 10
OPSET = 22
CONTRIB = "com.microsoft"
PRODUCER = "onnx-genai-toolkit"

FLOAT = onnx.TensorProto.FLOAT
INT64 = onnx.TensorProto.INT64
INT32 = onnx.TensorProto.INT32
BOOL = onnx.TensorProto.BOOL
UINT8 = onnx.TensorProto.UINT8


class GraphWriter:
    """A writer of a graph in topological order. Large tensors are streamed to the data file; small ones are inline.

    Args:
        shared: tensors in the data file of another graph of the same folder. They are not written again.
    """

    def __init__(self, data: DataFile, shared: Mapping[str, onnx.TensorProto] | None = None) -> None:
        self._data, self._shared = data, shared or {}
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: dict[str, onnx.TensorProto] = {}
        self._constants: set[str] = set()
        self._values: list[onnx.ValueInfoProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []

    def input(self, name: str, element: int, dims: Dims) -> None:
        self._inputs.append(helper.make_tensor_value_info(name, element, dims))

    def output(self, name: str, element: int, dims: Dims) -> None:
        self._outputs.append(helper.make_tensor_value_info(name, element, dims))

    def value(self, name: str, element: int, dims: Dims) -> None:
        """Declare the type of a value inside the graph."""
        self._values.append(helper.make_tensor_value_info(name, element, dims))

    def initializer(
        self, name: str, dims: tuple[int, ...], dtype: type[np.generic], chunks: Iterable[NDArray[Any]]
    ) -> str:
        """Write a tensor to the data file, chunk by chunk, unless another graph shares it; return its name."""
        if name not in self._shared:
            self._initializers[name] = self._data.append(name, dims, dtype, chunks)
        return name

    def array(self, name: str, array: NDArray[Any]) -> str:
        """Write an array as an initializer and return its name."""
        return self.initializer(name, array.shape, array.dtype.type, [array])

    def has_initializer(self, name: str) -> bool:
        """Return True if a tensor is written, by this graph or by the graph that shares it."""
        return name in self._initializers or name in self._shared

    def has_node(self, name: str) -> bool:
        return any(node.name == name for node in self._nodes)

    def tensors(self, *prefixes: str) -> dict[str, onnx.TensorProto]:
        """Return the initializers whose names start with one of the prefixes."""
        return {name: tensor for name, tensor in self._initializers.items() if name.startswith(prefixes)}

    def int64(self, value: int | Sequence[int]) -> str:
        """Return the name of a constant. Each constant is written only once."""
        return self._constant(f"INT64/{value if isinstance(value, int) else list(value)}", np.array(value, np.int64))

    def float32(self, value: float) -> str:
        """Return the name of a scalar constant. Each constant is written only once."""
        return self._constant(f"FLOAT/{value}", np.array(value, np.float32))

    def _constant(self, key: str, array: NDArray[Any]) -> str:
        name = f"/model/constants/{key}"
        if name not in self._constants:
            self._constants.add(name)
            tensor = numpy_helper.from_array(array, name)
            self._nodes.append(
                helper.make_node("Constant", [], [name], name=f"/model/constant_nodes/{key}", value=tensor)
            )
        return name

    def node(
        self,
        op_type: str,
        inputs: Sequence[str],
        name: str,
        dims: Dims,
        *,
        element: int = FLOAT,
        output: str | None = None,
        domain: str = "",
        **attributes: Any,
    ) -> str:
        """Append a node with one output, named `{name}/output_0` by default, and return the output's name."""
        result = output or f"{name}/output_0"
        self.nodes(op_type, inputs, [result], name, domain=domain, **attributes)
        self.value(result, element, dims)
        return result

    def nodes(
        self,
        op_type: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        name: str,
        *,
        domain: str = "",
        **attributes: Any,
    ) -> None:
        """Append a node with any number of outputs, without declaring their types."""
        self._nodes.append(helper.make_node(op_type, inputs, outputs, name=name, domain=domain, **attributes))

    def model(self) -> onnx.ModelProto:
        """Return the finished model; its tensors refer to the data file."""
        outputs = {value.name for value in self._outputs}
        used = {name for node in self._nodes for name in node.input}
        shared = [tensor for name, tensor in self._shared.items() if name in used]
        graph = helper.make_graph(
            self._nodes,
            "main_graph",
            self._inputs,
            self._outputs,
            initializer=[*self._initializers.values(), *shared],
            value_info=[value for value in self._values if value.name not in outputs],
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIB, 1)]
        functions = []
        if any(node.domain == OURS for node in self._nodes):  # other runtimes need these functions
            opsets.append(helper.make_opsetid(OURS, 1))
            functions = list(own_functions(OPSET))
        return helper.make_model(
            graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name=PRODUCER, functions=functions
        )


# Readers memory-map the file, so tensors are aligned to cache lines, and large tensors to pages.
_SMALL_ALIGNMENT = 64
_LARGE_ALIGNMENT = 4096
_LARGE_BYTES = 1 << 20

_DATA_TYPES = {
    np.dtype(np.float32): onnx.TensorProto.FLOAT,
    np.dtype(np.float16): onnx.TensorProto.FLOAT16,
    np.dtype(np.uint8): onnx.TensorProto.UINT8,
    np.dtype(np.int64): onnx.TensorProto.INT64,
}


class DataFile(AbstractContextManager["DataFile"]):
    """An external-data file of an ONNX model, open for appending tensors."""

    def __init__(self, path: Path) -> None:
        self._location = path.name
        self._file = path.open("wb")

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def append(
        self, name: str, dims: tuple[int, ...], dtype: type[np.generic], chunks: Iterable[NDArray[Any]]
    ) -> onnx.TensorProto:
        """Write a tensor from chunks of its elements in row-major order, and return its TensorProto.

        Raises:
            ValueError: the chunks have another type, or another number of elements than `dims`.
            OSError: the file cannot be written.
        """
        element = np.dtype(dtype)
        length = element.itemsize * int(np.prod(dims, dtype=np.int64))
        alignment = _LARGE_ALIGNMENT if length >= _LARGE_BYTES else _SMALL_ALIGNMENT
        self._file.write(bytes(-self._file.tell() % alignment))
        offset = self._file.tell()
        self._write(name, element, length, chunks)
        written = self._file.tell() - offset
        if written != length:
            raise ValueError(f"{name} {list(dims)} needs {length} bytes, but its chunks contain {written} bytes")
        tensor = onnx.TensorProto(
            name=name, dims=dims, data_type=_DATA_TYPES[element], data_location=onnx.TensorProto.EXTERNAL
        )
        for key, value in (("location", self._location), ("offset", offset), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))
        return tensor

    def _write(self, name: str, element: np.dtype[Any], length: int, chunks: Iterable[NDArray[Any]]) -> None:
        """Write the chunks of a tensor of `length` bytes."""
        for chunk in chunks:
            if chunk.dtype != element:
                raise ValueError(f"a chunk of {name} is {chunk.dtype}, expected {element}")
            self._file.write(np.ascontiguousarray(chunk).data)


class HollowFile(DataFile):
    """A data file with holes in place of large tensors.

    The holes occupy no disk space, and the tensors are generated on demand.

    Attributes:
        hollow: the chunks of the omitted tensors, by name.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.hollow: dict[str, Chunks] = {}

    def __exit__(self, *error: object) -> None:
        self._file.truncate()  # extends the file over a hole at its end
        super().__exit__(*error)

    def _write(self, name: str, element: np.dtype[Any], length: int, chunks: Iterable[NDArray[Any]]) -> None:
        if not isinstance(chunks, Chunks):
            super()._write(name, element, length, chunks)
            return
        self.hollow[name] = chunks
        self._file.seek(length, os.SEEK_CUR)


POSITIONS, VECTORS = "position_ids", "hidden_states"


@dataclass(frozen=True)
class WrittenWeight:
    """A matrix in the graph: the nodes for its matmul and its look-up, without arrays, and the names of the arrays."""

    product: WeightNode
    lookup: WeightNode
    names: dict[str, str]


@dataclass(frozen=True)
class Export:
    """The state of one export.

    Attributes:
        graph: the graph written so far.
        spec: the architecture.
        options: the export's options.
        weights: the weights to read.
        prequantized: the matrices of quantised blocks that have been written, by name.
        stored: the names of the keys and values that each layer stores, by layer.
        reordered: names of values with permuted columns, by the original value's name and the order's bytes.
    """

    graph: GraphWriter
    spec: DecoderSpec
    options: ExportOptions
    weights: Weights
    prequantized: dict[str, WrittenWeight] = field(default_factory=dict)
    stored: dict[int, tuple[str, str]] = field(default_factory=dict)
    reordered: dict[tuple[str, bytes], str] = field(default_factory=dict)


def takes_positions(spec: DecoderSpec, options: ExportOptions) -> bool:
    """Return True if the graph needs position ids: for a table of positions, chunks, or rotation outside attention."""
    layers = range(spec.num_layers)
    rotates = any(map(spec.rotated, layers))
    by_position = any(map(spec.scales_queries, layers)) or any(map(spec.chunk, layers))
    return spec.position_embeddings or by_position or (rotates and not options.fused_rope)


def vectors_output(spec: DecoderSpec) -> str | None:
    """Return the name of the output of the vectors from which the logits are computed; None if there is none."""
    if spec.reads_vectors:
        return f"{VECTORS}_out"
    return None if spec.mtp is None else VECTORS


def caches_window(spec: DecoderSpec, options: ExportOptions, layer: int) -> bool:
    """Return True if a layer caches only the tokens within its window.

    A cache that another layer also reads is never cut, because both operators would drop tokens from it.
    """
    is_shared = spec.num_cached_layers is not None
    return options.windowed_kv_cache and spec.window(layer) is not None and not is_shared


def hidden_dims(width: int, *, sequence: int | str = "sequence_length") -> Dims:
    """Return the dimensions of a value with one vector per token."""
    return ["batch_size", sequence, width]
