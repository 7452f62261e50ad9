"""Recurrent layers. An item is a piece of a sequence's state, which all rows of the sequence update in order.

The order in which a row's numbers are added up depends neither on the number of rows nor on the other sequences.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import ir
from ...cache_layout import StateLayer
from ..jit.arguments import Address, Arguments, Held
from ..jit.dsl import inline
from ..jit.memory import (
    load,
    load_float32,
    read_float32,
    read_int32,
    read_int64,
    store,
    store_float32,
    stream_float32,
    write_float32,
)
from ..jit.native import native_op
from ..jit.vector import LANES, multiply_add, reduce_add, splat_float32
from ..jit.vector_math import UNARY
from ..program.calls import NO_ROWS, Call, Items, Rows, check_rows, row_at
from ..program.step_table import ErrorCode, StepField


class States(Arguments):
    """The states of a layer, which are `stride` bytes apart."""

    address: Address
    stride: int
    num_slots: int
    held: Held = None


def _states(layer: StateLayer) -> States:
    states = layer.states
    return States(address=states.ctypes.data, stride=states.strides[0], num_slots=layer.num_slots, held=states)


@inline
def _source(context: int, sequence: int, num_slots: int) -> Any:
    """Return the slot of a sequence's first state (-1 = zeros); -2 if a slot of the sequence does not exist."""
    begin, end = _rows(context, sequence)
    source = read_int32(read_int64(context + 8 * StepField.STATE_READS) + 4 * sequence)
    writes = read_int64(context + 8 * StepField.STATE_WRITES)
    if source < -1 or source >= num_slots:
        return -2
    for row in range(begin, end):
        target = read_int32(writes + 4 * row)
        if target < -1 or target >= num_slots:
            return -2
    return np.int64(source)


@inline
def _rows(context: int, sequence: int) -> Any:
    """Return the rows [begin, end) of a sequence."""
    starts = read_int64(context + 8 * StepField.SEQUENCE_STARTS)
    return np.int64(read_int32(starts + 4 * sequence)), np.int64(read_int32(starts + 4 * sequence + 4))


# Columns in an item. A prompt of one sequence is shared among the threads by columns, because its rows are in order.
_PIECE = 512


@inline
def _piece(item: int, pieces: int, width: int) -> Any:
    """Return the sequence of an item, and the columns [first, last) of the item's piece."""
    sequence = item // pieces
    first = (item - sequence * pieces) * _PIECE
    return sequence, first, min(width, first + _PIECE)


@inline
def _target(context: int, row: int) -> Any:
    """Return the slot that receives the state after a row; -1 = none."""
    return np.int64(read_int32(read_int64(context + 8 * StepField.STATE_WRITES) + 4 * row))


# --- running sums ----------------------------------------------------------------------------------------------------


class RecurrenceArguments(Arguments):
    """Rows and states. A row has `pieces` pieces."""

    x: Rows
    decay: Rows
    out: Rows
    states: States
    pieces: int


