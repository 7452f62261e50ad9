"""A sequence outside a decoder: its tokens, their numerics, and the arrays of its cached state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class StoredArray(NamedTuple):
    """An array of a sequence's cached state: name, dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The number of bytes of the array."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class StoredTokens:
    """Tokens, and the number of tokens whose state is stored.

    Attributes:
        tokens: token ids.
        numerics: 1 per token with prefill numerics, else 0; empty if the decoder does not distinguish them.
        num_stored: number of leading tokens whose state is in the arrays.
    """

    tokens: Sequence[int]
    numerics: bytes
    num_stored: int
