"""What a decoder's layers keep in a block, and the memory behind the blocks: reserved once, touched on demand, never
moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from genai.common.host_memory import ReservedMemory
from genai.kernels.cache_layout import PAGE_TOKENS, PackedPages, PagedLayer
from genai.kernels.device import DeviceArray, DeviceMemory
from genai.kernels.float_bits import FLOAT_BITS

ITEM_BYTES = {"float16": 2, "float32": 4, "bfloat16": 2, "float8": 1}
PACKED_BITS = {"int8": 8, "int4": 4}
# What arrays of a page hold where it is not what they are called.
_STORED_AS = {**FLOAT_BITS, **dict.fromkeys(PACKED_BITS, "uint8")}
_LINE = 64


@dataclass(frozen=True)
class LayerShape:
    """What a layer keeps per token.

    Attributes:
        kv_heads: heads of keys and values; latent attention (MLA) has one.
        head_size: elements per key head; for latent attention the whole latent row.
        v_head_size: elements per value head; 0 where values are part of the key row (latent attention).
        dtype: "float16", "float32"; "bfloat16", "float8", of which arrays hold the bits; or small integers with scales
            (`PackedPages`): "int8", "int4".
    """

    kv_heads: int
    head_size: int
    v_head_size: int
    dtype: str = "float32"

    @property
    def packed(self) -> PackedPages | None:
        """How small integers lie in a page; None for floats.

        Raises:
            FormatError: heads of these sizes cannot be packed.
        """
        bits = PACKED_BITS.get(self.dtype)
        return None if bits is None else PackedPages(bits, self.head_size, self.v_head_size)

    @property
    def bytes_per_token(self) -> int:
        """Cache bytes per token, scales included."""
        if (packed := self.packed) is not None:
            return self.kv_heads * (packed.key_bytes + packed.value_bytes) // PAGE_TOKENS
        return self.kv_heads * (self.head_size + self.v_head_size) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class CacheLayout:
    """What a block holds.

    Attributes:
        layers: in the order of their numbers.
        block_size: tokens per block.
    """

    layers: tuple[LayerShape, ...]
    block_size: int

    @property
    def bytes_per_token(self) -> int:
        """Cache bytes per token over all layers."""
        return sum(layer.bytes_per_token for layer in self.layers)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers."""
        return self.bytes_per_token * self.block_size


def blocks_that_fit(layout: CacheLayout, num_bytes: int) -> int:
    """How many whole blocks fit into a number of bytes."""
    return max(num_bytes, 0) // layout.bytes_per_block


class PagedStorage:
    """Keys and values of every paged layer.

    What a block holds of all layers lies together: [num_blocks][layers: keys, values], so that memory that is filled
    on demand grows with the blocks in use, and few huge pages serve all layers of a sequence.

    Args:
        layout: what each layer keeps.
        num_blocks: blocks to reserve, at least 1; their bytes are `blocks`, uint8 [num_blocks, bytes].
        allocate: a device's memory (see `genai.kernels.device.Executor.allocate`).

    Raises:
        MemoryError: there is not so much memory.
    """

    def __init__(
        self, layout: CacheLayout, num_blocks: int, allocate: Callable[[int], DeviceMemory] = ReservedMemory
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks = {num_blocks}: at least one block is expected")
        self.layout = layout
        self.num_blocks = num_blocks
        block_bytes = sum(_part_bytes(part, layer) for layer in layout.layers for part in self._parts(layer))
        self._memory = allocate(num_blocks * block_bytes)
        self.blocks: DeviceArray = self._memory.bytes.reshape(num_blocks, block_bytes)
        self.layers: tuple[PagedLayer, ...] = tuple(self._carve())

    def _parts(self, layer: LayerShape) -> list[tuple[int, ...]]:
        """Shapes of what a layer keeps in a block: keys and values."""
        if (packed := layer.packed) is not None:
            return [(layer.kv_heads, packed.key_bytes), (layer.kv_heads, packed.value_bytes)]
        tokens = self.layout.block_size
        return [(layer.kv_heads, layer.head_size, tokens), (layer.kv_heads, tokens, layer.v_head_size)]

    def _carve(self) -> Iterator[PagedLayer]:
        start = 0
        for layer in self.layout.layers:
            arrays: list[DeviceArray] = []
            for shape in self._parts(layer):
                # Viewed as another type as a whole: not every device can do that with a part of rows.
                numbers = self.blocks.view(_STORED_AS.get(layer.dtype, layer.dtype))
                size, first = _shape_bytes(shape, layer), start // numbers.itemsize
                part = numbers[:, first : first + size // numbers.itemsize]
                arrays.append(part.reshape(self.num_blocks, *shape))
                start += _part_bytes(shape, layer)
            yield PagedLayer(arrays[0], arrays[1], layer.packed)

    def close(self) -> None:
        """Give the memory back to the system; arrays of it that the caller still holds read as zeros."""
        self.layers, self.blocks = (), None
        self._memory.close()


def _shape_bytes(shape: tuple[int, ...], layer: LayerShape) -> int:
    return int(np.prod(shape, dtype=np.int64)) * ITEM_BYTES.get(layer.dtype, 1)


def _part_bytes(part: tuple[int, ...], layer: LayerShape) -> int:
    """Bytes of a part, up to whole cache lines."""
    return -(-_shape_bytes(part, layer) // _LINE) * _LINE
