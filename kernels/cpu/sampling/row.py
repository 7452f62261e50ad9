"""One row of logits on its way to a token.

A row is **open** at first: the logits themselves say which tokens are in play (masked ones are -inf). A step that
leaves few of them **closes** it: the few become a list of candidates in order of their ids, and later steps look at
nothing else. Whoever changes logits of an open row first takes a copy (`writable`), so the caller's never change.

Order among tokens, wherever one is needed: the larger logit first, among equals the lower id.
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
# Tokens whose largest logit is known.
BLOCK = 2 * LANES


class Row(NamedTuple):
    """The arrays that belong to a row while it is worked on.

    Attributes:
        given: float32 [V], the caller's logits; read only.
        own: float32 [V], the copy, where flags[OWNED].
        blocks: float32 [2, blocks]: largest logit (MAXIMA) and sum of the weights (SUMS) of each block of tokens.
        numbers: float64 [3, V], of each candidate: logit (VALUES), weight (WEIGHTS: e to the distance from the
            maximum over the temperature), and another order (KEYS).
        ids: int32 [3, V]: token of each candidate (TOKENS), room for sorting (ORDER), and, per token and zero between
            uses, what the history says of it (MARKS).
        state: float64 [4]: the largest logit in play (MAXIMUM), what logits were divided by so far (TEMPERATURE);
            `total_weight` (TOTAL), and the temperature it was found at (SUMMED_AT, or NOWHERE).
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
# Is the row open? Is `own` in use? Are maxima up to date? How many candidates are there? What went wrong?
OPEN, OWNED, SCANNED, COUNT, STATUS = 0, 1, 2, 3, 4
# Rows of blocks, of numbers and of ids; states and flags.
_BLOCKS, _NUMBERS, _IDS, _STATES, _FLAGS = 2, 3, 3, 4, 5
MASKED = np.float32(-np.inf)


@helper
def reset(row: Row) -> None:
    """Begin with untouched logits, all of them in play."""
    row.flags[OPEN] = 1
    row.flags[OWNED] = row.flags[SCANNED] = row.flags[COUNT] = row.flags[STATUS] = 0
    row.state[TEMPERATURE] = 1.0


@helper
def current(row: Row) -> Any:
    """The logits of an open row, float32 [V]."""
    return row.own if row.flags[OWNED] else row.given


@helper
def writable(row: Row) -> Any:
    """The logits of an open row, to be changed: a copy, of which nothing is known any more."""
    if not row.flags[OWNED]:
        for token in range(row.given.shape[0]):
            row.own[token] = row.given[token]
        row.flags[OWNED] = 1
    row.flags[SCANNED] = 0
    return row.own


class Workspace(Arguments):
    """Memory for `slots` slots; a slot works on one row of `vocab_size` logits after another. Arrays are [slots, ...],
    see `Row`; pages are touched only when needed.
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
        """Memory for rows of vocab_size logits."""
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
    """A row whose logits lie at an address, in a slot."""
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
