"""Collects nodes, initialisers and values of one ONNX graph, with the names that onnxruntime-genai's builder uses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from .data_file import DataFile

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
    """Emits a graph in topological order. Large tensors go to the data file as they come, small constants inline."""

    def __init__(self, data: DataFile) -> None:
        self._data = data
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
        """Say the type of a value inside the graph."""
        self._values.append(helper.make_tensor_value_info(name, element, dims))

    def initializer(
        self, name: str, dims: tuple[int, ...], dtype: type[np.generic], chunks: Iterable[NDArray[Any]]
    ) -> str:
        """Write a tensor to the data file, chunk by chunk; returns its name."""
        self._initializers[name] = self._data.append(name, dims, dtype, chunks)
        return name

    def array(self, name: str, array: NDArray[Any]) -> str:
        """Write an array that is at hand as an initialiser; returns its name."""
        return self.initializer(name, array.shape, array.dtype.type, [array])

    def has_initializer(self, name: str) -> bool:
        return name in self._initializers

    def int64(self, value: int | Sequence[int]) -> str:
        """The name of a constant; written once however often it is asked for."""
        return self._constant(f"INT64/{value if isinstance(value, int) else list(value)}", np.array(value, np.int64))

    def float32(self, value: float) -> str:
        """The name of a scalar constant."""
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
        """Append a node with one output, `{name}/output_0` unless said otherwise; returns the output's name."""
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
        """Append a node with any outputs; their types are not said."""
        self._nodes.append(helper.make_node(op_type, inputs, outputs, name=name, domain=domain, **attributes))

    def model(self) -> onnx.ModelProto:
        """The finished model; its tensors refer to the data file."""
        outputs = {value.name for value in self._outputs}
        graph = helper.make_graph(
            self._nodes,
            "main_graph",
            self._inputs,
            self._outputs,
            initializer=list(self._initializers.values()),
            value_info=[value for value in self._values if value.name not in outputs],
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIB, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name=PRODUCER)
