"""One row of logits while a token is sampled from it.

At first a row is **open**: the logits themselves determine which tokens are in play (masked tokens are -inf). A step
that leaves few tokens **closes** the row: the tokens become a list of candidates in order of their ids, and later steps
read only this list. A step that changes logits of an open row copies them first (`writable`), so the caller's logits
never change.

In every order of tokens, larger logits come first, and among equal logits, lower ids come first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..jit.arguments import Address, Arguments
from ..jit.dsl import helper, inline
from ..jit.memory import array_at
from ..jit.vector import LANES

_floats, _float_rows = array_at("float32", 1), array_at("float32", 2)
_doubles, _double_rows = array_at("float64", 1), array_at("float64", 2)
_integers, _integer_rows = array_at("int64", 1), array_at("int32", 2)
# Tokens per block. The largest logit of each block is stored.
BLOCK = 2 * LANES


class Row(NamedTuple):
    """The arrays that belong to a row while it is processed.

    Attributes:
        given: float32 [V], the caller's logits; read only.
        own: float32 [V], the copy of the logits, if flags[OWNED].
        blocks: float32 [2, blocks]: largest logit (MAXIMA) and sum of weights (SUMS) of each block of tokens.
        numbers: float64 [3, V], of each candidate: logit (VALUES), weight (WEIGHTS: e to the power of the distance from
            the maximum over the temperature), and the key of another order (KEYS).
        ids: int32 [3, V]: token of each candidate (TOKENS), scratch memory for sorting (ORDER), and marks of the
            history per token, which are zero between uses (MARKS).
        state: float64 [4]: largest logit in play (MAXIMUM), product of the temperatures applied so far (TEMPERATURE),
            `total_weight` (TOTAL), and the temperature at which it was computed (SUMMED_AT, or NOWHERE).
        flags: int64 [5], see OPEN to STATUS.
    """

    given: Any
    own: Any
    blocks: Any
    numbers: Any
    ids: Any
    state: Any
    flags: Any


MAXIMA, SUMS = 0, 1
VALUES, WEIGHTS, KEYS = 0, 1, 2
TOKENS, ORDER, MARKS = 0, 1, 2
MAXIMUM, TEMPERATURE, TOTAL, SUMMED_AT = 0, 1, 2, 3
NOWHERE = -1.0
# True if the row is open; if `own` is in use; if maxima are up to date; the number of candidates; the status.
OPEN, OWNED, SCANNED, COUNT, STATUS = 0, 1, 2, 3, 4
# Numbers of rows of `blocks`, `numbers` and `ids`, and sizes of `state` and `flags`.
_BLOCKS, _NUMBERS, _IDS, _STATES, _FLAGS = 2, 3, 3, 4, 5
MASKED = np.float32(-np.inf)


@helper
def reset(row: Row) -> None:
    """Start with the caller's logits, with all tokens in play."""
    row.flags[OPEN] = 1
    row.flags[OWNED] = row.flags[SCANNED] = row.flags[COUNT] = row.flags[STATUS] = 0
    row.state[TEMPERATURE] = 1.0


@helper
def current(row: Row) -> Any:
    """Return the logits of an open row, float32 [V]."""
    return row.own if row.flags[OWNED] else row.given


@helper
def writable(row: Row) -> Any:
    """Return the logits of an open row for changes: a copy, whose maxima must be computed again."""
    if not row.flags[OWNED]:
        for token in range(row.given.shape[0]):
            row.own[token] = row.given[token]
        row.flags[OWNED] = 1
    row.flags[SCANNED] = 0
    return row.own


class Workspace(Arguments):
    """Memory for `slots` slots. A slot processes one row of `vocab_size` logits after another.

    Arrays are [slots, ...], see `Row`. Pages of memory are touched only when they are needed.
    """

    slots: int
    vocab_size: int
    blocks_per_row: int
    own: Address
    blocks: Address
    numbers: Address
    ids: Address
    state: Address
    flags: Address

    @classmethod
    def allocate(cls, slots: int, vocab_size: int) -> Workspace:
        """Return the memory for rows of vocab_size logits."""
        blocks = -(-vocab_size // BLOCK)
        return cls(
            slots=slots,
            vocab_size=vocab_size,
            blocks_per_row=blocks,
            own=np.empty((slots, vocab_size), np.float32),
            blocks=np.empty((slots, _BLOCKS, blocks), np.float32),
            numbers=np.empty((slots, _NUMBERS, vocab_size), np.float64),
            ids=np.zeros((slots, _IDS, vocab_size), np.int32),
            state=np.empty((slots, _STATES), np.float64),
            flags=np.empty((slots, _FLAGS), np.int64),
        )


@inline
def row_in_slot(slots: Workspace, slot: int, given: int) -> Any:
    """Return a row in a slot, with logits at an address."""
    size, blocks = slots.vocab_size, slots.blocks_per_row
    return Row(
        _floats(given, size),
        _floats(slots.own + 4 * size * slot, size),
        _float_rows(slots.blocks + 4 * _BLOCKS * blocks * slot, _BLOCKS, blocks),
        _double_rows(slots.numbers + 8 * _NUMBERS * size * slot, _NUMBERS, size),
        _integer_rows(slots.ids + 4 * _IDS * size * slot, _IDS, size),
        _doubles(slots.state + 8 * _STATES * slot, _STATES),
        _integers(slots.flags + 8 * _FLAGS * slot, _FLAGS),
    )
