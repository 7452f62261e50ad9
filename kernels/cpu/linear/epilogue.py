"""The scale and the terms that are applied to the sums of a matmul before its activation."""

from __future__ import annotations

from typing import Any

from ..jit.arguments import Address, Arguments
from ..jit.dsl import inline
from ..jit.memory import load_first
from ..program.calls import NO_ROWS, Rows, row_at
from .lora import NO_TARGET


class TermsArguments(Arguments):
    """One scale per column, and the terms that are then added: an adapter's delta, a bias and a row of addends.

    Each is as wide as the result; an address of 0 means that it is absent.

    Attributes:
        target: adapter target; NO_TARGET = none.
    """

    scale: Address = None
    bias: Address = None
    addend: Rows = NO_ROWS
    target: int = NO_TARGET


@inline
def addend_of(terms: TermsArguments, row: int) -> Any:
    """Return the address of a row of addends, or 0 if there are none."""
    return row_at(terms.addend, row) if terms.addend.address != 0 else 0


@inline
def scaled(sums: Any, scale: int, column: int, left: int) -> Any:
    """Return the sums of LANES columns times their scales, if there are any. The terms must be added afterwards."""
    if scale != 0:
        sums = sums * load_first(scale + 4 * column, left)
    return sums


@inline
def with_terms(sums: Any, bias: int, addend: int, column: int, left: int) -> Any:
    """Return the sums of LANES columns plus the bias and the row of addends, if there are any."""
    if bias != 0:
        sums = sums + load_first(bias + 4 * column, left)
    if addend != 0:
        sums = sums + load_first(addend + 4 * column, left)
    return sums
