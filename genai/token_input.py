"""Token ids from callers: whatever form they come in, checked, and nothing truncated silently."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import InputError


def token_row(tokens: Any, vocab_size: int) -> list[int]:
    """The ids of one sequence: a list, an array [L] or [1, L], or a Tensor.

    Raises:
        InputError: none at all, not whole numbers, or outside the vocabulary.
    """
    return token_rows(tokens, 1, vocab_size, None)[0]


def token_rows(tokens: Any, batch_size: int, vocab_size: int, pad_token_id: int | None) -> list[list[int]]:
    """One list of ids per sequence.

    Args:
        tokens: [L], [batch_size, L], flat [batch_size * L], a list of lists, or a Tensor of those shapes.
        batch_size: number of rows wanted.
        vocab_size: ids must lie below it.
        pad_token_id: trailing ids of this value are dropped from rectangular batches.

    Raises:
        InputError: not whole numbers, ids outside the vocabulary, a number of rows that is not batch_size, empty.
    """
    value = tokens.as_numpy() if hasattr(tokens, "as_numpy") else tokens
    if isinstance(value, (list, tuple)) and any(isinstance(row, (list, tuple, np.ndarray)) for row in value):
        rows = [_ids(row) for row in value]
    else:
        rows = _split(_ids(value), batch_size, pad_token_id)
    if len(rows) != batch_size:
        raise InputError(f"got {len(rows)} rows of tokens", f"batch_size is {batch_size}", "pass one row per sequence")
    for index, row in enumerate(rows):
        _check(row, index, vocab_size)
    return [row.tolist() for row in rows]


def _ids(value: Any) -> NDArray[np.int64]:
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise InputError("the tokens are ragged", str(error), "pass a list of lists, one per sequence") from error
    if array.size == 0:
        raise InputError("there are no tokens", "a sequence needs at least one", "pass at least one token per sequence")
    if array.dtype.kind not in "iu":
        raise InputError(
            f"token ids of type {array.dtype}",
            "ids are whole numbers",
            "pass what Tokenizer.encode returned",
        )
    return array.astype(np.int64)


def _split(array: NDArray[np.int64], batch_size: int, pad_token_id: int | None) -> list[NDArray[np.int64]]:
    if array.ndim > 2:
        raise InputError(f"tokens of shape {list(array.shape)}", "[L] or [batch_size, L] is expected", "reshape them")
    if array.ndim == 2 and array.shape[0] == batch_size:
        return [_without_padding(row, pad_token_id) for row in array] if batch_size > 1 else [array[0]]
    flat = array.reshape(-1)
    if flat.size % batch_size:
        raise InputError(
            f"{flat.size} tokens cannot be split over {batch_size} sequences",
            "a flat list is divided into equal rows",
            "pass a list of lists, one per sequence",
        )
    return [_without_padding(row, pad_token_id) if batch_size > 1 else row for row in flat.reshape(batch_size, -1)]


def _without_padding(row: NDArray[np.int64], pad_token_id: int | None) -> NDArray[np.int64]:
    if pad_token_id is None:
        return row
    kept = np.flatnonzero(row != pad_token_id)
    return row[: kept[-1] + 1] if len(kept) else row


def _check(row: NDArray[np.int64], index: int, vocab_size: int) -> None:
    if row.ndim != 1:
        raise InputError(f"row {index} has shape {list(row.shape)}", "a row is a list of ids", "flatten it")
    bad = row[(row < 0) | (row >= vocab_size)]
    if bad.size:
        raise InputError(
            f"token id {int(bad[0])} in row {index}",
            f"the vocabulary has ids 0 to {vocab_size - 1}",
            "use the model's own tokenizer",
        )
