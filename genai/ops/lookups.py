"""Look-ups in block-quantised tables: GatherBlockQuantized."""

from __future__ import annotations

from typing import Any

import numpy as np

from genai.kernels.cpu.arrays.block_weights import block_rows
from genai.kernels.cpu.linear.packing import pack_matrix
from genai.kernels.cpu.program.thread_pool import Threads
from genai.kernels.weight_layout import BlockMatrix

from ..onnx.node import MS
from ..onnx.types import DataType, TensorType, Type
from .products import packed_blocks
from .registry import KernelError, NodeSpec, operator
from .shape_rules import NodeTypes, shape_rule, times


@operator("GatherBlockQuantized", domain=MS, table=lambda spec: _table(spec, spec.constant(0)))
def gather_block_quantized(data: Any, ids: Any, scales: Any, *, table: BlockMatrix, threads: Threads | None) -> Any:
    """Gather and dequantise rows of a table; negative ids count from the end, and ids out of range return zeros."""
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
            "GatherBlockQuantized: the table must be [rows, columns], gathered along axis 0 and quantised along axis 1"
        )
    block = int(attributes.get("block_size", 128))
    if data.dtype == np.uint8:
        bits = int(attributes.get("bits", 4))
        return packed_blocks(spec, 0, 2, 3, n=data.shape[0], k=data.shape[1] * 8 // bits, bits=bits, block=block)
    if data.dtype.name not in ("int4", "uint4"):
        raise KernelError(
            f"GatherBlockQuantized: the table is {data.dtype}, but only uint8, int4 and uint4 are supported"
        )
    return spec.pack((0, 2, 3), f"nibbles{list(data.shape)}:{block}", lambda: _pack_nibbles(spec, data, block))


def _pack_nibbles(spec: NodeSpec, data: Any, block: int) -> BlockMatrix:
    """Pack an int4 or uint4 table; the default zero point is 0 for both. Signed values are shifted up by 8."""
    rows, columns = data.shape
    offset = 8 if data.dtype.name == "int4" else 0
    padded = np.full((rows, -(-columns // block) * block), offset, np.uint8)
    padded[:, :columns] = (data.astype(np.int8) + offset).astype(np.uint8)
    scales = spec.constant(2)
    points = spec.constant(3).astype(np.float32) if spec.has(3) else np.zeros(scales.shape, np.float32)
    return pack_matrix(
        padded[:, 0::2] | padded[:, 1::2] << 4, scales, points + offset, n=rows, k=columns, bits=4, block_size=block
    )


@shape_rule("GatherBlockQuantized")
def gather_block_quantized_types(types: NodeTypes) -> list[Type | None]:
    """Gather along `gather_axis`, dequantised to the scales' type; uint8 data has 8 / bits elements per byte."""
    data, indices, scales = types.tensor(0), types.tensor(1), types.tensor(2)
    if scales is None:
        return []
    if data is None or indices is None or not data.shape or indices.shape is None:
        return [TensorType(scales.dtype)]
    shape = list(data.shape)
    if data.dtype is DataType.UINT8:
        shape[-1] = times(shape[-1], 8 // max(types.attribute("bits", 4), 1))
    axis = types.attribute("gather_axis", 0) % len(shape)
    return [TensorType(scales.dtype, (*shape[:axis], *indices.shape, *shape[axis + 1 :]))]
