"""Block-wise weight-only quantisation to 4 or 8 bits, as com.microsoft operators or as blocked DequantizeLinear nodes.

The methods are in `genai.quant`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.common.progress import task
from genai.kernels.weights import BLOCKS, QuantizationError, QuantizedWeight
from genai.quant.methods import InputStatistics

from ...errors import GraphError, InputError, NotSupportedYetError, OptionError, did_you_mean
from ...onnx.ir import Graph, Node, OnnxModel, OnnxTensor, make_node
from ...onnx.node import MS
from ...onnx.types import DataType
from ...onnx.writer import to_proto
from ...ops.weight_nodes import uniform_arrays
from ...optimize.base import Level, run_rewrites
from ...optimize.constant_folding import lift_constants
from .selection import chosen_nodes
from .types import QuantFormat
from .weight_methods import METHODS, BlockFormat, BlockMethod, input_statistics

BLOCK_AXES = {"MatMul": 0, "Gather": 1}
"""The operators that are quantised, and the axis of the weight along which blocks run."""
_BITS = (4, 8)
# The opset that introduced blocks in DequantizeLinear.
_BLOCKED_OPSET = 21


@dataclass(frozen=True)
class BlockRequest:
    """The validated arguments of a weight-only quantisation.

    Attributes:
        method: a name in METHODS.
        block_format: bits, block size and symmetry.
        node_formats: formats of individual nodes, by name.
        format: QOperator, or QDQ for opset 21 or later.
        op_types: operators to quantise, from BLOCK_AXES.
        accuracy_level: accuracy level of matmuls; 4 allows rounding of activations to 8 bits.
        include: names of the nodes of the main graph to quantise; None means all nodes.
        exclude: names of nodes of the main graph that stay float; None means no nodes.
        reader: for GPTQ, an object whose get_next() returns feeds of the model.

    Raises:
        OptionError, NotSupportedYetError: a value is not supported.
    """

    method: str
    block_format: BlockFormat
    node_formats: Mapping[str, BlockFormat] = field(default_factory=dict)
    format: QuantFormat = QuantFormat.QOperator
    op_types: Collection[str] = ("MatMul",)
    accuracy_level: int | None = None
    include: Sequence[str] | None = None
    exclude: Sequence[str] | None = None
    reader: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.format, QuantFormat):
            raise OptionError(
                f"quant_format is {self.format!r}", "quant_format must be a QuantFormat", "pass QuantFormat.QOperator"
            )
        if self.method not in METHODS:
            raise NotSupportedYetError(
                f"the method {self.method!r} is not supported",
                f"the supported methods are {', '.join(METHODS)}",
                "use DefaultWeightOnlyQuantConfig or RTNWeightOnlyQuantConfig",
            )
        for block_format in (self.block_format, *self.node_formats.values()):
            _check_block_format(block_format)
        for name in self.op_types:
            if name not in BLOCK_AXES:
                raise OptionError(
                    f"op_types_to_quantize contains {name!r}",
                    "only MatMul and Gather are supported",
                    did_you_mean(name, BLOCK_AXES, "pass MatMul or Gather"),
                )
        if "Gather" in self.op_types and (self.format is QuantFormat.QDQ or self.block_format.bits != 4):
            raise NotSupportedYetError(
                "the tables of Gather nodes cannot be quantised in this format",
                "onnxruntime's operator for look-ups supports only 4-bit tables",
                "use QuantFormat.QOperator and bits=4, or quantise only MatMul",
            )
        if self.accuracy_level not in (None, *range(5)):
            raise OptionError(
                f"accuracy_level is {self.accuracy_level!r}", "the level must be from 0 to 4", "pass 4 or 0"
            )


def _check_block_format(block_format: BlockFormat) -> None:
    if block_format.bits not in _BITS:
        raise NotSupportedYetError(f"bits is {block_format.bits}", f"the supported values are {_BITS}", "pass bits=4")
    if block_format.block_size not in BLOCKS:
        raise OptionError(
            f"block_size is {block_format.block_size}",
            f"the supported block sizes are {', '.join(map(str, BLOCKS))}",
            "pass block_size=32",
        )


def quantize_in_blocks(model: OnnxModel, request: BlockRequest) -> None:
    """Quantise the constant matrices of a model, in place.

    Raises:
        GraphError: the model's opset is too old for the format.
        InputError: no matrix of the model is suitable, or a matrix contains NaN or infinity.
        OptionError: no node has one of the names, or the method needs a reader and there is none.
    """
    run_rewrites(model, (lift_constants,), Level.BASIC)
    if request.format is QuantFormat.QDQ and (model.opset_version() or 0) < _BLOCKED_OPSET:
        raise GraphError(
            f"the model has opset {model.opset_version()}, but QDQ needs {_BLOCKED_OPSET}",
            "DequantizeLinear supports blocks only from this opset",
            "convert the model first, or use QuantFormat.QOperator",
        )
    chosen = [
        (graph, node)
        for graph in model.graphs()
        for node in chosen_nodes(
            graph,
            request.op_types,
            *((request.include, request.exclude) if graph is model.graph else (None, None)),
            include_option="nodes_to_include",
        )
        if node.key[0] == "" and _matrix(graph, node) is not None
    ]
    if not chosen:
        raise InputError(
            "no weight of the model can be quantised",
            f"no selected node of {', '.join(sorted(request.op_types))} has a constant float matrix",
            "check op_types_to_quantize, nodes_to_include and nodes_to_exclude",
        )
    inputs = _inputs(model, chosen, request.reader) if request.method == "GPTQ" else {}
    writer = _Writer(model, request.format, METHODS[request.method], request.accuracy_level, inputs)
    with task("Quantising", len(chosen)) as progress:
        for graph, node in chosen:
            writer.write(graph, node, request.node_formats.get(node.name, request.block_format))
            progress.add(1)
    for graph in model.graphs():
        for name in [*graph.initializers]:
            if not graph.is_used(name):
                graph.remove_initializer(name)


def _inputs(model: OnnxModel, chosen: Sequence[tuple[Graph, Node]], reader: Any) -> dict[str, InputStatistics]:
    """Return statistics of the inputs of each weight. Several nodes may share a weight."""
    values: dict[str, set[str]] = {}
    for graph, node in chosen:
        tensor = _matrix(graph, node)
        if node.op_type == "MatMul" and tensor is not None:
            values.setdefault(tensor.name, set()).add(node.input(0))
    return input_statistics(to_proto(model), values, reader) if values else {}


def _matrix(graph: Graph, node: Node) -> OnnxTensor | None:
    """Return the constant float matrix of a MatMul or the table of a Gather of rows, or None."""
    tensor = graph.constant_tensor(node.input(1 if node.op_type == "MatMul" else 0))
    if tensor is None or len(tensor.shape) != 2 or tensor.dtype not in (DataType.FLOAT, DataType.FLOAT16):
        return None
    return None if node.op_type == "Gather" and node.attribute("axis", 0) not in (0, -2) else tensor


@dataclass(frozen=True)
class _Writer:
    """A replacer of float nodes with quantised nodes; a shared weight is stored only once."""

    model: OnnxModel
    format: QuantFormat
    method: BlockMethod
    accuracy_level: int | None
    inputs: Mapping[str, InputStatistics]
    stored: dict[tuple[Any, ...], list[str]] = field(default_factory=dict)

    def write(self, graph: Graph, node: Node, block_format: BlockFormat) -> None:
        """Quantise one node."""
        tensor = _matrix(graph, node)
        assert tensor is not None
        write = self._table if node.op_type == "Gather" else self._product
        if node.op_type == "MatMul" and self.format is QuantFormat.QDQ:
            write = self._dequantised
        key = (graph, tensor.name, write, block_format)
        if key not in self.stored:
            self.stored[key] = self._store(graph, node, tensor, block_format)
        write(graph, node, self.stored[key], tensor.shape, block_format)

    def _store(self, graph: Graph, node: Node, tensor: OnnxTensor, block_format: BlockFormat) -> list[str]:
        """Store a weight; return the names of its integers, its scales and, if present, its zero points."""
        weight, name = tensor.array(), tensor.name
        try:
            matrix = np.ascontiguousarray(weight.T) if node.op_type == "MatMul" else weight
            inputs = self.inputs.get(name) if node.op_type == "MatMul" else None
            blocks = self.method(matrix, block_format, tensor.dtype is DataType.FLOAT16, inputs)
        except QuantizationError as error:
            raise InputError(
                f"the weight {name!r} of node {node.name!r} cannot be quantised",
                str(error),
                "check the float model, or keep the node float: nodes_to_exclude=[...]",
            ) from error
        scales = blocks.scales.astype(tensor.dtype.numpy_dtype)
        suffix = f"_Q{block_format.bits}"
        if node.op_type == "MatMul" and self.format is QuantFormat.QOperator:
            parts: list[tuple[str, NDArray[Any], DataType | None]]
            stored = uniform_arrays(blocks)
            parts = [(f"{name}{suffix}", stored["codes"], None), (f"{name}_scales", scales, None)]
            parts += [(f"{name}_zero_points", stored["zero_points"], None)] if "zero_points" in stored else []
        else:
            # The 4-bit types need this IR version.
            self.model.ir_version = max(self.model.ir_version, 10)
            steps, points, dtype = _integers(blocks)
            arrays = [(suffix, steps, dtype), ("_scales", scales, None), ("_zero_points", points, dtype)]
            if node.op_type == "MatMul":
                arrays = [(f"_DQ{end}", None if array is None else array.T, kind) for end, array, kind in arrays]
            parts = [(f"{name}{end}", array, kind) for end, array, kind in arrays if array is not None]
        return [_added(graph, *part) for part in parts]

    def _product(
        self, graph: Graph, node: Node, stored: list[str], shape: tuple[int, ...], block_format: BlockFormat
    ) -> None:
        self.model.opset_imports.setdefault(MS, 1)
        product = make_node(
            "MatMulNBits",
            [node.inputs[0], *stored],
            node.outputs,
            domain=MS,
            name=f"{node.name}_Q{block_format.bits}",
            K=shape[0],
            N=shape[1],
            bits=block_format.bits,
            block_size=block_format.block_size,
            accuracy_level=self.accuracy_level or None,
        )
        graph.replace_node(node, product)

    def _table(
        self, graph: Graph, node: Node, stored: list[str], shape: tuple[int, ...], block_format: BlockFormat
    ) -> None:
        self.model.opset_imports.setdefault(MS, 1)
        table = make_node(
            "GatherBlockQuantized",
            [stored[0], node.inputs[1], *stored[1:]],
            node.outputs,
            domain=MS,
            name=f"{node.name}_Q4",
            block_size=block_format.block_size,
            gather_axis=0,
            quantize_axis=1,
        )
        graph.replace_node(node, table)

    def _dequantised(
        self, graph: Graph, node: Node, stored: list[str], shape: tuple[int, ...], block_format: BlockFormat
    ) -> None:
        product = node.copy()
        product.inputs[1] = graph.fresh_name(f"{stored[0]}_output")
        dequantise = make_node(
            "DequantizeLinear",
            stored,
            [product.inputs[1]],
            name=f"{node.name}_DQ",
            axis=0,
            block_size=block_format.block_size,
        )
        graph.replace_node(node, dequantise, product)


def _added(graph: Graph, prefix: str, values: NDArray[Any], dtype: DataType | None = None) -> str:
    name = graph.fresh_name(prefix)
    graph.add_initializer(OnnxTensor.from_array(name, values, dtype))
    return name


def _integers(weight: QuantizedWeight) -> tuple[NDArray[Any], NDArray[Any] | None, DataType]:
    """Return one integer per element [n, k], zero points [n, blocks] or None, and the type (signed if None)."""
    bits = weight.format.bits
    if weight.offsets is None:
        return (weight.codes.astype(np.int16) - (1 << (bits - 1))).astype(np.int8), None, DataType[f"INT{bits}"]
    return weight.codes, weight.offsets, DataType[f"UINT{bits}"]
