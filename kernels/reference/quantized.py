"""Products and look-ups with block-quantised weights: MatMulNBits and GatherBlockQuantized of com.microsoft."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Float64 = NDArray[np.float64]


def unpack_bits(packed: Array, bits: int) -> Array:
    """Integers from bytes that hold several along the last axis, the lowest bits first."""
    parts = [(packed >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return np.stack(parts, axis=-1).reshape(*packed.shape[:-1], -1)


def dequantize_weight(
    b: Array, scales: Array, zero_points: Array | None = None, *, n: int, k: int, bits: int, block_size: int
) -> Float64:
    """The weight of MatMulNBits as float64 [n, k]; arguments as in `matmul_nbits`."""
    blocks = -(-k // block_size)
    integers = unpack_bits(b.reshape(n, blocks, -1), bits).astype(np.float64)
    points: Array = np.full((n, blocks), 2.0 ** (bits - 1))
    if zero_points is not None and zero_points.dtype == np.uint8:
        points = unpack_bits(zero_points.reshape(n, -1), bits)[:, :blocks].astype(np.float64)
    elif zero_points is not None:
        points = zero_points.reshape(n, blocks).astype(np.float64)
    weight = (integers - points[:, :, None]) * scales.reshape(n, blocks, 1).astype(np.float64)
    return weight.reshape(n, -1)[:, :k]


def quantize_activations(a: Array, block_size: int) -> Float64:
    """Activations rounded to 8 bits per block of the last axis, as values: max |a| / 127 per step, ties to even.

    A block with an infinity or a NaN is NaN throughout.
    """
    k = a.shape[-1]
    padding = [(0, 0)] * (a.ndim - 1) + [(0, -k % block_size)]
    blocks = np.pad(a.astype(np.float64), padding).reshape(*a.shape[:-1], -1, block_size)
    largest = np.abs(blocks).max(axis=-1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        step = np.where(np.isfinite(largest), largest / 127, np.nan)
        rounded = np.where(largest == 0, 0.0, np.rint(blocks * (127 / largest)) * step)
    return rounded.reshape(*a.shape[:-1], -1)[..., :k]


def matmul_nbits(
    a: Array,
    b: Array,
    scales: Array,
    zero_points: Array | None = None,
    bias: Array | None = None,
    *,
    n: int,
    k: int,
    bits: int,
    block_size: int,
    accuracy_level: int = 0,
) -> Array:
    """com.microsoft::MatMulNBits.

    Args:
        a: [..., k]. b: uint8 [n, blocks, block_size * bits / 8]. scales: [n, blocks].
        zero_points: uint8 packed [n, ceil(blocks * bits / 8)], or floats [n, blocks]. bias: [n].
        accuracy_level: 4 rounds the activations to 8 bits per block; other levels keep them exact.
    """
    weight = dequantize_weight(b, scales, zero_points, n=n, k=k, bits=bits, block_size=block_size)
    activations = quantize_activations(a, block_size) if accuracy_level == 4 else a.astype(np.float64)
    with np.errstate(invalid="ignore"):
        result = activations @ weight.T
    if bias is not None:
        result = result + bias
    return result.astype(a.dtype)


def gather_block_quantized(
    data: Array,
    indices: Array,
    scales: Array,
    zero_points: Array | None = None,
    *,
    bits: int = 4,
    block_size: int = 128,
    gather_axis: int = 0,
    quantize_axis: int = 1,
) -> Array:
    """com.microsoft::GatherBlockQuantized.

    Args:
        data: uint8 (several elements in a byte along the last axis, default zero point 2 ** (bits - 1)), or one
            element per entry (ml_dtypes int4 or uint4, default zero point 0).
        indices: integers; those outside the gathered axis give zeros.
        scales, zero_points: one per block of quantize_axis; zero points are stored as the data are.
    """
    packed = data.dtype == np.uint8
    integers = (unpack_bits(data, bits) if packed else data).astype(np.float64)
    points: Array = np.asarray(2.0 ** (bits - 1) if packed else 0.0)
    if zero_points is not None:
        points = (unpack_bits(zero_points, bits) if packed else zero_points).astype(np.float64)
        points = _per_element(points, quantize_axis, block_size, integers.shape)
    values = (integers - points) * _per_element(scales, quantize_axis, block_size, integers.shape)
    size = integers.shape[gather_axis]
    wrapped = np.where(indices < 0, indices + size, indices)
    known = (wrapped >= 0) & (wrapped < size)
    gathered = np.take(values, np.where(known, wrapped, 0), axis=gather_axis)
    axis = gather_axis % integers.ndim
    mask = known.reshape((1,) * axis + known.shape + (1,) * (integers.ndim - axis - 1))
    return np.where(mask, gathered, 0.0).astype(scales.dtype)


def _per_element(per_block: Array, axis: int, block_size: int, shape: tuple[int, ...]) -> Float64:
    """Repeat each block's number over its elements."""
    repeated = np.repeat(per_block.astype(np.float64), block_size, axis=axis)
    return np.take(repeated, np.arange(shape[axis]), axis=axis)
