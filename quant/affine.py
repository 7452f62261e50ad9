"""Uniform quantisation per tensor or per channel: value = (integer - zero point) * scale.

The definition is that of ONNX's QuantizeLinear and DequantizeLinear. Scale and zero point are derived from a range
[low, high] in the usual way (Jacob et al. 2018, arXiv:1712.05877): the range is widened to include 0, so that 0 is
exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from genai.kernels.weights import QuantizationError

# Below this limit, a float32 scale loses precision, and 1 / scale overflows.
_LEAST_SCALE = float(np.finfo(np.float32).tiny)
_CHUNK_FLOATS = 1 << 20


@dataclass(frozen=True)
class IntegerRange:
    """A range of quantised integers, including both ends."""

    low: int
    high: int


@dataclass(frozen=True)
class AffineParameters:
    """The scales and zero points of a tensor.

    Attributes:
        scale: float32, [] for the whole tensor or [channels].
        zero_point: int32, with the same shape as scale.
    """

    scale: NDArray[np.float32]
    zero_point: NDArray[np.int32]


def integer_range(bits: int, *, signed: bool, symmetric: bool = False, reduce_range: bool = False) -> IntegerRange:
    """Return the range of integers to use for an integer type.

    Args:
        bits: 4, 8 or 16.
        signed: True for signed integers.
        symmetric: True to exclude the lowest signed integer, so that the range is symmetric around 0. Ignored with 4
            bits, which have only 16 values.
        reduce_range: True to use one bit less, for instructions that saturate sums of two 8-bit products.
    """
    half = 1 << (bits - 1)
    if reduce_range:
        quarter = half // 2
        if not signed:
            return IntegerRange(0, half - 1)
        return IntegerRange(-quarter, quarter if bits > 4 else quarter - 1)
    if not signed:
        return IntegerRange(0, 2 * half - 1)
    return IntegerRange(-half + (symmetric and bits > 4), half - 1)


def affine_parameters(
    low: NDArray[Any], high: NDArray[Any], integers: IntegerRange, *, symmetric: bool, least_range: float = 0.0
) -> AffineParameters:
    """Return scales and zero points for ranges.

    Args:
        low, high: [] or [channels], finite.
        integers: the range of integers.
        symmetric: True to widen ranges to the same magnitude on both sides of 0.
        least_range: minimum width of a range.

    Raises:
        QuantizationError: a range is not finite, or its ends are in the wrong order.
    """
    lowest, highest = np.asarray(low, np.float64), np.asarray(high, np.float64)
    if not np.all(np.isfinite(lowest) & np.isfinite(highest)) or np.any(lowest > highest):
        raise QuantizationError(f"the range {low} to {high} is not a finite, ascending range")
    lowest, highest = np.minimum(lowest, 0), np.maximum(highest, 0)
    highest = np.maximum(highest, lowest + least_range)
    if symmetric:
        highest = np.maximum(-lowest, highest)
        lowest = -highest
    scale = (highest - lowest) / (integers.high - integers.low)
    empty = scale < _LEAST_SCALE  # every value is (almost) 0, so any scale works
    scale = np.where(empty, 1.0, scale)
    if symmetric:
        points = np.full(scale.shape, np.rint((integers.low + integers.high) / 2))
    else:
        points = np.rint(integers.low - lowest / scale)
    points = np.where(empty, np.clip(0, integers.low, integers.high), points)
    return AffineParameters(scale.astype(np.float32), points.astype(np.int32))


def snapped_parameters(
    low: float, high: float, integers: IntegerRange, *, least_range: float = 0.0
) -> AffineParameters:
    """Return parameters with the zero point at the lowest integer if no value is negative, otherwise in the middle."""
    if min(low, 0.0) >= 0.0:
        return affine_parameters(np.asarray(0.0), np.asarray(high), integers, symmetric=False, least_range=least_range)
    middle = (integers.low + integers.high + 1) // 2
    reach = max(-low / (middle - integers.low), max(high, 0.0) / (integers.high - middle))
    scale = max(reach, least_range / (integers.high - integers.low))
    if scale < _LEAST_SCALE:
        scale = 1.0
    return AffineParameters(np.asarray(scale, np.float32), np.asarray(middle, np.int32))


def quantize_affine(
    values: NDArray[Any],
    parameters: AffineParameters,
    integers: IntegerRange,
    axis: int | None = None,
    dtype: Any = np.int32,
) -> NDArray[Any]:
    """Return round(value / scale) + zero point, with halves rounded to even, saturated.

    Args:
        values: an array of any float type; converted to float32 in parts.
        parameters: scales and zero points.
        integers: the range of integers.
        axis: axis of the channels, if there are several scales.
        dtype: dtype of the result; must represent the integers.

    Raises:
        QuantizationError: a value is NaN or infinite; the message contains its index.
    """
    shape, rows = values.shape, np.atleast_1d(values)
    scale, point = (along(one, rows.ndim, axis) for one in (parameters.scale, parameters.zero_point))
    by_row = scale.ndim > 0 and scale.shape[0] > 1
    result = np.empty(rows.shape, dtype)
    step = max(1, _CHUNK_FLOATS // max(1, rows[0].size if len(rows) else 1))
    for first in range(0, len(rows), step):
        part = slice(first, first + step)
        own = part if by_row else slice(None)
        wide = rows[part].astype(np.float32)
        if not np.all(np.isfinite(wide)):
            index = np.argwhere(~np.isfinite(wide))[0] + [first, *[0] * (wide.ndim - 1)]
            raise QuantizationError(f"the value at {index.tolist()} is {rows[tuple(index)]}, expected a finite number")
        wide /= scale[own] if scale.ndim else scale
        np.rint(wide, out=wide)
        wide += point[own] if point.ndim else point
        result[part] = np.clip(wide, integers.low, integers.high, out=wide).astype(np.int32)
    return result.reshape(shape)


def dequantize_affine(
    steps: NDArray[Any], parameters: AffineParameters, axis: int | None = None
) -> NDArray[np.float32]:
    """Return (integer - zero point) * scale."""
    scale, point = along(parameters.scale, steps.ndim, axis), along(parameters.zero_point, steps.ndim, axis)
    result: NDArray[np.float32] = (steps.astype(np.int32) - point).astype(np.float32) * scale
    return result


def along(parameter: NDArray[Any], rank: int, axis: int | None) -> NDArray[Any]:
    """Reshape parameters, one per index of an axis, to broadcast to arrays of this rank; a scalar is unchanged."""
    if parameter.ndim == 0:
        return parameter
    if axis is None:
        raise QuantizationError(f"{parameter.size} scales were given without a channel axis")
    return parameter.reshape([-1 if i == axis % rank else 1 for i in range(rank)])


def channel_ranges(values: NDArray[Any], axis: int | None) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the minimum and maximum values: [] for the whole array, or [channels] for an axis.

    Raises:
        QuantizationError: the array is empty.
    """
    if not values.size:
        raise QuantizationError(f"an array of shape {list(values.shape)} has no values")
    over = None if axis is None else tuple(i for i in range(values.ndim) if i != axis % values.ndim)
    return np.asarray(values.min(axis=over), np.float32), np.asarray(values.max(axis=over), np.float32)


def bias_steps(bias: NDArray[Any], scale: NDArray[Any]) -> NDArray[np.int32]:
    """Convert a bias to int32 at the scales of the matmul that it is added to, saturated.

    Args:
        bias: [channels].
        scale: [] or [channels].
    """
    steps = np.rint(np.asarray(bias, np.float64) / np.asarray(scale, np.float64))
    limits = np.iinfo(np.int32)
    return np.clip(steps, limits.min, limits.max).astype(np.int32)


def widened_for_bias(weight_scale: NDArray[np.float32], x_scale: float, bias: NDArray[Any]) -> NDArray[np.float32]:
    """Return weight scales, enlarged where a bias at x_scale * weight_scale would not fit 31 bits.

    Args:
        weight_scale: [] or [channels].
        x_scale: scale of the activations.
        bias: [channels].
    """
    magnitude = np.abs(np.asarray(bias, np.float64))
    needed = magnitude / (np.iinfo(np.int32).max * max(float(x_scale), _LEAST_SCALE))
    least = needed if weight_scale.ndim else needed.max(initial=0)
    return np.maximum(weight_scale.astype(np.float64), least).astype(np.float32)
