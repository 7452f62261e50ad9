"""Values of latent attention, whose keys are also the values: a page of keys is rewritten as a page of values.

All heads of a layer read the rewritten page, so this costs little. The page is in the scratch of a thread.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

from ...cache_layout import PAGE_TOKENS, SCALE_COLUMNS, PagedLayer
from ..jit import memory
from ..jit.dsl import intrinsic
from ..jit.emit import FLOAT_VECTOR, INT8, INT16, INT64, LANES, Emitter
from ..jit.native import NativeOp, native_op
from ..jit.variants import once
from .arguments import AttentionArguments
from .pages import PACKED_BITS, item_bytes, key_columns, value_columns

_LANE_BYTES, _LANES_APART = 4, 4  # bytes of a lane; lanes whose bytes form a square
_SCALES = 2 * PAGE_TOKENS  # bytes of the scales of a group of columns


def value_page_bytes(layer: PagedLayer) -> int:
    """Return the bytes of scratch for a page of values: 0 if the layer stores values."""
    if layer.values is not None:
        return 0
    if layer.packed is not None:
        return layer.packed.value_bytes
    return PAGE_TOKENS * layer.head_size * item_bytes(layer.kind)


def keys_to_values_op(kind: str) -> NativeOp:
    """Return op(arguments, keys, values, -, -), which writes a page of keys as a page of values of the same kind."""
    return _packed_op(PACKED_BITS[kind]) if kind in PACKED_BITS else _floats_op(kind)


@once
def _floats_op(kind: str) -> NativeOp:
    item, vector = item_bytes(kind), ir.VectorType(INT16, LANES) if kind == "float16" else FLOAT_VECTOR

    @intrinsic(None, "int64", "int64", "int64")
    def transpose(e: Emitter, source: Any, target: Any, stride: Any) -> None:
        """Store LANES columns of LANES tokens as rows, `stride` bytes apart."""
        columns = [e.load(e.at(source, item * PAGE_TOKENS * column), vector) for column in range(LANES)]
        for token, row in enumerate(e.transposed(columns)):
            e.store(row, e.at(target, e.builder.mul(stride, INT64(token))))

    @intrinsic(None, "int64", "int64")
    def copy(e: Emitter, source: Any, target: Any) -> None:
        e.store(e.load(source, vector.element), target)

    def keys_to_values(arguments: AttentionArguments, keys: int, values: int, unused: int, too: int) -> int:
        size = arguments.head_size
        whole, stride = size // LANES * LANES, item * size
        for first in range(0, PAGE_TOKENS, LANES):
            for column in range(0, whole, LANES):
                source = keys + item * (column * PAGE_TOKENS + first)
                transpose(source, values + first * stride + item * column, stride)
        for column in range(whole, size):
            for token in range(PAGE_TOKENS):
                copy(keys + item * (column * PAGE_TOKENS + token), values + token * stride + item * column)
        return 0

    return native_op(AttentionArguments, name=f"keys_to_values_{kind}")(keys_to_values)


@intrinsic(None, "int64", "int64", "int64")
def _turn_squares(e: Emitter, source: Any, target: Any, stride: Any) -> None:
    """Transpose squares of four bytes in four lanes each, and store the squares `stride` bytes apart."""
    square = _LANE_BYTES * _LANES_APART
    found = e.load(source, ir.VectorType(INT8, _LANE_BYTES * LANES))
    for index in range(LANES // _LANES_APART):
        lanes = [index * square + _LANE_BYTES * lane + byte for byte in range(_LANE_BYTES) for lane in range(4)]
        e.store(e.shuffle(found, found, lanes), e.at(target, e.builder.mul(stride, INT64(index))))


@once
def _packed_op(bits: int) -> NativeOp:
    def keys_to_values(arguments: AttentionArguments, keys: int, values: int, unused: int, too: int) -> int:
        size = arguments.head_size
        groups = size // SCALE_COLUMNS if bits == 4 else 1
        columns, width = key_columns(bits, size), value_columns(bits, size)
        # A lane holds four columns of a token in keys, and four tokens of a column in values.
        for first in range(0, PAGE_TOKENS, LANES):
            for column in range(0, columns, _LANE_BYTES):
                source = keys + column * PAGE_TOKENS + _LANE_BYTES * first
                target = values + first * width + _LANE_BYTES * column
                _turn_squares(source, target, _LANE_BYTES * width)
        for column in range(columns, width):  # padding
            for token in range(0, PAGE_TOKENS, _LANE_BYTES):
                memory.write_int32(values + token * width + _LANE_BYTES * column, np.int32(0))
        source, target = keys + PAGE_TOKENS * columns, values + PAGE_TOKENS * width
        for i in range(0, _SCALES * groups, 4 * LANES):
            memory.store_int32(target + i, memory.load_int32(source + i))
        return 0

    return native_op(AttentionArguments, name=f"keys_to_values_{bits}")(keys_to_values)
