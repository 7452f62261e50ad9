"""Shapes, parts of rows, embeddings, wanted rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..block_matrix import BlockMatrix
from ..cpu.products.gather import gather_blocks
from ..cpu.products.packing import pack_matrix
from ..cpu.rowwise.gather import embedding
from ..cpu.rowwise.gather import wanted_rows as wanted_rows_call
from ..cpu.tape.context import Word
from ..cpu.tape.program import Call, Rows
from ..registry import NodeSpec
from .base import IdType, RowNode, RowType, ValueType, row_input, rule
from .nodes import Columns, RowCall

MS, OURS = "com.microsoft", "genai"
_FLOAT32 = 1  # onnx.TensorProto.FLOAT


@rule("Identity")
def identity(spec: NodeSpec, types: Sequence[ValueType]) -> RowNode | None:
    """Another name."""
    x = row_input(types, 0)
    return None if x is None else Columns(spec.inputs[0], spec.outputs[0], x)


@rule("Cast")
def cast(spec: NodeSpec, types: Sequence[ValueType]) -> RowNode | None:
    """float32 to float32."""
    return identity(spec, types) if int(spec.attributes["to"]) == _FLOAT32 else None


@rule("Reshape")
def reshape(spec: NodeSpec, types: Sequence[ValueType]) -> RowNode | None:
    """Rows stay rows while the last axis holds a whole part of one."""
    x, target = row_input(types, 0), spec.constants[1]
    if x is None or target is None or int(spec.attributes.get("allowzero", 0)):
        return None
    dims = [int(d) if d != 0 else x.shape[i] for i, d in enumerate(target.reshape(-1)) if d != 0 or i < len(x.shape)]
    fixed = [d for d in dims if d > 0]
    if len(dims) != target.size or dims.count(-1) != 1 or dims[-1] <= 0 or x.width % dims[-1]:
        return None
    # What the open dimension gets must be a whole number per row, however many rows there are.
    if x.width % int(np.prod(fixed)) or dims.index(-1) > 1 or any(d != 1 for d in dims[: dims.index(-1)]):
        return None
    return Columns(spec.inputs[0], spec.outputs[0], replace(x, shape=tuple(dims)))


@rule("Slice")
def slice_(spec: NodeSpec, types: Sequence[ValueType]) -> RowNode | None:
    """A run of the last axis."""
    x = row_input(types, 0)
    if (
        x is None
        or x.last != x.width
        or any(spec.constants[i] is None for i in range(1, len(spec.inputs)) if spec.has(i))
    ):
        return None
    starts, ends = spec.constant(1).reshape(-1), spec.constant(2).reshape(-1)
    axes = spec.constant(3).reshape(-1) if spec.has(3) else np.arange(len(starts))
    steps = spec.constant(4).reshape(-1) if spec.has(4) else np.ones(len(starts), np.int64)
    if len(starts) != 1 or int(axes[0]) not in (-1, len(x.shape) - 1) or int(steps[0]) != 1:
        return None
    first, last, _ = slice(int(starts[0]), int(ends[0])).indices(x.width)
    return Columns(spec.inputs[0], spec.outputs[0], x.with_width(last - first), first) if last > first else None


@rule("Gather")
def gather(spec: NodeSpec, types: Sequence[ValueType]) -> RowNode | None:
    """Rows of a table of floats by token ids or positions."""
    table, ids = spec.constants[0], types[1]
    if table is None or not isinstance(ids, IdType) or int(spec.attributes.get("axis", 0)) != 0 or table.ndim != 2:
        return None
    if table.dtype.name not in ("float32", "float16", "bfloat16"):
        return None
    word = ids.word

    def make(sources: Sequence[Rows], targets: Sequence[Rows]) -> Call:
        return embedding(table, targets[0], word)

    return RowCall((), {spec.outputs[0]: RowType((1, -1, table.shape[1]), table.shape[1])}, make)


@rule("GatherBlockQuantized", domain=MS)
def gather_block_quantized(spec: NodeSpec, types: Sequence[ValueType]) -> RowNode | None:
    """Rows of a block-quantised table, in the packed form that a tied head has."""
    data, attributes, ids = spec.constants[0], spec.attributes, types[1]
    if data is None or data.ndim != 2 or data.dtype != np.uint8 or not isinstance(ids, IdType):
        return None
    if int(attributes.get("gather_axis", 0)) % 2 != 0 or int(attributes.get("quantize_axis", 1)) % 2 != 1:
        return None
    bits, block = int(attributes.get("bits", 4)), int(attributes.get("block_size", 128))
    n, k = data.shape[0], data.shape[1] * 8 // bits
    points = spec.constant(3) if spec.has(3) else None
    matrix: BlockMatrix = spec.pack(
        (0, 2, 3),
        f"block_matrix[{n},{k}]:{bits}:{block}",
        lambda: pack_matrix(
            data,
            spec.constant(2),
            points,
            n=n,
            k=k,
            bits=bits,
            block_size=block,
            walkers=spec.options.get("walkers"),
            arena=spec.options.get("arena"),
        ),
    )
    word = ids.word

    def make(sources: Sequence[Rows], targets: Sequence[Rows]) -> Call:
        return gather_blocks(matrix, targets[0], word)

    return RowCall((), {spec.outputs[0]: RowType((1, -1, k), k)}, make)


@rule("WantedRows", domain=OURS)
def wanted_rows(spec: NodeSpec, types: Sequence[ValueType]) -> RowNode | None:
    """The rows whose logits are wanted."""
    x = row_input(types, 0)
    if x is None or x.counted is not Word.TOKENS or x.last != x.width:
        return None
    shape = (-1, x.width) if spec.attributes.get("squeeze", 0) else (1, -1, x.width)

    def make(sources: Sequence[Rows], targets: Sequence[Rows]) -> Call:
        return wanted_rows_call(sources[0], targets[0])

    return RowCall((spec.inputs[0],), {spec.outputs[0]: RowType(shape, x.width, Word.WANTED)}, make)
