"""Memory layouts, defined once: constants of packed matrices (see `block_matrix`), and keys and values in pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Rows of a weight matrix that lie side by side in memory. A kernel keeps one output row per SIMD lane, so no sum ever
# crosses lanes: nothing is shuffled, and results do not depend on the width of the machine's vectors.
TILE_ROWS = 16
# A block above 256 could not be summed exactly in float32 (256 * 255 * 127 < 2**24), one that is no multiple of 16
# would end in the middle of the eight bytes that the INT4 kernel sums in 16-bit lanes.
BLOCK_SIZES = range(16, 257, 16)

# Tokens in a page of keys and values: two vectors of scores, one step of a product of tiles.
PAGE_TOKENS = 32


class FormatError(ValueError):
    """Arrays that do not fit the layout asked for; the message names the shapes."""


@dataclass(frozen=True)
class PagedLayer:
    """Keys and values of one attention layer, in pages of PAGE_TOKENS tokens.

    Attributes:
        keys: float32 or float16 [num_blocks, kv_heads, head_size, PAGE_TOKENS]. Tokens are innermost, so that the
            scores of neighbouring tokens are one vector and no sum crosses its lanes.
        values: the same type, [num_blocks, kv_heads, PAGE_TOKENS, v_head_size].

    Each block is contiguous; between blocks there may be others' memory. A token's place is its slot,
    block * PAGE_TOKENS + offset.
    """

    keys: NDArray[Any]
    values: NDArray[Any]

    def __post_init__(self) -> None:
        for name, array in (("keys", self.keys), ("values", self.values)):
            if array.ndim != 4 or array.dtype not in (np.float32, np.float16) or not array[:1].flags.c_contiguous:
                raise FormatError(
                    f"{name} must be a float32 or float16 array of 4 dimensions, contiguous block by block, "
                    f"got {array.dtype} {list(array.shape)} with strides {list(array.strides)}"
                )
        tokens = self.keys.shape[3], self.values.shape[2]
        if self.keys.shape[:2] != self.values.shape[:2] or self.keys.dtype != self.values.dtype:
            raise FormatError(
                f"keys {self.keys.dtype} {list(self.keys.shape)} and values {self.values.dtype} "
                f"{list(self.values.shape)} must agree in type, blocks and heads"
            )
        if tokens != (PAGE_TOKENS, PAGE_TOKENS):
            raise FormatError(f"pages of keys and values hold {tokens[0]} and {tokens[1]} tokens, not {PAGE_TOKENS}")

    @property
    def num_blocks(self) -> int:
        return int(self.keys.shape[0])

    @property
    def kv_heads(self) -> int:
        return int(self.keys.shape[1])

    @property
    def head_size(self) -> int:
        return int(self.keys.shape[2])

    @property
    def v_head_size(self) -> int:
        return int(self.values.shape[3])
