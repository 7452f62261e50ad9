"""Storage of new keys and values in their pages. An item is one head of one token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...cache_layout import PAGE_TOKENS
from ..jit import memory
from ..jit.dsl import inline, intrinsic
from ..jit.emit import FLOAT_VECTOR, INT64, Emitter
from ..jit.native import NativeOp, native_op
from ..jit.variants import once
from ..jit.vector import LANES
from ..program.calls import Rows, row_at
from ..program.driver import call_operator
from ..program.step_table import ErrorCode, StepField
from .arguments import AttentionArguments
from .hadamard import hadamard_transform
from .heads import head_bytes, head_stride
from .packing import round_head_of
from .pages import PACKED_BITS, item_bytes, key_columns, value_columns

_AHEAD = 4  # rows to prefetch ahead
_LINE = 64


@inline
def _fetch(rows: Rows, row: int, column: int, width: int) -> None:
    """Prefetch a part of a row. The row may lie after the last row."""
    address = row_at(rows, row) + 4 * column
    for i in range(0, 4 * width, _LINE):
        memory.prefetch(address + i)


def store_scratch(head_size: int, v_head_size: int) -> int:
    """Return the bytes of scratch that `store_op` needs."""
    return head_bytes(head_size) + (LANES + 1) * head_bytes(max(head_size, v_head_size))


@intrinsic(None, "int64", "int64", "int64")
def _store_transposed(e: Emitter, source: Any, stride: Any, target: Any) -> None:
    """Store LANES columns of LANES keys, which are `stride` bytes apart, as rows of a page of float32 numbers."""
    keys = [e.load(e.at(source, e.builder.mul(stride, INT64(key))), FLOAT_VECTOR) for key in range(LANES)]
    for column, vector in enumerate(e.transposed(keys)):
        e.store(vector, e.at(target, 4 * PAGE_TOKENS * column))


@inline
def _are_neighbours(slots: int, row: int, count: int) -> Any:
    """Return True if the LANES rows from `row` exist among `count` rows, and have consecutive slots of one page."""
    first = memory.read_int64(slots + 8 * row)
    found = row + LANES <= count and first % LANES == 0
    if found:
        for index in range(LANES):
            found = found and memory.read_int64(slots + 8 * (row + index)) == first + index
    return found


@once
def store_op(kind: str) -> NativeOp:
    """Return the operator that normalises and rotates keys, and stores keys and values at the step's SLOT_MAPPING.

    Keys and values are stored in the format of a page of this kind. Numbers are rounded once, to nearest even.
    """
    store_key, store_value = _packed_of(PACKED_BITS[kind]) if kind in PACKED_BITS else _floats_of(kind)
    stores_together = kind == "float32"

    @inline
    def store_together(arguments: AttentionArguments, context: int, row: int, head: int, slot: int, ready: int) -> Any:
        """Store LANES keys with consecutive slots of one page, and their values. Returns 0 or an error."""
        size, v_size = arguments.head_size, arguments.v_head_size
        stride = head_stride(max(size, v_size))
        # The last key is first, because `make_ready` overwrites the memory before its result.
        for index in range(LANES - 1, -1, -1):
            status: int = call_operator(
                arguments.make_ready, arguments, context, row + index, -1 - head, ready + index * stride
            )
            if status != 0:
                return status
        block, token = slot // PAGE_TOKENS, slot % PAGE_TOKENS
        key_page = arguments.key_pages + block * arguments.key_block + head * arguments.key_page + 4 * token
        for column in range(0, size, LANES):
            _store_transposed(ready + 4 * column, stride, key_page + 4 * PAGE_TOKENS * column)
        value_page = arguments.value_pages + block * arguments.value_block + head * arguments.value_page
        for index in range(LANES):
            if arguments.keys_to_values != 0:
                continue
            source = row_at(arguments.value, row + index) + 4 * head * v_size
            store_value(source, v_size, value_page, token + index, ready, ready)
            _fetch(arguments.key, row + LANES + index, head * size, size)
            _fetch(arguments.value, row + LANES + index, head * v_size, v_size)
        return np.int64(0)

    def store_kv(arguments: AttentionArguments, context: int, begin: int, end: int, scratch: int) -> int:
        blocks, rows = arguments.num_blocks, memory.read_int64(context + 8 * StepField.TOKENS)
        slots = memory.read_int64(context + 8 * StepField.SLOT_MAPPING) + 8 * arguments.cache_group * rows
        size, v_size = arguments.head_size, arguments.v_head_size
        ready = scratch + head_stride(size)
        work = ready + head_stride(max(size, v_size))
        item = begin
        while item < end:
            # Neighbouring tokens of a head are consecutive items, because their keys share the cache lines of a page.
            row, head = item % rows, item // rows
            slot = memory.read_int64(slots + 8 * row)
            if slot < 0 or slot >= blocks * PAGE_TOKENS:
                return ErrorCode.SLOT.value
            if stores_together and size % LANES == 0 and _are_neighbours(slots, row, min(rows, row + end - item)):
                together: int = store_together(arguments, context, row, head, slot, ready)
                if together != 0:
                    return together
                item += LANES
                continue
            status: int = call_operator(arguments.make_ready, arguments, context, row, -1 - head, ready)
            if status != 0:
                return status
            block, token = slot // PAGE_TOKENS, slot % PAGE_TOKENS
            key_page = arguments.key_pages + block * arguments.key_block + head * arguments.key_page
            store_key(ready, size, key_page, token, work)
            _fetch(arguments.key, row + _AHEAD, head * size, size)
            if arguments.keys_to_values == 0:
                value_page = arguments.value_pages + block * arguments.value_block + head * arguments.value_page
                source = row_at(arguments.value, row) + 4 * head * v_size
                store_value(source, v_size, value_page, token, ready, work)
                _fetch(arguments.value, row + _AHEAD, head * v_size, v_size)
            item += 1
        return 0

    return native_op(AttentionArguments, name=f"store_kv_{kind}")(store_kv)


# Functions that store a key (float32, padded with zeros) and a value (float32) as a token of a page. `ready` and `work`
# each have room for one head.
_Storing = tuple[Callable[[int, int, int, int, int], None], Callable[[int, int, int, int, int, int], None]]


def _floats_of(kind: str) -> _Storing:
    number = item_bytes(kind)
    write, store = (memory.write_half, memory.store_half), (memory.write_float32, memory.store_float32)
    write, store = write if kind == "float16" else store

    @inline
    def store_key(ready: int, size: int, page: int, token: int, work: int) -> None:
        for i in range(size):
            write(page + (i * PAGE_TOKENS + token) * number, memory.read_float32(ready + 4 * i))

    @inline
    def store_value(source: int, size: int, page: int, token: int, ready: int, work: int) -> None:
        line = page + token * size * number
        whole = size // LANES * LANES
        for i in range(0, whole, LANES):
            store(line + i * number, memory.load_float32(source + 4 * i))
        for i in range(whole, size):
            write(line + i * number, memory.read_float32(source + 4 * i))

    return store_key, store_value


def _packed_of(bits: int) -> _Storing:
    round_head = round_head_of(bits)

    @inline
    def store_key(ready: int, size: int, page: int, token: int, work: int) -> None:
        columns = key_columns(bits, size)
        round_head(ready, size, work, page + PAGE_TOKENS * columns + 2 * token)
        for i in range(0, columns, 4):
            memory.write_int32(page + i * PAGE_TOKENS + 4 * token, memory.read_int32(work + i))

    @inline
    def store_value(source: int, size: int, page: int, token: int, ready: int, work: int) -> None:
        for i in range(0, size, LANES):
            memory.store_float32(ready + 4 * i, memory.load_first(source + 4 * i, min(size - i, LANES)))
        if bits == 4:
            hadamard_transform(ready, size)
        columns: Any = value_columns(bits, size)
        round_head(ready, size, work, page + PAGE_TOKENS * columns + 2 * token)
        # Bytes are written one by one, because other threads may be writing neighbouring tokens.
        address = page + token // 4 * 4 * columns + token % 4
        for i in range(columns):
            memory.write_int8(address + 4 * i, np.int8(memory.read_int8(work + i)))

    return store_key, store_value
