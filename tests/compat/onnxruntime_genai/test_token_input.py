from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from genai.compat.onnxruntime_genai.tensor import Tensor
from genai.compat.onnxruntime_genai.token_rows import token_rows
from genai.errors import InputError


def filled(rows: list[list[int]], lengths: tuple[int, ...]) -> Tensor:
    """As Tokenizer.encode_batch returns it."""
    tensor = Tensor(np.array(rows, np.int32))
    tensor.row_lengths = lengths
    return tensor


@pytest.mark.parametrize(
    ("tokens", "batch", "expected"),
    [
        ([1, 2, 3], 1, [[1, 2, 3]]),
        (np.array([1, 2], np.int32), 1, [[1, 2]]),
        (np.array([[1, 2]], np.uint8), 1, [[1, 2]]),
        ([[1, 2], [3]], 2, [[1, 2], [3]]),
        (np.array([[1, 2], [3, 0]]), 2, [[1, 2], [3]]),
        (np.array([1, 2, 3, 0]), 2, [[1, 2], [3]]),
        (np.array([[0, 0], [3, 4]]), 2, [[0, 0], [3, 4]]),
        # Rows that all end so have tokens there: the longest has no fill.
        (np.array([[1, 2, 0], [3, 4, 0]]), 2, [[1, 2, 0], [3, 4, 0]]),
        (np.array([[1, 2, 0], [3, 0, 0]]), 2, [[1, 2, 0], [3, 0]]),
        ([[1, 2, 0], [3, 4, 5]], 2, [[1, 2, 0], [3, 4, 5]]),
        (filled([[1, 2, 0], [3, 0, 0]], (3, 1)), 2, [[1, 2, 0], [3]]),
        (filled([[1, 0]], (2,)), 1, [[1, 0]]),
        ([0, 0], 1, [[0, 0]]),
    ],
)
def test_forms(tokens: Any, batch: int, expected: list[list[int]]) -> None:
    assert token_rows(tokens, batch, 10, 0) == expected


@pytest.mark.parametrize(
    ("tokens", "batch", "message"),
    [
        ([], 1, "no tokens"),
        ([[1], []], 2, "no tokens"),
        ([1.5], 1, "float64"),
        (np.array([1.0]), 1, "float64"),
        ([True], 1, "bool"),
        (["a"], 1, "<U1"),
        ([10], 1, "token id 10"),
        ([-1], 1, "token id -1"),
        ([1, 2, 3], 2, "cannot be divided equally among 2"),
        ([[1], [2], [3]], 2, "3 rows"),
        (np.zeros((1, 1, 1), int), 1, r"shape \[1, 1, 1\]"),
        (2**40, 1, "token id 1099511627776"),
        (None, 1, "object"),
        (filled([[1], [0]], (1, 0)), 2, "no tokens"),
    ],
)
def test_refusals(tokens: Any, batch: int, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        token_rows(tokens, batch, 10, 0)
    assert caught.value.why
    assert caught.value.fix
