"""Attention over dense float32 tensors: softmax(scale * query @ keys + bias) @ values, a panel of queries at a time.

Scores are computed with keys as rows and queries as lanes. The softmax therefore needs no sums across lanes, and its
weights already have the layout of the second matmul's right operand, so no data is rearranged between the matmuls. Keys
and values are packed first.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ....checks import Float32
from ...jit import memory
from ...jit.arguments import Address, Arguments, Binding, offset_of, size as words_of
from ...jit.dsl import inline
from ...jit.native import NativeOp, native_op
from ...jit.variants import once
from ...jit.vector import LANES, maximum, splat_float32, where_less
from ...jit.vector_math import exp_of_negative
from ...program.bound_program import BoundPrograms, NodeProgram, first_element
from ...program.calls import Call, Items
from ...program.driver import call_operator
from ...program.thread_pool import Threads, own_memory
from .micro import VECTOR_BYTES, WORD_BYTES, Tiling, first_row, floats
from .packing import transpose_lines
from .product import FinishArguments, GemmArguments, finish_op, product_call


class TensorArguments(Arguments):
    """A tensor with four axes: its address, and the bytes between batches, heads, rows and columns."""

    address: Address
    batch: int
    head: int
    row: int
    column: int


class HeadsArguments(Arguments):
    """Keys [size, length] and values [length, width] of every head, packed as left panels of `tile_rows` rows."""

    heads: int
    length: int
    size: int
    width: int
    tile_rows: int
    packed_keys: Address
    packed_values: Address


class PackingArguments(HeadsArguments):
    """The tensors to pack."""

    keys: TensorArguments
    values: TensorArguments


class DenseAttentionArguments(HeadsArguments):
    """Queries [rows, size] of every head, a bias (0 = none), and the destination for the results.

    `product` holds the arguments of `multiply` except the operands and their rows. With `nan_is_zero`, rows of NaN
    become 0.
    """

    query: TensorArguments
    bias: TensorArguments
    out: Address
    rows: int
    scale: float
    nan_is_zero: int
    multiply: Address
    product: GemmArguments


# Number of left panels that are multiplied at a time.
_GROUP = 16
# Bytes of the arguments of a matmul, in whole cache lines.
_PRODUCT_BYTES = -(-8 * words_of(GemmArguments) // 64) * 64
_FLOPS_PER_NANOSECOND = 60.0
# Maximum number of a bias's terms, with those that heads share, that are read faster in any order than rearranged.
_SMALL_BIAS = 8192


_LEFT, _ROWS, _LEFT_PANELS, _LEFT_GROUP, _RIGHT, _WORDS, _OUT = (
    offset_of(GemmArguments, *path.split("."))
    for path in ("left", "rows", "cut.left_panels", "cut.left_group", "right", "word_count", "finishing.out")
)


@inline
def _pack(source: int, line_step: int, word_step: int, lines: int, words: int, tile_rows: int, out: int) -> None:
    """Pack lines of words with any strides as left panels."""
    panels = -(-lines // tile_rows)
    for panel in range(panels):
        line = first_row(panel, panels, lines)
        height = first_row(panel + 1, panels, lines) - line
        target, at = out + 4 * line * words, source + line * line_step
        if word_step == 4:
            transpose_lines((at, line_step, height, words, target, 4 * height))
        elif line_step == 4:
            for index in range(words):
                some = memory.load_first(at + index * word_step, height)
                memory.store_first(target + 4 * index * height, some, height)
        else:
            for index in range(words):
                for m in range(height):
                    number = memory.read_int32(at + m * line_step + index * word_step)
                    memory.write_int32(target + 4 * (index * height + m), number)


@native_op(PackingArguments)
def pack_keys_and_values(arguments: PackingArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Pack the heads of batches; even items are keys, odd items are values."""
    heads, length = arguments.heads, arguments.length
    size, width, tile_rows = arguments.size, arguments.width, arguments.tile_rows
    for item in range(begin, end):
        number, is_value = item // 2, item % 2
        batch = number // heads
        head = number - batch * heads
        if is_value:
            values = arguments.values
            source = values.address + batch * values.batch + head * values.head
            out = arguments.packed_values + 4 * number * length * width
            _pack(source, values.column, values.row, width, length, tile_rows, out)
        else:
            keys = arguments.keys
            source = keys.address + batch * keys.batch + head * keys.head
            out = arguments.packed_keys + 4 * number * length * size
            _pack(source, keys.column, keys.row, length, size, tile_rows, out)
    return 0


