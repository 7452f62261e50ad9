"""Low-rank adapters in programs: rows shrink to a few numbers per adapter, and products add these times its columns.

What a row's adapters are is read from the step. A program knows the numbers of targets only, so that adapters come and
go without it: an adapter is one block of memory that begins with a table of where its factors lie, target by target.

`shrink` computes hidden = weight * (x @ A.T) for all rows of an adapter together, four ranks and up to four rows at a
time, so that A is read once for four rows. A product then adds hidden @ B.T to a tile's sums before its bias and
activation (`add_adapters`): there is no row of addends in memory, and a row without adapters costs a comparison. Sums
are float32, in the order of columns and of ranks: a row's result does not depend on the rows beside it.

With many adapters in a step their factors are a large part of what it reads. So A lies in the order in which it is
read. B comes from memory while the base's products are computed: whoever adds a group of columns notes the lines of the
next group (`start_asking`), and the product's micro-kernel asks for a few of them with each op of weights. Asking
for all of them at once would wait: a core has room for a few dozen lines that are on their way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from genai.common.host_memory import mapped_array

from ...checks import FormatError
from ...device import Factors, StepContext, StepError
from ..jit.arguments import Arguments
from ..jit.dsl import helper, inline
from ..jit.emit import FLOAT_VECTOR, INT16, INT64, LANES, Emitter, constant, micro_kernel
from ..jit.isa import stream_prefetch
from ..jit.memory import (
    entry,
    load_float32,
    load_half,
    prefetch_second,
    read_float32,
    read_int32,
    read_int64,
    store_float32,
    write_float32,
    write_int64,
)
from ..jit.native import native_op
from ..jit.vector import multiply_add, reduce_add, splat_float32
from ..program.calls import Call, Items, Rows, row_at
from ..program.step_table import ContextTable, StepField

NO_TARGET = -1
_LINE = 64
# A product of fewer columns is no target of adapters.
MIN_COLUMNS = LANES
# Ranks of a block of shrinking, and the rows that meet them at once.
_RANKS, _ROWS = 4, 4
_VECTOR_BYTES = 4 * LANES
SCRATCH_BYTES = _RANKS * _ROWS * _VECTOR_BYTES
# What is to be asked for: how many runs of lines are noted and how many may be, then where they begin. Runs are short,
# so that what a step of the micro-kernel reads itself need not wait behind them.
RUN_LINES = 2
_RUN_BYTES, _MOST_RUNS = RUN_LINES * _LINE, 512
ASKED_BYTES = 8 * (2 + _MOST_RUNS)
# No micro-kernel follows: lines are asked for at once.
NOT_ASKED = 0
# An adapter's table: bytes per number, then per target these four, then what the third of them points to.
_HEADER, _TARGET, _SEGMENT = 1, 4, 5
_A, _RANK, _SEGMENTS, _COUNT = 0, 1, 2, 3
_FIRST, _END, _B, _OFFSET, _SEGMENT_RANK = 0, 1, 2, 3, 4
_SHORTS = ir.VectorType(INT16, LANES)


# --- memory ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class CpuAdapter:
    """An adapter's factors; see `genai.kernels.device.DeviceAdapter`.

    Per target A of all factors that lie there, one below the other, in blocks of four ranks (the last of as many as are
    left): [block][columns / 16][rank][16], the columns filled up with zeros; and each one's B in tiles of sixteen
    columns of the result, [tile][rank][16].

    Attributes:
        memory: uint8, all of it. rank: the largest of all targets.
    """

    memory: NDArray[np.uint8]
    rank: int

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self.memory.nbytes

    @property
    def address(self) -> int:
        """Of its table."""
        return int(self.memory.__array_interface__["data"][0])


def pack_adapter(factors: Sequence[Sequence[Factors]]) -> CpuAdapter:
    """Lay an adapter out; see `genai.kernels.device.Executor.load_adapter`."""
    every = [one for target in factors for one in target]
    dtype = every[0].a.dtype if every else np.dtype(np.float32)
    for one in every:
        if {one.a.dtype, one.b.dtype} != {dtype} or dtype.name not in ("float16", "float32"):
            raise FormatError(f"factors are {one.a.dtype} and {one.b.dtype}, expected all float16 or all float32")
        if one.a.ndim != 2 or one.b.ndim != 2 or one.a.shape[0] != one.b.shape[1] or one.first % LANES:
            raise FormatError(
                f"factors are {list(one.a.shape)} and {list(one.b.shape)}, of columns from {one.first} on; expected "
                f"[rank, columns] and [columns of the result, rank], from a multiple of {LANES} on"
            )
    tiles = [-(-len(one.b) // LANES) * one.rank for one in every]
    entries = _HEADER + _TARGET * len(factors) + _SEGMENT * len(every)
    begin = -(-8 * entries // _LINE) * _LINE
    shrinking = [_in_blocks(target, dtype) for target in factors]
    sizes = [one.nbytes for one in shrinking], [dtype.itemsize * LANES * count for count in tiles]
    memory = mapped_array(begin + sum(map(_lines, [*sizes[0], *sizes[1]])))
    table, address = memory[: 8 * entries].view(np.int64), int(memory.__array_interface__["data"][0])
    table[0] = dtype.itemsize
    segment, end = _HEADER + _TARGET * len(factors), begin
    for number, target in enumerate(factors):
        at = table[_HEADER + _TARGET * number :]
        at[_A], at[_SEGMENTS], at[_COUNT] = address + end, address + 8 * segment, len(target)
        at[_RANK] = sum(one.rank for one in target)
        blocks = shrinking[number]
        memory[end : end + blocks.nbytes].view(dtype)[...] = blocks
        end, offset = end + _lines(blocks.nbytes), 0
        for one in target:
            columns, rank = one.b.shape
            padded = np.zeros((-(-columns // LANES) * LANES, rank), dtype)
            padded[:columns] = one.b
            tiled = padded.reshape(-1, LANES, rank).transpose(0, 2, 1)
            table[segment : segment + _SEGMENT] = one.first, one.first + columns, address + end, offset, rank
            memory[end : end + padded.nbytes].view(dtype)[...] = tiled.reshape(-1)
            segment, end, offset = segment + _SEGMENT, end + _lines(padded.nbytes), offset + rank
    return CpuAdapter(memory, max((sum(one.rank for one in target) for target in factors), default=0))


def _in_blocks(target: Sequence[Factors], dtype: Any) -> NDArray[Any]:
    """The A of a target, as `CpuAdapter` says; flat."""
    if not target:
        return np.empty(0, dtype)
    joined = np.concatenate([one.a for one in target])
    ranks, columns = joined.shape
    padded = np.zeros((ranks, -(-columns // LANES), LANES), dtype)
    padded.reshape(ranks, -1)[:, :columns] = joined
    whole = ranks // _RANKS * _RANKS
    blocks = padded[:whole].reshape(-1, _RANKS, *padded.shape[1:]).swapaxes(1, 2)
    return np.concatenate([blocks.reshape(-1), padded[whole:].swapaxes(0, 1).reshape(-1)])


def _lines(size: int) -> int:
    return -(-size // _LINE) * _LINE


# --- the step --------------------------------------------------------------------------------------------------------


@dataclass
class _Group:
    """The rows of an adapter."""

    adapter: CpuAdapter
    rows: list[NDArray[np.int32]] = field(default_factory=list)


def _own(adapter: object) -> CpuAdapter:
    if not isinstance(adapter, CpuAdapter):
        raise StepError(f"{adapter!r:.80} is no adapter in this device's memory")
    return adapter


def fill_adapters(table: ContextTable, step: StepContext, targets: int) -> None:
    """Write a step's adapters into the table that its programs read.

    Args:
        targets: how many the program has.
    """
    table.count(StepField.LORA_BLOCKS, 0)
    if not len(step.adapter_rows.ids) or not targets:
        return
    groups = [_Group(_own(adapter)) for adapter in step.adapter_rows.adapters]
    parts = np.empty((len(step.adapter_rows.ids), 2), np.int64)
    weights = step.adapter_rows.weights.astype(np.float32).view(np.int32)
    ids, bounds, starts = step.adapter_rows.ids.tolist(), step.adapter_rows.offsets.tolist(), step.cu_seqlens_q.tolist()
    stride = 0
    for sequence, (first, last) in enumerate(pairwise(starts)):
        offset = 0
        for index in range(bounds[sequence], bounds[sequence + 1]):
            group = groups[ids[index]]
            parts[index] = group.adapter.address, offset
            rows = np.empty((last - first, 3), np.int32)
            rows[:, 0], rows[:, 1], rows[:, 2] = np.arange(first, last), offset, weights[index]
            group.rows.append(rows)
            offset += _lines(4 * group.adapter.rank)
        stride = max(stride, offset)
    blocks, begin = [], 0
    for group in groups:
        end = begin + sum(map(len, group.rows))
        blocks += [(group.adapter.address, rank, begin, end) for rank in range(0, group.adapter.rank, _RANKS)]
        begin = end
    every = [rows for group in groups for rows in group.rows]
    table.array(StepField.ADAPTERS_OF_SEQUENCE, step.adapter_rows.offsets)
    table.array(StepField.ROW_ADAPTERS, parts)
    table.array(StepField.SHRINK_BLOCKS, np.array(blocks, np.int64).reshape(-1, 4))
    table.array(StepField.SHRINK_ROWS, np.concatenate(every))
    table.room(StepField.HIDDEN, targets * starts[-1] * stride // 4, np.float32)
    table.count(StepField.HIDDEN_STRIDE, stride)
    table.count(StepField.HIDDEN_TARGET, starts[-1] * stride)
    table.count(StepField.LORA_BLOCKS, len(blocks))


# --- shrinking -------------------------------------------------------------------------------------------------------


class ShrinkArguments(Arguments):
    """Rows, and the target whose factors they meet."""

    x: Rows
    target: int


def _shrink_kernel(item_bytes: int, rows: int) -> Any:
    """Sums [rank][row] of LANES parts each, of a block's ranks with some rows, to memory.

    Its arguments: addresses of the block, of the rows and of the results; columns; the block's last rank, which stands
    in for those that a smaller block does not have.
    """
    stored = FLOAT_VECTOR if item_bytes == 4 else _SHORTS
    size = item_bytes * LANES

    def emit(e: Emitter, a: Any, *values: Any) -> None:
        x, (out, columns, last) = values[:rows], values[rows:]
        b = e.builder
        ranks = [
            b.mul(b.select(b.icmp_signed("<", INT64(rank), last), INT64(rank), last), INT64(size))
            for rank in range(_RANKS)
        ]
        step = b.mul(b.add(last, INT64(1)), INT64(size))
        level, distance = stream_prefetch()

        def add(sums: list[Any], vectors: list[Any], index: Any) -> list[Any]:
            at = e.at(a, b.mul(index, step))
            for line in range(0, _RANKS * size, _LINE):
                e.prefetch(e.at(at, distance + line), level)
            factors = [e.load(e.at(at, rank), stored) for rank in ranks]
            if item_bytes == 2:
                factors = [e.from_half(factor) for factor in factors]
            pairs = [(factor, vector) for factor in factors for vector in vectors]
            return [e.fast_multiply_add(f, v, s) for s, (f, v) in zip(sums, pairs, strict=True)]

        whole = b.udiv(columns, INT64(LANES))
        # A masked round does the columns that are left behind the last whole vector; where there are none, the last
        # vector's factors meet zeros.
        left = b.urem(columns, INT64(LANES))
        mask, behind = e.first_lanes(left), b.mul(whole, INT64(_VECTOR_BYTES))
        vectors = [e.load_masked(e.at(row, behind), FLOAT_VECTOR, mask) for row in x]
        last_vector = b.udiv(b.sub(columns, INT64(1)), INT64(LANES))
        sums = add([constant(FLOAT_VECTOR, 0.0)] * (_RANKS * rows), vectors, last_vector)
        with e.loop(whole, sums) as (index, carried):
            vectors = [e.load(e.at(row, b.mul(index, INT64(_VECTOR_BYTES))), FLOAT_VECTOR) for row in x]
            carried[:] = add(carried, vectors, index)
        for number, total in enumerate(carried):
            e.store(total, e.at(out, number * _VECTOR_BYTES))

    return micro_kernel(emit)


def _by_bytes(rows: int) -> Any:
    """The kernel for a number of rows, of factors with two or four bytes a number."""
    half, single = (_shrink_kernel(item_bytes, rows) for item_bytes in (2, 4))

    @inline
    def multiply(item_bytes: int, values: Any) -> None:
        if item_bytes == 2:
            half(values)
        else:
            single(values)

    return multiply


_one_row, _some_rows = _by_bytes(1), _by_bytes(_ROWS)


def shrink_call(x: Rows, target: int) -> Call:
    """hidden = weight * (x @ A.T) for all rows and adapters of the step, at a target.

    Args:
        x: rows [TOKENS, K], K at least MIN_COLUMNS.
    """
    if x.counted != StepField.TOKENS or x.width < MIN_COLUMNS:
        raise ValueError(f"x is [{x.counted.name}, {x.width}], expected [TOKENS, {MIN_COLUMNS} or more]")
    return Call(shrink, ShrinkArguments(x=x, target=target), Items(StepField.LORA_BLOCKS), SCRATCH_BYTES)


_BLOCKS, _BLOCK_ROWS = int(StepField.SHRINK_BLOCKS), int(StepField.SHRINK_ROWS)
_HIDDEN, _STRIDE, _HIDDEN_TARGET = (
    int(one) for one in (StepField.HIDDEN, StepField.HIDDEN_STRIDE, StepField.HIDDEN_TARGET)
)
_ANY, _BOUNDS, _OF_ROW = (
    int(one) for one in (StepField.LORA_BLOCKS, StepField.ADAPTERS_OF_SEQUENCE, StepField.ROW_ADAPTERS)
)
_SEQUENCES = int(StepField.SEQUENCE_OF_ROW)
_BLOCK_BYTES, _ROW_BYTES, _OF_ROW_BYTES = 32, 12, 16


@inline
def _hidden_row(context: int, target: int, row: int) -> Any:
    return entry(context, _HIDDEN) + target * entry(context, _HIDDEN_TARGET) + row * entry(context, _STRIDE)


@inline
def _write_hidden(context: int, target: int, of_row: int, rank: int, total: Any) -> None:
    """One number of a row: the sum of what was added up lane by lane, times the adapter's weight."""
    address = _hidden_row(context, target, read_int32(of_row)) + read_int32(of_row + 4) + 4 * rank
    write_float32(address, read_float32(of_row + 8) * reduce_add(total))


