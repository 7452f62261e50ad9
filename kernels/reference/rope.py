"""Rotary position embedding, as com.microsoft::RotaryEmbedding and as GroupQueryAttention applies it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def rotate(x: Array, positions: Array, cos_cache: Array, sin_cache: Array, interleaved: bool = False) -> Array:
    """Rotate the first 2 * cos_cache.shape[1] elements of the last axis.

    Args:
        x: [batch, sequence, heads, head_size]. positions: integers [batch, sequence].
        cos_cache, sin_cache: [max_positions, rotary_dim / 2].
        interleaved: pairs are neighbours instead of elements half a rotary_dim apart.
    """
    half = cos_cache.shape[1]
    cosine = cos_cache.astype(np.float64)[positions][:, :, None, :]
    sine = sin_cache.astype(np.float64)[positions][:, :, None, :]
    result = x.astype(np.float64)
    pairs = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(0, half), slice(half, 2 * half))
    first, second = x[..., pairs[0]].astype(np.float64), x[..., pairs[1]].astype(np.float64)
    result[..., pairs[0]] = first * cosine - second * sine
    result[..., pairs[1]] = second * cosine + first * sine
    return result.astype(x.dtype)


def rotary_embedding(
    x: Array,
    position_ids: Array,
    cos_cache: Array,
    sin_cache: Array,
    *,
    interleaved: bool = False,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
    scale: float = 1.0,
) -> Array:
    """com.microsoft::RotaryEmbedding.

    Args:
        x: [batch, sequence, hidden], or [batch, heads, sequence, head_size].
        position_ids: [1] (the first token's position, for all sequences) or [batch, sequence].
        num_heads: heads of a 3-D input whose rotary dimension is less than its head size; 0 = found from the caches.
        rotary_embedding_dim: 0, or twice the width of the caches.
        scale: factor on the result.
    """
    if rotary_embedding_dim not in (0, 2 * cos_cache.shape[1]):
        raise ValueError(
            f"rotary_embedding_dim is {rotary_embedding_dim}, the caches have {cos_cache.shape[1]} columns"
        )
    if x.ndim == 4:
        heads_last = np.swapaxes(x, 1, 2)
    else:
        heads = num_heads or x.shape[2] // (2 * cos_cache.shape[1])
        heads_last = x.reshape(*x.shape[:2], heads, -1)
    batch, length = heads_last.shape[:2]
    if position_ids.size == 1:
        position_ids = np.broadcast_to(position_ids.reshape(1, 1) + np.arange(length), (batch, length))
    result = (rotate(heads_last, position_ids, cos_cache, sin_cache, interleaved) * scale).astype(x.dtype)
    return np.swapaxes(result, 1, 2) if x.ndim == 4 else result.reshape(x.shape)
