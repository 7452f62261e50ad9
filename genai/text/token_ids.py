"""Checks rows of token ids from callers: lists, arrays, or anything that NumPy converts to an array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError


def token_row(tokens: Any, vocab_size: int) -> list[int]:
    """Return the ids of one sequence.

    Args:
        tokens: a list, or an array [L] or [1, L].
        vocab_size: the upper bound of ids, exclusive.

    Raises:
        InputError: the tokens are not whole numbers, are outside the vocabulary, are empty, or have several rows.
    """
    return checked_rows(split_rows(tokens, 1), 1, vocab_size)[0]


def split_rows(tokens: Any, count: int) -> list[NDArray[np.int64]]:
    """Return rows of ids as int64.

    Args:
        tokens: a list of `count` rows of any lengths, or an array [L], [count, L] or flat [count * L].
        count: the number of rows.

    Raises:
        InputError: the tokens are not whole numbers, or an array that cannot be split into rows.
    """
    if holds_rows(tokens):
        return [_ids(row) for row in tokens]
    array = _ids(tokens)
    if array.ndim > 2:
        raise InputError(
            f"the tokens have shape {list(array.shape)}",
            "the shape must be [length] or [batch_size, length]",
            "reshape the tokens",
        )
    if array.size % count:
        raise InputError(
            f"{array.size} tokens cannot be divided equally among {count} sequences",
            "a flat list is divided into equal rows",
            "pass a list of lists, one per sequence",
        )
    return list(array if array.ndim == 2 and array.shape[0] == count else array.reshape(count, -1))


def holds_rows(tokens: Any) -> bool:
    """Return True if `tokens` is a list of rows, which may have different lengths."""
    return isinstance(tokens, (list, tuple)) and any(isinstance(row, (list, tuple, np.ndarray)) for row in tokens)


def checked_rows(rows: Sequence[NDArray[np.int64]], count: int, vocab_size: int) -> list[list[int]]:
    """Return the rows as lists.

    Raises:
        InputError: the number of rows is not `count`, a row is not one-dimensional, or an id is outside the vocabulary.
    """
    if len(rows) != count:
        raise InputError(f"the tokens have {len(rows)} rows", f"batch_size is {count}", "pass one row per sequence")
    for index, row in enumerate(rows):
        _check(row, index, vocab_size)
    return [row.tolist() for row in rows]


def _ids(value: Any) -> NDArray[np.int64]:
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise InputError(
            "the rows of tokens have different lengths", str(error), "pass a list of lists, one per sequence"
        ) from error
    if array.size == 0:
        raise InputError(
            "there are no tokens", "a sequence needs at least one token", "pass text or token ids for each sequence"
        )
    if array.dtype.kind not in "iu":
        raise InputError(
            f"the token ids have the type {array.dtype}",
            "token ids must be whole numbers",
            "pass the result of Tokenizer.encode",
        )
    return array.astype(np.int64)


def _check(row: NDArray[np.int64], index: int, vocab_size: int) -> None:
    if row.ndim != 1:
        raise InputError(f"row {index} has shape {list(row.shape)}", "a row must be a list of ids", "flatten the row")
    bad = row[(row < 0) | (row >= vocab_size)]
    if bad.size:
        raise InputError(
            f"token id {int(bad[0])} in row {index} is not in the vocabulary",
            f"valid ids are 0 to {vocab_size - 1}",
            "use the model's own tokenizer",
        )
