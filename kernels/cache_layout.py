"""The layout of keys and values in the pages of the cache, defined once for every device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .checks import FormatError
from .float_bits import FLOAT_BITS
from .weight_layout import TILE_ROWS

# Tokens in a page of keys and values. Their scores fill two vectors, and they are one step of a tile matmul.
PAGE_TOKENS = 32
# Number of columns that share a scale when keys and values have 4 bits.
SCALE_COLUMNS = 32
_SCALE_BYTES = 2  # float16
# The largest head size for which the integer dot products of packed heads fit in int32.
MOST_PACKED_COLUMNS = 1024


@dataclass(frozen=True)
class PackedPages:
    """Pages of keys and values as small integers with scales. A page holds PAGE_TOKENS tokens of one KV head.

    A 32-bit lane holds the bytes of four neighbouring columns (keys) or tokens (values), so one instruction multiplies
    sixteen tokens (or columns) by four numbers each. A page contains, in this order:

    - keys: [columns / 4][PAGE_TOKENS][4 columns] bytes; or values: [PAGE_TOKENS / 4][columns][4 tokens] bytes.
    - scales [groups][PAGE_TOKENS], float16.

    With 8 bits, each byte is one column (an int8), and each token has one scale: value = integer * scale. Columns are
    padded with zeros to a multiple of 4 (keys) or 16 (values).

    With 4 bits, keys and values are multiplied by the normalised Hadamard matrix of the head's size before they are
    stored. Every 32 columns have one scale and 16 bytes. Byte i holds column i in its low nibble and column i + 16 in
    its high nibble: value = (nibble - 7.5) * scale.

    Attributes:
        bits: 8 or 4.
        head_size, v_head_size: number of columns of a key and of a value; with 4 bits, each is a power of two of at
            least 32.
    """

    bits: int
    head_size: int
    v_head_size: int

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise FormatError(f"bits is {self.bits}, expected 4 or 8")
        for name, size in (("head_size", self.head_size), ("v_head_size", self.v_head_size)):
            if not 1 <= size <= MOST_PACKED_COLUMNS:
                raise FormatError(f"{name} is {size}, expected 1 to {MOST_PACKED_COLUMNS}")
            if self.bits == 4 and not can_rotate(size):
                raise FormatError(f"{name} is {size}, expected a power of two of at least {SCALE_COLUMNS} for 4 bits")

    @property
    def key_columns(self) -> int:
        """The number of bytes of a token's key without its scales."""
        return self.head_size // 2 if self.bits == 4 else -(-self.head_size // 4) * 4

    @property
    def value_columns(self) -> int:
        """The number of bytes of a token's value without its scales."""
        return self.v_head_size // 2 if self.bits == 4 else -(-self.v_head_size // TILE_ROWS) * TILE_ROWS

    @property
    def key_groups(self) -> int:
        """The number of scales of a token's key."""
        return self._groups(self.head_size)

    @property
    def value_groups(self) -> int:
        """The number of scales of a token's value."""
        return self._groups(self.v_head_size)

    def _groups(self, size: int) -> int:
        return size // SCALE_COLUMNS if self.bits == 4 else 1

    @property
    def key_bytes(self) -> int:
        """The number of bytes of a head's page of keys, a multiple of a cache line."""
        return PAGE_TOKENS * (self.key_columns + _SCALE_BYTES * self.key_groups)

    @property
    def value_bytes(self) -> int:
        """The number of bytes of a head's page of values, a multiple of a cache line."""
        return PAGE_TOKENS * (self.value_columns + _SCALE_BYTES * self.value_groups)


def can_rotate(size: int) -> bool:
    """Return True if heads of this size can be stored with 4 bits, which needs a Hadamard matrix of this size."""
    return size >= SCALE_COLUMNS and size & (size - 1) == 0


# The NumPy type of an array's bits, and the kind of float that the bits represent, for floats without a NumPy type.
_FLOAT_KINDS = {bits: kind for kind, bits in FLOAT_BITS.items()}


@dataclass(frozen=True)
class StateLayer:
    """The states of one recurrent layer.

    Attributes:
        states: float32 [num_slots, size]. Each state is contiguous; other memory may lie between states.
        group: index of its cache group, whose `StateSlots` refer to these states.
    """

    states: NDArray[np.float32]
    group: int = 0

    def __post_init__(self) -> None:
        if self.states.ndim != 2 or self.states.dtype != np.float32 or not self.states[:1].flags.c_contiguous:
            raise FormatError(
                f"states must be a float32 array [slots, size] of contiguous rows, got {self.states.dtype} "
                f"{list(self.states.shape)} with strides {list(self.states.strides)}"
            )

    @property
    def num_slots(self) -> int:
        return int(self.states.shape[0])

    @property
    def size(self) -> int:
        """The number of floats in a state."""
        return int(self.states.shape[1])


