"""LoRA adapters in programs: each row shrinks to a few numbers per adapter, which matmuls multiply by the columns of B.

The adapters of a row are read from the step. A program contains only the indices of targets, so adapters can be loaded
and unloaded without changing the program. An adapter is one block of memory that starts with a table of the addresses
of its factors, target by target.

`shrink` computes hidden = weight * (x @ A.T) for all rows of an adapter together, four ranks and up to four rows at a
time, so that A is read once for four rows. A matmul then adds hidden @ B.T to a tile's sums before its bias and
activation (`add_adapters`). So no row of addends is stored in memory, and a row without adapters costs one comparison.
Sums are float32, in the order of columns and of ranks: a row's result does not depend on the other rows.

With many adapters in a step, their factors cause a large part of the memory traffic. So A is stored in the order in
which it is read, and B is fetched while the base products are computed: `add_adapters` notes the lines that the next
group of columns needs (`start_asking`), and the matmul's micro-kernel prefetches a few of them in each step of weights.
Prefetching all lines together would stall, because a core can have only a few dozen lines in flight.
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
# A matmul with fewer columns cannot be a target of adapters.
MIN_COLUMNS = LANES
# Number of ranks in a block of `shrink`, and number of rows that a block is multiplied by at a time.
_RANKS, _ROWS = 4, 4
_VECTOR_BYTES = 4 * LANES
SCRATCH_BYTES = _RANKS * _ROWS * _VECTOR_BYTES
# Notes of memory to prefetch: the number of noted runs of lines, their maximum number, then their addresses. Runs are
# short, so that the loads of a micro-kernel's step do not wait for them.
RUN_LINES = 2
_RUN_BYTES, _MOST_RUNS = RUN_LINES * _LINE, 512
ASKED_BYTES = 8 * (2 + _MOST_RUNS)
# No micro-kernel follows, so lines are prefetched immediately.
NOT_ASKED = 0
# An adapter's table: bytes per number, then four entries per target, then the segments that the third entry points to.
_HEADER, _TARGET, _SEGMENT = 1, 4, 5
_A, _RANK, _SEGMENTS, _COUNT = 0, 1, 2, 3
_FIRST, _END, _B, _OFFSET, _SEGMENT_RANK = 0, 1, 2, 3, 4
_SHORTS = ir.VectorType(INT16, LANES)


# --- memory ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class CpuAdapter:
    """An adapter's factors; see `genai.kernels.device.DeviceAdapter`.

    For each target, the A matrices of all its factors are stacked in blocks of four ranks (the last block holds the
    remaining ranks): [block][columns / 16][rank][16], with the columns padded with zeros. Each B is stored in tiles of
    sixteen columns of the result, [tile][rank][16].

    Attributes:
        memory: uint8, the whole adapter.
        rank: largest sum of ranks of a target.
    """

    memory: NDArray[np.uint8]
    rank: int

    @property
    def nbytes(self) -> int:
        """The bytes of the adapter."""
        return self.memory.nbytes

    @property
    def address(self) -> int:
        """The address of the adapter's table."""
        return int(self.memory.__array_interface__["data"][0])


