"""The memory behind the blocks: reserved once, touched on demand, never moved."""

from __future__ import annotations

import contextlib
import mmap
import platform
import sys
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .groups import ITEM_BYTES, CacheGroup, CacheLayout

CacheArray: TypeAlias = NDArray[np.float32] | NDArray[np.float16]

_LINE, _HUGE_PAGE = 64, 1 << 21
# Python knows MAP_NORESERVE from 3.13 on; before, its value on the common Linux machines.
_LINUX_MAP_NORESERVE = 0x4000
_COMMON_MACHINES = ("x86_64", "aarch64", "i686", "armv7l", "riscv64")


@dataclass(frozen=True)
class LayerCache:
    """The paged keys and values of one layer.

    Attributes:
        keys: [num_blocks, kv_heads, head_size, block_size], contiguous block by block.
        values: [num_blocks, kv_heads, block_size, v_head_size], likewise.
        window: newest tokens that attention looks at; None = all.
    """

    keys: CacheArray
    values: CacheArray
    window: int | None


class PagedStorage:
    """Keys and values of every paged layer.

    What a block holds of all layers lies together: [num_blocks][layers: keys, values]. Address space for all blocks is
    reserved at once and the system adds a page, a huge one if it can, when it is first written: so memory grows with
    the blocks in use, few huge pages serve all layers of a sequence, and no array ever moves. Where such a reservation
    is not available (off Linux), the arrays are ordinary zeroed memory: most systems fill it on demand as well, and
    close() frees it once no array of it is held.

    Args:
        layout: what each layer keeps; fixed_state groups have no part in it.
        num_blocks: blocks to reserve, at least 1.

    Raises:
        MemoryError: the address space cannot be reserved.
    """

    def __init__(self, layout: CacheLayout, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks = {num_blocks}: at least one block is expected")
        self.layout = layout
        self.num_blocks = num_blocks
        groups = [group for group in layout.groups if group.kind == "paged"]
        block_bytes = sum(_part_bytes(part, group) for group in groups for part in self._parts(group))
        self._map = _reserve(num_blocks * block_bytes)
        memory = _aligned(num_blocks * block_bytes, self._map)
        self._blocks: NDArray[np.uint8] = memory.reshape(num_blocks, block_bytes)
        self._layers: tuple[LayerCache | None, ...] | None = self._carve(groups)

    def _parts(self, group: CacheGroup) -> list[tuple[int, ...]]:
        """Shapes of what the group keeps in a block: keys and values of each entry in turn."""
        heads, tokens = group.kv_heads, self.layout.block_size
        return [(heads, group.head_size, tokens), (heads, tokens, group.v_head_size)] * len(group.layers)

    def _carve(self, groups: list[CacheGroup]) -> tuple[LayerCache | None, ...]:
        layers: list[LayerCache | None] = [None] * self.layout.num_layers
        start = 0
        for group in groups:
            arrays: list[CacheArray] = []
            for shape in self._parts(group):
                part = self._blocks[:, start : start + _shape_bytes(shape, group)]
                arrays.append(part.view(group.dtype).reshape(self.num_blocks, *shape))
                start += _part_bytes(shape, group)
            for entry, layer in enumerate(group.layers):
                layers[layer] = LayerCache(arrays[2 * entry], arrays[2 * entry + 1], group.window)
            for layer, owner in group.shared_layers:
                layers[layer] = layers[owner]
        return tuple(layers)

    @property
    def layers(self) -> tuple[LayerCache | None, ...]:
        """By layer number; None where a layer keeps no keys and values.

        Raises:
            ValueError: the storage is closed.
        """
        if self._layers is None:
            raise ValueError("the cache storage is closed")
        return self._layers

    def copy_block(self, source: int, destination: int) -> None:
        """Copy a block's keys and values in every layer.

        Raises:
            ValueError: a block that does not exist, or the storage is closed.
        """
        if self._layers is None:
            raise ValueError("the cache storage is closed")
        for block in (source, destination):
            if not 0 <= block < self.num_blocks:
                raise ValueError(f"block {block} is not in the storage: its blocks are 0 to {self.num_blocks - 1}")
        self._blocks[destination] = self._blocks[source]

    def close(self) -> None:
        """Give the memory back to the system.

        Reserved pages go even while the caller holds arrays of them; those then read as zeros.
        """
        self._layers = None
        self._blocks = np.empty((0, 0), np.uint8)
        mapping, self._map = self._map, None
        if mapping is None:
            return
        try:
            mapping.close()
        except BufferError:
            # The caller still holds an array: return the pages now, the addresses when the array goes.
            mapping.madvise(mmap.MADV_DONTNEED)


def _shape_bytes(shape: tuple[int, ...], group: CacheGroup) -> int:
    return int(np.prod(shape, dtype=np.int64)) * ITEM_BYTES[group.dtype]


def _part_bytes(part: tuple[int, ...], group: CacheGroup) -> int:
    """Bytes of a part, up to whole cache lines."""
    return -(-_shape_bytes(part, group) // _LINE) * _LINE


def _aligned(size: int, mapping: mmap.mmap | None) -> NDArray[np.uint8]:
    """So many zeros: of the mapping from a huge page on, or of ordinary memory from a cache line on."""
    memory, step = (
        (np.zeros(size + _LINE, np.uint8), _LINE) if mapping is None else (np.frombuffer(mapping, np.uint8), _HUGE_PAGE)
    )
    first = -memory.ctypes.data % step
    return memory[first : first + size]


def _reserve(size: int) -> mmap.mmap | None:
    """Private anonymous address space that takes no memory until written; None where the system has no such thing."""
    flags = _reserve_flags()
    if flags is None or size == 0:
        return None
    try:
        mapping = mmap.mmap(-1, size + _HUGE_PAGE, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"cannot reserve {size} bytes of address space for the KV cache: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without huge pages: ordinary ones serve as well
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def _reserve_flags() -> int | None:
    if not sys.platform.startswith("linux"):
        return None
    known: Any = getattr(mmap, "MAP_NORESERVE", None)
    if known is None:
        known = _LINUX_MAP_NORESERVE if platform.machine() in _COMMON_MACHINES else 0
    return mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | int(known)
