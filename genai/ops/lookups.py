"""Rows of tables by ids: Gather, GatherBlockQuantized."""

from __future__ import annotations

from typing import Any

import numpy as np

from genai.kernels.cpu.arrays.functions import block_rows
from genai.kernels.cpu.linear.packing import pack_matrix
from genai.kernels.cpu.program.thread_pool import Threads
from genai.kernels.ir import BlockWeight, DenseWeight, Ids, Lookup, Reordered, RowsType, Weight
from genai.kernels.weight_layout import BlockMatrix

from ..lowering import rules
from ..lowering.rows import BATCH, Kind, NotFlattenable, RowDim, State
from ..onnx.ir import Graph, Node
from ..onnx.node import MS
from ..onnx.types import DataType, TensorType, Type
from .products import check_stored, packed_blocks
from .registry import KernelError, NodeSpec, operator
from .support import as_array


@operator("Gather")
def gather(x: Any, indices: Any, *, axis: int = 0) -> Any:
    """Look up slices along an axis; negative indices count from the end. Raises IndexError when out of range."""
    return as_array(np.take(x, indices, axis=axis))


@operator("GatherBlockQuantized", domain=MS, table=lambda spec: _table(spec, spec.constant(0)))
def gather_block_quantized(data: Any, ids: Any, scales: Any, *, table: BlockMatrix, threads: Threads | None) -> Any:
    """Rows of a block-quantised table, dequantised; negative ids count from the end, others beyond it give zeros."""
    flat = np.ascontiguousarray(ids, np.int64).reshape(-1)
    valid = (flat >= -table.rows) & (flat < table.rows)
    rows = block_rows(np.where(valid, flat % table.rows, 0), table, threads=threads)
    rows[~valid] = 0
    return rows.reshape(*ids.shape, table.columns).astype(scales.dtype, copy=False)


