"""Interpolation along two neighbouring axes: each result is a sum of elements times weights, row by row.

A row of the image is first interpolated along its columns. Such rows are kept in scratch memory while the results'
rows need them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...checks import Float32, check
from ..jit.arguments import Address, Arguments, Binding
from ..jit.dsl import inline
from ..jit.memory import load, load_float32, read_float32, read_int64, store, store_float32, write_float32, write_int64
from ..jit.native import NativeOp, native_op
from ..jit.variants import once
from ..jit.vector import LANES, splat_float32
from ..program.bound_program import NodeProgram
from ..program.calls import Call, Items
from ..program.thread_pool import Threads

Taps: TypeAlias = Sequence[tuple[NDArray[np.int64], NDArray[np.float32]]]
"""The elements along an axis, and their weights: one of each for every result, per tap."""

_NANOSECONDS_PER_PRODUCT = 0.1
# The results' rows of an item if there are few planes.
_BAND, _FEW_PLANES = 16, 32


class AxisTaps(Arguments):
    """The elements, int64 [taps, results], and their weights, float32 [taps, results], along an axis."""

    elements: Address
    weights: Address
    taps: int
    results: int


class InterpolationArguments(Arguments):
    """Planes [x_rows, x_columns, inner] and results [rows.results, columns.results, inner].

    Items are planes times `bands` of up to `band` rows of results. A thread has memory for `slots` rows.
    """

    x: Address
    out: Address
    x_rows: int
    x_columns: int
    inner: int
    rows: AxisTaps
    columns: AxisTaps
    bands: int
    band: int
    slots: int


@once
def interpolate_op(whole_vectors: bool) -> NativeOp:
    """Return the operator.

    Args:
        whole_vectors: True if `inner` is a multiple of LANES; otherwise, it may be any number.
    """

    @inline
    def pixel(x: int, elements: int, weights: int, inner: int, first: int, left: int) -> Any:
        at, weight = x + 4 * (read_int64(elements) * inner + first), read_float32(weights)
        return (load_float32(at) if whole_vectors else load(at, left)) * weight

    @inline
    def along_columns(columns: Any, x: int, inner: int, out: int) -> None:
        # Locals, because the compiler cannot know that no store changes the arguments.
        count, taps, elements, weights = columns.results, columns.taps, columns.elements, columns.weights
        if inner == 1 and taps == 2:
            more, heavier = elements + 8 * count, weights + 4 * count
            for column in range(count):
                one = read_float32(x + 4 * read_int64(elements + 8 * column)) * read_float32(weights + 4 * column)
                two = read_float32(x + 4 * read_int64(more + 8 * column)) * read_float32(heavier + 4 * column)
                write_float32(out + 4 * column, one + two)
            return
        for column in range(count):
            for first in range(0, inner, LANES):
                left = inner - first
                value = pixel(x, elements + 8 * column, weights + 4 * column, inner, first, left)
                for tap in range(1, taps):
                    number = tap * count + column
                    value = value + pixel(x, elements + 8 * number, weights + 4 * number, inner, first, left)
                target = out + 4 * (column * inner + first)
                if whole_vectors:
                    store_float32(target, value)
                else:
                    store(target, value, left)

    @inline
    def along_rows(lines: int, weights: int, taps: int, count: int, width: int, out: int) -> None:
        if taps == 2:
            one, two = read_int64(lines), read_int64(lines + 8)
            a, b = splat_float32(read_float32(weights)), splat_float32(read_float32(weights + 4 * count))
            for first in range(0, width, LANES):
                left = width - first
                store(out + 4 * first, load(one + 4 * first, left) * a + load(two + 4 * first, left) * b, left)
            return
        for first in range(0, width, LANES):
            left = width - first
            value = load(read_int64(lines) + 4 * first, left) * read_float32(weights)
            for tap in range(1, taps):
                value = value + load(read_int64(lines + 8 * tap) + 4 * first, left) * read_float32(
                    weights + 4 * tap * count
                )
            store(out + 4 * first, value, left)

    def interpolate(arguments: InterpolationArguments, context: int, begin: int, end: int, scratch: int) -> int:
        slots, inner, bands, taps = arguments.slots, arguments.inner, arguments.bands, arguments.rows.taps
        elements, weights, count = arguments.rows.elements, arguments.rows.weights, arguments.rows.results
        row_bytes, width = 4 * arguments.x_columns * inner, arguments.columns.results * inner
        # The row in each slot, the place of each tap's row, and the rows.
        places = scratch + 8 * slots
        lines = places + 8 * taps
        for item in range(begin, end):
            plane, band = item // bands, item % bands
            x = arguments.x + plane * arguments.x_rows * row_bytes
            for slot in range(slots):
                write_int64(scratch + 8 * slot, -1)
            first_row = band * arguments.band
            for row in range(first_row, min(count, first_row + arguments.band)):
                for tap in range(taps):
                    index = read_int64(elements + 8 * (tap * count + row))
                    slot = index % slots
                    line = lines + 4 * slot * width
                    write_int64(places + 8 * tap, line)
                    if read_int64(scratch + 8 * slot) != index:
                        write_int64(scratch + 8 * slot, index)
                        along_columns(arguments.columns, x + index * row_bytes, inner, line)
                out = arguments.out + 4 * (plane * count + row) * width
                along_rows(places, weights + 4 * row, taps, count, width, out)
        return 0

    name = f"interpolate_{'vectors' if whole_vectors else 'any'}"
    return native_op(InterpolationArguments, name=name)(interpolate)


class Interpolation:
    """The sums of elements times weights along two axes: columns first, then rows.

    Args:
        shape: planes, rows, columns, and numbers per column of x.
        rows, columns: taps of the axes.

    Attributes:
        given: the shape of x.

    Raises:
        ValueError: an axis has no taps, or taps of different sizes.
        IndexError: an element is outside the image.
    """

    def __init__(self, shape: tuple[int, int, int, int], rows: Taps, columns: Taps) -> None:
        planes, x_rows, x_columns, inner = shape
        row_taps, column_taps = _taps("rows", rows, x_rows), _taps("columns", columns, x_columns)
        self.given, self._made = shape, (planes, row_taps.results, column_taps.results, inner)
        self._taps = len(rows) + len(columns)
        # Rows of results need neighbouring rows; their numbers modulo `slots` must differ.
        spans = [int(max(index) - min(index)) for index in zip(*(index for index, _ in rows), strict=True)]
        slots = max(spans, default=0) + 1
        band = row_taps.results if planes >= _FEW_PLANES else min(_BAND, max(row_taps.results, 1))
        bands = -(-row_taps.results // max(band, 1))
        arguments = InterpolationArguments(
            x=Binding("x"), out=Binding("out"), x_rows=x_rows, x_columns=x_columns, inner=inner, rows=row_taps,
            columns=column_taps, bands=bands, band=band, slots=slots,
        )  # fmt: skip
        scratch = 8 * (slots + len(rows)) + 4 * slots * column_taps.results * inner
        op = interpolate_op(inner > 0 and inner % LANES == 0)
        self._call = Call(op, arguments, Items(factor=planes * bands), scratch)

    @cached_property
    def _program(self) -> NodeProgram:
        return NodeProgram([[self._call]], math.prod(self._made) * self._taps * _NANOSECONDS_PER_PRODUCT)

    def __call__(self, x: Float32, threads: Threads | None = None) -> Float32:
        """Return the sums [planes, rows, columns, inner]."""
        check("x", x, self.given)
        out = np.empty(self._made, np.float32)
        if out.size:
            self._program.run(threads, x=x, out=out)
        return out


def _taps(name: str, taps: Taps, extent: int) -> AxisTaps:
    sizes = {(index.shape, weights.shape) for index, weights in taps}
    if len(sizes) != 1 or any(index.ndim != 1 or index.shape != weights.shape for index, weights in taps):
        raise ValueError(f"{name} have taps of the sizes {sorted(sizes)}, expected one size of one axis")
    elements = np.stack([index for index, _ in taps]).astype(np.int64)
    weights = np.stack([weights for _, weights in taps]).astype(np.float32)
    if elements.size and not 0 <= int(elements.min()) <= int(elements.max()) < extent:
        raise IndexError(f"{name} are from {elements.min()} to {elements.max()}, expected 0 to {extent - 1}")
    return AxisTaps(elements=elements, weights=weights, taps=len(taps), results=elements.shape[1])
