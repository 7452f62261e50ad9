"""Keys and values in pages: the slow form of `cpu.paged`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..formats import PAGE_TOKENS, PagedLayer
from .attention import attend, causal_mask

Array = NDArray[Any]


def write_kv(layer: PagedLayer, k: Array, v: Array, slots: Array) -> None:
    """Store token t at slot slots[t] = block * PAGE_TOKENS + offset."""
    for token, slot in enumerate(slots):
        block, offset = divmod(int(slot), PAGE_TOKENS)
        layer.keys[block, :, :, offset] = k[token]
        layer.values[block, :, offset] = v[token]


def paged_attention(
    q: Array,
    layer: PagedLayer,
    *,
    query_start: Array,
    context_lengths: Array,
    positions: Array,
    block_tables: Array,
    scale: float | None = None,
    softcap: float = 0.0,
    window: int = -1,
    sinks: Array | None = None,
    smooth_softmax: bool = False,
) -> Array:
    """Attention of flat rows [T, heads, head_size] over paged keys; arguments as in `cpu.paged.eager`."""
    heads = q.shape[1]
    group = heads // layer.kv_heads
    output = np.zeros((len(q), heads, layer.v_head_size), q.dtype)
    for sequence, length in enumerate(context_lengths):
        rows = slice(query_start[sequence], query_start[sequence + 1])
        blocks = block_tables[sequence, : -(-int(length) // PAGE_TOKENS)]
        visible = causal_mask(positions[rows], int(length), window)
        for head in range(heads) if len(positions[rows]) else ():
            output[rows, head] = attend(
                q[rows, head],
                layer.keys[blocks, head // group].swapaxes(1, 2).reshape(-1, layer.head_size)[:length],
                layer.values[blocks, head // group].reshape(-1, layer.v_head_size)[:length],
                visible,
                scale=scale or 1 / math.sqrt(q.shape[2]),
                softcap=softcap,
                sink=float(sinks[head]) if sinks is not None else 0.0 if smooth_softmax else None,
            )
    return output
