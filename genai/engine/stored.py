"""What a sequence is outside of a decoder: its tokens, how they round, and the form of its state as arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class StoredArray(NamedTuple):
    """An array of a sequence's cached state: its name, the name of its type, and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class StoredTokens:
    """Tokens, and how much of their state is kept.

    Attributes:
        tokens: ids. numerics: per token 1 where it has prefill numerics, else 0; empty where there is no difference.
        num_stored: so many tokens at the beginning have their state in the arrays.
    """

    tokens: Sequence[int]
    numerics: bytes
    num_stored: int
