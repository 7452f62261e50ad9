"""Reading and writing pages of keys and values in NumPy: floats, or scaled integers (`cache_layout.PackedPages`)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..cache_layout import PAGE_TOKENS, SCALE_COLUMNS, PagedLayer
from ..float_bits import read_floats, stored_floats
from .functions import Array, Float64

_HALF = SCALE_COLUMNS // 2


def write_pages(layer: PagedLayer, slots: NDArray[np.int64], keys: Array, values: Array) -> None:
    """Write new keys [T, kv_heads, head_size] and values [T, kv_heads, v_head_size] to their slots."""
    write_keys(layer, slots, keys)
    if layer.values is None:
        return
    blocks, offsets = np.divmod(slots, PAGE_TOKENS)
    if layer.packed is None:
        layer.values[blocks, :, offsets] = stored_floats(values, layer.kind)
        return
    pack = _packed_bytes if layer.packed.bits == 8 else _packed_nibbles
    stored_values, value_scales = _parts(layer)[1]
    integers, scales = pack(values, layer.packed.value_columns)
    stored_values[blocks, :, offsets // 4, :, offsets % 4] = integers
    value_scales[blocks, :, :, offsets] = scales


def write_keys(layer: PagedLayer, slots: NDArray[np.int64], keys: Array) -> None:
    """Write keys [T, kv_heads, head_size] to their slots. Values do not change."""
    blocks, offsets = np.divmod(slots, PAGE_TOKENS)
    if layer.packed is None:
        layer.keys[blocks, :, :, offsets] = stored_floats(keys, layer.kind)
        return
    pack = _packed_bytes if layer.packed.bits == 8 else _packed_nibbles
    stored, stored_scales = _parts(layer)[0]
    integers, scales = pack(keys, layer.packed.key_columns)
    stored[blocks, :, :, offsets] = integers.reshape(*integers.shape[:2], -1, 4)
    stored_scales[blocks, :, :, offsets] = scales


def read_pages(layer: PagedLayer, table: NDArray[Any]) -> tuple[Array, Array]:
    """Return keys [tokens, kv_heads, head_size] and values of the pages in a block table, in order."""
    if layer.packed is None:
        keys = read_floats(layer.keys[table].transpose(0, 3, 1, 2), layer.kind)
        keys = keys.reshape(-1, *keys.shape[2:])
        if layer.values is None:
            return keys, keys
        values = read_floats(layer.values[table].swapaxes(1, 2), layer.kind)
        return keys, values.reshape(-1, *values.shape[2:])
    unpack = _from_bytes if layer.packed.bits == 8 else _from_nibbles
    (stored_keys, key_scales), *others = _parts(layer)
    integers = stored_keys[table].transpose(0, 3, 1, 2, 4)  # [pages, PAGE_TOKENS, heads, columns / 4, 4]
    keys = unpack(integers.reshape(*integers.shape[:3], -1), key_scales[table].transpose(0, 3, 1, 2))
    keys = keys[..., : layer.head_size].reshape(-1, keys.shape[2], layer.head_size)
    if not others:
        return keys, keys
    stored_values, value_scales = others[0]
    integers = stored_values[table].transpose(0, 2, 4, 1, 3)  # [pages, PAGE_TOKENS / 4, 4, heads, columns]
    integers = integers.reshape(len(integers), PAGE_TOKENS, *integers.shape[3:])
    values = unpack(integers, value_scales[table].transpose(0, 3, 1, 2))
    values = values[..., : layer.v_head_size]
    return keys, values.reshape(-1, *values.shape[2:])


def hadamard(x: Array) -> Float64:
    """Multiply the last axis, a power of two, by Sylvester's normalised Hadamard matrix, which is its own inverse."""
    size, step = x.shape[-1], 1
    result: Float64 = x.astype(np.float64) / np.sqrt(size)
    while step < size:
        pairs = result.reshape(*x.shape[:-1], -1, 2, step)
        result = np.stack([pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]], axis=-2)
        result, step = result.reshape(x.shape), 2 * step
    return result


def _parts(layer: PagedLayer) -> list[tuple[Array, Array]]:
    """Return the integers and scales of keys, and of values unless they are the keys, as views of the pages."""
    packed = layer.packed
    assert packed is not None
    dtype = np.int8 if packed.bits == 8 else np.uint8
    found = []
    for pages, columns, groups, axes in (
        (layer.keys, packed.key_columns, packed.key_groups, (-1, PAGE_TOKENS, 4)),
        (layer.values, packed.value_columns, packed.value_groups, (PAGE_TOKENS // 4, -1, 4)),
    ):
        if pages is not None:
            integers, scales = pages[..., : PAGE_TOKENS * columns].view(dtype), pages[..., PAGE_TOKENS * columns :]
            scales = scales.view(np.float16).reshape(*pages.shape[:2], groups, PAGE_TOKENS)
            found.append((integers.reshape(*pages.shape[:2], *axes), scales))
    return found


def _scaled(x: Float64, scale: Float64) -> Float64:
    """Return x / scale, or 0 where the scale is 0 or not finite."""
    usable = (scale > 0) & np.isfinite(scale)
    return np.where(usable, np.nan_to_num(x) / np.where(usable, scale, 1.0), 0.0)


def _scales(largest: Float64) -> NDArray[np.float16]:
    return largest.astype(np.float32).astype(np.float16)


def _packed_bytes(x: Array, columns: int) -> tuple[Array, Array]:
    """Pack [T, heads, size] into int8 [T, heads, columns] and float16 scales [T, heads, 1]."""
    wide = x.astype(np.float64)
    scales = _scales(np.abs(wide).max(axis=-1, keepdims=True) / 127)
    integers = np.zeros((*wide.shape[:-1], columns), np.int8)
    integers[..., : wide.shape[-1]] = np.clip(np.rint(_scaled(wide, scales.astype(np.float64))), -127, 127)
    return integers, scales


def _packed_nibbles(x: Array, columns: int) -> tuple[Array, Array]:
    """Transform and pack [T, heads, size] into uint8 [.., columns = size / 2] and float16 scales [.., size / 32]."""
    groups = hadamard(x).reshape(*x.shape[:-1], -1, SCALE_COLUMNS)
    scales = _scales(np.abs(groups).max(axis=-1) / 7.5)
    scaled = _scaled(groups, scales.astype(np.float64)[..., None])
    nibbles = np.clip(np.rint(scaled + 7.5), 0, 15).astype(np.uint8)
    return (nibbles[..., :_HALF] | nibbles[..., _HALF:] << 4).reshape(*x.shape[:-1], columns), scales


def _from_bytes(integers: Array, scales: Array) -> Float64:
    """Unpack integers [..., columns] with scales [..., 1]."""
    return integers.astype(np.float64) * scales.astype(np.float64)


def _from_nibbles(integers: Array, scales: Array) -> Float64:
    """Unpack bytes [..., columns] with scales [..., groups], and transform the numbers [..., 2 * columns] back."""
    groups = integers.reshape(*integers.shape[:-1], -1, _HALF)
    nibbles = np.concatenate([groups & 15, groups >> 4], axis=-1).astype(np.float64)
    return hadamard(((nibbles - 7.5) * scales.astype(np.float64)[..., None]).reshape(*integers.shape[:-1], -1))