def linear_recurrence(x: Rows, decay: Rows, out: Rows, layer: StateLayer) -> Call:
    """Return the call of an `ir.LinearRecurrence`."""
    for name, rows in (("x", x), ("decay", decay), ("out", out)):
        check_rows(name, rows, StepField.TOKENS, layer.size)
    pieces = -(-layer.size // _PIECE)
    arguments = RecurrenceArguments(x=x, decay=decay, out=out, states=_states(layer), pieces=pieces)
    return Call(linear_recurrence_op, arguments, Items(StepField.SEQUENCES, factor=pieces))


@native_op(RecurrenceArguments)
def linear_recurrence_op(arguments: RecurrenceArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Update states and write rows. A piece of a state stays in a register from row to row."""
    width, states, stride = arguments.out.width, arguments.states.address, arguments.states.stride
    for item in range(begin, end):
        sequence, first, last = _piece(item, arguments.pieces, width)
        begin_row, end_row = _rows(context, sequence)
        source = _source(context, sequence, arguments.states.num_slots)
        if source < -1:
            return ErrorCode.SLOT.value
        for column in range(first, last, LANES):
            left = last - column
            state = splat_float32(0.0)
            if source >= 0:
                state = load(states + source * stride + 4 * column, left)
            for row in range(begin_row, end_row):
                decay, x = row_at(arguments.decay, row), row_at(arguments.x, row)
                state = load(decay + 4 * column, left) * state + load(x + 4 * column, left)
                store(row_at(arguments.out, row) + 4 * column, state, left)
                target = _target(context, row)
                if target >= 0:
                    store(states + target * stride + 4 * column, state, left)
    return 0


# --- convolutions ----------------------------------------------------------------------------------------------------


class ConvArguments(Arguments):
    """Rows, states and weights.

    Attributes:
        weight: float32 [taps, channels].
        bias: float32 [channels], or 0.
        taps: size of the kernel.
        dilation: rows between consecutive taps.
        pieces: number of pieces of a row.
    """

    x: Rows
    out: Rows
    states: States
    weight: Address
    bias: Address
    taps: int
    dilation: int
    pieces: int


def causal_conv(
    op: ir.CausalConv, x: Rows, out: Rows, weight: NDArray[np.float32], bias: Any, layer: StateLayer
) -> Call:
    """Return the call of an `ir.CausalConv`.

    Args:
        weight: float32 [channels, 1, taps].
    """
    channels, taps = weight.shape[0], weight.shape[-1]
    for name, rows in (("x", x), ("out", out)):
        check_rows(name, rows, StepField.TOKENS, channels)
    if layer.size != channels * (taps - 1) * op.dilation:
        raise ValueError(
            f"a state has {layer.size} numbers, expected {taps - 1} x {op.dilation} rows of {channels} channels"
        )
    pieces = -(-channels // _PIECE)
    arguments = ConvArguments(
        x=x, out=out, states=_states(layer), weight=np.ascontiguousarray(weight.reshape(channels, taps).T), bias=bias,
        taps=taps, dilation=op.dilation, pieces=pieces,
    )  # fmt: skip
    return Call(causal_conv_op, arguments, Items(StepField.SEQUENCES, factor=pieces))


@inline
def _earlier(arguments: ConvArguments, source: int, begin: int, index: int, column: int, left: int) -> Any:
    """Return columns of a row of x by its index in the step; rows before `begin` come from the state, or are zero."""
    width = 4 * arguments.x.width
    value = splat_float32(0.0)
    if index >= begin:
        value = load(row_at(arguments.x, index) + 4 * column, left)
    elif source >= 0:
        state = arguments.states.address + source * arguments.states.stride
        entry = (arguments.taps - 1) * arguments.dilation + index - begin
        value = load(state + entry * width + 4 * column, left)
    return value


@native_op(ConvArguments)
def causal_conv_op(arguments: ConvArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Compute rows, and store the last rows of x as the state."""
    width, taps, dilation = arguments.x.width, arguments.taps, arguments.dilation
    history = (taps - 1) * dilation
    for item in range(begin, end):
        sequence, first, last = _piece(item, arguments.pieces, width)
        begin_row, end_row = _rows(context, sequence)
        source = _source(context, sequence, arguments.states.num_slots)
        if source < -1:
            return ErrorCode.SLOT.value
        for row in range(begin_row, end_row):
            target = _target(context, row)
            state = arguments.states.address + target * arguments.states.stride
            # Row by row, because the columns of a row are neighbours in memory.
            for column in range(first, last, LANES):
                left = last - column
                total = splat_float32(0.0)
                for tap in range(taps):
                    value = _earlier(arguments, source, begin_row, row - (taps - 1 - tap) * dilation, column, left)
                    weight = load(arguments.weight + 4 * (tap * width + column), left)
                    total = multiply_add(value, weight, total)
                if arguments.bias != 0:
                    total = total + load(arguments.bias + 4 * column, left)
                store(row_at(arguments.out, row) + 4 * column, total, left)
                for entry in range(history if target >= 0 else 0):
                    value = _earlier(arguments, source, begin_row, row + 1 + entry - history, column, left)
                    store(state + 4 * (entry * width + column), value, left)
    return 0


# --- linear attention ------------------------------------------------------------------------------------------------


class LinearAttentionArguments(Arguments):
    """Rows and states, see `ir.LinearAttention`; an address of 0 = absent.

    Attributes:
        heads, key_heads, value_heads: numbers of heads.
        size, v_size: rows and columns of a head's state.
        decays: decays of a head and row, 1 or `size`.
        betas: 1 if every head has its own beta, else 0.
        pieces: number of pieces of a head's state; with states of one column, number of groups of heads.
    """

    query: Rows
    key: Rows
    value: Rows
    decay: Rows
    beta: Rows
    out: Rows
    states: States
    heads: int
    key_heads: int
    value_heads: int
    size: int
    v_size: int
    decays: int
    betas: int
    pieces: int
    scale: float


# Columns of a state that are updated together: four vectors, so that four independent sums hide the latency of an
# addition. A piece of a state with 128 rows takes 32 KB of scratch memory, which fits into the first-level cache.
_COLUMNS = 4 * LANES
_VECTOR = 4 * LANES
_STATE_ROW = 4 * _COLUMNS


def linear_attention(op: ir.LinearAttention, rows: dict[str, Rows], out: Rows, layer: StateLayer) -> Call:
    """Return the call of an `ir.LinearAttention`, given the rows of its values by name."""
    for name, width in (
        (op.query, op.heads * op.head_size), (op.key, op.key_heads * op.head_size),
        (op.value, op.value_heads * op.v_head_size),
    ):  # fmt: skip
        check_rows(name, rows[name], StepField.TOKENS, width)
    check_rows("out", out, StepField.TOKENS, op.out_heads * op.v_head_size)
    if layer.size != op.value_heads * op.head_size * op.v_head_size:
        raise ValueError(
            f"a state has {layer.size} numbers, expected {op.value_heads} heads of {op.head_size} x {op.v_head_size}"
        )
    for one, other in ((op.value_heads, op.key_heads), (op.out_heads, op.heads), (op.out_heads, op.value_heads)):
        if one % other:
            raise ValueError(f"{one} heads cannot share {other} heads evenly")
    decay, beta = (rows[name] if name else NO_ROWS for name in (op.decay, op.beta))
    if op.decay and decay.width not in (op.value_heads, op.value_heads * op.head_size):
        raise ValueError(f"decay has {decay.width} numbers per row, expected one per head or per row of its state")
    if op.beta and beta.width not in (1, op.value_heads):
        raise ValueError(f"beta has {beta.width} numbers per row, expected 1 or {op.value_heads}")
    narrow = _is_narrow(op, decay)
    pieces = -(-op.value_heads // _HEADS) if narrow else -(-op.v_head_size // _COLUMNS)
    arguments = LinearAttentionArguments(
        query=rows[op.query], key=rows[op.key], value=rows[op.value], decay=decay, beta=beta, out=out,
        states=_states(layer), heads=op.heads, key_heads=op.key_heads, value_heads=op.value_heads, size=op.head_size,
        v_size=op.v_head_size, decays=max(decay.width // op.value_heads, 1), betas=int(beta.width > 1), pieces=pieces,
        scale=op.scale,
    )  # fmt: skip
    if narrow:
        scratch = 4 * op.head_size * min(op.value_heads, _HEADS)
        return Call(narrow_attention_op, arguments, Items(StepField.SEQUENCES, pieces), scratch)
    padded = -(-op.head_size // LANES) * _VECTOR
    scratch = op.head_size * _STATE_ROW + 2 * padded
    return Call(linear_attention_op, arguments, Items(StepField.SEQUENCES, op.value_heads * pieces), scratch)


def _is_narrow(op: ir.LinearAttention, decay: Rows) -> bool:
    """Return True if a state is one column, whose rows have separate decays, and all heads share a query and a key."""
    shares = op.heads == 1 and op.key_heads == 1 and op.value_heads > 1
    return shares and op.v_head_size == 1 and not op.beta and decay.width == op.value_heads * op.head_size


# Heads in an item, if a state is one column.
_HEADS = 64


@native_op(LinearAttentionArguments)
def narrow_attention_op(arguments: LinearAttentionArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Update states of one column by all rows of their sequences (Mamba-1). Items are groups of heads.

    A vector holds rows of a state, which are side by side because there is one column.
    """
    size, pieces, scale = arguments.size, arguments.pieces, arguments.scale
    for item in range(begin, end):
        sequence = item // pieces
        first = (item - sequence * pieces) * _HEADS
        last = min(arguments.value_heads, first + _HEADS)
        begin_row, end_row = _rows(context, sequence)
        source = _source(context, sequence, arguments.states.num_slots)
        if source < -1:
            return ErrorCode.SLOT.value
        inside, length = 4 * first * size, (last - first) * size
        before = arguments.states.address + source * arguments.states.stride + inside
        for i in range(0, length, LANES):
            state = splat_float32(0.0)
            if source >= 0:
                state = load(before + 4 * i, length - i)
            store(scratch + 4 * i, state, min(length - i, LANES))
        for row in range(begin_row, end_row):
            _update_narrow(arguments, row, first, last, scratch, size, scale)
            target = _target(context, row)
            if target >= 0:
                after = arguments.states.address + target * arguments.states.stride + inside
                for i in range(0, length, LANES):
                    store(after + 4 * i, load(scratch + 4 * i, length - i), min(length - i, LANES))
    return 0


@inline
def _update_narrow(
    arguments: LinearAttentionArguments, row: int, first: int, last: int, states: int, size: int, scale: float
) -> None:
    """Update the states of heads, which are in scratch memory, by a row, and write the row's results."""
    key, query = row_at(arguments.key, row), row_at(arguments.query, row)
    value, out = row_at(arguments.value, row), row_at(arguments.out, row)
    decay = row_at(arguments.decay, row) + 4 * first * size
    for head in range(first, last):
        weight, total = splat_float32(read_float32(value + 4 * head)), splat_float32(0.0)
        for i in range(0, size, LANES):
            at, left = 4 * ((head - first) * size + i), size - i
            factor = _exp(load(decay + at, left), 0.0, 0.0)
            state = multiply_add(load(states + at, left), factor, weight * load(key + 4 * i, left))
            store(states + at, state, min(left, LANES))
            total = multiply_add(state, load(query + 4 * i, left), total)
        write_float32(out + 4 * head, reduce_add(total) * scale)


@inline
def _copy_state(source: int, source_row: int, target: int, target_row: int, size: int, columns: int) -> None:
    """Copy `columns` columns of `size` rows; columns beyond them are zeros when reading, and dropped when writing."""
    for i in range(size):
        for part in range(0, _COLUMNS, LANES):
            if columns > part:
                value = load(source + i * source_row + 4 * part, columns - part)
                store(target + i * target_row + 4 * part, value, min(columns - part, LANES))


@inline
def _factors(arguments: LinearAttentionArguments, row: int, head: int, key: int, factors: int, decayed: int) -> None:
    """Write the decay of each row of a head's state, and its product with the key."""
    size = arguments.size
    for i in range(0, size, LANES):
        factor = splat_float32(1.0)
        if arguments.decay.address != 0:
            decay = row_at(arguments.decay, row) + 4 * head * arguments.decays
            if arguments.decays == 1:
                factor = _exp(splat_float32(read_float32(decay)), 0.0, 0.0)
            else:
                factor = _exp(load(decay + 4 * i, size - i), 0.0, 0.0)
        store_float32(factors + 4 * i, factor)
        store_float32(decayed + 4 * i, factor * load(key + 4 * i, size - i))


_exp = UNARY["exp"].function


@inline
def _update(
    arguments: LinearAttentionArguments, row: int, head: int, first: int, left: int, before: int, before_row: int,
    after: int, after_row: int, factors: int, decayed: int,
) -> None:  # fmt: skip
    """Update a piece of a head's state by a row, and write the row's result.

    The state is read from `before` and written to `after`, which may be the same; their rows are `before_row` and
    `after_row` bytes apart.
    """
    size = arguments.size
    key_head = head * arguments.key_heads // arguments.value_heads
    key = row_at(arguments.key, row) + 4 * key_head * size
    _factors(arguments, row, head, key, factors, decayed)
    value = row_at(arguments.value, row) + 4 * (head * arguments.v_size + first)
    left_b, left_c, left_d = max(left - LANES, 0), max(left - 2 * LANES, 0), max(left - 3 * LANES, 0)
    a, b = load(value, left), load(value + _VECTOR, left_b)
    c, d = load(value + 2 * _VECTOR, left_c), load(value + 3 * _VECTOR, left_d)
    if arguments.beta.address != 0:
        beta = read_float32(row_at(arguments.beta, row) + 4 * head * arguments.betas)
        a_known, b_known = splat_float32(0.0), splat_float32(0.0)
        c_known, d_known = splat_float32(0.0), splat_float32(0.0)
        for i in range(size):
            at, factor = before + i * before_row, read_float32(decayed + 4 * i)
            a_known = multiply_add(load_float32(at), factor, a_known)
            b_known = multiply_add(load_float32(at + _VECTOR), factor, b_known)
            c_known = multiply_add(load_float32(at + 2 * _VECTOR), factor, c_known)
            d_known = multiply_add(load_float32(at + 3 * _VECTOR), factor, d_known)
        a, b, c, d = (a - a_known) * beta, (b - b_known) * beta, (c - c_known) * beta, (d - d_known) * beta
    # The first query of the head is multiplied in the pass that updates the state: large states are read from memory
    # farther away than the registers.
    shared = max(arguments.heads // arguments.value_heads, 1)
    query_head = head * shared
    if arguments.heads < arguments.value_heads:
        query_head = head * arguments.heads // arguments.value_heads
    query = row_at(arguments.query, row) + 4 * query_head * size
    # The next step reads the state after all weights of the model, which leave nothing of it in the caches.
    streams = after_row != _STATE_ROW and (after | after_row) % _VECTOR == 0 and shared == 1
    a_out, b_out = splat_float32(0.0), splat_float32(0.0)
    c_out, d_out = splat_float32(0.0), splat_float32(0.0)
    for i in range(size):
        at, to = before + i * before_row, after + i * after_row
        factor, weight, asked = read_float32(factors + 4 * i), read_float32(key + 4 * i), read_float32(query + 4 * i)
        a_new = multiply_add(load_float32(at), factor, a * weight)
        b_new = multiply_add(load_float32(at + _VECTOR), factor, b * weight)
        c_new = multiply_add(load_float32(at + 2 * _VECTOR), factor, c * weight)
        d_new = multiply_add(load_float32(at + 3 * _VECTOR), factor, d * weight)
        if streams:
            stream_float32(to, a_new)
            stream_float32(to + _VECTOR, b_new)
            stream_float32(to + 2 * _VECTOR, c_new)
            stream_float32(to + 3 * _VECTOR, d_new)
        else:
            store_float32(to, a_new)
            store_float32(to + _VECTOR, b_new)
            store_float32(to + 2 * _VECTOR, c_new)
            store_float32(to + 3 * _VECTOR, d_new)
        a_out, b_out = multiply_add(a_new, asked, a_out), multiply_add(b_new, asked, b_out)
        c_out, d_out = multiply_add(c_new, asked, c_out), multiply_add(d_new, asked, d_out)
    out = row_at(arguments.out, row) + 4 * (head * shared * arguments.v_size + first)
    for number in range(shared):
        if number > 0:
            query = query + 4 * size
            out = out + 4 * arguments.v_size
            a_out, b_out = splat_float32(0.0), splat_float32(0.0)
            c_out, d_out = splat_float32(0.0), splat_float32(0.0)
            for i in range(size):
                at, asked = after + i * after_row, read_float32(query + 4 * i)
                a_out = multiply_add(load_float32(at), asked, a_out)
                b_out = multiply_add(load_float32(at + _VECTOR), asked, b_out)
                c_out = multiply_add(load_float32(at + 2 * _VECTOR), asked, c_out)
                d_out = multiply_add(load_float32(at + 3 * _VECTOR), asked, d_out)
        scale = arguments.scale
        store(out, a_out * scale, left)
        store(out + _VECTOR, b_out * scale, left_b)
        store(out + 2 * _VECTOR, c_out * scale, left_c)
        store(out + 3 * _VECTOR, d_out * scale, left_d)


@native_op(LinearAttentionArguments)
def linear_attention_op(arguments: LinearAttentionArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Update pieces of states by all rows of their sequences. Items are pieces of heads.

    Whole pieces are read from the cache by the first row, and written to the cache by the last row. Between these rows,
    and if a piece is narrower than _COLUMNS, the state is in scratch memory.
    """
    size, v_size, pieces = arguments.size, arguments.v_size, arguments.pieces
    padded = -(-size // LANES) * _VECTOR
    factors = scratch + size * _STATE_ROW
    for item in range(begin, end):
        head_of_sequence = item // pieces
        first = (item - head_of_sequence * pieces) * _COLUMNS
        left = min(v_size - first, _COLUMNS)
        sequence = head_of_sequence // arguments.value_heads
        head = head_of_sequence - sequence * arguments.value_heads
        begin_row, end_row = _rows(context, sequence)
        source = _source(context, sequence, arguments.states.num_slots)
        if source < -1:
            return ErrorCode.SLOT.value
        inside = 4 * (head * size * v_size + first)
        before, before_row = scratch, _STATE_ROW
        if source >= 0:
            before, before_row = arguments.states.address + source * arguments.states.stride + inside, 4 * v_size
        if source < 0 or left < _COLUMNS:
            for i in range(0, size * _STATE_ROW, _VECTOR):
                store_float32(scratch + i, splat_float32(0.0))
            if source >= 0:
                _copy_state(before, before_row, scratch, _STATE_ROW, size, left)
            before, before_row = scratch, _STATE_ROW
        for row in range(begin_row, end_row):
            target = _target(context, row)
            state = arguments.states.address + target * arguments.states.stride + inside
            after, after_row = scratch, _STATE_ROW
            if row == end_row - 1 and target >= 0 and left == _COLUMNS:
                after, after_row = state, 4 * v_size
            _update(arguments, row, head, first, left, before, before_row, after, after_row, factors, factors + padded)
            if target >= 0 and after != state:
                _copy_state(scratch, _STATE_ROW, state, 4 * v_size, size, left)
            before, before_row = after, after_row
    return 0