@inline
def _multiply(
    arguments: DenseAttentionArguments, scratch: int, left: int, rows: int, right: int, words: int, out: int
) -> None:
    """Multiply packed left panels by one right panel, and write the result as [rows][columns of the panel]."""
    panels = -(-rows // arguments.tile_rows)
    group = min(panels, _GROUP)
    memory.copy_arguments(arguments.product, scratch)
    memory.write_int64(scratch + _LEFT, left)
    memory.write_int64(scratch + _ROWS, rows)
    memory.write_int64(scratch + _LEFT_PANELS, panels)
    memory.write_int64(scratch + _LEFT_GROUP, group)
    memory.write_int64(scratch + _RIGHT, right)
    memory.write_int64(scratch + _WORDS, words)
    memory.write_int64(scratch + _OUT, out)
    call_operator(arguments.multiply, scratch, 0, 0, -(-panels // group), scratch + _PRODUCT_BYTES)


@inline
def _softmax(
    scores: int, length: int, row_bytes: int, scale: float, bias: int, bias_row: int, bias_column: int, rows: int
) -> Any:
    """Compute e ** (scale * score + bias - largest) for LANES queries in place, and return the sums over keys."""
    largest = splat_float32(-np.inf)
    for key in range(length):
        address, there = scores + key * row_bytes, bias + key * bias_column
        value = memory.load_float32(address) * scale
        if bias != 0:
            if bias_row == 0:
                value = value + memory.read_float32(there)
            elif bias_row == 4:
                value = value + memory.load_first(there, rows)
            else:
                memory.store_float32(address, value)
                for lane in range(rows):
                    term = memory.read_float32(there + lane * bias_row)
                    memory.write_float32(address + 4 * lane, memory.read_float32(address + 4 * lane) + term)
                value = memory.load_float32(address)
        memory.store_float32(address, value)
        largest = maximum(largest, value)
    total = splat_float32(0.0)
    for key in range(length):
        weight = exp_of_negative(memory.load_float32(scores + key * row_bytes) - largest)
        memory.store_float32(scores + key * row_bytes, weight)
        total = total + weight
    return total


@once
def attend_op(tiling: Tiling) -> NativeOp:
    """Return the attention operator. Items are panels of queries, head by head."""
    vectors, columns = tiling.vectors, tiling.columns
    row_bytes = vectors * VECTOR_BYTES
    sums_bytes = _GROUP * tiling.rows * row_bytes

    def attend(arguments: DenseAttentionArguments, context: int, begin: int, end: int, scratch: int) -> int:
        heads, rows, length = arguments.heads, arguments.rows, arguments.length
        size, width, scale = arguments.size, arguments.width, arguments.scale
        panels = -(-rows // columns)
        queries = scratch + _PRODUCT_BYTES + sums_bytes
        scores = queries + size * row_bytes
        mixed = scores + length * row_bytes
        query_row, query_column, terms = arguments.query.row, arguments.query.column, arguments.bias
        for item in range(begin, end):
            number = item // panels
            first = (item - number * panels) * columns
            count = min(columns, rows - first)
            batch = number // heads
            head = number - batch * heads
            query = arguments.query.address + batch * arguments.query.batch + head * arguments.query.head
            for vector in range(vectors):
                lane = vector * LANES
                lines = min(max(count - lane, 1), LANES)
                at = query + min(first + lane, rows - 1) * query_row
                if query_column == 4:
                    transpose_lines((at, query_row, lines, size, queries + 4 * lane, row_bytes))
                else:
                    for index in range(size):
                        for m in range(lines):
                            value = memory.read_int32(at + m * query_row + index * query_column)
                            memory.write_int32(queries + index * row_bytes + 4 * (lane + m), value)
            left = arguments.packed_keys + 4 * number * length * size
            _multiply(arguments, scratch, left, length, queries, size, scores)
            left = arguments.packed_values + 4 * number * length * width
            bias = terms.address
            if bias != 0:
                bias += batch * terms.batch + head * terms.head + first * terms.row
            totals = mixed + width * row_bytes
            for vector in range(vectors):
                here = bias + vector * LANES * terms.row if bias != 0 else 0
                left_rows = min(max(count - vector * LANES, 0), LANES)
                total = _softmax(
                    scores + vector * VECTOR_BYTES, length, row_bytes, scale, here, terms.row, terms.column, left_rows
                )
                memory.store_float32(totals + vector * VECTOR_BYTES, total)
            _multiply(arguments, scratch, left, width, scores, length, mixed)
            out = arguments.out + 4 * ((batch * rows + first) * heads + head) * width
            for index in range(width):
                for vector in range(vectors):
                    address = mixed + index * row_bytes + vector * VECTOR_BYTES
                    total = memory.load_float32(totals + vector * VECTOR_BYTES)
                    value = memory.load_float32(address) / total
                    if arguments.nan_is_zero != 0:
                        value = where_less(total, np.inf, value, 0.0)
                    memory.store_float32(address, value)
            for index in range(0, width, LANES):
                some = min(LANES, width - index)
                transpose_lines((mixed + index * row_bytes, row_bytes, some, count, out + 4 * index, 4 * heads * width))
        return 0

    return native_op(DenseAttentionArguments, name=f"attend_{vectors}")(attend)


def _queries_last(bias: Float32) -> Float32:
    """Return the bias with each key's terms for all queries side by side, which pays off if heads share the bias."""
    if bias.strides[2] in (0, 4):
        return bias
    distinct = bias[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in bias.strides)]
    return np.broadcast_to(np.ascontiguousarray(distinct.swapaxes(2, 3)).swapaxes(2, 3), bias.shape)


class DenseAttention:
    """Attention on arrays. The calls for a shape are built once."""

    def __init__(self, threads: Threads, scale: float, *, nan_is_zero: bool = False) -> None:
        self._threads, self._scale, self._nan_is_zero = threads, float(np.float32(scale)), nan_is_zero
        self._programs: BoundPrograms[NodeProgram] = BoundPrograms()

    def __call__(self, query: Float32, keys: Float32, values: Float32, bias: Float32 | None) -> Float32:
        """Return attention [B, H, T, width], a view of [B, T, H, width]. All arrays are float32 with any strides.

        Args:
            query: [B, H, T, size].
            keys: [B, H, size, S].
            values: [B, H, S, width].
            bias: [B, H, T, S] or None. All operands may be broadcast views.
        """
        batch, heads, rows, size = query.shape
        length, width = values.shape[2:]
        shapes = ((batch, heads, rows, size), (batch, heads, size, length), (batch, heads, length, width))
        given = (query, keys, values)
        if any(x.shape != shape or x.dtype != np.float32 for x, shape in zip(given, shapes, strict=True)):
            raise ValueError(f"queries, keys and values {[(x.dtype, list(x.shape)) for x in given]} do not match")
        if bias is not None and (bias.shape != (batch, heads, rows, length) or bias.dtype != np.float32):
            raise ValueError(f"bias is {bias.dtype} {list(bias.shape)}, expected {[batch, heads, rows, length]}")
        # Heads are side by side in memory, which is the layout that the operators after attention expect.
        out = np.empty((batch, rows, heads, width), np.float32)
        if not out.size:
            return out.transpose(0, 2, 1, 3)
        if bias is not None and heads > 1 and bias.strides[1] == 0 and bias.size > _SMALL_BIAS:
            bias = _queries_last(bias)
        strides = (*(x.strides for x in given), (0, 0, 0, 0) if bias is None else bias.strides)
        program = self._programs.get(self._made, query.shape, values.shape, strides)
        packed_keys = own_memory("left", 4 * batch * heads * length * size)
        packed_values = own_memory("right", 4 * batch * heads * length * width)
        program.run(
            self._threads, query=first_element(query), keys=first_element(keys), values=first_element(values),
            bias=None if bias is None else first_element(bias), out=out, packed_keys=packed_keys,
            packed_values=packed_values,
        )  # fmt: skip
        return out.transpose(0, 2, 1, 3)

    def _made(
        self, queries: tuple[int, ...], values: tuple[int, ...], strides: tuple[tuple[int, ...], ...]
    ) -> NodeProgram:
        (batch, heads, rows, size), (length, width), tiling = queries, values[2:], floats().tiling
        names = ("query", "keys", "values", "bias")
        tensors = {
            name: TensorArguments(address=Binding(name), batch=steps[0], head=steps[1], row=steps[2], column=steps[3])
            for name, steps in zip(names, strides, strict=True)
        }
        shared: dict[str, Any] = {
            "heads": heads, "length": length, "size": size, "width": width, "tile_rows": tiling.rows,
            "packed_keys": Binding("packed_keys"), "packed_values": Binding("packed_values"),
        }  # fmt: skip
        packing = PackingArguments(**shared, keys=tensors["keys"], values=tensors["values"])
        row_bytes = tiling.columns * WORD_BYTES
        finishing = FinishArguments(out=0, out_stride=row_bytes, width=tiling.columns)
        # A matmul with one right panel. The operands and their numbers of rows and words are set for each call.
        product: Any = product_call(floats(), 0, 1, 0, 1, 0, finish_op(floats(), "copy"), finishing, threads=1)
        attending = DenseAttentionArguments(
            **shared, query=tensors["query"], bias=tensors["bias"], out=Binding("out"), rows=rows, scale=self._scale,
            nan_is_zero=self._nan_is_zero, multiply=product.op, product=product.arguments,
        )  # fmt: skip
        # The scratch holds the arguments and sums of matmuls, queries, scores, results and totals.
        scratch = _PRODUCT_BYTES + (_GROUP * tiling.rows + size + length + width + 1) * row_bytes
        items = Items(factor=batch * heads * -(-rows // tiling.columns))
        flops = 2.0 * batch * heads * rows * length * (size + width)
        phases = [
            [Call(pack_keys_and_values, packing, Items(factor=2 * batch * heads))],
            [Call(attend_op(tiling), attending, items, scratch)],
        ]
        return NodeProgram(phases, flops / _FLOPS_PER_NANOSECOND)
