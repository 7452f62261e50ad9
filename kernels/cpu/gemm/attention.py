"""Attention over dense float32 tensors: softmax(scale * query @ keys + bias) @ values, a panel of queries at a time.

Scores are computed with keys as rows and queries as lanes. So the softmax needs no sums across lanes, and its weights
lie as the second product wants its right operand: nothing is moved between the two. Keys and values are packed first.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from ..checks import Float32
from ..functions import exp
from ..jit import NativeOp, native_op
from ..lazy import inline
from ..memory import (
    float_word,
    load_first,
    load_float32,
    read_float32,
    read_int32,
    store_first,
    store_float32,
    word,
    write_float32,
    write_int32,
    write_int64,
)
from ..tape.driver import call_operator
from ..tape.program import Call, Hole, Items
from ..tape.replay import Crew, Replay
from ..vector import LANES, maximum, splat_float32, where_less
from . import finish as f
from . import product as p
from .finish import finish_op
from .micro import floats
from .product import product_op
from .tiling import VECTOR_BYTES, Tiling, first_row
from .transposing import turn_lines

# Arguments of both operators: addresses, and bytes from one batch, head, row and column to the next.
(
    QUERY, QUERY_BATCH, QUERY_HEAD, QUERY_ROW, QUERY_COLUMN,
    KEYS, KEYS_BATCH, KEYS_HEAD, KEYS_ROW, KEYS_COLUMN,
    VALUES, VALUES_BATCH, VALUES_HEAD, VALUES_ROW, VALUES_COLUMN,
    BIAS, BIAS_BATCH, BIAS_HEAD, BIAS_ROW, BIAS_COLUMN,
    OUT, HEADS, ROWS, LENGTH, SIZE, WIDTH, SCALE, NAN_IS_ZERO, PACKED_KEYS, PACKED_VALUES, MULTIPLY, FINISH,
    TILE_ROWS,
) = range(33)  # fmt: skip
# Left panels that are multiplied at a time.
_GROUP = 16
_BLOCK_WORDS = 32
_FLOPS_PER_NANOSECOND = 60.0
_KEPT = 16


@inline
def _pack(source: int, line_step: int, word_step: int, lines: int, words: int, tile_rows: int, out: int) -> None:
    """Lines of words, wherever they lie, as left panels."""
    panels = -(-lines // tile_rows)
    for panel in range(panels):
        line = first_row(panel, panels, lines)
        height = first_row(panel + 1, panels, lines) - line
        target, at = out + 4 * line * words, source + line * line_step
        if word_step == 4:
            turn_lines((at, line_step, height, words, target, 4 * height))
        elif line_step == 4:
            for index in range(words):
                store_first(target + 4 * index * height, load_first(at + index * word_step, height), height)
        else:
            for index in range(words):
                for m in range(height):
                    write_int32(target + 4 * (index * height + m), read_int32(at + m * line_step + index * word_step))


@native_op
def pack_keys_and_values(arguments: int, context: int, begin: int, end: int, scratch: int) -> int:
    """Items are heads of batches, for keys, and again for values."""
    heads, length = word(arguments, HEADS), word(arguments, LENGTH)
    size, width, tile_rows = word(arguments, SIZE), word(arguments, WIDTH), word(arguments, TILE_ROWS)
    for item in range(begin, end):
        number, is_value = item // 2, item % 2
        batch = number // heads
        head = number - batch * heads
        if is_value:
            source = word(arguments, VALUES)
            source += batch * word(arguments, VALUES_BATCH) + head * word(arguments, VALUES_HEAD)
            out = word(arguments, PACKED_VALUES) + 4 * number * length * width
            column, row = word(arguments, VALUES_COLUMN), word(arguments, VALUES_ROW)
            _pack(source, column, row, width, length, tile_rows, out)
        else:
            source = word(arguments, KEYS) + batch * word(arguments, KEYS_BATCH) + head * word(arguments, KEYS_HEAD)
            out = word(arguments, PACKED_KEYS) + 4 * number * length * size
            _pack(source, word(arguments, KEYS_COLUMN), word(arguments, KEYS_ROW), length, size, tile_rows, out)
    return 0


@inline
def _multiply(
    arguments: int, block: int, left: int, rows: int, right: int, words: int, out: int, row_bytes: int
) -> None:
    """A product of packed operands with one right panel, written as [rows][columns of the panel]."""
    panels = -(-rows // word(arguments, TILE_ROWS))
    group = min(panels, _GROUP)
    values = (left, rows, panels, group, right, 1, 1, words, word(arguments, FINISH), 0, out, row_bytes, row_bytes // 4)
    for index in range(len(values)):
        write_int64(block + 8 * index, values[index])
    for index in range(len(values), p.FINISH_ARGUMENTS + f.Q + 1):
        write_int64(block + 8 * index, 0)
    call_operator(word(arguments, MULTIPLY), block, 0, 0, -(-panels // group), block + 8 * _BLOCK_WORDS)


@inline
def _softmax(
    scores: int, length: int, row_bytes: int, scale: float, bias: int, bias_row: int, bias_column: int, rows: int
) -> Any:
    """e ** (scale * score + bias - largest) of LANES queries in place, keys apart by row_bytes; returns the sums."""
    largest = splat_float32(-np.inf)
    for key in range(length):
        place, there = scores + key * row_bytes, bias + key * bias_column
        value = load_float32(place) * scale
        if bias != 0:
            if bias_row == 0:
                value = value + read_float32(there)
            elif bias_row == 4:
                value = value + load_first(there, rows)
            else:
                store_float32(place, value)
                for lane in range(rows):
                    term = read_float32(there + lane * bias_row)
                    write_float32(place + 4 * lane, read_float32(place + 4 * lane) + term)
                value = load_float32(place)
        store_float32(place, value)
        largest = maximum(largest, value)
    total = splat_float32(0.0)
    for key in range(length):
        weight = exp(load_float32(scores + key * row_bytes) - largest)
        store_float32(scores + key * row_bytes, weight)
        total = total + weight
    return total


@cache
def attend_op(tiling: Tiling) -> NativeOp:
    """Items are panels of queries, head by head."""
    vectors, columns = tiling.vectors, tiling.columns
    row_bytes = vectors * VECTOR_BYTES
    sums_bytes = _GROUP * tiling.rows * row_bytes

    def attend(arguments: int, context: int, begin: int, end: int, scratch: int) -> int:
        heads, rows, length = word(arguments, HEADS), word(arguments, ROWS), word(arguments, LENGTH)
        size, width, scale = word(arguments, SIZE), word(arguments, WIDTH), float_word(arguments, SCALE)
        panels = -(-rows // columns)
        queries = scratch + 8 * _BLOCK_WORDS + sums_bytes
        scores = queries + size * row_bytes
        mixed = scores + length * row_bytes
        query_row, query_column = word(arguments, QUERY_ROW), word(arguments, QUERY_COLUMN)
        for item in range(begin, end):
            number = item // panels
            first = (item - number * panels) * columns
            count = min(columns, rows - first)
            batch = number // heads
            head = number - batch * heads
            query = word(arguments, QUERY) + batch * word(arguments, QUERY_BATCH) + head * word(arguments, QUERY_HEAD)
            for vector in range(vectors):
                lane = vector * LANES
                lines = min(max(count - lane, 1), LANES)
                at = query + min(first + lane, rows - 1) * query_row
                if query_column == 4:
                    turn_lines((at, query_row, lines, size, queries + 4 * lane, row_bytes))
                else:
                    for index in range(size):
                        for m in range(lines):
                            value = read_int32(at + m * query_row + index * query_column)
                            write_int32(queries + index * row_bytes + 4 * (lane + m), value)
            left = word(arguments, PACKED_KEYS) + 4 * number * length * size
            _multiply(arguments, scratch, left, length, queries, size, scores, row_bytes)
            left = word(arguments, PACKED_VALUES) + 4 * number * length * width
            bias = word(arguments, BIAS)
            if bias != 0:
                bias += batch * word(arguments, BIAS_BATCH) + head * word(arguments, BIAS_HEAD)
                bias += first * word(arguments, BIAS_ROW)
            totals = mixed + width * row_bytes
            for vector in range(vectors):
                here = bias + vector * LANES * word(arguments, BIAS_ROW) if bias != 0 else 0
                left_rows = min(max(count - vector * LANES, 0), LANES)
                total = _softmax(
                    scores + vector * VECTOR_BYTES, length, row_bytes, scale, here, word(arguments, BIAS_ROW),
                    word(arguments, BIAS_COLUMN), left_rows,
                )  # fmt: skip
                store_float32(totals + vector * VECTOR_BYTES, total)
            _multiply(arguments, scratch, left, width, scores, length, mixed, row_bytes)
            out = word(arguments, OUT) + 4 * ((batch * rows + first) * heads + head) * width
            for index in range(width):
                for vector in range(vectors):
                    place = mixed + index * row_bytes + vector * VECTOR_BYTES
                    total = load_float32(totals + vector * VECTOR_BYTES)
                    value = load_float32(place) / total
                    if word(arguments, NAN_IS_ZERO) != 0:
                        value = where_less(total, np.inf, value, 0.0)
                    store_float32(place, value)
            for index in range(0, width, LANES):
                some = min(LANES, width - index)
                turn_lines((mixed + index * row_bytes, row_bytes, some, count, out + 4 * index, 4 * heads * width))
        return 0

    attend.__name__ = f"attend_{vectors}"
    return native_op(attend)


def scratch_bytes(tiling: Tiling, length: int, size: int, width: int) -> int:
    """What `attend_op` needs: arguments and sums of products, queries, scores, results and totals."""
    row_bytes = tiling.vectors * VECTOR_BYTES
    return 8 * _BLOCK_WORDS + _GROUP * tiling.rows * row_bytes + (size + length + width + 1) * row_bytes


def _queries_last(bias: Float32) -> Float32:
    """The same terms, each key's side by side for all queries, as they are added: worth it where heads share them."""
    if bias.strides[2] in (0, 4):
        return bias
    distinct = bias[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in bias.strides)]
    return np.broadcast_to(np.ascontiguousarray(distinct.swapaxes(2, 3)).swapaxes(2, 3), bias.shape)


