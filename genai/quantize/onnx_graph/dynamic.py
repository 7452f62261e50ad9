"""Dynamic quantisation: weights are quantised once; activations are quantised in each run, by their range in that run.

    MatMul(x, w)  ->  Mul(Cast(MatMulInteger(x8, w8)), Mul(x_scale, w_scale)),  x8, x_scale = DynamicQuantizeLinear(x)

Runtimes fuse this into one operator. All nodes that use x share its integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.kernels.weights import QuantizationError
from genai.quant.affine import AffineParameters, affine_parameters, channel_ranges, quantize_affine

from ...errors import InputError
from ...onnx.ir import Graph, Node, OnnxModel, OnnxTensor, make_node
from ...onnx.types import DataType
from .calibrate import is_float
from .operator_rules import DYNAMIC_OPERATORS, WITHOUT_EFFECT
from .options import DynamicOptions
from .qdq import remove_unused
from .selection import checked_op_types, chosen_nodes, require_float_model
from .static import prepare_model
from .types import BYTES, QuantType, checked_type

# The version that introduced DynamicQuantizeLinear.
_OPSET = 11
# Node types by requested operator; a Gemm counts as a MatMul because it is a MatMul and an Add.
_OF_OPERATOR = {"MatMul": ("MatMul", "Gemm"), "Conv": ("Conv",), "Gather": ("Gather",)}


@dataclass(frozen=True)
class DynamicRequest:
    """The validated arguments of a dynamic quantisation.

    Attributes: see `StaticRequest`.

    Raises:
        OptionError: the type is not an 8-bit type.
        NotSupportedYetError: the type is float8.
    """

    op_types: Sequence[str] | None = None
    per_channel: bool = False
    reduce_range: bool = False
    weight_type: QuantType = QuantType.QInt8
    include: Sequence[str] | None = None
    exclude: Sequence[str] | None = None
    options: DynamicOptions = field(default_factory=DynamicOptions)

    def __post_init__(self) -> None:
        object.__setattr__(self, "weight_type", checked_type("weight_type", self.weight_type, BYTES))


def quantize_dynamically(model: OnnxModel, request: DynamicRequest) -> None:
    """Quantise a model in place.

    Raises:
        GenaiError: see `quantize_static`.
    """
    require_float_model(model, _OPSET, "DynamicQuantizeLinear needs this opset")
    prepare_model(model)
    requested = checked_op_types(request.op_types, (*DYNAMIC_OPERATORS, "Gemm"), model.graph, WITHOUT_EFFECT)
    op_types = {name for one in requested for name in _OF_OPERATOR.get(one, (one,))}
    chosen = {*map(id, chosen_nodes(model.graph, op_types, request.include, request.exclude))}
    graphs = list(model.graphs()) if request.options.enable_subgraph else [model.graph]
    count = 0
    for graph in graphs:
        writer = _Writer(graph, request)
        for node in list(graph.nodes):
            inner = graph is not model.graph and node.op_type in op_types
            if node.key[0] == "" and (id(node) in chosen or (inner and node.name not in (request.exclude or ()))):
                count += writer.quantise(node)
        writer.finish()
    if not count:
        present = sorted({node.op_type for node in model.graph.nodes})
        raise InputError(
            f"nothing in the model can be quantised: {len(chosen)} nodes are selected, and none of them is suitable",
            f"{', '.join(sorted(op_types))} with constant float32 weights can be quantised; the model has "
            f"{', '.join(present)}",
            "check nodes_to_quantize, nodes_to_exclude and op_types_to_quantize, and that the model is float32",
        )


@dataclass
class _Writer:
    """A quantiser for the nodes of one graph."""

    graph: Graph
    request: DynamicRequest
    _activations: dict[str, tuple[str, str, str]] = field(default_factory=dict)
    _weights: dict[tuple[Any, ...], tuple[str, str, str]] = field(default_factory=dict)

    def quantise(self, node: Node) -> bool:
        """Replace a node if its form is supported, and return True if the node was replaced."""
        writers = {"MatMul": self._matmul, "Gemm": self._gemm, "Conv": self._conv, "Gather": self._gather}
        return writers[node.op_type](node)

    def finish(self) -> None:
        """Sort the nodes, and remove unused constants."""
        self.graph.topological_sort()
        remove_unused(self.graph)

    def _matmul(self, node: Node) -> bool:
        graph, (x, weight) = self.graph, node.inputs
        matrix = self._constant(weight)
        if not is_float(graph, x) or not is_float(graph, weight) or graph.constant_tensor(x) is not None:
            return False
        if matrix is None:
            if self.request.options.mat_mul_const_b_only or graph.constant_tensor(weight) is not None:
                return False
            right = self._activation(weight)
        elif matrix.ndim < 2:
            return False
        else:
            axis = 1 if self.request.per_channel and matrix.ndim == 2 else None
            right = self._weight(weight, matrix, axis, self.request.weight_type)
        left = self._activation(x)
        sums = self._new(node, "output_quantized")
        product = make_node("MatMulInteger", [left[0], right[0], left[2], right[2]], [sums], name=self._name(node))
        graph.replace_node(node, product, *self._scaled(node, sums, left[1], right[1], node.outputs[0]))
        return True

    def _gemm(self, node: Node) -> bool:
        """Quantise a Gemm if it computes x @ w + c without further factors."""
        graph, (x, weight) = self.graph, node.inputs[:2]
        matrix = self._constant(weight)
        plain = node.attribute("alpha", 1.0) == 1.0 and node.attribute("beta", 1.0) == 1.0
        if matrix is None or not plain or node.attribute("transA", 0) or not is_float(graph, weight):
            return False
        if not is_float(graph, x) or graph.constant_tensor(x) is not None:
            return False
        transposed = bool(node.attribute("transB", 0))
        axis = 1 if self.request.per_channel else None
        right = self._weight(weight, matrix.T if transposed else matrix, axis, self.request.weight_type, transposed)
        left = self._activation(x)
        sums = self._new(node, "output_quantized")
        product = make_node("MatMulInteger", [left[0], right[0], left[2], right[2]], [sums], name=self._name(node))
        result = self._new(node, "MatMul") if node.input(2) else node.outputs[0]
        nodes = [product, *self._scaled(node, sums, left[1], right[1], result)]
        if node.input(2):
            nodes.append(make_node("Add", [result, node.inputs[2]], node.outputs, name=self._name(node, "Add")))
        graph.replace_node(node, *nodes)
        return True

    def _conv(self, node: Node) -> bool:
        graph, (x, weight) = self.graph, node.inputs[:2]
        kernel = self._constant(weight)
        if kernel is None or not is_float(graph, weight) or not is_float(graph, x):
            return False
        if graph.constant_tensor(x) is not None:
            return False
        axis = 0 if self.request.per_channel else None
        right = self._weight(weight, kernel, axis, self.request.weight_type, one_point=axis is not None)
        left = self._activation(x)
        sums = self._new(node, "output_quantized")
        product = node.copy()
        product.op_type, product.outputs, product.name = "ConvInteger", [sums], self._name(node)
        product.inputs = [left[0], right[0], left[2], self._one_point(right[2])]
        spread = [-1, *[1] * (kernel.ndim - 2)]
        scale = right[1] if axis is None else self._reshaped(right[1], spread)
        result = self._new(node, "scaled_output") if node.input(2) else node.outputs[0]
        nodes = [product, *self._scaled(node, sums, left[1], scale, result)]
        if node.input(2):
            bias = self._reshaped(node.inputs[2], spread)
            nodes.append(make_node("Add", [result, bias], node.outputs, name=self._name(node, "bias_add")))
        graph.replace_node(node, *nodes)
        return True

    def _gather(self, node: Node) -> bool:
        """Quantise a look-up: gather rows of an integer table, and dequantise the rows."""
        graph, table = self.graph, self._constant(node.inputs[0])
        if table is None or table.ndim < 2 or not is_float(graph, node.inputs[0]):
            return False
        quantized = self._weight(node.inputs[0], table, None, self.request.weight_type)
        rows = node.copy()
        rows.inputs[0], rows.outputs, rows.name = quantized[0], [self._new(node, "quantized")], self._name(node)
        values = make_node(
            "DequantizeLinear",
            [rows.outputs[0], quantized[1], quantized[2]],
            node.outputs,
            name=self._name(node, "dequant"),
        )
        graph.replace_node(node, rows, values)
        return True

    # Parts

    def _activation(self, name: str) -> tuple[str, str, str]:
        """Return the names of a value's integers, scale and zero point, all computed in each run."""
        if name not in self._activations:
            fresh = self.graph.fresh_name
            outputs = fresh(f"{name}_quantized"), fresh(f"{name}_scale"), fresh(f"{name}_zero_point")
            self._activations[name] = outputs
            quantize = make_node("DynamicQuantizeLinear", [name], list(outputs), name=fresh(f"{name}_QuantizeLinear"))
            self.graph.append(quantize)
        return self._activations[name]

    def _weight(
        self, name: str, values: NDArray[Any], axis: int | None, kind: QuantType, transposed: bool = False,
        one_point: bool = False,
    ) -> tuple[str, str, str]:  # fmt: skip
        """Return the names of a constant's integers, scales and zero points; `one_point`: one for all channels."""
        key = (name, axis, kind, transposed, one_point)
        if key not in self._weights:
            fresh = self.graph.fresh_name
            steps, parameters = self._steps(
                name, values, axis, kind, True if one_point else self.request.options.weight_symmetric
            )
            prefix = f"{name}_Transposed" if transposed else name
            names = fresh(f"{prefix}_quantized"), fresh(f"{prefix}_scale"), fresh(f"{prefix}_zero_point")
            self._add(names[0], steps, kind.data_type)
            self._add(names[1], parameters.scale, DataType.FLOAT)
            self._add(names[2], parameters.zero_point, kind.data_type)
            self._weights[key] = names
        return self._weights[key]

    def _steps(
        self, name: str, values: NDArray[Any], axis: int | None, kind: QuantType, symmetric: bool | None
    ) -> tuple[NDArray[Any], AffineParameters]:
        symmetric = kind.is_signed if symmetric is None else symmetric
        integers = kind.integers(symmetric=symmetric, reduce_range=self.request.reduce_range)
        try:
            low, high = channel_ranges(values, axis)
            parameters = affine_parameters(low, high, integers, symmetric=symmetric)
            dtype = kind.data_type.numpy_dtype
            return quantize_affine(values, parameters, integers, axis, dtype), parameters
        except QuantizationError as error:
            raise InputError(
                f"constant {name!r} cannot be quantised",
                str(error),
                "check the float model, or exclude the nodes that use the constant: nodes_to_exclude=[...]",
            ) from error

    def _scaled(self, node: Node, sums: str, x_scale: str, scale: str, result: str) -> list[Node]:
        """Return the nodes that convert int32 sums to floats."""
        values, both = self._new(node, "output_cast"), self._new(node, "scales")
        return [
            make_node("Cast", [sums], [values], name=self._name(node, "cast"), to=int(DataType.FLOAT)),
            make_node("Mul", [x_scale, scale], [both], name=self._name(node, "scales_mul")),
            make_node("Mul", [values, both], [result], name=self._name(node, "output_scale_mul")),
        ]

    def _one_point(self, name: str) -> str:
        """Return a scalar constant for a zero point that all channels share."""
        points = self.graph.constant(name)
        assert points is not None
        return name if points.ndim == 0 else self.graph.add_constant(f"{name}_common", points.reshape(-1)[0])

    def _reshaped(self, name: str, shape: list[int]) -> str:
        """Reshape a constant directly, and any other value by a node."""
        values = self._constant(name)
        if values is not None:
            return self.graph.add_constant(f"{name}_reshaped", values.reshape(shape))
        extents = self.graph.add_constant(f"{name}_reshape_shape", np.asarray(shape, np.int64))
        result = self.graph.fresh_name(f"{name}_reshaped")
        self.graph.append(
            make_node("Reshape", [name, extents], [result], name=self.graph.fresh_name(f"{name}_reshape"))
        )
        return result

    def _add(self, name: str, values: NDArray[Any], dtype: DataType) -> None:
        self.graph.add_initializer(OnnxTensor.from_array(name, values, dtype))

    def _constant(self, name: str) -> NDArray[Any] | None:
        return self.graph.constant(name) if name else None

    def _new(self, node: Node, suffix: str) -> str:
        return self.graph.fresh_name(f"{node.outputs[0]}_{suffix}")

    def _name(self, node: Node, suffix: str = "quant") -> str:
        return self.graph.fresh_name(f"{node.name or node.outputs[0]}_{suffix}")
