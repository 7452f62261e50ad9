"""Depthwise convolution (a separate kernel per channel, as in MobileNet), and the final step of any convolution.

For a depthwise convolution, a plane is first copied to scratch memory with its pads. The columns of each residue modulo
the stride are placed side by side, so that sixteen neighbouring outputs read neighbouring inputs for each tap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from ...checks import Float32, check
from ..jit.arguments import Address, Arguments
from ..jit.dsl import inline
from ..jit.memory import (
    load_first,
    load_first_bytes,
    load_first_signed_bytes,
    load_float32 as load,
    read_float32,
    read_int8,
    read_uint8,
    store_first,
    store_first_bytes,
    store_float32,
    write_float32,
)
from ..jit.native import NativeOp, native_op
from ..jit.variants import once
from ..jit.vector import LANES, every_other, maximum, minimum, multiply_add, splat_float32, to_float32, to_int32
from ..jit.vector_math import rounded
from ..program.bound_program import run_alone
from ..program.calls import Items
from ..program.thread_pool import Threads, fixed_address

_NANOSECONDS_PER_PRODUCT = 0.03
# Kernel sizes and column strides for which specialised code is compiled.
_KNOWN_SIZES, _KNOWN_STEPS = (3, 5), (1, 2)


Limits: TypeAlias = tuple[float, float]
NO_LIMITS: Limits = (-np.inf, np.inf)
_NANOSECONDS_PER_ELEMENT = 0.15


class PlanesArguments(Arguments):
    """Planes of `size` numbers. Plane p has bias number p modulo `channels`, if there are biases."""

    values: Address
    size: int
    bias: Address
    channels: int
    low: float
    high: float


@native_op(PlanesArguments)
def finish_planes(arguments: PlanesArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Add the bias to planes [begin, end) in place and clip them to the limits. NaNs are preserved."""
    size, channels, low, high = arguments.size, arguments.channels, arguments.low, arguments.high
    for plane in range(begin, end):
        addend = read_float32(arguments.bias + 4 * (plane % channels)) if channels > 0 else np.float32(0)
        values = arguments.values + 4 * plane * size
        for first in range(0, size, LANES):
            left = min(size - first, LANES)
            value = load_first(values + 4 * first, left) + addend
            store_first(values + 4 * first, minimum(maximum(value, low), high), left)
    return 0


def finish_channels(
    values: Float32, bias: Float32 | None, limits: Limits = NO_LIMITS, *, threads: Threads | None = None
) -> None:
    """Add the channel's bias [C] to [N * C, elements] in place, and clip the results to the limits.

    Args:
        threads: None = only the calling thread.
    """
    check("values", values, (None, None))
    if bias is not None:
        check("bias", bias, (None,))
        if not len(bias) or len(values) % len(bias):
            raise ValueError(f"{len(values)} planes do not match {len(bias)} channels")
    (planes, size), channels = values.shape, 0 if bias is None else len(bias)
    run_alone(
        finish_planes, Items(factor=planes), values.size * _NANOSECONDS_PER_ELEMENT, threads,
        values=values, size=size, bias=bias, channels=channels, low=limits[0], high=limits[1],
    )  # fmt: skip


class DepthwiseArguments(Arguments):
    """Planes [x_rows, x_columns], a kernel [height, width] and a bias per channel, and result planes [rows, columns].

    `top` and `left` are pads. Results are clipped to [`low`, `high`]. Inputs and results of 8 bits have zero points,
    and there is a factor per channel for the sums.
    """

    x: Address
    weight: Address
    bias: Address
    out: Address
    channels: int
    x_rows: int
    x_columns: int
    height: int
    width: int
    rows: int
    columns: int
    row_stride: int
    column_stride: int
    top: int
    left: int
    low: float
    high: float
    factors: Address = None
    x_zero: float = 0.0
    out_zero: float = 0.0


ItemType: TypeAlias = Literal["float32", "int8", "uint8"]


