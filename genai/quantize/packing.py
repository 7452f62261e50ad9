"""Replacement of a float matrix in the graph with a packed matrix, and of the operators that read the matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.kernels.weights import ROW, QuantizedWeight, pack_bits, packed_bytes

from ..onnx.ir import DataType, Graph, Node, OnnxTensor, make_node
from ..onnx.node import MS, OURS
from ..ops.weight_nodes import WeightNode, embedding_node, linear_node
from .choices import FormatChoice
from .sites import Site

# The types of DequantizeLinear's input, by bits and by whether there are zero points.
_QDQ_TYPES = {(4, False): DataType.INT4, (8, False): DataType.INT8}
_QDQ_TYPES |= {(4, True): DataType.UINT4, (8, True): DataType.UINT8}
# Indices of QMoE's data, scales, bias and zero points for the matrices that are inputs 2 and 4 of MoE.
_QMOE_INPUTS = {2: (2, 3, 4, 11), 4: (5, 6, 7, 12)}
# Attributes of MoE that QMoE lacks, because it always normalises routing weights.
_NOT_IN_QMOE = ("normalize_routing_weights",)


@dataclass(frozen=True)
class Packing:
    """One matrix to replace.

    Args:
        graph: graph of the model that is written.
        site: the matrix's site in the float model.
        choice: storage format of the matrix.
        packed: the quantised matrix.
        accuracy_level: precision to which matmuls may round activations.
    """

    graph: Graph
    site: Site
    choice: FormatChoice
    packed: QuantizedWeight
    accuracy_level: int

    def replace(self) -> None:
        """Make matmuls and look-ups read the packed matrix."""
        site = self.site
        if self.choice.qdq and not site.lookups:
            for node in site.products:
                self._dequantise_before(self._own(node))
            return
        names: dict[str, str] = {}
        if site.products:
            product = linear_node(self.packed, accuracy_level=self.accuracy_level, own=self._is_own)
            names = self._constants(product)
            for node in site.products:
                self._replace_product(self._own(node), product, names)
        for node in site.lookups:
            self._replace_lookup(self._own(node), names)

    def _own(self, node: Node) -> Node:
        """Return the corresponding node of the copied graph."""
        own = self.graph.producer(node.output(0))
        assert own is not None
        return own

    @property
    def _is_own(self) -> bool:
        """True to use our operators for both uses of a tied matrix, so that the matrix is stored only once."""
        return bool(self.site.products and self.site.lookups) and not self.choice.has_foreign_kernel(self.site)

    def experts_constants(self) -> list[str]:
        """Add integers [experts, rows, bytes], scales and any zero points [experts, rows, …]; return their names."""
        packed, count, base = self.packed, self.site.experts, self.site.base_name
        form = packed.format
        # The operator expects rows whose last block is not padded.
        data = packed.data[:, : packed_bytes(packed.columns, form.bits)]
        names = [f"{base}.{part}" for part in ("qweight", "scales", "zero_points")]
        self.graph.add_initializer(OnnxTensor.from_array(names[0], data.reshape(count, -1, data.shape[1])))
        self._add_scales(names[1], packed.scales.reshape(count, -1, packed.scales.shape[1]))
        if packed.offsets is None:
            return names[:2]
        points = pack_bits(packed.offsets, form.bits)
        self.graph.add_initializer(OnnxTensor.from_array(names[2], points.reshape(count, -1, points.shape[1])))
        return names

    # Constants

    def _constants(self, weight_node: WeightNode, known: Mapping[str, str] | None = None) -> dict[str, str]:
        """Add a node's arrays as initializers, except those that are `known`, and return their names."""
        found = dict(known or {})
        scales: dict[int, str] = {}
        for part, array in weight_node.arrays.items():
            if part in found:
                continue
            # onnxruntime-genai's builder uses the same names.
            name = f"{self.site.base_name}_{f'Q{self.packed.format.bits}' if part == 'codes' else part}"
            if part in ("scales", "offset_scales") and id(array) in scales:
                found[part] = scales[id(array)]
                continue
            scales[id(array)] = found[part] = name
            if part == "scales" and weight_node.domain == MS:
                self._add_scales(name, array)
            else:
                self.graph.add_initializer(OnnxTensor.from_array(name, array))
        return found

    def _add_scales(self, name: str, scales: NDArray[np.float32]) -> None:
        """Add scales for an operator that expects float32; store them as float16 with a Cast if that is exact."""
        with np.errstate(over="ignore"):
            narrow = scales.astype(np.float16)
        if self.site.half:
            self.graph.add_initializer(OnnxTensor.from_array(name, narrow))
        elif self.choice.half_scales and np.array_equal(narrow.astype(np.float32), scales):
            self.graph.add_initializer(OnnxTensor.from_array(f"{name}/half", narrow))
            cast = make_node("Cast", [f"{name}/half"], [name], name=f"{name}/Cast", to=int(DataType.FLOAT))
            self.graph.nodes.insert(0, cast)
            self.graph.invalidate()
        else:
            self.graph.add_initializer(OnnxTensor.from_array(name, scales))

    # Operators

    def _replace_product(self, node: Node, weight_node: WeightNode, names: Mapping[str, str]) -> None:
        bias = node.input(2) if node.op_type == "Gemm" else ""
        result = node.output(0)
        product = self.graph.fresh_name(f"{result}/product") if bias else result
        name = f"{node.name}_Q{self.packed.format.bits}"
        made = self._computed(weight_node, names, node.input(0), product, name)
        if bias:
            made.append(make_node("Add", [product, bias], [result], name=f"{node.name}/bias"))
        self.graph.replace_node(node, *made)

    def _computed(
        self, weight_node: WeightNode, names: Mapping[str, str], value: str, result: str, name: str
    ) -> list[Node]:
        """Return the operator's node. Our operator computes in float32, so float16 values need Casts around it."""
        widened, narrowed = value, result
        before, after = [], []
        if weight_node.domain == OURS and self.site.half:
            narrowed = self.graph.fresh_name(f"{result}/wide")
            after = [make_node("Cast", [narrowed], [result], name=f"{name}/narrow", to=int(DataType.FLOAT16))]
            if not weight_node.computed:  # the input is x, not ids
                widened = self.graph.fresh_name(f"{value}/wide")
                before = [make_node("Cast", [value], [widened], name=f"{name}/widen", to=int(DataType.FLOAT))]
        made = make_node(
            weight_node.op_type, weight_node.inputs(widened, names), [narrowed], domain=weight_node.domain, name=name,
            **weight_node.attributes,
        )  # fmt: skip
        return [*before, made, *after]

    def _replace_lookup(self, node: Node, names: Mapping[str, str]) -> None:
        """Look up rows in the arrays of the matmuls, if the matrix has matmuls."""
        packed, graph = self.packed, self.graph
        weight_node = embedding_node(packed, own=self._is_own, cut=True)
        nodes = []
        if names and weight_node.domain == MS:  # matmuls store the codes in blocks
            shape = graph.add_constant(f"{node.name}/shape", np.array(packed.data.shape, np.int64))
            rows = graph.fresh_name(f"{names['codes']}/rows")
            nodes.append(make_node("Reshape", [names["codes"], shape], [rows], name=rows))
            names = {**names, "codes": rows}
        names = self._constants(weight_node, names)
        result = node.output(0)
        # onnxruntime's operator returns whole blocks; a Slice removes the padding.
        cut = weight_node.domain == MS and packed.format.padded(packed.columns) != packed.columns
        whole = graph.fresh_name(f"{result}/padded") if cut else result
        nodes += self._computed(weight_node, names, node.input(1), whole, f"{node.name}BlockQuantized")
        if cut:
            ends = [
                graph.add_constant(f"{node.name}/{part}", np.array([value], np.int64))
                for part, value in (("first", 0), ("last", packed.columns), ("axis", -1))
            ]
            nodes.append(make_node("Slice", [whole, *ends], [result], name=f"{node.name}/Slice"))
        graph.replace_node(node, *nodes)

    def _dequantise_before(self, node: Node) -> None:
        """Keep a matmul's operator, but make it read the output of a DequantizeLinear of integers [K, N]."""
        graph, packed, base = self.graph, self.packed, self.site.base_name
        form, has_zeros = packed.format, packed.offsets is not None
        integers, points = f"{base}_Q{form.bits}", f"{base}_zero_points"
        dtype, wide = _QDQ_TYPES[form.bits, has_zeros], f"{base}/dequantized"
        if integers not in graph.initializers:
            codes = packed.codes if has_zeros else (packed.codes.astype(np.int16) - (1 << (form.bits - 1)))
            by_row = form.block_size == ROW
            scales = packed.scales.reshape(-1) if by_row else np.ascontiguousarray(packed.scales.T)
            graph.add_initializer(OnnxTensor.from_array(integers, np.ascontiguousarray(codes.T), dtype))
            self._add_scales(f"{base}_scales", scales)
            inputs = [integers, f"{base}_scales"]
            if packed.offsets is not None:
                zeros = packed.offsets.reshape(-1) if by_row else np.ascontiguousarray(packed.offsets.T)
                graph.add_initializer(OnnxTensor.from_array(points, zeros, dtype))
                inputs.append(points)
            blocks: dict[str, Any] = {"axis": 1} if by_row else {"axis": 0, "block_size": form.block_size}
            made = make_node("DequantizeLinear", inputs, [wide], name=wide, **blocks)
            graph.insert_before(node, made)
        if node.attribute("transB", 0):
            node.set_attribute("transB", 0)
        node.inputs = [node.input(0), wide, *node.inputs[2:]]
        graph.update(node)


