"""Insertion of QuantizeLinear and DequantizeLinear nodes around float operators."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...onnx.ir import Graph, Node, OnnxModel, OnnxTensor, make_node
from ...onnx.node import MS
from ...onnx.types import DataType
from .options import StaticOptions
from .parameters import Parameters, Quantisation, QuantisedConstant
from .placement import Placement

# The first opset in which ONNX's own QuantizeLinear and DequantizeLinear support 4 and 16 bits.
_ALL_TYPES = 21


@dataclass
class QdqWriter:
    """A quantiser for one graph, which writes each scale, zero point and constant only once."""

    model: OnnxModel
    placement: Placement
    parameters: Parameters
    options: StaticOptions
    _names: dict[Any, Any] = field(default_factory=dict)
    _nodes: list[Node] = field(default_factory=list)

    def write(self) -> None:
        """Insert the nodes, and remove the nodes that they replace."""
        graph = self.model.graph
        for node in self.placement.absorbed:
            self._absorb(node)
        for use in self.placement.constants:
            constant = self.parameters.constants.get((id(use.node), use.index))
            if constant is not None:
                use.node.inputs[use.index] = self._constant(use.name, constant, use.kind)
                graph.update(use.node)
        for name, how in self.parameters.activations.items():
            self._activation(name, how)
        graph.append(*self._nodes)
        graph.topological_sort()
        remove_unused(graph)

    def _absorb(self, node: Node) -> None:
        """Remove a Relu or Clip unless its result stayed float; the node before it then computes the result."""
        graph, (source, result) = self.model.graph, (node.inputs[0], node.outputs[0])
        if result not in self.parameters.activations:
            return
        producer = graph.producer(source)
        assert producer is not None
        graph.remove_nodes([node])
        graph.values.pop(source, None)
        producer.outputs[:] = [result if name == source else name for name in producer.outputs]
        graph.update(producer)

    def _activation(self, name: str, how: Quantisation) -> None:
        graph = self.model.graph
        before, after = name, f"{name}_DequantizeLinear_Output"
        if graph.is_output(name) and graph.producer(name) is not None:
            # The graph's output keeps its name, so the name of the node's result must change.
            before, after = graph.fresh_name(f"{name}_QuantizeLinear_Input"), name
            producer = graph.producer(name)
            assert producer is not None
            producer.outputs[:] = [before if one == name else one for one in producer.outputs]
            graph.update(producer)
            self._pair(name, before, after, how)
            return
        users = graph.consumers(name)
        if not self.options.dedicated_qdq_pair or len(users) < 2:
            after = graph.fresh_name(after)
            graph.replace_uses(name, after)
            self._pair(name, before, after, how)
            return
        for number, user in enumerate(users, 1):
            dequantized = graph.fresh_name(f"{after}_{number}")
            user.inputs[:] = [dequantized if one == name else one for one in user.inputs]
            graph.update(user)
            self._pair(name, before, dequantized, how)

    def _pair(self, name: str, before: str, after: str, how: Quantisation) -> None:
        """Add before -> QuantizeLinear -> DequantizeLinear -> after, with the parameters of the value's root."""
        middle = self.model.graph.fresh_name(f"{name}_QuantizeLinear_Output")
        scale, point = self._scales(self.placement.root(name), how.parameters, how.type, None)
        self._node("QuantizeLinear", name, [before, scale, point], middle, how.type.data_type, None)
        self._node("DequantizeLinear", name, [middle, scale, point], after, how.type.data_type, None)

    def _constant(self, name: str, constant: QuantisedConstant, kind: str) -> str:
        """Add a constant's integers and its DequantizeLinear; return the name of the dequantised value."""
        key = ("constant", name, id(constant))
        if key in self._names:
            return str(self._names[key])
        graph, dtype = self.model.graph, DataType.INT32 if constant.type is None else constant.type.data_type
        prefix = f"{name}_quantized" if kind == "bias" else name
        # A constant that is used as an activation has one scale, which values selected from the constant share.
        owner = None if kind == "data" else constant
        scale, point = self._scales(prefix, constant.parameters, constant.type, owner)
        after = graph.fresh_name(f"{name}_DequantizeLinear_Output")
        if self.options.add_qdq_pair_to_weight and kind == "weight":
            quantised = graph.fresh_name(f"{name}_QuantizeLinear_Output")
            self._node("QuantizeLinear", name, [name, scale, point], quantised, dtype, constant.axis)
        else:
            quantised = graph.fresh_name(f"{name}_quantized")
            graph.add_initializer(OnnxTensor.from_array(quantised, constant.steps, dtype))
        self._node("DequantizeLinear", name, [quantised, scale, point], after, dtype, constant.axis)
        self._names[key] = after
        return after

    def _scales(self, prefix: str, parameters: Any, kind: Any, owner: Any) -> tuple[str, str]:
        """Return the names of a scale and a zero point, and add them to the graph if necessary."""
        key = (prefix, None if owner is None else id(owner))
        if key not in self._names:
            graph, dtype = self.model.graph, DataType.INT32 if kind is None else kind.data_type
            scale, point = graph.fresh_name(f"{prefix}_scale"), graph.fresh_name(f"{prefix}_zero_point")
            graph.add_initializer(OnnxTensor.from_array(scale, parameters.scale.astype(np.float32)))
            graph.add_initializer(OnnxTensor.from_array(point, parameters.zero_point, dtype))
            self._names[key] = (scale, point)
        names: tuple[str, str] = self._names[key]
        return names

    def _node(self, op_type: str, name: str, inputs: list[str], output: str, dtype: DataType, axis: int | None) -> None:
        # onnxruntime's operators of the same names also support 4 and 16 bits in older opsets.
        is_newer = dtype not in (DataType.INT8, DataType.UINT8, DataType.INT32)
        ours = self.options.use_qdq_contrib_ops or (is_newer and (self.model.opset_version() or 0) < _ALL_TYPES)
        if ours:
            self.model.opset_imports.setdefault(MS, 1)
        node_name = self.model.graph.fresh_name(f"{name}_{op_type}")
        self._nodes.append(make_node(op_type, inputs, [output], domain=MS if ours else "", name=node_name, axis=axis))


def remove_unused(graph: Graph) -> None:
    """Remove unused constants, and the types of values that no longer exist."""
    for name in [*graph.initializers]:
        if not graph.is_used(name):
            graph.remove_initializer(name)
    for name in [*graph.values]:
        if not graph.defines(name):
            del graph.values[name]
