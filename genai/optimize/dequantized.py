"""Converts products and look-ups of dequantised weights to operators of block-quantised weights.

Quantisers write the same weights in several forms: DequantizeLinear before a MatMul or after a Gather, MatMulInteger
with activations that are quantised dynamically, or GatherBlockQuantized with 4-bit types. The rules convert each form
to MatMulNBits or GatherBlockQuantized with bytes. Codes and scales are converted when they are read, so that a graph
can be analysed without reading its weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.kernels.weight_layout import BLOCK_SIZES

from ..onnx.ir import DataType, Graph, Node, OnnxTensor, make_node
from ..onnx.node import MS
from ..ops.registry import INT8_LEVEL
from ..ops.weights import BLOCK_PRODUCT
from .base import Level, made_by, node_rule, only_user, replaced
from .quantized import dynamic_product

_BITS = {DataType.INT4: 4, DataType.UINT4: 4, DataType.INT8: 8, DataType.UINT8: 8}
_SIGNED = (DataType.INT4, DataType.INT8)
# Block sizes for rows with one scale: the first that divides the columns, else the first. One size for products and
# look-ups means fewer kernels.
_WHOLE_ROW_BLOCKS = (64, 32, 16)
# The number of rows converted in each step.
_STEP = 1024
_LOOKUP = "GatherBlockQuantized"


@dataclass(frozen=True)
class _Stored:
    """A constant matrix of 4- or 8-bit integers, as the file stores it.

    Attributes:
        scale, point: scales and zero points: one for each block of columns of each row, one per row, or a single one.
        block: number of columns that share a scale; 0 = all columns.
        transposed: True if the matrix is stored as [columns, rows], and blocks of scales too.
    """

    weight: OnnxTensor
    scale: OnnxTensor
    point: OnnxTensor | None
    block: int
    transposed: bool

    @property
    def bits(self) -> int:
        """The number of bits of an integer."""
        return _BITS[self.weight.dtype]

    @property
    def rows(self) -> int:
        """The number of outputs of a product, or of entries of a table."""
        return self.weight.shape[self.transposed]

    @property
    def columns(self) -> int:
        """The number of inputs of a product, or the width of a table."""
        return self.weight.shape[1 - self.transposed]

    def codes(self, block: int) -> NDArray[np.uint8]:
        """Return unsigned codes [rows, blocks, bytes]. Signed integers are shifted, and rows are padded."""
        bits, (rows, columns) = self.bits, (self.rows, self.columns)
        stored = self.weight.array().view(np.uint8)
        blocks = -(-columns // block)
        packed = np.empty((rows, blocks * block * bits // 8), np.uint8)
        for first in range(0, rows, _STEP):
            part = slice(first, min(first + _STEP, rows))
            wide = np.zeros((part.stop - first, blocks * block), np.uint8)
            wide[:, :columns] = stored[:, part].T if self.transposed else stored[part]
            wide[:, :columns] += np.uint8(self.shift)
            packed[part] = wide if bits == 8 else (wide[:, 0::2] & 15) | (wide[:, 1::2] << np.uint8(4))
        return packed.reshape(rows, blocks, -1)

    @property
    def shift(self) -> int:
        """The number that is added to signed integers."""
        return 1 << (self.bits - 1) if self.weight.dtype in _SIGNED else 0

    def scales(self, block: int) -> NDArray[Any]:
        """Return the scales [rows, blocks]."""
        return self._per_block(self.scale.array(), block)

    def points(self, block: int) -> NDArray[np.float32]:
        """Return the zero points of the codes [rows, blocks]."""
        zeros = np.zeros(1, np.float32) if self.point is None else self.point.array().astype(np.float32)
        return self._per_block(zeros, block) + np.float32(self.shift)

    def _per_block(self, values: NDArray[Any], block: int) -> NDArray[Any]:
        if values.ndim == 2:
            return np.ascontiguousarray(values.T if self.transposed else values)
        shape = self.rows, -(-self.columns // block)
        return np.ascontiguousarray(np.broadcast_to(values.reshape(-1, 1), shape))


def _stored(
    graph: Graph, names: tuple[str, str, str], *, block: int, axis: int, contraction: int, rows_differ: bool = True
) -> _Stored | None:
    """Return a constant matrix; None if a part is not constant or has a form without a kernel.

    Args:
        names: the names of the integers, the scale, and the zero point ("" = none).
        block: size of the scales' blocks; 0 = none.
        axis: axis of the blocks, or of the scales if there is more than one.
        contraction: axis of the columns.
        rows_differ: True if each row can have a scale of its own.
    """
    weight, scale = (graph.constant_tensor(name) for name in names[:2])
    point = graph.constant_tensor(names[2]) if names[2] else None
    if weight is None or scale is None or weight.dtype not in _BITS or len(weight.shape) != 2 or 0 in weight.shape:
        return None
    if scale.dtype not in (DataType.FLOAT, DataType.FLOAT16, DataType.BFLOAT16) or (names[2] and point is None):
        return None
    if point is not None and (point.dtype is not weight.dtype or point.shape != scale.shape):
        return None
    rows, columns = weight.shape[1 - contraction], weight.shape[contraction]
    if block:
        sizes = (rows, -(-columns // block))
        expected = sizes if contraction else sizes[::-1]
        if axis % 2 != contraction or block not in BLOCK_SIZES or scale.shape != expected:
            return None
    elif scale.num_elements != 1 and not (rows_differ and axis % 2 != contraction and scale.shape == (rows,)):
        return None
    return _Stored(weight, scale, point, block, contraction == 0)


def _dequantized(graph: Graph, node: Node | None, contraction: int) -> _Stored | None:
    """Return the constant matrix that a DequantizeLinear converts to floats, or None."""
    if node is None or node.key != ("", "DequantizeLinear"):
        return None
    names = node.input(0), node.input(1), node.input(2)
    block, axis = int(node.attribute("block_size", 0)), int(node.attribute("axis", 1))
    return _stored(graph, names, block=block, axis=axis, contraction=contraction)


def _added(graph: Graph, stored: _Stored, block: int, *, flat: bool = False) -> list[str]:
    """Add the codes, the scales and the zero points of blocks; return their names. Equal parts are added once.

    Args:
        flat: True for codes [rows, bytes] instead of [rows, blocks, bytes].
    """
    rows, blocks = stored.rows, -(-stored.columns // block)
    width = block * stored.bits // 8
    codes = (rows, blocks * width) if flat else (rows, blocks, width)
    parts = [
        ("codes" + "_flat" * flat, DataType.UINT8, codes, lambda: stored.codes(block)),
        ("scales", stored.scale.dtype, (rows, blocks), lambda: stored.scales(block)),
    ]
    if stored.point is not None or not stored.shift:
        parts.append(("points", DataType.FLOAT, (rows, blocks), lambda: stored.points(block)))
    names = []
    for kind, dtype, shape, make in parts:
        name = "/".join((stored.weight.name, stored.scale.name, f"{kind}_{block}_{int(stored.transposed)}"))
        if name not in graph.initializers:
            graph.add_initializer(OnnxTensor.computed(name, dtype, shape, make))
        names.append(name)
    return names


def _whole_row_block(columns: int) -> int:
    return next((size for size in _WHOLE_ROW_BLOCKS if columns % size == 0), 0)


def _as_product(graph: Graph, end: Node, x: str, stored: _Stored, bias: str = "", **attributes: Any) -> bool:
    block = stored.block or _whole_row_block(stored.columns) or _WHOLE_ROW_BLOCKS[0]
    inputs = [x, *_added(graph, stored, block)]
    if bias:
        inputs = [*inputs, *[""] * (5 - len(inputs)), bias]
    sizes: dict[str, Any] = {"K": stored.columns, "N": stored.rows, "bits": stored.bits, "block_size": block}
    return replaced(graph, end, BLOCK_PRODUCT, inputs, domain=MS, **sizes, **attributes)


@node_rule(Level.EXTENDED, ("", "MatMul"), domain=MS)
def pack_dequantized_products(graph: Graph, node: Node) -> bool:
    """MatMul(x, DequantizeLinear(w, scale, zero point)) -> MatMulNBits.

    w is a constant [K, N] of 4 or 8 bits, or [N, K] followed by a Transpose. It has one scale per block of K, one per
    column or a single scale.
    """
    source, contraction = graph.producer(node.inputs[1]), 0
    if source is not None and source.key == ("", "Transpose") and source.attribute("perm", None) in (None, [1, 0]):
        source, contraction = graph.producer(source.inputs[0]), 1
    stored = _dequantized(graph, source, contraction)
    return stored is not None and _as_product(graph, node, node.inputs[0], stored)


@node_rule(Level.EXTENDED, ("", "MatMulInteger"), (MS, "DynamicQuantizeMatMul"), domain=MS)
def pack_dynamic_products(graph: Graph, node: Node) -> bool:
    """DynamicQuantizeLinear and MatMulInteger, or DynamicQuantizeMatMul -> MatMulNBits with 8-bit activations.

    The graph quantises the activations of all tokens of a step with one scale, so that a token's result depends on the
    other tokens. MatMulNBits quantises each row separately.
    """
    bias = ""
    if node.op_type == "MatMulInteger":
        found = dynamic_product(graph, node)
        if found is None:
            return False
        source, scale, end = found
        x, names = source.input(0), (node.input(1), scale, node.input(3))
    else:
        x, end, bias, names = node.input(0), node, node.input(4), (node.input(1), node.input(2), node.input(3))
    stored = _stored(graph, names, block=0, axis=1, contraction=0)
    return stored is not None and _as_product(graph, end, x, stored, bias, accuracy_level=INT8_LEVEL)


@node_rule(Level.EXTENDED, ("", "DequantizeLinear"), ("", "Gather"), domain=MS)
def pack_dequantized_lookups(graph: Graph, node: Node) -> bool:
    """DequantizeLinear(Gather(table, ids), scale, zero point), or Gather of the result -> GatherBlockQuantized.

    A table without a width that blocks divide is dequantised before the look-up, so that it becomes a float table.
    """
    if node.op_type == "Gather":
        stored = _dequantized(graph, graph.producer(node.input(0)), 1)
        return stored is not None and not node.attribute("axis", 0) and _as_lookup(graph, node, node.input(1), stored)
    gather = made_by(graph, node.input(0), "Gather")
    if gather is None or gather.attribute("axis", 0) or only_user(graph, node.input(0)) is not node:
        return False
    names = gather.input(0), node.input(1), node.input(2)
    stored = _stored(graph, names, block=0, axis=0, contraction=1, rows_differ=False)
    if stored is None:
        return False
    if _as_lookup(graph, node, gather.input(1), stored):
        return True
    table = graph.fresh_name(f"{names[0]}/dequantized")
    graph.insert_before(gather, make_node("DequantizeLinear", [name for name in names if name], [table], name=table))
    return replaced(graph, node, "Gather", [table, gather.input(1)])


def _as_lookup(graph: Graph, end: Node, ids: str, stored: _Stored) -> bool:
    block = stored.block or _whole_row_block(stored.columns)
    if not block or stored.columns % block:  # rows of tables are not padded
        return False
    codes, *others = _added(graph, stored, block, flat=True)
    attributes: dict[str, Any] = {"bits": stored.bits, "block_size": block, "gather_axis": 0, "quantize_axis": 1}
    return replaced(graph, end, _LOOKUP, [codes, ids, *others], domain=MS, **attributes)


@node_rule(Level.EXTENDED, (MS, _LOOKUP), domain=MS)
def pack_nibble_lookups(graph: Graph, node: Node) -> bool:
    """GatherBlockQuantized of a 4-bit type -> GatherBlockQuantized of bytes."""
    table = graph.constant_tensor(node.input(0))
    axes = int(node.attribute("gather_axis", 0)) % 2, int(node.attribute("quantize_axis", 1)) % 2
    if table is None or table.dtype not in (DataType.INT4, DataType.UINT4) or axes != (0, 1):
        return False
    names = node.input(0), node.input(2), node.input(3)
    stored = _stored(graph, names, block=int(node.attribute("block_size", 128)), axis=1, contraction=1)
    return stored is not None and _as_lookup(graph, node, node.input(1), stored)


PACK_DEQUANTIZED = (pack_dequantized_products, pack_dynamic_products, pack_dequantized_lookups, pack_nibble_lookups)
"""All rules of this module."""