@dataclass(frozen=True)
class PagedLayer:
    """Keys and values of one attention layer, in pages of PAGE_TOKENS tokens.

    Each block is contiguous; other memory may lie between blocks. A token's index is its slot,
    block * PAGE_TOKENS + offset.

    Attributes:
        keys: float32, float16, or the bits of bfloat16 (uint16) or float8 (uint8), [num_blocks, kv_heads, head_size,
            PAGE_TOKENS]. Tokens are the innermost axis, so that the scores of neighbouring tokens form one vector and
            no sum crosses its lanes.
        values: the same type, [num_blocks, kv_heads, PAGE_TOKENS, v_head_size]. None = a key is also the value of its
            token (latent attention).
        packed: layout of `keys` and `values` if they are small integers, uint8 [num_blocks, kv_heads, bytes of a page];
            None = floats.
        group: index of its cache group in `StepContext.groups`, which holds the block tables of this layer.
    """

    keys: NDArray[Any]
    values: NDArray[Any] | None
    packed: PackedPages | None = None
    group: int = 0

    def __post_init__(self) -> None:
        axes, types = (4, ("float32", "float16", *_FLOAT_KINDS)) if self.packed is None else (3, ("uint8",))
        for name, array in (("keys", self.keys), ("values", self.values)):
            if array is None:
                continue
            if array.ndim != axes or array.dtype not in types or not array[:1].flags.c_contiguous:
                raise FormatError(
                    f"{name} must be a {' or '.join(types)} array of {axes} dimensions, "
                    f"contiguous block by block, "
                    f"got {array.dtype} {list(array.shape)} with strides {list(array.strides)}"
                )
        if self.values is not None and (
            self.keys.shape[:2] != self.values.shape[:2] or self.keys.dtype != self.values.dtype
        ):
            raise FormatError(
                f"keys {self.keys.dtype} {list(self.keys.shape)} and values {self.values.dtype} "
                f"{list(self.values.shape)} must agree in type, blocks and heads"
            )
        self._check_pages()

    def _check_pages(self) -> None:
        if self.packed is not None:
            if self.values is None and self.packed.v_head_size != self.packed.head_size:
                raise FormatError(f"keys cannot be the values of {self.packed}, whose sizes differ")
            found, wanted = [self.keys.shape[2]], [self.packed.key_bytes]
            if self.values is not None:
                found, wanted = [*found, self.values.shape[2]], [*wanted, self.packed.value_bytes]
            if found != wanted:
                raise FormatError(f"pages of keys and values have {found} bytes, expected {wanted} for {self.packed}")
            return
        tokens = self.keys.shape[3], PAGE_TOKENS if self.values is None else self.values.shape[2]
        if tokens != (PAGE_TOKENS, PAGE_TOKENS):
            raise FormatError(
                f"pages of keys and values have {tokens[0]} and {tokens[1]} tokens, expected {PAGE_TOKENS}"
            )

    @property
    def kind(self) -> str:
        """The type of keys and values: float32, float16, bfloat16, float8, int8 or int4."""
        if self.packed is not None:
            return f"int{self.packed.bits}"
        return _FLOAT_KINDS.get(str(self.keys.dtype), str(self.keys.dtype))

    @property
    def num_blocks(self) -> int:
        return int(self.keys.shape[0])

    @property
    def kv_heads(self) -> int:
        return int(self.keys.shape[1])

    @property
    def head_size(self) -> int:
        return int(self.keys.shape[2]) if self.packed is None else self.packed.head_size

    @property
    def v_head_size(self) -> int:
        if self.values is None:
            return self.head_size
        return int(self.values.shape[3]) if self.packed is None else self.packed.v_head_size

    @property
    def token_bytes(self) -> int:
        """The number of bytes of a token's keys and values."""
        pages = [self.keys] if self.values is None else [self.keys, self.values]
        return sum(int(one[:1].nbytes) for one in pages) // PAGE_TOKENS


CacheLayer = PagedLayer | StateLayer
"""The cached data of one layer of a program."""
