"""Rows of a block-quantised embedding table."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..block_matrix import BlockMatrix
from .checks import Float32, check
from .products.gather import gather_blocks
from .tape.context import ContextTable, Word
from .tape.eager import run_calls
from .tape.program import Rows
from .team import Team

_INT64 = np.dtype(np.int64)
_NANOSECONDS_PER_ELEMENT = 1.5


def block_rows(tokens: NDArray[np.int64], table: BlockMatrix, *, team: Team | None = None) -> Float32:
    """table[tokens] as float32 [T, columns].

    Args:
        tokens: int64 [T].
        table: as packed for products, so that it may be shared with a tied head.

    Raises:
        ValueError: tokens of another type or shape.
        IndexError: a token is outside the table.
    """
    check("tokens", tokens, (None,), _INT64)
    if tokens.size and (tokens.min() < 0 or tokens.max() >= table.rows):
        bad = tokens[(tokens < 0) | (tokens >= table.rows)][0]
        raise IndexError(f"token {bad} is outside the embedding table of {table.rows} rows")
    out = np.empty((tokens.size, table.columns), np.float32)
    if not tokens.size:
        return out
    context = ContextTable()
    context.count(Word.TOKENS, tokens.size)
    context.array(Word.TOKEN_IDS, tokens)
    call = gather_blocks(table, Rows.of(out))
    run_calls([[call]], context, team=team, work=out.size * _NANOSECONDS_PER_ELEMENT)
    return out