class MixturePacking:
    """The matrices of a mixture of experts: MoE becomes QMoE.

    Args:
        graph: graph of the model that is written.
        node: MoE node of the float model.
        packings: matrices by their input index (2 and 4).
    """

    def __init__(self, graph: Graph, node: Node, packings: Mapping[int, Packing]) -> None:
        self._graph, self._packings = graph, packings
        own = graph.producer(node.output(0))
        assert own is not None
        self._node = own

    def replace(self) -> None:
        """Replace the node with QMoE."""
        node, inputs = self._node, [self._node.input(0), self._node.input(1), *[""] * 11]
        bits = {}
        for index, (data, scales, bias, points) in _QMOE_INPUTS.items():
            packing = self._packings[index]
            names = packing.experts_constants()
            inputs[data], inputs[scales], inputs[bias] = names[0], names[1], node.input(index + 1)
            inputs[points] = names[2] if len(names) > 2 else ""
            bits[index] = packing.packed.format.bits
        while not inputs[-1]:
            inputs.pop()
        kept = {name: node.attribute(name) for name in node.attributes if name not in _NOT_IN_QMOE}
        first = self._packings[2]
        sizes = {"expert_weight_bits": bits[2], "block_size": first.packed.format.block_size}
        if bits[2] != bits[4]:
            sizes |= {"fc1_expert_weight_bits": bits[2], "fc2_expert_weight_bits": bits[4]}
        level = {"accuracy_level": first.accuracy_level} if first.accuracy_level else {}
        made = make_node("QMoE", inputs, node.outputs, domain=MS, name=f"{node.name}_Q", **kept, **sizes, **level)
        self._graph.replace_node(node, made)
