"""Calls carried out at once, one after another, by a team of Python threads: for callers that have no tape."""

from __future__ import annotations

import numpy as np

from ..jit import kernel
from ..team import Team, run
from .context import ContextTable, ErrorCode
from .driver import call_operator
from .program import Phases, argument_word

_LINE = 64


@kernel("void(int64, int64, int64, int64, int64, int64)")
def run_items(operator: int, arguments: int, context: int, scratch_bytes: int, begin: int, end: int) -> None:
    """Items [begin, end) of a native operator, with scratch of their own."""
    scratch = np.empty(scratch_bytes + _LINE, np.uint8)
    address = scratch.ctypes.data
    status = call_operator(operator, arguments, context, begin, end, address + -address % _LINE)
    if status == ErrorCode.INDEX_OUTSIDE_TABLE.value:
        raise IndexError("index outside its table")
    if status == ErrorCode.SLOT.value:
        raise IndexError("slot outside the cache")
    if status == ErrorCode.POSITION.value:
        raise IndexError("position outside its sequence")
    if status == ErrorCode.PAGE.value:
        raise IndexError("context longer than its block table, or block table entry outside the cache")
    if status == ErrorCode.ROTARY_POSITION.value:
        raise IndexError("position outside the rotary tables")


def run_calls(phases: Phases, context: ContextTable, *, team: Team | None, work: float) -> None:
    """Carry out calls.

    Args:
        work: nanoseconds that a call takes on one thread, roughly.

    Raises:
        IndexError: an operator was given a number that leads outside its memory.
    """
    for phase in phases:
        for call in phase:
            arguments = np.array([argument_word(value) for value in call.arguments], np.int64)
            counted = int(context.words[call.items.counted])
            if items := -(-counted * call.items.factor // call.items.divisor):
                given = (call.op.address, arguments.ctypes.data, context.address, call.scratch)
                run(team, run_items, given, items, work=work)
