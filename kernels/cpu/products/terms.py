"""What is added to the sums of a product before anything else happens to them."""

from __future__ import annotations

from typing import Any

from ..arguments import Address, Arguments
from ..lazy import inline
from ..memory import load_first
from ..program.calls import NO_ROWS, Rows, row_at


class TermsArguments(Arguments):
    """A bias and a row of addends, as wide as the result; 0 = none."""

    bias: Address = None
    addend: Rows = NO_ROWS


@inline
def addend_of(terms: TermsArguments, row: int) -> Any:
    """The address of a row of addends; 0 where there are none."""
    return row_at(terms.addend, row) if terms.addend.address != 0 else 0


@inline
def with_terms(sums: Any, bias: int, addend: int, column: int, left: int) -> Any:
    """The sums of LANES columns plus a bias and a row of addends, where their addresses are not 0."""
    if bias != 0:
        sums = sums + load_first(bias + 4 * column, left)
    if addend != 0:
        sums = sums + load_first(addend + 4 * column, left)
    return sums
