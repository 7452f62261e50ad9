"""A product with dequantised constant weights keeps them packed: the QDQ form of a block-quantised layer."""

from __future__ import annotations

import numpy as np

from ..ir import Attribute, DataType, Graph, Model, Node, Tensor
from .base import Level

DOMAIN, OP_TYPE = "genai", "DequantizedMatMul"
# What the kernels sum exactly within a block, and in whole runs of bytes.
_BLOCK_SIZES = range(16, 257, 16)
_BITS = {DataType.INT4: 4, DataType.UINT4: 4, DataType.INT8: 8, DataType.UINT8: 8}
_SIGNED = (DataType.INT4, DataType.INT8)


class PackDequantizedProducts:
    """MatMul(x, DequantizeLinear(w, scale, zero point)) -> genai::DequantizedMatMul(x, bytes of w, scale, zero point).

    w is a constant [K, N] of 4 or 8 bits, with scales per block of K, per column or one for all; or [N, K] behind a
    Transpose. 4-bit weights stay as they lie in the file, two to a byte.
    """

    name = "pack_dequantized_products"
    level = Level.ALL

    def apply(self, model: Model) -> int:
        graph, changes = model.graph, 0
        for node in list(graph.nodes):
            packed = _packed(graph, node) if node.key == ("", "MatMul") else None
            if packed is not None:
                graph.replace_node(node, packed)
                changes += 1
        if changes:
            model.opset_imports.setdefault(DOMAIN, 1)
        return changes


def _packed(graph: Graph, node: Node) -> Node | None:
    source, transposed = graph.producer(node.inputs[1]), 0
    if source is not None and source.key == ("", "Transpose") and source.attribute("perm", None) in (None, [1, 0]):
        source, transposed = graph.producer(source.inputs[0]), 1
    if source is None or source.key != ("", "DequantizeLinear"):
        return None
    weight, scale = graph.constant_tensor(source.input(0)), graph.constant_tensor(source.input(1))
    if weight is None or scale is None or weight.dtype not in _BITS or len(weight.shape) != 2 or 0 in weight.shape:
        return None
    if source.input(2) and graph.constant_tensor(source.input(2)) is None:
        return None
    block = _block_size(source, weight, scale, contraction=transposed)
    if block is None or (_BITS[weight.dtype] == 4 and weight.shape[1] % 2):  # rows that end within a byte
        return None
    attributes = {
        "bits": _BITS[weight.dtype],
        "block_size": block,
        "signed": int(weight.dtype in _SIGNED),
        "transposed": transposed,
    }
    return Node(
        OP_TYPE,
        [node.inputs[0], _bytes(graph, weight), *source.inputs[1:]],
        list(node.outputs),
        DOMAIN,
        node.name,
        {name: Attribute.of(name, value) for name, value in attributes.items()},
    )


def _block_size(source: Node, weight: Tensor, scale: Tensor, *, contraction: int) -> int | None:
    """Inputs that share a scale: a block size, 0 for all of them; None if the scales lie along another axis."""
    axis = int(source.attribute("axis", 1)) % 2
    block = int(source.attribute("block_size", 0))
    if block:
        return block if axis == contraction and block in _BLOCK_SIZES else None
    if scale.num_elements == 1:
        return 0
    return 0 if axis != contraction and scale.shape == (weight.shape[1 - contraction],) else None


def _bytes(graph: Graph, weight: Tensor) -> str:
    """The constant as bytes, over the same storage."""
    name = f"{weight.name}/bytes"
    if name not in graph.initializers:
        rows, columns = weight.shape
        data = weight.raw().view(np.uint8).reshape(rows, columns * _BITS[weight.dtype] // 8)
        graph.add_initializer(Tensor.from_array(name, data))
    return name