class DenseAttention:
    """Runs attention on arrays; the calls for a shape are written once."""

    def __init__(self, crew: Crew, scale: float, *, nan_is_zero: bool = False) -> None:
        self._crew, self._scale, self._nan_is_zero = crew, float(np.float32(scale)), nan_is_zero
        self._replays: dict[tuple[Any, ...], Replay] = {}

    def __call__(self, query: Float32, keys: Float32, values: Float32, bias: Float32 | None) -> Float32:
        """query: [B, H, T, size]; keys: [B, H, size, S]; values: [B, H, S, width]; bias: [B, H, T, S] or None.

        All float32 with any strides (broadcast views will do); to [B, H, T, width], a view of [B, T, H, width].

        Raises:
            ValueError: shapes or types do not fit together.
        """
        batch, heads, rows, size = query.shape
        length, width = values.shape[2:]
        shapes = ((batch, heads, rows, size), (batch, heads, size, length), (batch, heads, length, width))
        given = (query, keys, values)
        if any(x.shape != shape or x.dtype != np.float32 for x, shape in zip(given, shapes, strict=True)):
            raise ValueError(f"queries, keys and values {[(x.dtype, list(x.shape)) for x in given]} do not fit")
        if bias is not None and (bias.shape != (batch, heads, rows, length) or bias.dtype != np.float32):
            raise ValueError(f"bias is {bias.dtype} {list(bias.shape)}, expected {[batch, heads, rows, length]}")
        # Heads lie side by side in memory, as what follows attention wants them.
        out = np.empty((batch, rows, heads, width), np.float32)
        if not out.size:
            return out.transpose(0, 2, 1, 3)
        if bias is not None and heads > 1 and bias.strides[1] == 0:
            bias = _queries_last(bias)
        strides = [x.strides for x in given] + [(0, 0, 0, 0) if bias is None else bias.strides]
        key = (query.shape, values.shape, tuple(strides))
        replay = self._replays.get(key)
        if replay is None:
            if len(self._replays) >= _KEPT:
                self._replays = {}
            replay = self._replays[key] = self._made(query.shape, length, width, strides)
        self._crew.run(replay, {
            "query": query.ctypes.data, "keys": keys.ctypes.data, "values": values.ctypes.data,
            "bias": 0 if bias is None else bias.ctypes.data, "out": out.ctypes.data,
            "packed keys": self._crew.buffer("left", 4 * batch * heads * length * size),
            "packed values": self._crew.buffer("right", 4 * batch * heads * length * width),
        })  # fmt: skip
        return out.transpose(0, 2, 1, 3)

    def _made(self, shape: tuple[int, ...], length: int, width: int, strides: list[tuple[int, ...]]) -> Replay:
        batch, heads, rows, size = shape
        tiling = floats().tiling
        places: list[Any] = []
        for name, steps in zip(("query", "keys", "values", "bias"), strides, strict=True):
            places += [Hole(name), *steps]
        arguments = (
            *places, Hole("out"), heads, rows, length, size, width, self._scale, self._nan_is_zero,
            Hole("packed keys"), Hole("packed values"), product_op(floats()), finish_op(tiling, "copy"), tiling.rows,
        )  # fmt: skip
        packing = Call(pack_keys_and_values, arguments, Items(factor=2 * batch * heads))
        scratch = scratch_bytes(tiling, length, size, width)
        items = Items(factor=batch * heads * -(-rows // tiling.columns))
        flops = 2.0 * batch * heads * rows * length * (size + width)
        return Replay([[packing], [Call(attend_op(tiling), arguments, items, scratch)]], flops / _FLOPS_PER_NANOSECOND)
