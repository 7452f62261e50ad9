"""Writing new keys and values into the pages of the cache."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..formats import PagedLayer
from .checks import Float32, check, check_rows
from .jit import Kernel, kernel
from .team import Team, run
from .vector import LANES, load_row, store_row

_INT64 = np.dtype(np.int64)
_NANOSECONDS_PER_ELEMENT = 0.3


def _make(name: str, storage: str) -> Kernel:
    def scatter(source: Any, pages: Any, slots: Any, begin: int, end: int) -> None:
        """Copy the heads of tokens [begin, end) to their slots."""
        block_size = pages.shape[2]
        for token in range(begin, end):
            block, offset = divmod(slots[token], block_size)
            if block < 0 or block >= pages.shape[0]:
                raise IndexError("slot outside the cache")
            for head in range(pages.shape[1]):
                for first in range(0, source.shape[2], LANES):
                    store_row(pages, (block, head, offset, first), load_row(source, (token, head, first)))

    scatter.__name__ = name
    return kernel(f"void(float32[:,:,:], {storage}[:,:,:,::1], int64[::1], int64, int64)")(scatter)


write_float32 = _make("write_float32", "float32")
write_float16 = _make("write_float16", "uint16")


def write_kv(layer: PagedLayer, k: Float32, v: Float32, slots: NDArray[np.int64], *, team: Team | None = None) -> None:
    """Store the keys and values of new tokens; float16 pages round to nearest even.

    Args:
        layer: the pages to write to.
        k: float32 [T, kv_heads, head_size]; v: float32 [T, kv_heads, v_head_size]. Each token's heads must be
            contiguous, so slices of packed QKV will do.
        slots: int64 [T], block * block_size + offset.

    Raises:
        ValueError: a shape or type does not fit.
        IndexError: a slot is outside the layer; tokens before it may have been written.
    """
    check_rows("k", k, (None, layer.kv_heads, layer.head_size))
    check_rows("v", v, (k.shape[0], layer.kv_heads, layer.v_head_size))
    check("slots", slots, (k.shape[0],), _INT64)
    kernel = write_float32 if layer.key_storage is layer.keys else write_float16
    for source, pages in ((k, layer.key_storage), (v, layer.value_storage)):
        run(team, kernel, (source, pages, slots), k.shape[0], work=source.size * _NANOSECONDS_PER_ELEMENT)
