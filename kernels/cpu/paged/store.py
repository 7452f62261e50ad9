"""New keys and values into their pages: one item is one head of one token."""

from __future__ import annotations

from functools import cache

from ...formats import PAGE_TOKENS
from ..jit import NativeOp, native_op
from ..lazy import inline
from ..memory import (
    load_float32,
    prefetch,
    read_float32,
    read_int64,
    store_float32,
    store_half,
    word,
    write_float32,
    write_half,
)
from ..tape.context import ErrorCode, Word
from ..tape.driver import call_operator
from ..vector import LANES
from .arguments import (
    HEAD_SIZE,
    KEY,
    KEY_BLOCK,
    KEY_PAGES,
    KEY_STRIDE,
    MAKE_READY,
    NUM_BLOCKS,
    V_HEAD_SIZE,
    VALUE,
    VALUE_BLOCK,
    VALUE_PAGES,
    VALUE_STRIDE,
)
from .heads import head_bytes, head_stride

_AHEAD = 4  # rows
_LINE = 64


@inline
def _fetch(arguments: int, rows: int, stride: int, row: int, column: int, width: int) -> None:
    """Ask for a part of a row, which may lie behind the last."""
    place = word(arguments, rows) + row * word(arguments, stride) + 4 * column
    for i in range(0, 4 * width, _LINE):
        prefetch(place + i)


def store_scratch(head_size: int) -> int:
    """Bytes of scratch that `store_op` needs."""
    return 2 * head_bytes(head_size)


@cache
def store_op(half: bool) -> NativeOp:
    """Norm and rotate keys, and store keys and values at the step's SLOTS; float16 rounds to nearest even."""
    item_bytes = 2 if half else 4
    write, store = (write_half, store_half) if half else (write_float32, store_float32)

    def store_kv(arguments: int, context: int, begin: int, end: int, scratch: int) -> int:
        blocks, rows = word(arguments, NUM_BLOCKS), read_int64(context + 8 * Word.TOKENS)
        size, v_size = word(arguments, HEAD_SIZE), word(arguments, V_HEAD_SIZE)
        ready = scratch + head_stride(size)
        for item in range(begin, end):
            # Neighbouring tokens of a head follow each other: they share the lines of a page of keys.
            row, head = item % rows, item // rows
            slot = read_int64(read_int64(context + 8 * Word.SLOTS) + 8 * row)
            if slot < 0 or slot >= blocks * PAGE_TOKENS:
                return ErrorCode.SLOT.value
            status: int = call_operator(word(arguments, MAKE_READY), arguments, context, row, -1 - head, ready)
            if status != 0:
                return status
            block, token = slot // PAGE_TOKENS, slot % PAGE_TOKENS
            column = word(arguments, KEY_PAGES) + block * word(arguments, KEY_BLOCK)
            column += (head * size * PAGE_TOKENS + token) * item_bytes
            for i in range(size):
                write(column + i * PAGE_TOKENS * item_bytes, read_float32(ready + 4 * i))
            source = word(arguments, VALUE) + row * word(arguments, VALUE_STRIDE) + 4 * head * v_size
            line = word(arguments, VALUE_PAGES) + block * word(arguments, VALUE_BLOCK)
            line += (head * PAGE_TOKENS + token) * v_size * item_bytes
            whole = v_size // LANES * LANES
            for i in range(0, whole, LANES):
                store(line + i * item_bytes, load_float32(source + 4 * i))
            for i in range(whole, v_size):
                write(line + i * item_bytes, read_float32(source + 4 * i))
            _fetch(arguments, KEY, KEY_STRIDE, row + _AHEAD, head * size, size)
            _fetch(arguments, VALUE, VALUE_STRIDE, row + _AHEAD, head * v_size, v_size)
        return 0

    store_kv.__name__ = f"store_kv_{'float16' if half else 'float32'}"
    return native_op(store_kv)
