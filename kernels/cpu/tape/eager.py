"""Calls carried out at once, one after another, by a team of Python threads: for callers that have no tape."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..jit import kernel
from ..team import Team, run
from .context import ContextTable, ErrorCode
from .driver import call_operator
from .program import Phases, argument_word

_LINE = 64


_REFUSALS = {
    ErrorCode.INDEX_OUTSIDE_TABLE: "index outside its table",
    ErrorCode.SLOT: "slot outside the cache",
    ErrorCode.POSITION: "position outside its sequence",
    ErrorCode.PAGE: "context longer than its block table, or block table entry outside the cache",
    ErrorCode.ROTARY_POSITION: "position outside the rotary tables",
}


@kernel("void(int64, int64, int64, int64, int64[::1], int64, int64)", allocates=True)
def run_items(
    operator: int, arguments: int, context: int, scratch_bytes: int, refusal: Any, begin: int, end: int
) -> None:
    """Items [begin, end) of a native operator, with scratch of their own; its error code goes to refusal[0]."""
    scratch = np.empty(scratch_bytes + _LINE, np.uint8)
    address = scratch.ctypes.data
    status = call_operator(operator, arguments, context, begin, end, address + -address % _LINE)
    if status != 0:
        refusal[0] = status


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
                refusal = np.zeros(1, np.int64)
                given = (call.op.address, arguments.ctypes.data, context.address, call.scratch, refusal)
                run(team, run_items, given, items, work=work)
                if refusal[0]:
                    raise IndexError(_REFUSALS[ErrorCode(refusal[0])])
