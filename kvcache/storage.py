"""The layout of a decoder's cache in blocks, and the memory of the blocks.

The memory is reserved once, filled on demand and never moved.
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

# The states of a step: its initial state, the state after it, and the state after the last full block.
STATES_PER_SEQUENCE = 3
# Expected number of states that are kept for each sequence, from which later requests continue, and the maximum number
# of slots.
_SNAPSHOTS_PER_SEQUENCE, _MOST_SLOTS = 24, 4096
ITEM_BYTES = {"float16": 2, "float32": 4, "bfloat16": 2, "float8": 1}
PACKED_BITS = {"int8": 8, "int4": 4}
# The dtypes of page arrays that are stored under another dtype.
_STORED_AS = {**FLOAT_BITS, **dict.fromkeys(PACKED_BITS, "uint8")}
_LINE = 64


@dataclass(frozen=True)
class LayerShape:
    """The data that an attention layer caches per token.

    Attributes:
        kv_heads: number of heads of keys and values; latent attention (MLA) has one.
        head_size: elements per key head; for latent attention the whole latent row.
        v_head_size: elements per value head; 0 if a key is also the value of its token (latent attention).
        dtype: "float16" or "float32"; "bfloat16" or "float8", whose bits are stored as integers; or "int8" or "int4",
            stored with scales (`PackedPages`).
    """

    kv_heads: int
    head_size: int
    v_head_size: int
    dtype: str = "float32"

    @property
    def packed(self) -> PackedPages | None:
        """The layout of small integers in a page; None if the layer stores floats.

        Raises:
            FormatError: heads of these sizes cannot be packed.
        """
        bits = PACKED_BITS.get(self.dtype)
        return None if bits is None else PackedPages(bits, self.head_size, self.v_head_size or self.head_size)

    @property
    def bytes_per_token(self) -> int:
        """The number of cache bytes per token, including scales."""
        if (packed := self.packed) is not None:
            return self.kv_heads * (packed.key_bytes + packed.value_bytes * bool(self.v_head_size)) // PAGE_TOKENS
        return self.kv_heads * (self.head_size + self.v_head_size) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class StateShape:
    """The state that a recurrent layer stores per sequence.

    Attributes:
        size: number of float32 elements in the state.
    """

    size: int

    @property
    def bytes_per_token(self) -> int:
        """The number of cache bytes per token, which is 0."""
        return 0

    @property
    def nbytes(self) -> int:
        """The number of bytes in a state."""
        return 4 * self.size


@dataclass(frozen=True)
class CacheLayout:
    """The shapes of all layers' caches, and the groups of layers that share blocks.

    Attributes:
        layers: the layers' shapes in the order of the layer numbers.
        block_size: tokens per block.
        groups: groups that contain every layer once, with recurrent layers in the last group. Default: one group with
            attention.
    """

    layers: tuple[LayerShape | StateShape, ...]
    block_size: int
    groups: tuple[CacheGroup, ...] = ()

    def __post_init__(self) -> None:
        groups = self.groups or (CacheGroup(tuple(range(len(self.layers)))),)
        if sorted(layer for group in groups for layer in group.layers) != list(range(len(self.layers))):
            raise ValueError(f"each of the {len(self.layers)} layers must belong to exactly one group, not {groups}")
        if any(
            isinstance(self.layers[layer], StateShape) != (group.kind is GroupKind.STATE)
            for group in groups
            for layer in group.layers
        ) or any(group.kind is GroupKind.STATE for group in groups[:-1]):
            raise ValueError(f"the last group must contain exactly the layers with states, not {groups}")
        object.__setattr__(self, "groups", groups)

    @property
    def bytes_per_token(self) -> int:
        """The number of cache bytes per token over all layers."""
        return sum(layer.bytes_per_token for layer in self.layers)

    @property
    def bytes_per_block(self) -> int:
        """The number of bytes in a page, which is large enough for a block of any group: at least one cache line."""
        return max(_LINE, self.block_size * max(map(self.group_bytes_per_token, self.page_groups), default=0))

    @property
    def page_groups(self) -> tuple[CacheGroup, ...]:
        """The groups whose layers store rows in pages."""
        return self.groups[:-1] if self.groups[-1].kind is GroupKind.STATE else self.groups

    @property
    def bytes_per_state(self) -> int:
        """The number of bytes in a slot, which holds the states of all recurrent layers; 0 if there are none."""
        return sum(-(-layer.nbytes // _LINE) * _LINE for layer in self.layers if isinstance(layer, StateShape))

    def group_bytes_per_token(self, group: CacheGroup) -> int:
        """Return the number of cache bytes per token for a group's layers."""
        return sum(self.layers[layer].bytes_per_token for layer in group.layers)

    def most_blocks(self, tokens: int, step_tokens: int) -> list[int]:
        """Return the maximum number of blocks of a sequence, per group with pages; see CacheGroup.most_blocks."""
        return [group.most_blocks(tokens, step_tokens, self.block_size) for group in self.page_groups]

    def tokens_within(self, num_blocks: int, step_tokens: int, most: int) -> int:
        """Return the maximum length of a sequence in `num_blocks` blocks, at most `most` tokens; 0 if none fits."""
        size = self.block_size
        # Find the first number of blocks per table that does not fit; a sequence's blocks increase with that number.
        count = bisect_right(
            range(1, -(-most // size) + 1), num_blocks, key=lambda each: sum(self.most_blocks(each * size, step_tokens))
        )
        return min(count * size, most)

    @property
    def kinds(self) -> list[CacheGroup]:
        """The groups, after merging groups of the same kind and window."""
        layers: dict[tuple[GroupKind, int], tuple[int, ...]] = {}
        for group in self.groups:
            kind = group.kind, group.window
            layers[kind] = tuple(sorted((*layers.get(kind, ()), *group.layers)))
        return [CacheGroup(numbers, *kind) for kind, numbers in layers.items()]

    def kind_bytes(self, kind: CacheGroup, tokens: int, step_tokens: int) -> int:
        """Return the maximum number of bytes that a sequence of `tokens` tokens uses in all groups of a kind."""
        if kind.kind is GroupKind.STATE:
            return STATES_PER_SEQUENCE * self.bytes_per_state
        same = [group for group in self.groups if (group.kind, group.window) == (kind.kind, kind.window)]
        return len(same) * kind.most_blocks(tokens, step_tokens, self.block_size) * self.bytes_per_block

    def sequence_bytes(self, tokens: int, step_tokens: int) -> int:
        """Return the maximum number of bytes that a sequence of `tokens` tokens uses."""
        return sum(self.kind_bytes(kind, tokens, step_tokens) for kind in self.kinds)


def grouped_layout(
    layers: Sequence[LayerShape | StateShape], kinds: Sequence[tuple[GroupKind, int]], block_size: int
) -> CacheLayout:
    """Return the layout of layers with the given kinds and windows (0 = all); see `groups.plan_groups`."""
    groups = plan_groups([layer.bytes_per_token for layer in layers], kinds)
    return CacheLayout(tuple(layers), block_size, groups)


def blocks_that_fit(layout: CacheLayout, num_bytes: int) -> int:
    """Return the number of whole blocks that fit into `num_bytes` bytes."""
    return max(num_bytes, 0) // layout.bytes_per_block


def blocks_and_slots(layout: CacheLayout, num_bytes: int, context: int, step_tokens: int) -> tuple[int, int]:
    """Divide memory between blocks and slots of states; return the number of each.

    The memory is divided as sequences of the whole context with their snapshots need it. One such sequence always fits.

    Args:
        num_bytes: memory of the cache, at least that of one sequence.
        context: number of tokens of the longest sequence.
        step_tokens: maximum number of tokens per step.
    """
    state = layout.bytes_per_state
    if not state:
        return blocks_that_fit(layout, num_bytes), 0
    own = STATES_PER_SEQUENCE * state
    pages = layout.sequence_bytes(context, step_tokens) - own
    expected = own + _SNAPSHOTS_PER_SEQUENCE * state
    share = max(own, min(num_bytes * expected // (expected + pages), num_bytes - pages))
    slots = min(share // state, _MOST_SLOTS)
    return blocks_that_fit(layout, num_bytes - slots * state), slots


class PagedStorage:
    """The keys and values of every paged layer, and the states of every recurrent layer.

    The parts of a block that belong to the layers of its group are contiguous: [num_blocks][layers: keys, values].
    Memory that is filled on demand therefore grows with the number of blocks in use, and a few huge pages serve all
    layers of a sequence. Every group uses the same memory; only the tables that hold a block record its group. A slot
    holds the states of all recurrent layers.

    Args:
        layout: the shapes and groups of the layers.
        num_blocks: number of blocks to reserve, at least 1; the attribute `blocks` is their memory, uint8
            [num_blocks, bytes].
        allocate: a device's allocator (see `genai.kernels.device.Executor.allocate`).
        num_slots: number of slots to reserve, at least 1 if there are states; the attribute `slots` is their memory,
            uint8 [num_slots, bytes].

    Attributes:
        layers: the arrays of each layer, by layer number.
        parts: the bytes [start, end) that a layer uses in a block or slot, by layer number.

    Raises:
        MemoryError: there is not enough memory.
    """

    def __init__(
        self,
        layout: CacheLayout,
        num_blocks: int,
        allocate: Callable[[int], DeviceMemory] = ReservedMemory,
        num_slots: int = 0,
    ) -> None:
        if layout.page_groups and num_blocks < 1:
            raise ValueError(f"num_blocks = {num_blocks}: the storage needs at least one block")
        if layout.bytes_per_state and num_slots < 1:
            raise ValueError(f"num_slots = {num_slots}: the storage needs at least one slot")
        self.layout, self.num_blocks = layout, num_blocks
        self.parts: dict[int, tuple[int, int]] = {}
        for group in layout.groups:
            start = 0
            for layer in group.layers:
                end = start + sum(self._rounded_bytes(layer))
                self.parts[layer], start = (start, end), end
        ends = [self.parts[layer][1] for group in layout.page_groups for layer in group.layers]
        block_bytes = max([_LINE, *ends]) if layout.page_groups else 0  # a model without layers has blocks, too
        self._memories: list[DeviceMemory] = []
        self.blocks = self._rows(num_blocks, block_bytes, allocate)
        self.slots = self._rows(num_slots, layout.bytes_per_state, allocate)
        carved: dict[int, PagedLayer | StateLayer] = {}
        for number, group in enumerate(layout.groups):
            carved |= {layer: self._carve(layer, number) for layer in group.layers}
        self.layers = tuple(carved[layer] for layer in range(len(layout.layers)))

    def _rows(self, count: int, nbytes: int, allocate: Callable[[int], DeviceMemory]) -> DeviceArray:
        """Return an array uint8 [count, nbytes]; None if `nbytes` is 0."""
        if not nbytes:
            return None
        self._memories.append(allocate(count * nbytes))
        return self._memories[-1].bytes.reshape(count, nbytes)

    @property
    def block_bytes(self) -> int:
        """The number of bytes in a block; 0 if no layer has pages."""
        return 0 if self.blocks is None else int(self.blocks.shape[1])

    def _rounded_bytes(self, number: int) -> list[int]:
        """Return the sizes of a layer's arrays in a block or slot, rounded up to whole cache lines."""
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
        # The memory is viewed as another dtype as a whole, because some devices cannot view a part of each row.
        numbers = self.blocks.view(_STORED_AS.get(layer.dtype, layer.dtype))
        for shape, rounded in zip(_arrays(layer), self._rounded_bytes(number), strict=True):
            size, first = _shape_bytes(shape, layer), start // numbers.itemsize
            part = numbers[:, first : first + size // numbers.itemsize]
            arrays.append(part.reshape(self.num_blocks, *shape))
            start += rounded
        return PagedLayer(arrays[0], arrays[1] if len(arrays) > 1 else None, layer.packed, group)

    def close(self) -> None:
        """Return the memory to the system. Arrays of this memory that the caller still holds then read as zeros."""
        self.layers, self.blocks, self.slots = (), None, None
        for memory in self._memories:
            memory.close()


def _arrays(layer: LayerShape) -> list[tuple[int, ...]]:
    """Return the shapes of a layer's keys in one block, and of its values unless they are the keys."""
    shapes: list[tuple[int, ...]]
    if (packed := layer.packed) is not None:
        shapes = [(layer.kv_heads, packed.key_bytes), (layer.kv_heads, packed.value_bytes)]
    else:
        shapes = [(layer.kv_heads, layer.head_size, PAGE_TOKENS), (layer.kv_heads, PAGE_TOKENS, layer.v_head_size)]
    return shapes if layer.v_head_size else shapes[:1]


def _shape_bytes(shape: tuple[int, ...], layer: LayerShape) -> int:
    return int(np.prod(shape, dtype=np.int64)) * ITEM_BYTES.get(layer.dtype, 1)
