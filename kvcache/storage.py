"""What a decoder's layers keep in a block, and the memory behind the blocks: reserved once, touched on demand, never
moved.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from genai.common.host_memory import ReservedMemory
from genai.kernels.cache_layout import PAGE_TOKENS, PackedPages, PagedLayer, StateLayer
from genai.kernels.device import DeviceArray, DeviceMemory
from genai.kernels.float_bits import FLOAT_BITS

from .groups import CacheGroup, GroupKind, plan_groups

# The state that a step begins from, and the one behind it.
STATES_PER_SEQUENCE = 2
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
class StateShape:
    """What a recurrent layer keeps per sequence.

    Attributes:
        size: numbers of its state, float32.
    """

    size: int

    @property
    def bytes_per_token(self) -> int:
        """Cache bytes per token: none."""
        return 0

    @property
    def nbytes(self) -> int:
        """Bytes of a state."""
        return 4 * self.size


@dataclass(frozen=True)
class CacheLayout:
    """What the layers keep, and which of them share a block.

    Attributes:
        layers: in the order of their numbers.
        block_size: tokens per block.
        groups: each layer is in one of them, those with states in the last; all layers in one group with full
            attention where none are given.
    """

    layers: tuple[LayerShape | StateShape, ...]
    block_size: int
    groups: tuple[CacheGroup, ...] = ()

    def __post_init__(self) -> None:
        groups = self.groups or (CacheGroup(tuple(range(len(self.layers)))),)
        if sorted(layer for group in groups for layer in group.layers) != list(range(len(self.layers))):
            raise ValueError(f"each of {len(self.layers)} layers belongs to one group, not {groups}")
        if any(
            isinstance(self.layers[layer], StateShape) != (group.kind is GroupKind.STATE)
            for group in groups
            for layer in group.layers
        ) or any(group.kind is GroupKind.STATE for group in groups[:-1]):
            raise ValueError(f"layers with states, and no others, form the last group, not {groups}")
        object.__setattr__(self, "groups", groups)

    @property
    def bytes_per_token(self) -> int:
        """Cache bytes per token over all layers."""
        return sum(layer.bytes_per_token for layer in self.layers)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a page, which holds a block of any group: those of the largest."""
        return self.block_size * max(map(self.group_bytes_per_token, self.page_groups), default=0)

    @property
    def page_groups(self) -> tuple[CacheGroup, ...]:
        """The groups whose layers keep rows in pages."""
        return self.groups[:-1] if self.groups[-1].kind is GroupKind.STATE else self.groups

    @property
    def bytes_per_state(self) -> int:
        """Bytes of a slot, which holds the states of all recurrent layers; 0 = there are none."""
        return sum(-(-layer.nbytes // _LINE) * _LINE for layer in self.layers if isinstance(layer, StateShape))

    def group_bytes_per_token(self, group: CacheGroup) -> int:
        """Cache bytes per token of the layers in a group."""
        return sum(self.layers[layer].bytes_per_token for layer in group.layers)

    def most_blocks(self, tokens: int, step_tokens: int) -> list[int]:
        """Per group of pages, the most blocks that one sequence of so many tokens holds: see CacheGroup.most_blocks."""
        return [group.most_blocks(tokens, step_tokens, self.block_size) for group in self.page_groups]

    def tokens_within(self, num_blocks: int, step_tokens: int, most: int) -> int:
        """The longest sequence for which so many blocks are enough, up to `most` tokens; 0 = not even a block."""
        size = self.block_size
        # The first number of blocks per table that is too many: what a sequence needs grows with it.
        count = bisect_right(
            range(1, -(-most // size) + 1), num_blocks, key=lambda each: sum(self.most_blocks(each * size, step_tokens))
        )
        return min(count * size, most)

    @property
    def kinds(self) -> list[CacheGroup]:
        """The groups, those of one kind and window taken together."""
        layers: dict[tuple[GroupKind, int], tuple[int, ...]] = {}
        for group in self.groups:
            kind = group.kind, group.window
            layers[kind] = tuple(sorted((*layers.get(kind, ()), *group.layers)))
        return [CacheGroup(numbers, *kind) for kind, numbers in layers.items()]

    def kind_bytes(self, kind: CacheGroup, tokens: int, step_tokens: int) -> int:
        """The most bytes that a sequence of so many tokens takes for all groups of a kind."""
        if kind.kind is GroupKind.STATE:
            return STATES_PER_SEQUENCE * self.bytes_per_state
        same = [group for group in self.groups if (group.kind, group.window) == (kind.kind, kind.window)]
        return len(same) * kind.most_blocks(tokens, step_tokens, self.block_size) * self.bytes_per_block

    def sequence_bytes(self, tokens: int, step_tokens: int) -> int:
        """The most bytes that a sequence of so many tokens takes."""
        return sum(self.kind_bytes(kind, tokens, step_tokens) for kind in self.kinds)


def grouped_layout(
    layers: Sequence[LayerShape | StateShape], kinds: Sequence[tuple[GroupKind, int]], block_size: int
) -> CacheLayout:
    """The layout of layers of these kinds, each with its window (0 = all); see `groups.plan_groups`."""
    groups = plan_groups([layer.bytes_per_token for layer in layers], kinds)
    return CacheLayout(tuple(layers), block_size, groups)


def blocks_that_fit(layout: CacheLayout, num_bytes: int) -> int:
    """How many whole blocks fit into a number of bytes."""
    return max(num_bytes, 0) // layout.bytes_per_block


class PagedStorage:
    """Keys and values of every paged layer, and the states of every recurrent one.

    What a block holds of the layers of its group lies together: [num_blocks][layers: keys, values], so that memory that
    is filled on demand grows with the blocks in use, and few huge pages serve all layers of a sequence. Every group
    sees the same memory; which group a block belongs to is known to the tables that hold it. A slot holds the states of
    all recurrent layers.

    Args:
        layout: what each layer keeps.
        num_blocks: blocks to reserve, at least 1; their bytes are `blocks`, uint8 [num_blocks, bytes].
        allocate: a device's memory (see `genai.kernels.device.Executor.allocate`).
        num_slots: slots to reserve, at least 1 where there are states; their bytes are `slots`, uint8 [num_slots,
            bytes].

    Attributes:
        layers: by their numbers.
        parts: by the number of a layer, the bytes of a block, or of a slot, that it takes: [start, end).

    Raises:
        MemoryError: there is not so much memory.
    """

    def __init__(
        self,
        layout: CacheLayout,
        num_blocks: int,
        allocate: Callable[[int], DeviceMemory] = ReservedMemory,
        num_slots: int = 0,
    ) -> None:
        if layout.page_groups and num_blocks < 1:
            raise ValueError(f"num_blocks = {num_blocks}: at least one block is expected")
        if layout.bytes_per_state and num_slots < 1:
            raise ValueError(f"num_slots = {num_slots}: at least one slot is expected")
        self.layout, self.num_blocks = layout, num_blocks
        self.parts: dict[int, tuple[int, int]] = {}
        for group in layout.groups:
            start = 0
            for layer in group.layers:
                end = start + sum(self._rounded_bytes(layer))
                self.parts[layer], start = (start, end), end
        block_bytes = max((self.parts[layer][1] for group in layout.page_groups for layer in group.layers), default=0)
        self._memories: list[DeviceMemory] = []
        self.blocks = self._rows(num_blocks, block_bytes, allocate)
        self.slots = self._rows(num_slots, layout.bytes_per_state, allocate)
        carved: dict[int, PagedLayer | StateLayer] = {}
        for number, group in enumerate(layout.groups):
            carved |= {layer: self._carve(layer, number) for layer in group.layers}
        self.layers = tuple(carved[layer] for layer in range(len(layout.layers)))

    def _rows(self, count: int, nbytes: int, allocate: Callable[[int], DeviceMemory]) -> DeviceArray:
        """uint8 [count, nbytes]; None where there is nothing to keep."""
        if not nbytes:
            return None
        self._memories.append(allocate(count * nbytes))
        return self._memories[-1].bytes.reshape(count, nbytes)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block; 0 = no layer has pages."""
        return 0 if self.blocks is None else int(self.blocks.shape[1])

    def _rounded_bytes(self, number: int) -> list[int]:
        """Bytes of what a layer keeps in a block, or in a slot, up to whole cache lines."""
        layer = self.layout.layers[number]
        sizes = (
            [layer.nbytes] if isinstance(layer, StateShape) else [_shape_bytes(one, layer) for one in _arrays(layer)]
        )
        return [-(-size // _LINE) * _LINE for size in sizes]

    def _carve(self, number: int, group: int) -> PagedLayer | StateLayer:
        layer, start = self.layout.layers[number], self.parts[number][0]
        if isinstance(layer, StateShape):
            return StateLayer(self.slots.view("float32")[:, start // 4 : start // 4 + layer.size], group)
        arrays: list[DeviceArray] = []
        # Viewed as another type as a whole: not every device can do that with a part of rows.
        numbers = self.blocks.view(_STORED_AS.get(layer.dtype, layer.dtype))
        for shape, rounded in zip(_arrays(layer), self._rounded_bytes(number), strict=True):
            size, first = _shape_bytes(shape, layer), start // numbers.itemsize
            part = numbers[:, first : first + size // numbers.itemsize]
            arrays.append(part.reshape(self.num_blocks, *shape))
            start += rounded
        return PagedLayer(arrays[0], arrays[1], layer.packed, group)

    def close(self) -> None:
        """Give the memory back to the system; arrays of it that the caller still holds read as zeros."""
        self.layers, self.blocks, self.slots = (), None, None
        for memory in self._memories:
            memory.close()


def _arrays(layer: LayerShape) -> list[tuple[int, ...]]:
    """Shapes of what a layer keeps in a block: keys and values."""
    if (packed := layer.packed) is not None:
        return [(layer.kv_heads, packed.key_bytes), (layer.kv_heads, packed.value_bytes)]
    return [(layer.kv_heads, layer.head_size, PAGE_TOKENS), (layer.kv_heads, PAGE_TOKENS, layer.v_head_size)]


def _shape_bytes(shape: tuple[int, ...], layer: LayerShape) -> int:
    return int(np.prod(shape, dtype=np.int64)) * ITEM_BYTES.get(layer.dtype, 1)