@once
def spread_plane_of(item_type: ItemType) -> Callable[[Any, int, int, int, int, int, float], None]:
    """Return the helper that spreads a plane as float32 [bands][residues of the column stride][lanes].

    Its arguments are the operator's arguments, the plane's address, the column stride, the numbers of lanes and bands,
    the address of the result, and the number outside the plane. The zero point is subtracted from numbers of 8 bits.
    """
    itemsize = 4 if item_type == "float32" else 1
    loads = {"float32": load_first, "int8": load_first_signed_bytes, "uint8": load_first_bytes}
    reads = {"float32": read_float32, "int8": read_int8, "uint8": read_uint8}
    load_numbers, read_number = loads[item_type], reads[item_type]

    @inline
    def load_floats(arguments: Any, address: int, count: int) -> Any:
        return load_numbers(address, count)

    @inline
    def load_moved_bytes(arguments: Any, address: int, count: int) -> Any:
        return to_float32(to_int32(load_numbers(address, count))) - arguments.x_zero

    @inline
    def read_float(arguments: Any, address: int) -> Any:
        return read_number(address)

    @inline
    def read_moved_byte(arguments: Any, address: int) -> Any:
        return np.float32(read_number(address)) - np.float32(arguments.x_zero)

    is_float = item_type == "float32"
    load_some, read_one = (load_floats, read_float) if is_float else (load_moved_bytes, read_moved_byte)

    @inline
    def spread(arguments: Any, x: int, step: int, lanes: int, bands: int, out: int, fill: float) -> None:
        x_rows, x_columns = arguments.x_rows, arguments.x_columns
        top, left_pad = arguments.top, arguments.left
        outside = splat_float32(fill)
        for band in range(bands):
            source, row_out = band - top, out + 4 * band * step * lanes
            row = x + itemsize * source * x_columns
            for lane in range(0, step * lanes, LANES):
                store_float32(row_out + 4 * lane, outside)
            if source < 0 or source >= x_rows:
                continue
            if step == 1:
                count = min(x_columns, lanes - left_pad)
                for first in range(0, count, LANES):
                    some = min(count - first, LANES)
                    numbers = load_some(arguments, row + itemsize * first, some)
                    store_first(row_out + 4 * (left_pad + first), numbers, some)
            elif step == 2:
                count = min(x_columns, 2 * lanes - left_pad)
                for first in range(0, count, 2 * LANES):
                    some = count - first
                    lower = load_some(arguments, row + itemsize * first, some)
                    upper = load_some(arguments, row + itemsize * (first + LANES), some - LANES)
                    for odd in range(2):
                        column = first + odd + left_pad
                        target = row_out + 4 * (column % 2 * lanes + column // 2)
                        store_first(target, every_other(lower, upper, odd), (some + 1 - odd) // 2)
            else:
                for part in range(step):
                    # The columns lane * step + part - left_pad that are inside the plane.
                    first = max(0, -((part - left_pad) // step))
                    last = min(lanes, (x_columns - 1 - part + left_pad) // step + 1)
                    for lane in range(first, last):
                        number = read_one(arguments, row + itemsize * (lane * step + part - left_pad))
                        write_float32(row_out + 4 * (part * lanes + lane), number)

    return spread


@once
def depthwise_op(known: tuple[int, int, int] | None, item_type: ItemType = "float32") -> NativeOp:
    """Return the operator. Items are planes; plane p uses kernel number p modulo the number of channels.

    Args:
        known: height and width of the kernels and stride along columns, for specialised code; None = any sizes.
        item_type: type of the inputs. If it has 8 bits, so have the results: round(sum * factor) + zero point.
    """
    known_height, known_width, known_step = known or (0, 0, 0)
    itemsize = 4 if item_type == "float32" else 1
    spread = spread_plane_of(item_type)

    @inline
    def finish_floats(arguments: Any, channel: int, out: int, value: Any, left: int) -> None:
        store_first(out, minimum(maximum(value, arguments.low), arguments.high), left)

    @inline
    def finish_bytes(arguments: Any, channel: int, out: int, value: Any, left: int) -> None:
        value = value * read_float32(arguments.factors + 4 * channel)
        value = rounded(minimum(maximum(value, arguments.low), arguments.high))
        store_first_bytes(out, value + arguments.out_zero, left)

    finish = finish_floats if item_type == "float32" else finish_bytes

    def planes(arguments: DepthwiseArguments, context: int, begin: int, end: int, scratch: int) -> int:
        height = known_height if known_height > 0 else arguments.height
        width = known_width if known_width > 0 else arguments.width
        step = known_step if known_step > 0 else arguments.column_stride
        rows, columns, row_stride = arguments.rows, arguments.columns, arguments.row_stride
        lanes, bands = spread_lanes(columns, width, step), (rows - 1) * row_stride + height
        plane_bytes = itemsize * arguments.x_rows * arguments.x_columns
        for plane in range(begin, end):
            channel = plane % arguments.channels
            spread(arguments, arguments.x + plane * plane_bytes, step, lanes, bands, scratch, 0.0)
            bias = splat_float32(read_float32(arguments.bias + 4 * channel))
            weight = arguments.weight + 4 * channel * height * width
            out = arguments.out + itemsize * plane * rows * columns
            for row in range(rows):
                for column in range(0, columns, LANES):
                    value = bias
                    for i in range(height):
                        band = scratch + 4 * (row * row_stride + i) * step * lanes + 4 * column
                        for j in range(width):
                            inputs = load(band + 4 * (j % step * lanes + j // step))
                            value = multiply_add(inputs, read_float32(weight + 4 * (i * width + j)), value)
                    target = out + itemsize * (row * columns + column)
                    finish(arguments, channel, target, value, min(columns - column, LANES))
        return 0

    name = f"depthwise_{item_type}_" + ("any" if known is None else "_".join(map(str, known)))
    return native_op(DepthwiseArguments, name=name)(planes)


@inline
def spread_lanes(columns: int, width: int, step: int) -> Any:
    """Return the number of columns of one residue that whole vectors of outputs read, rounded up to whole vectors."""
    needed = -(-columns // LANES) * LANES + (width - 1) // step
    return -(-needed // LANES) * LANES


def depthwise(
    x: Float32, weight: Float32, bias: Float32, sizes: tuple[int, int], *, strides: tuple[int, int] = (1, 1),
    pads: tuple[int, int] = (0, 0), limits: Limits = NO_LIMITS, threads: Threads | None = None,
) -> Float32:  # fmt: skip
    """Convolve [N * C, rows, columns] with [C, height, width] and [C] to [N * C, *sizes], clipped to the limits.

    Args:
        pads: rows of zeros above and columns of zeros to the left. Everything outside the image counts as 0.
        threads: None = only the calling thread.
    """
    check("x", x, (None, None, None))
    low, high = limits
    return _convolved(
        "float32", np.dtype(np.float32), x, weight, bias, sizes, strides, pads, threads, low=low, high=high
    )


def depthwise_bytes(
    x: NDArray[Any], weight: Float32, bias: Float32, sizes: tuple[int, int], *, x_zero: int, factors: Float32,
    out_zero: int, dtype: np.dtype[Any], strides: tuple[int, int] = (1, 1), pads: tuple[int, int] = (0, 0),
    threads: Threads | None = None,
) -> NDArray[Any]:  # fmt: skip
    """Return round(sums * factors) + out_zero, saturated, for the sums of `depthwise` of x - x_zero.

    Args:
        x: int8 or uint8 [N * C, rows, columns].
        dtype: int8 or uint8, type of the result.
        weight, bias: whole numbers [C, height, width] and [C], of which sums are exact in float32. They and the factors
            are the same in all runs of a recorded program.
        factors: float32 [C].
        pads: rows of x_zero above and columns of x_zero to the left. Everything outside the image counts as x_zero.
    """
    for name, found in (("x", x.dtype), ("the result", dtype)):
        if found not in (np.int8, np.uint8):
            raise ValueError(f"{name} is {found}, expected int8 or uint8")
    check("x", x, (None, None, None), x.dtype)
    check("factors", factors, (len(weight),))
    info, item_type = np.iinfo(dtype), cast(ItemType, x.dtype.name)
    weight, bias, factors = map(fixed_address, (weight, bias, factors))
    return _convolved(
        item_type, dtype, x, weight, bias, sizes, strides, pads, threads, low=float(info.min - out_zero),
        high=float(info.max - out_zero), factors=factors, x_zero=float(x_zero), out_zero=float(out_zero),
    )  # fmt: skip


def _convolved(
    item_type: ItemType, dtype: np.dtype[Any], x: NDArray[Any], weight: Float32, bias: Float32, sizes: tuple[int, int],
    strides: tuple[int, int], pads: tuple[int, int], threads: Threads | None, **finishing: Any,
) -> NDArray[Any]:  # fmt: skip
    channels, height, width = weight.shape
    check("weight", weight, (None, None, None))
    check("bias", bias, (channels,))
    if min(strides) < 1 or min(pads) < 0 or min(sizes) < 1:
        raise ValueError(f"strides {strides}, pads {pads} and sizes {sizes} are out of range")
    if channels < 1 or len(x) % channels or not height * width:
        raise ValueError(f"planes {list(x.shape)} and kernels {list(weight.shape)} do not match")
    out = np.empty((len(x), *sizes), dtype)
    if len(x):
        (rows, columns), (row_stride, step) = sizes, strides
        known = (height, width, step) if height == width and height in _KNOWN_SIZES and step in _KNOWN_STEPS else None
        scratch = 4 * ((rows - 1) * row_stride + height) * step * int(spread_lanes(columns, width, step))
        run_alone(
            depthwise_op(known, item_type), Items(factor=len(x)),
            out.size * height * width * _NANOSECONDS_PER_PRODUCT, threads, scratch=scratch, x=x, weight=weight,
            bias=bias, out=out, channels=channels, x_rows=x.shape[1], x_columns=x.shape[2], height=height, width=width,
            rows=rows, columns=columns, row_stride=row_stride, column_stride=step, top=pads[0], left=pads[1],
            **finishing,
        )  # fmt: skip
    return out
