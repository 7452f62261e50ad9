"""Sums of overlapping windows, as in a transposed convolution: each window is added to an image at its position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from ...checks import Float32, check
from ..jit.arguments import Address, Arguments, Binding
from ..jit.memory import (
    load_float32,
    load_within,
    read_float32,
    read_int64,
    store,
    store_float32,
    write_float32,
)  # fmt: skip
from ..jit.native import native_op
from ..jit.vector import LANES, interleaved, splat_float32
from ..program.bound_program import NodeProgram, first_element
from ..program.calls import Call, Items
from ..program.thread_pool import Threads
from .gemm.windows import Windows

_NANOSECONDS_PER_TAP = 0.1


class OverlapArguments(Arguments):
    """Planes of windows [taps][positions], and planes of results [rows][columns].

    Result row r adds elements in the rows of positions `row_places`[`row_ends`[r] : `row_ends`[r + 1]]. Columns with
    the remainder c modulo `step` add the taps `column_ends`[c] to `column_ends`[c + 1]: `column_places` is the distance
    of a tap's elements, and `column_firsts` is the position from which the first of these columns reads. `width` is the
    number of positions in a row.
    """

    parts: Address
    out: Address
    bias: Address
    row_ends: Address
    row_places: Address
    column_ends: Address
    column_places: Address
    column_firsts: Address
    channels: int
    rows: int
    columns: int
    width: int
    step: int
    image_bytes: int
    channel_bytes: int


@native_op(OverlapArguments)
def add_overlaps(arguments: OverlapArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Add windows to images. Items are rows of results.

    Each result adds only the elements of its own taps, so that NaN and infinity do not spread to other results.
    """
    rows, columns, width, step = arguments.rows, arguments.columns, arguments.width, arguments.step
    column_places, column_firsts = arguments.column_places, arguments.column_firsts
    for item in range(begin, end):
        plane, row = item // rows, item % rows
        image, channel = plane // arguments.channels, plane % arguments.channels
        parts = arguments.parts + image * arguments.image_bytes + channel * arguments.channel_bytes
        out, bias = arguments.out + 4 * item * columns, np.float32(0)
        if arguments.bias:
            bias = read_float32(arguments.bias + 4 * channel)
        first_row = read_int64(arguments.row_ends + 8 * row)
        last_row = read_int64(arguments.row_ends + 8 * row + 8)
        for first in range(0, (columns + step - 1) // step, LANES):
            for remainder in range(min(step, columns)):
                total = splat_float32(bias)
                last = read_int64(arguments.column_ends + 8 * remainder + 8)
                for tap in range(read_int64(arguments.column_ends + 8 * remainder), last):
                    position = read_int64(column_firsts + 8 * tap) + first
                    if position <= -LANES or position >= width:
                        continue
                    source = parts + 4 * (read_int64(column_places + 8 * tap) + position)
                    if position >= 0 and position + LANES <= width:
                        for place in range(first_row, last_row):
                            total = total + load_float32(source + 4 * read_int64(arguments.row_places + 8 * place))
                    else:
                        for place in range(first_row, last_row):
                            address = source + 4 * read_int64(arguments.row_places + 8 * place)
                            total = total + load_within(address, -position, width - position)
                if step == 1:
                    store(out + 4 * first, total, columns - first)
                else:
                    store_float32(scratch + 4 * LANES * remainder, total)
            left = min(columns - first * step, LANES * step)
            if step == 2 and columns > 1:
                even, odd = load_float32(scratch), load_float32(scratch + 4 * LANES)
                store(out + 8 * first, interleaved(even, odd, 0), left)
                if left > LANES:
                    store(out + 8 * first + 4 * LANES, interleaved(even, odd, 1), left - LANES)
            elif step > 1:
                place = out + 4 * first * step
                for lane in range(LANES):
                    for remainder in range(min(step, left - lane * step)):
                        found = read_float32(scratch + 4 * (LANES * remainder + lane))
                        write_float32(place + 4 * (lane * step + remainder), found)
    return 0


def overlapped(
    parts: Float32, windows: Windows, begins: tuple[int, ...], sizes: tuple[int, ...], bias: Float32 | None = None,
    threads: Threads | None = None, *, out: Float32 | None = None,
) -> Float32:  # fmt: skip
    """Return the sums [N, M, sizes ...] of windows [N, M, taps, counts ...], plus the bias [M].

    Args:
        parts: the windows; the first three axes may have any strides.
        begins: number of elements that the result omits before each axis.
        sizes: extents of the result; elements of windows beyond it are omitted.
        out: array for the result; None = a new array.
    """
    images, channels = parts.shape[:2]
    if parts.dtype != np.float32 or parts.shape[2:] != (math.prod(windows.kernel), *windows.counts):
        raise ValueError(f"parts are {parts.dtype} {list(parts.shape)}, which do not match {windows}")
    if bias is not None:
        check("bias", bias, (channels,))
    if out is None:
        out = np.empty((images, channels, *sizes), np.float32)
    check("out", out, (images, channels, *sizes))
    if out.size:
        if not parts[0, 0, 0].flags.c_contiguous:
            raise ValueError(f"parts have strides {parts.strides}, but the positions must be contiguous")
        addresses = {"parts": first_element(parts), "out": first_element(out)}
        addresses["bias"] = 0 if bias is None else first_element(bias)
        program = _program(images, channels, parts.strides[:3], windows, begins, sizes)
        program.run_bound(addresses, threads, 0, parts.size * _NANOSECONDS_PER_TAP)
    return out


@lru_cache(maxsize=64)
def _program(
    images: int, channels: int, strides: tuple[int, ...], windows: Windows, begins: tuple[int, ...],
    sizes: tuple[int, ...],
) -> NodeProgram:  # fmt: skip
    kernel, step, tap_words = windows.kernel, windows.strides[-1], strides[2] // 4
    # The distance of neighbouring taps and of neighbouring positions on each axis but the last.
    distances = [
        (math.prod(kernel[axis + 1 :]) * tap_words, math.prod(windows.counts[axis + 1 :]))
        for axis in range(len(kernel) - 1)
    ]
    axes = [
        [[tap * tap_step + place * place_step for tap, place in line] for line in _sources(windows, axis, begin, size)]
        for axis, ((tap_step, place_step), begin, size) in enumerate(
            zip(distances, begins[:-1], sizes[:-1], strict=True)
        )
    ]
    rows = [[sum(places) for places in product(*lines)] for lines in product(*axes)]
    columns = _taps_of_columns(windows, begins[-1])
    arguments = OverlapArguments(
        parts=Binding("parts"), out=Binding("out"), bias=Binding("bias"), row_ends=_ends(rows),
        row_places=_flat(rows), column_ends=_ends(columns), channels=channels, rows=len(rows), columns=sizes[-1],
        column_places=_flat([[tap * tap_words for tap, _ in taps] for taps in columns]),
        column_firsts=_flat([[first for _, first in taps] for taps in columns]), width=windows.counts[-1], step=step,
        image_bytes=strides[0], channel_bytes=strides[1],
    )  # fmt: skip
    scratch = 4 * LANES * step if step > 1 else 0
    return NodeProgram([[Call(add_overlaps, arguments, Items(factor=images * channels * len(rows)), scratch)]])


def _sources(windows: Windows, axis: int, begin: int, size: int) -> list[list[tuple[int, int]]]:
    """Return the taps and the positions on an axis whose elements each result adds."""
    stride, dilation, places = windows.strides[axis], windows.dilations[axis], windows.counts[axis]
    found = []
    for result in range(begin, begin + size):
        pairs = [(tap, divmod(result - tap * dilation, stride)) for tap in range(windows.kernel[axis])]
        found.append([(tap, place) for tap, (place, rest) in pairs if rest == 0 and 0 <= place < places])
    return found


def _taps_of_columns(windows: Windows, begin: int) -> list[list[tuple[int, int]]]:
    """Return the taps of each remainder of columns, and the position from which its first column reads."""
    stride, dilation = windows.strides[-1], windows.dilations[-1]
    found = []
    for remainder in range(stride):
        pairs = [(tap, divmod(remainder + begin - tap * dilation, stride)) for tap in range(windows.kernel[-1])]
        found.append([(tap, place) for tap, (place, rest) in pairs if rest == 0])
    return found


def _ends(lists: Sequence[Sequence[object]]) -> NDArray[np.int64]:
    """Return the index of the first element of each list in all lists, and the number of elements."""
    return np.cumsum([0, *map(len, lists)], dtype=np.int64)


def _flat(lists: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    return np.array([number for numbers in lists for number in numbers] or [0], np.int64)
