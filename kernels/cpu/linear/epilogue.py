"""What is added to the sums of a product before anything else happens to them."""

from __future__ import annotations

from typing import Any

from ..jit.arguments import Address, Arguments
from ..jit.dsl import inline
from ..jit.memory import load_first
from ..program.calls import NO_ROWS, Rows, row_at
from .lora import NO_TARGET


class TermsArguments(Arguments):
    """What columns are multiplied by, then what is added: by adapters (their target; NO_TARGET = none), a bias, a row
    of addends. All are as wide as the result; 0 = none."""

    scale: Address = None
    bias: Address = None
    addend: Rows = NO_ROWS
    target: int = NO_TARGET


@inline
def addend_of(terms: TermsArguments, row: int) -> Any:
    """The address of a row of addends; 0 where there are none."""
    return row_at(terms.addend, row) if terms.addend.address != 0 else 0


@inline
def scaled(sums: Any, scale: int, column: int, left: int) -> Any:
    """The sums of LANES columns, multiplied where there is something to multiply by: before anything is added."""
    if scale != 0:
        sums = sums * load_first(scale + 4 * column, left)
    return sums


@inline
def with_terms(sums: Any, bias: int, addend: int, column: int, left: int) -> Any:
    """The sums of LANES columns plus a bias and a row of addends, where there are any."""
    if bias != 0:
        sums = sums + load_first(bias + 4 * column, left)
    if addend != 0:
        sums = sums + load_first(addend + 4 * column, left)
    return sums