def _table(spec: NodeSpec, data: Any) -> BlockMatrix:
    attributes = spec.attributes
    gather_axis, quantize_axis = int(attributes.get("gather_axis", 0)), int(attributes.get("quantize_axis", 1))
    if data.ndim != 2 or gather_axis % 2 != 0 or quantize_axis % 2 != 1:
        raise KernelError(
            "GatherBlockQuantized: only a table [rows, columns] gathered by rows and quantised along columns"
        )
    block = int(attributes.get("block_size", 128))
    if data.dtype == np.uint8:
        bits = int(attributes.get("bits", 4))
        return packed_blocks(spec, 0, 2, 3, n=data.shape[0], k=data.shape[1] * 8 // bits, bits=bits, block=block)
    if data.dtype.name not in ("int4", "uint4"):
        raise KernelError(f"GatherBlockQuantized over {data.dtype}: only uint8, int4 and uint4 are supported")
    return spec.pack((0, 2, 3), f"nibbles{list(data.shape)}:{block}", lambda: _pack_nibbles(spec, data, block))


def _pack_nibbles(spec: NodeSpec, data: Any, block: int) -> BlockMatrix:
    """int4 and uint4 tables; both have zero point 0 unless they bring their own. Signed values move up by 8."""
    rows, columns = data.shape
    offset = 8 if data.dtype.name == "int4" else 0
    padded = np.full((rows, -(-columns // block) * block), offset, np.uint8)
    padded[:, :columns] = (data.astype(np.int8) + offset).astype(np.uint8)
    scales = spec.constant(2)
    points = spec.constant(3).astype(np.float32) if spec.has(3) else np.zeros(scales.shape, np.float32)
    return pack_matrix(
        padded[:, 0::2] | padded[:, 1::2] << 4, scales, points + offset, n=rows, k=columns, bits=4, block_size=block
    )


@rules.shape_rule("GatherBlockQuantized")
def gather_block_quantized_types(types: rules.NodeTypes) -> list[Type | None]:
    """Gather along `gather_axis`, dequantised to the scales' type; uint8 data hold 8 / bits elements per byte."""
    data, indices, scales = types.tensor(0), types.tensor(1), types.tensor(2)
    if scales is None:
        return []
    if data is None or indices is None or not data.shape or indices.shape is None:
        return [TensorType(scales.dtype)]
    shape = list(data.shape)
    if data.dtype is DataType.UINT8:
        shape[-1] = rules.times(shape[-1], 8 // max(types.attribute("bits", 4), 1))
    axis = types.attribute("gather_axis", 0) % len(shape)
    return [TensorType(scales.dtype, (*shape[:axis], *indices.shape, *shape[axis + 1 :]))]


@rules.row_rule("Gather", "GatherBlockQuantized")
@rules.row_rule("GatherBlockQuantized", domain=MS)
def gather_rows(at: rules.NodeRows) -> rules.States:
    data, indices = at.first(), at.states[1]
    assert indices is not None
    name = "gather_axis" if at.node.op_type == "GatherBlockQuantized" else "axis"
    if data.kind is Kind.LENGTHS:
        picks = at.ints(1)
        try:
            return [State(Kind.LENGTHS, entries=tuple(data.entries[i] for i in picks))]
        except IndexError:
            raise NotFlattenable(f"picks dimension {picks} of {len(data.entries)}") from None
    axis = at.axis(data, 0, name)
    if data.kind is Kind.UNIFORM and indices.kind is Kind.ROWS:
        shape = [*data.known_shape[:axis], *indices.known_shape, *data.known_shape[axis + 1 :]]
        if at.node.op_type == "GatherBlockQuantized":
            shape[-1] = _unpacked_width(at.graph, at.node, data)
        return [State(Kind.ROWS, tuple(shape), axis + indices.axis)]
    if data.kind is Kind.ROWS and indices.kind is Kind.UNIFORM:
        if axis == data.axis:
            return [_last_row(at, data)]
        shape = [*data.known_shape[:axis], *indices.known_shape, *data.known_shape[axis + 1 :]]
        return [State(Kind.ROWS, tuple(shape), data.axis + (indices.rank - 1) * (axis < data.axis))]
    raise NotFlattenable("tokens are looked up by other tokens")


def _unpacked_width(graph: Graph, node: Node, data: State) -> RowDim:
    """Elements in a row of a quantised table: a uint8 one holds several to a byte, an int4 one says its own number."""
    stored = graph.type_of(node.inputs[0])
    packed = isinstance(stored, TensorType) and stored.dtype is DataType.UINT8
    return RowDim(data.known_shape[-1].factor * (8 // int(node.attribute("bits", 4)) if packed else 1))


def _last_row(at: rules.NodeRows, data: State) -> State:
    """Gather(index -1) along the token axis: the last row of each sequence, the wanted rows of the step."""
    index = at.graph.constant(at.node.inputs[1])
    if index is None or index.ndim != 0 or int(index) != -1 or data.axis != 1 or data.known_shape[0] != BATCH:
        raise NotFlattenable("picks tokens by their place in the sequence")
    at.found.last_row_gathers.append(at.node)
    shape = (RowDim(1, tokens=True), *data.known_shape[2:])
    return State(Kind.ROWS, shape, 0)


@rules.record_rule("Gather")
def gather_record(spec: rules.RowSpec) -> rules.Made | None:
    """Rows of a table of floats; columns of rows, by a constant."""
    if (x := spec.rows(0)) is not None:
        return _columns_of(spec, x)
    table, ids = spec.constants[0], spec.types[1]
    if table is None or not isinstance(ids, Ids) or int(spec.attributes.get("axis", 0)) != 0 or table.ndim != 2:
        return None
    if table.dtype.name not in ("float32", "float16", "bfloat16"):
        return None
    return _lookup(spec, DenseWeight(spec.inputs[0], table.shape[0], table.shape[1], transposed=True), ids)


def _columns_of(spec: rules.RowSpec, x: RowsType) -> rules.Made | None:
    order = spec.constants[1]
    if order is None or order.ndim != 1 or not order.size or x.last != x.width:
        return None
    if int(spec.attributes.get("axis", 0)) not in (-1, len(x.shape) - 1) or order.dtype != np.int64:
        return None
    if order.min() < 0 or order.max() >= x.width:
        return None
    out = spec.outputs[0]
    record = Reordered(spec.inputs[0], spec.constant_name(1), out, op_type=spec.op_type)
    return rules.Made([record], {out: x.with_width(order.size)})


@rules.record_rule("GatherBlockQuantized", domain=MS)
def gather_block_quantized_record(spec: rules.RowSpec) -> rules.Made | None:
    """Rows of a block-quantised table, in the packed form that a tied head has."""
    data, attributes, ids = spec.constants[0], spec.attributes, spec.types[1]
    if data is None or data.ndim != 2 or data.dtype != np.uint8 or not isinstance(ids, Ids):
        return None
    if int(attributes.get("gather_axis", 0)) % 2 != 0 or int(attributes.get("quantize_axis", 1)) % 2 != 1:
        return None
    bits, block = int(attributes.get("bits", 4)), int(attributes.get("block_size", 128))
    table, scales, points = (spec.constant_name(index) for index in (0, 2, 3))
    weight = BlockWeight(table, scales, points, data.shape[0], data.shape[1] * 8 // bits, bits, block)
    check_stored(weight, data, spec.constant(2))
    return _lookup(spec, weight, ids)


def _lookup(spec: NodeSpec, table: Weight, ids: Ids) -> rules.Made:
    out = spec.outputs[0]
    width = table.columns
    return rules.Made([Lookup(table, ids, out, op_type=spec.op_type)], {out: RowsType((1, -1, width), width)})


rules.stored_weights("GatherBlockQuantized", {0: rules.Packed("bits", scales=2, points=3)})
