"""Row and lowering rules of table look-ups by token ids."""

from __future__ import annotations

import numpy as np

from genai.kernels.ir import DenseWeight, Embedding, Ids, RowsType, SelectColumns, Weight

from ..onnx.ir import Graph, Node
from ..onnx.node import MS
from ..onnx.types import DataType, TensorType
from ..ops.registry import NodeSpec
from ..ops.weights import check_stored, uniform_weight
from .movement import item_of_row
from .rows import BATCH, Kind, NotFlattenable, RowDim, State
from .rules import Lowered, LoweringSpec, NodeRows, Packed, States, lowering_rule, row_rule, stored_weights


@row_rule("Gather", "GatherBlockQuantized")
@row_rule("GatherBlockQuantized", domain=MS)
def gather_rows(at: NodeRows) -> States:
    data, indices = at.first(), at.states[1]
    assert indices is not None
    name = "gather_axis" if at.node.op_type == "GatherBlockQuantized" else "axis"
    if data.kind is Kind.LENGTHS:
        picks = at.ints(1)
        try:
            return [State(Kind.LENGTHS, entries=tuple(data.entries[i] for i in picks))]
        except IndexError:
            raise NotFlattenable(f"dimension {picks} is outside a shape of rank {len(data.entries)}") from None
    axis = at.axis(data, 0, name)
    if data.kind is Kind.UNIFORM and indices.kind is Kind.ROWS:
        shape = [*data.known_shape[:axis], *indices.known_shape, *data.known_shape[axis + 1 :]]
        if at.node.op_type == "GatherBlockQuantized":
            shape[-1] = _unpacked_width(at.graph, at.node, data)
        return [State(Kind.ROWS, tuple(shape), axis + indices.axis)]
    if data.kind is Kind.ROWS and indices.kind is Kind.UNIFORM:
        if axis == data.axis:
            return [_row_of_sequence(at, data)]
        shape = [*data.known_shape[:axis], *indices.known_shape, *data.known_shape[axis + 1 :]]
        return [State(Kind.ROWS, tuple(shape), data.axis + (indices.rank - 1) * (axis < data.axis))]
    raise NotFlattenable("a lookup in per-token values depends on other tokens")


def _unpacked_width(graph: Graph, node: Node, data: State) -> RowDim:
    """Return the elements per row of a quantised table. uint8 packs several per byte; int4 shapes count elements."""
    stored = graph.type_of(node.inputs[0])
    packed = isinstance(stored, TensorType) and stored.dtype is DataType.UINT8
    return RowDim(data.known_shape[-1].factor * (8 // int(node.attribute("bits", 4)) if packed else 1))


def _row_of_sequence(at: NodeRows, data: State) -> State:
    """Convert a Gather of the first or last row of each sequence (index 0 or -1) to the step's logits rows."""
    index = at.graph.constant(at.node.inputs[1])
    if index is None or index.ndim != 0 or int(index) not in (0, -1) or data.axis != 1 or data.known_shape[0] != BATCH:
        raise NotFlattenable("tokens are selected by their position in the sequence")
    found = at.analysis.first_row_gathers if int(index) == 0 else at.analysis.last_row_gathers
    found.append(at.node)
    shape = (RowDim(1, tokens=True), *data.known_shape[2:])
    return State(Kind.ROWS, shape, 0)


@lowering_rule("Gather")
def lower_gather(spec: LoweringSpec) -> Lowered | None:
    """Lower a look-up in a float table, or a selection of columns by a constant."""
    if (x := spec.rows(0)) is not None:
        return _columns_of(spec, x)
    table, ids = spec.constants[0], spec.types[1]
    if table is None or not isinstance(ids, Ids) or int(spec.attributes.get("axis", 0)) != 0 or table.ndim != 2:
        return None
    if table.dtype.name not in ("float32", "float16", "bfloat16"):
        return None
    return _lookup(spec, DenseWeight(spec.inputs[0], table.shape[0], table.shape[1], transposed=True), ids)


def _columns_of(spec: LoweringSpec, x: RowsType) -> Lowered | None:
    order = spec.constants[1]
    if order is not None and order.ndim == 0:
        return item_of_row(spec, x, int(order), int(spec.attributes.get("axis", 0)))
    if order is None or order.ndim != 1 or not order.size or x.last != x.width:
        return None
    if int(spec.attributes.get("axis", 0)) not in (-1, len(x.shape) - 1) or order.dtype != np.int64:
        return None
    if order.min() < 0 or order.max() >= x.width:
        return None
    out = spec.outputs[0]
    op = SelectColumns(spec.inputs[0], spec.constant_name(1), out, op_type=spec.op_type)
    return Lowered([op], {out: x.with_width(order.size)})


@lowering_rule("GatherBlockQuantized", domain=MS)
def lower_gather_block_quantized(spec: LoweringSpec) -> Lowered | None:
    """Lower a look-up in a block-quantised table, in the packed form that it shares with a tied output head."""
    data, attributes, ids = spec.constants[0], spec.attributes, spec.types[1]
    if data is None or data.ndim != 2 or data.dtype != np.uint8 or not isinstance(ids, Ids):
        return None
    if int(attributes.get("gather_axis", 0)) % 2 != 0 or int(attributes.get("quantize_axis", 1)) % 2 != 1:
        return None
    bits, block = int(attributes.get("bits", 4)), int(attributes.get("block_size", 128))
    names = [spec.constant_name(index) for index in (0, 2, 3)]
    weight = uniform_weight(names, data.shape[0], data.shape[1] * 8 // bits, bits, block)
    check_stored(weight, data, spec.constant(2))
    return _lookup(spec, weight, ids)


def _lookup(spec: NodeSpec, table: Weight, ids: Ids) -> Lowered:
    out = spec.outputs[0]
    width = table.columns
    return Lowered([Embedding(table, ids, out, op_type=spec.op_type)], {out: RowsType((1, -1, width), width)})


stored_weights("GatherBlockQuantized", {0: Packed("bits", scales=2, points=3)})