@native_op(ShrinkArguments)
def shrink(arguments: ShrinkArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Items are blocks of ranks of an adapter; where it has no such ranks at this target, there is nothing to do."""
    x, target = arguments.x, arguments.target
    columns = x.width
    for item in range(begin, end):
        block = entry(context, _BLOCKS) + _BLOCK_BYTES * item
        table, rank = read_int64(block), read_int64(block + 8)
        item_bytes = read_int64(table)
        factors = table + 8 * (_HEADER + _TARGET * target)
        ranks = min(_RANKS, read_int64(factors + 8 * _RANK) - rank)
        a = read_int64(factors + 8 * _A) + rank * (-(-columns // LANES) * LANES) * item_bytes
        index, last = read_int64(block + 16), read_int64(block + 24)
        while ranks > 0 and index < last:
            of_row = entry(context, _BLOCK_ROWS) + _ROW_BYTES * index
            count = min(_ROWS, last - index)
            r0 = row_at(x, read_int32(of_row))
            if count == 1:
                _one_row(item_bytes, (a, r0, scratch, columns, ranks - 1))
                for number in range(ranks):
                    _write_hidden(
                        context, target, of_row, rank + number, load_float32(scratch + number * _VECTOR_BYTES)
                    )
            else:
                r1 = row_at(x, read_int32(of_row + _ROW_BYTES))
                r2 = row_at(x, read_int32(of_row + _ROW_BYTES * min(2, count - 1)))
                r3 = row_at(x, read_int32(of_row + _ROW_BYTES * min(3, count - 1)))
                _some_rows(item_bytes, (a, r0, r1, r2, r3, scratch, columns, ranks - 1))
                for number in range(ranks):
                    for m in range(count):
                        total = load_float32(scratch + (number * _ROWS + m) * _VECTOR_BYTES)
                        _write_hidden(context, target, of_row + _ROW_BYTES * m, rank + number, total)
            index += count
    return 0


# --- expanding -------------------------------------------------------------------------------------------------------


@inline
def _factor(address: int, item_bytes: int) -> Any:
    """LANES numbers of a factor."""
    return load_half(address) if item_bytes == 2 else load_float32(address)


@inline
def _segment_at(context: int, target: int, index: int) -> Any:
    """Of the index-th pair of a row and an adapter: the adapter's bytes per number and segments, and how many."""
    of_row = entry(context, _OF_ROW) + _OF_ROW_BYTES * index
    table = read_int64(of_row)
    factors = table + 8 * (_HEADER + _TARGET * target)
    offset = read_int64(of_row + 8)
    return read_int64(table), read_int64(factors + 8 * _SEGMENTS), read_int64(factors + 8 * _COUNT), offset


@inline
def _holds(segment: int, column: int) -> Any:
    return read_int64(segment + 8 * _FIRST) <= column and column < read_int64(segment + 8 * _END)


@inline
def _tile_of(segment: int, column: int, item_bytes: int) -> Any:
    """Where the factors of a tile's columns are, for the first rank."""
    rank = read_int64(segment + 8 * _SEGMENT_RANK)
    return read_int64(segment + 8 * _B) + (column - read_int64(segment + 8 * _FIRST)) * rank * item_bytes


@inline
def _expand_one(hidden: int, b: int, rank: int, item_bytes: int, total: Any) -> Any:
    for index in range(rank):
        total = multiply_add(_factor(b, item_bytes), read_float32(hidden + 4 * index), total)
        b += LANES * item_bytes
    return total


@inline
def _expand_any(hidden: int, b: int, rank: int, item_bytes: int, total: Any) -> Any:
    if item_bytes == 2:
        return _expand_one(hidden, b, rank, 2, total)
    return _expand_one(hidden, b, rank, 4, total)


@inline
def _expand_four(
    hidden: int, stride: int, b: int, rank: int, item_bytes: int, t0: Any, t1: Any, t2: Any, t3: Any
) -> Any:
    for index in range(rank):
        factor, at = _factor(b, item_bytes), hidden + 4 * index
        t0 = multiply_add(factor, read_float32(at), t0)
        t1 = multiply_add(factor, read_float32(at + stride), t1)
        t2 = multiply_add(factor, read_float32(at + 2 * stride), t2)
        t3 = multiply_add(factor, read_float32(at + 3 * stride), t3)
        b += LANES * item_bytes
    return t0, t1, t2, t3


@helper
def _delta(context: int, target: int, row: int, column: int) -> Any:
    """What a row's adapters add to the tile that begins with a column, in the order of adapters and ranks."""
    bounds = entry(context, _BOUNDS) + 4 * read_int32(entry(context, _SEQUENCES) + 4 * row)
    hidden = _hidden_row(context, target, row)
    total = splat_float32(0.0)
    for index in range(read_int32(bounds), read_int32(bounds + 4)):
        item_bytes, segment, count, offset = _segment_at(context, target, index)
        for _ in range(count):
            if _holds(segment, column):
                rank, b = read_int64(segment + 8 * _SEGMENT_RANK), _tile_of(segment, column, item_bytes)
                own = hidden + offset + 4 * read_int64(segment + 8 * _OFFSET)
                total = _expand_any(own, b, rank, item_bytes, total)
            segment += 8 * _SEGMENT
    return total


@inline
def _add(address: int, total: Any) -> None:
    store_float32(address, load_float32(address) + total)


@helper
def _add_four(context: int, target: int, sums: int, stride: int, row: int, column: int) -> None:
    """`_delta` of four neighbouring rows of one sequence, added to their sums: factors are loaded once for them."""
    bounds = entry(context, _BOUNDS) + 4 * read_int32(entry(context, _SEQUENCES) + 4 * row)
    hidden, next_row = _hidden_row(context, target, row), entry(context, _STRIDE)
    zero = splat_float32(0.0)
    t0, t1, t2, t3 = zero, zero, zero, zero
    for index in range(read_int32(bounds), read_int32(bounds + 4)):
        item_bytes, segment, count, offset = _segment_at(context, target, index)
        for _ in range(count):
            if _holds(segment, column):
                rank, b = read_int64(segment + 8 * _SEGMENT_RANK), _tile_of(segment, column, item_bytes)
                own = hidden + offset + 4 * read_int64(segment + 8 * _OFFSET)
                if item_bytes == 2:
                    t0, t1, t2, t3 = _expand_four(own, next_row, b, rank, 2, t0, t1, t2, t3)
                else:
                    t0, t1, t2, t3 = _expand_four(own, next_row, b, rank, 4, t0, t1, t2, t3)
            segment += 8 * _SEGMENT
    _add(sums, t0)
    _add(sums + stride, t1)
    _add(sums + 2 * stride, t2)
    _add(sums + 3 * stride, t3)


@inline
def start_asking(asked: int, most: int) -> None:
    """Nothing is noted; `most` runs of lines may be, as many as the next micro-kernel asks for."""
    write_int64(asked, 0)
    write_int64(asked + 8, min(most, _MOST_RUNS))


@inline
def _note(asked: int, address: int, size: int) -> None:
    """Note the lines of some memory; those that there is no room for are asked for at once."""
    count, most = 0, 0
    if asked != NOT_ASKED:
        count, most = read_int64(asked), read_int64(asked + 8)
    for run in range(address, address + size, _RUN_BYTES):
        if count < most:
            write_int64(asked + 16 + 8 * count, run)
            count += 1
        else:
            for line in range(RUN_LINES):
                prefetch_second(run + line * _LINE)
    if asked != NOT_ASKED:
        write_int64(asked, count)


@inline
def _expand_two(hidden: int, b: int, rank: int, item_bytes: int, t0: Any, t1: Any) -> Any:
    """Two neighbouring tiles."""
    size = LANES * item_bytes
    for index in range(rank):
        number, at = read_float32(hidden + 4 * index), b + index * size
        t0 = multiply_add(_factor(at, item_bytes), number, t0)
        t1 = multiply_add(_factor(at + rank * size, item_bytes), number, t1)
    return t0, t1


@inline
def _expand_group(hidden: int, b: int, rank: int, item_bytes: int, t0: Any, t1: Any, t2: Any, t3: Any) -> Any:
    """Four neighbouring tiles."""
    size = LANES * item_bytes
    for index in range(rank):
        number, at = read_float32(hidden + 4 * index), b + index * size
        t0 = multiply_add(_factor(at, item_bytes), number, t0)
        t1 = multiply_add(_factor(at + rank * size, item_bytes), number, t1)
        t2 = multiply_add(_factor(at + 2 * rank * size, item_bytes), number, t2)
        t3 = multiply_add(_factor(at + 3 * rank * size, item_bytes), number, t3)
    return t0, t1, t2, t3


@helper
def _add_row(context: int, target: int, sums: int, asked: int, row: int, column: int, tiles: int) -> None:
    """`_delta` of two or four neighbouring tiles, added to their sums; what lies behind them will be next."""
    bounds = entry(context, _BOUNDS) + 4 * read_int32(entry(context, _SEQUENCES) + 4 * row)
    hidden, last = _hidden_row(context, target, row), column + LANES * (tiles - 1)
    zero = splat_float32(0.0)
    t0, t1, t2, t3 = zero, zero, zero, zero
    for index in range(read_int32(bounds), read_int32(bounds + 4)):
        item_bytes, segment, count, offset = _segment_at(context, target, index)
        for _ in range(count):
            if read_int64(segment + 8 * _FIRST) <= last and column < read_int64(segment + 8 * _END):
                rank, b = read_int64(segment + 8 * _SEGMENT_RANK), _tile_of(segment, column, item_bytes)
                own = hidden + offset + 4 * read_int64(segment + 8 * _OFFSET)
                size = rank * LANES * item_bytes
                if _holds(segment, column) and _holds(segment, last):
                    _note(asked, b + tiles * size, tiles * size)
                    if tiles == 2:
                        if item_bytes == 2:
                            t0, t1 = _expand_two(own, b, rank, 2, t0, t1)
                        else:
                            t0, t1 = _expand_two(own, b, rank, 4, t0, t1)
                    elif item_bytes == 2:
                        t0, t1, t2, t3 = _expand_group(own, b, rank, 2, t0, t1, t2, t3)
                    else:
                        t0, t1, t2, t3 = _expand_group(own, b, rank, 4, t0, t1, t2, t3)
                else:
                    if _holds(segment, column):
                        t0 = _expand_any(own, b, rank, item_bytes, t0)
                    if _holds(segment, column + LANES):
                        t1 = _expand_any(own, b + size, rank, item_bytes, t1)
                    if tiles == 4 and _holds(segment, column + 2 * LANES):
                        t2 = _expand_any(own, b + 2 * size, rank, item_bytes, t2)
                    if tiles == 4 and _holds(segment, column + 3 * LANES):
                        t3 = _expand_any(own, b + 3 * size, rank, item_bytes, t3)
            segment += 8 * _SEGMENT
    _add(sums, t0)
    _add(sums + _VECTOR_BYTES, t1)
    if tiles == 4:
        _add(sums + 2 * _VECTOR_BYTES, t2)
        _add(sums + 3 * _VECTOR_BYTES, t3)


@helper
def _add_all(
    target: int, context: int, sums: int, stride: int, asked: int, row: int, count: int, column: int, tiles: int
) -> None:
    sequences, done = entry(context, _SEQUENCES), 0
    while done < count:
        some = 1
        if count - done >= _ROWS:
            first = read_int32(sequences + 4 * (row + done))
            if read_int32(sequences + 4 * (row + done + _ROWS - 1)) == first:  # rows of a sequence are neighbours
                some = _ROWS
        bounds = entry(context, _BOUNDS) + 4 * read_int32(sequences + 4 * (row + done))
        if read_int32(bounds) < read_int32(bounds + 4):
            at = sums + done * stride
            if some == _ROWS:
                for tile in range(tiles):
                    _add_four(context, target, at + tile * _VECTOR_BYTES, stride, row + done, column + LANES * tile)
            else:
                _add_row(context, target, at, asked, row + done, column, tiles)
        done += some


@inline
def add_adapters(
    target: int, context: int, sums: int, stride: int, asked: int, row: int, count: int, column: int, tiles: int
) -> None:
    """Add what adapters add at a target to sums in memory: of neighbouring rows, `stride` bytes apart, with two or four
    neighbouring tiles, whose first column is given. Lines of the next tiles are noted in `asked`."""
    if target >= 0 and entry(context, _ANY) > 0:
        _add_all(target, context, sums, stride, asked, row, count, column, tiles)


@inline
def with_adapters(sums: Any, target: int, context: int, row: int, column: int) -> Any:
    """The sums of a tile's LANES columns plus what the row's adapters add at a target."""
    if target >= 0 and entry(context, _ANY) > 0:
        sums = sums + _delta(context, target, row, column)
    return sums