def pack_adapter(factors: Sequence[Sequence[Factors]]) -> CpuAdapter:
    """Pack an adapter; see `genai.kernels.device.Executor.load_adapter`."""
    every = [one for target in factors for one in target]
    dtype = every[0].a.dtype if every else np.dtype(np.float32)
    for one in every:
        if {one.a.dtype, one.b.dtype} != {dtype} or dtype.name not in ("float16", "float32"):
            raise FormatError(f"factors are {one.a.dtype} and {one.b.dtype}, expected all float16 or all float32")
        if one.a.ndim != 2 or one.b.ndim != 2 or one.a.shape[0] != one.b.shape[1] or one.first % LANES:
            raise FormatError(
                f"factors are {list(one.a.shape)} and {list(one.b.shape)} starting at column {one.first}, expected "
                f"[rank, columns] and [columns of the result, rank] starting at a multiple of {LANES}"
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
    """Return the A matrices of a target in the blocks that `CpuAdapter` describes, flattened."""
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
    """The rows of a step that use an adapter."""

    adapter: CpuAdapter
    rows: list[NDArray[np.int32]] = field(default_factory=list)


def _own(adapter: object) -> CpuAdapter:
    if not isinstance(adapter, CpuAdapter):
        raise StepError(f"{adapter!r:.80} is not an adapter in the memory of this device")
    return adapter


def fill_adapters(table: ContextTable, step: StepContext, targets: int) -> None:
    """Write a step's adapters into the context table that its programs read.

    Args:
        targets: number of targets of the program.
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
    """Rows, and the target whose factors they are multiplied by."""

    x: Rows
    target: int


def _shrink_kernel(item_bytes: int, rows: int) -> Any:
    """Return a micro-kernel that multiplies a block's ranks by some rows, and stores [rank][row] vectors of LANES sums.

    Arguments: the addresses of the block, of the rows and of the results; the number of columns; the block's last rank,
    which stands in for ranks that a smaller block does not have.
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
        # A masked step covers the columns after the last whole vector. If there are none, the step multiplies the last
        # vector's factors by zeros.
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
    """Return a function that selects the kernel for `rows` rows by the bytes per number of the factors, two or four."""
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
    """Return a call that computes hidden = weight * (x @ A.T) at a target, for all rows and adapters of the step.

    Args:
        x: rows [TOKENS, K], K at least MIN_COLUMNS.
        target: index of the target.
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
    """Write one hidden number of a row: the sum of the lanes of `total`, times the adapter's weight."""
    address = _hidden_row(context, target, read_int32(of_row)) + read_int32(of_row + 4) + 4 * rank
    write_float32(address, read_float32(of_row + 8) * reduce_add(total))


@native_op(ShrinkArguments)
def shrink(arguments: ShrinkArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Shrink rows. Items are blocks of ranks of an adapter. Blocks that are missing at this target are skipped."""
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
    """Load LANES numbers of a factor."""
    return load_half(address) if item_bytes == 2 else load_float32(address)


@inline
def _segment_at(context: int, target: int, index: int) -> Any:
    """Return the data of the index-th pair of a row and an adapter at a target.

    The data are the adapter's bytes per number, the address and the number of its segments, and the offset of the
    adapter's part in a hidden row.
    """
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
    """Return the address of the factors of a tile's columns, at the first rank."""
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
    """Return the delta of a row's adapters for the tile at `column`, summed in the order of adapters and ranks."""
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
    """Add `_delta` of four neighbouring rows of one sequence to their sums. Factors are loaded once for all four."""
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
    """Clear the notes. `most` is the maximum number of runs of lines that the next micro-kernel can prefetch."""
    write_int64(asked, 0)
    write_int64(asked + 8, min(most, _MOST_RUNS))


@inline
def _note(asked: int, address: int, size: int) -> None:
    """Note the lines of a range of memory. Lines that exceed the maximum are prefetched immediately."""
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
    """Add the deltas of two neighbouring tiles to their totals."""
    size = LANES * item_bytes
    for index in range(rank):
        number, at = read_float32(hidden + 4 * index), b + index * size
        t0 = multiply_add(_factor(at, item_bytes), number, t0)
        t1 = multiply_add(_factor(at + rank * size, item_bytes), number, t1)
    return t0, t1


@inline
def _expand_group(hidden: int, b: int, rank: int, item_bytes: int, t0: Any, t1: Any, t2: Any, t3: Any) -> Any:
    """Add the deltas of four neighbouring tiles to their totals."""
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
    """Add `_delta` of two or four neighbouring tiles to their sums, and note the factors of the following tiles."""
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
            if read_int32(sequences + 4 * (row + done + _ROWS - 1)) == first:  # rows of a sequence are contiguous
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
    """Add the adapters' deltas at a target to sums in memory.

    The sums belong to `count` neighbouring rows, `stride` bytes apart, and to two or four neighbouring tiles that start
    at `column`. The lines of the next tiles are noted in `asked`.
    """
    if target >= 0 and entry(context, _ANY) > 0:
        _add_all(target, context, sums, stride, asked, row, count, column, tiles)


@inline
def with_adapters(sums: Any, target: int, context: int, row: int, column: int) -> Any:
    """Return the sums of a tile's LANES columns plus the delta of the row's adapters at a target."""
    if target >= 0 and entry(context, _ANY) > 0:
        sums = sums + _delta(context, target, row, column)
    return sums
