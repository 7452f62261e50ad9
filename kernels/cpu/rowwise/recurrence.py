"""Recurrent layers. An item is a piece of a sequence's state, which all rows of the sequence update in order."""

from __future__ import annotations

from ...cache_layout import StateLayer
from ..jit.arguments import Address, Arguments, Held
from ..jit.memory import load, read_int32, read_int64, store
from ..jit.native import native_op
from ..jit.vector import LANES, splat_float32
from ..program.calls import PIECE, Call, Items, Rows, check_rows, pieces_of, row_at
from ..program.step_table import ErrorCode, StepField


class RecurrenceArguments(Arguments):
    """Rows, and the states, which are `stride` bytes apart."""

    x: Rows
    decay: Rows
    out: Rows
    states: Address
    stride: int
    num_slots: int
    pieces: int
    held: Held = None


def linear_recurrence(x: Rows, decay: Rows, out: Rows, layer: StateLayer) -> Call:
    """Return the call of an `ir.LinearRecurrence`."""
    for name, rows in (("x", x), ("decay", decay), ("out", out)):
        check_rows(name, rows, StepField.TOKENS, layer.size)
    pieces = pieces_of(layer.size)
    arguments = RecurrenceArguments(
        x=x, decay=decay, out=out, states=layer.states.ctypes.data, stride=layer.states.strides[0],
        num_slots=layer.num_slots, pieces=pieces, held=layer.states,
    )  # fmt: skip
    return Call(linear_recurrence_op, arguments, Items(StepField.SEQUENCES, factor=pieces))


@native_op(RecurrenceArguments)
def linear_recurrence_op(arguments: RecurrenceArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Update states and write rows. A piece of a state stays in a register from row to row."""
    starts = read_int64(context + 8 * StepField.SEQUENCE_STARTS)
    reads = read_int64(context + 8 * StepField.STATE_READS)
    writes = read_int64(context + 8 * StepField.STATE_WRITES)
    width, slots = arguments.out.width, arguments.num_slots
    for item in range(begin, end):
        sequence = item // arguments.pieces
        first = (item - sequence * arguments.pieces) * PIECE
        last = min(width, first + PIECE)
        begin_row, end_row = read_int32(starts + 4 * sequence), read_int32(starts + 4 * sequence + 4)
        source = read_int32(reads + 4 * sequence)
        if source < -1 or source >= slots:
            return ErrorCode.SLOT.value
        for row in range(begin_row, end_row):
            target = read_int32(writes + 4 * row)
            if target < -1 or target >= slots:
                return ErrorCode.SLOT.value
        for column in range(first, last, LANES):
            left = last - column
            state = splat_float32(0.0)
            if source >= 0:
                state = load(arguments.states + source * arguments.stride + 4 * column, left)
            for row in range(begin_row, end_row):
                decay, x = row_at(arguments.decay, row), row_at(arguments.x, row)
                state = load(decay + 4 * column, left) * state + load(x + 4 * column, left)
                store(row_at(arguments.out, row) + 4 * column, state, left)
                target = read_int32(writes + 4 * row)
                if target >= 0:
                    store(arguments.states + target * arguments.stride + 4 * column, state, left)
    return 0
