"""Selection of the largest numbers of rows, and of boxes that do not overlap.

A candidate is one 64-bit integer: its number as an ordered integer, and below it the inverted index. So larger integers
are better candidates, and of equal numbers the first is better.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from ...checks import Float32, check
from ..jit.arguments import Address, Arguments, Binding
from ..jit.dsl import inline, intrinsic
from ..jit.emit import INT8, INT64, Emitter
from ..jit.memory import (
    load,
    load_float32,
    read_float32,
    read_int32,
    read_int64,
    store,
    store_float32,
    write_float32,
    write_int32,
    write_int64,
)
from ..jit.native import NativeOp, native_op
from ..jit.variants import once
from ..jit.vector import LANES, lanes_above, maximum, minimum, repeated, splat_float32, where_less
from ..program.bound_program import NodeProgram, run_alone
from ..program.calls import Call, Items
from ..program.step_table import ErrorCode
from ..program.thread_pool import Threads

_NANOSECONDS_PER_NUMBER, _NANOSECONDS_PER_PICKED, _NANOSECONDS_PER_COPIED = 1.5, 1.0, 0.2
_LARGEST, _INFINITY = 0x7FFFFFFF, 0x7F800000
_INDICES = 0xFFFFFFFF


class TopArguments(Arguments):
    """Rows of `width` numbers of 32 bits, and the first `count` indices of each row, int64."""

    x: Address
    out: Address
    width: int
    count: int
    is_float: int
    is_smallest: int


@inline
def _ordered(bits: int) -> Any:
    """Return a float32's bits as an integer in the order of the numbers. Zeros are equal, and NaNs are the largest."""
    magnitude = bits & _LARGEST
    if magnitude > _INFINITY:
        return np.int64(_LARGEST)
    if bits < 0:
        return np.int64(0) - magnitude
    return np.int64(magnitude)


@inline
def _sift_down(heap: int, place: int, size: int, value: int, sign: int) -> None:
    """Put a value into a heap's free place, or below it. The root is the least value if sign is 1, else the largest."""
    child = 2 * place + 1
    while child < size:
        found = read_int64(heap + 8 * child)
        if child + 1 < size:
            other = read_int64(heap + 8 * (child + 1))
            if (other < found) == (sign > 0):
                child, found = child + 1, other
        if (value < found) == (sign > 0):
            break
        write_int64(heap + 8 * place, found)
        place = child
        child = 2 * place + 1
    write_int64(heap + 8 * place, value)


@inline
def _candidate(arguments: TopArguments, x: int, index: int) -> Any:
    """Return the candidate for the number at an index of a row."""
    bits = np.int64(read_int32(x + 4 * index))
    key = _ordered(bits) if arguments.is_float != 0 else bits
    if arguments.is_smallest != 0:
        key = -1 - key
    return (key << 32) | (_INDICES - index)


@native_op(TopArguments)
def select_largest(arguments: TopArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Write the indices of the largest or smallest numbers of each row (items), the best first."""
    width, count, is_float = arguments.width, arguments.count, arguments.is_float
    sign = np.float32(-1.0) if arguments.is_smallest != 0 else np.float32(1.0)
    for row in range(begin, end):
        x, heap = arguments.x + 4 * row * width, arguments.out + 8 * row * count
        for index in range(count):
            write_int64(heap + 8 * index, _candidate(arguments, x, index))
        for place in range(count // 2 - 1, -1, -1):
            _sift_down(heap, place, count, read_int64(heap + 8 * place), 1)
        least = read_int64(heap)
        for first in range(count, width, LANES):
            last = min(first + LANES, width)
            # Numbers that do not exceed the least candidate's number are not candidates, because they come later.
            worst = read_float32(x + 4 * (_INDICES - (least & _INDICES))) * sign
            if is_float != 0 and last - first == LANES and lanes_above(load_float32(x + 4 * first) * sign, worst) == 0:
                continue
            for index in range(first, last):
                candidate = _candidate(arguments, x, index)
                if candidate > least:
                    _sift_down(heap, 0, count, candidate, 1)
                    least = read_int64(heap)
        for size in range(count - 1, 0, -1):
            last = read_int64(heap + 8 * size)
            write_int64(heap + 8 * size, read_int64(heap))
            _sift_down(heap, 0, size, last, 1)
        for place in range(count):
            write_int64(heap + 8 * place, _INDICES - (read_int64(heap + 8 * place) & _INDICES))
    return 0


def largest(
    x: NDArray[Any], count: int, *, smallest: bool = False, threads: Threads | None = None
) -> NDArray[np.int64]:
    """Return the indices [rows, count] of the largest (or smallest) numbers of each row, the best first.

    Equal numbers are ordered by index. NaN is larger than every other number.

    Args:
        x: float32 or int32 [rows, width].
        count: 0 to width.
    """
    is_float = x.dtype == np.float32
    check("x", x, (None, None), np.dtype(np.float32 if is_float else np.int32))
    rows, width = x.shape
    if not 0 <= count <= width or width > _LARGEST:
        raise ValueError(f"count is {count}, expected 0 to {min(width, _LARGEST)}")
    out = np.empty((rows, count), np.int64)
    if out.size:
        run_alone(
            select_largest, Items(factor=rows), x.size * _NANOSECONDS_PER_NUMBER, threads,
            x=x, out=out, width=width, count=count, is_float=int(is_float), is_smallest=int(smallest),
        )  # fmt: skip
    return out


class BoxArguments(Arguments):
    """Boxes [images, boxes, 4], and scores [images, classes, boxes], of which those above `least` may be selected.

    Boxes are two opposite corners, y before x, or if `is_centred`, the centre and the sizes.

    Results are the selected boxes, int64 [images, classes, limit], and their numbers, int64 [images, classes].
    """

    corners: Address
    is_centred: int
    scores: Address
    out: Address
    counts: Address
    classes: int
    boxes: int
    limit: int
    threshold: float
    least: float


# The numbers of a selected box: y0, x0, y1, x1 and its area.
_BOX_NUMBERS = 5


@inline
def _overlaps_any(
    chosen: int, room: int, count: int, y0: Any, x0: Any, y1: Any, x1: Any, area: Any, threshold: Any
) -> Any:
    """Return True if the intersection of a box and a selected box over their union exceeds the threshold.

    Args:
        chosen: the selected boxes, float32 [5, room]. Lanes up to the next multiple of LANES have the area 0.
    """
    if not area > 0:
        return False
    for first in range(0, count, LANES):
        at = chosen + 4 * first
        high = minimum(load_float32(at + 8 * room), splat_float32(y1)) - maximum(load_float32(at), splat_float32(y0))
        right, left = load_float32(at + 12 * room), load_float32(at + 4 * room)
        wide = minimum(right, splat_float32(x1)) - maximum(left, splat_float32(x0))
        areas, common = load_float32(at + 16 * room), high * wide
        union = areas + area - common
        common = where_less(0.0, high, where_less(0.0, wide, where_less(0.0, areas, common, 0.0), 0.0), 0.0)
        share = where_less(0.0, union, common / union, 0.0)
        if lanes_above(where_less(threshold, share, 1.0, 0.0), 0.0) != 0:
            return True
    return False


@native_op(BoxArguments)
def suppress_boxes(arguments: BoxArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Select boxes per image and class (items), the best first, that overlap no selected box."""
    boxes, limit = arguments.boxes, arguments.limit
    is_centred = arguments.is_centred
    chosen, room = scratch + 8 * boxes, -(-limit // LANES) * LANES
    threshold, least = np.float32(arguments.threshold), np.float32(arguments.least)
    for item in range(begin, end):
        corners = arguments.corners + 16 * boxes * (item // arguments.classes)
        scores, out = arguments.scores + 4 * boxes * item, arguments.out + 8 * limit * item
        size = 0
        for first in range(0, boxes, LANES):
            last = min(first + LANES, boxes)
            if lanes_above(load(scores + 4 * first, last - first), least) == 0:
                continue
            for index in range(first, last):
                if read_float32(scores + 4 * index) > least:
                    key = _ordered(np.int64(read_int32(scores + 4 * index)))
                    write_int64(scratch + 8 * size, (key << 32) | (_INDICES - index))
                    size += 1
        for place in range(size // 2 - 1, -1, -1):
            _sift_down(scratch, place, size, read_int64(scratch + 8 * place), -1)
        count = 0
        while size > 0 and count < limit:
            index = _INDICES - (read_int64(scratch) & _INDICES)
            size -= 1
            if size > 0:
                _sift_down(scratch, 0, size, read_int64(scratch + 8 * size), -1)
            box = corners + 16 * index
            y0, x0, y1, x1 = read_float32(box), read_float32(box + 4), read_float32(box + 8), read_float32(box + 12)
            if is_centred != 0:
                half_height, half_width = y1 / np.float32(2), x1 / np.float32(2)
                y0, y1, x0, x1 = y0 - half_height, y0 + half_height, x0 - half_width, x0 + half_width
            else:  # the corners may be in either order
                y0, y1, x0, x1 = min(y0, y1), max(y0, y1), min(x0, x1), max(x0, x1)
            area = (y1 - y0) * (x1 - x0)
            if not _overlaps_any(chosen, room, count, y0, x0, y1, x1, area, threshold):
                if count % LANES == 0:
                    for number in range(_BOX_NUMBERS):
                        store_float32(chosen + 4 * (number * room + count), splat_float32(0.0))
                place = chosen + 4 * count
                write_float32(place, y0)
                write_float32(place + 4 * room, x0)
                write_float32(place + 8 * room, y1)
                write_float32(place + 12 * room, x1)
                write_float32(place + 16 * room, area)
                write_int64(out + 8 * count, index)
                count += 1
        write_int64(arguments.counts + 8 * item, count)
    return 0


def without_overlap(
    corners: Float32, scores: Float32, limit: int, threshold: float, least: float, threads: Threads | None = None, *,
    is_centred: bool = False,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:  # fmt: skip
    """Return boxes [images, classes, limit] in the order of their scores, and their numbers [images, classes].

    Args:
        corners: float32 [images, boxes, 4], two opposite corners y, x.
        scores: float32 [images, classes, boxes]. Only boxes with scores above `least` are selected.
        limit: maximum number of boxes per image and class.
        threshold: intersection over union above which the box with the lower score is omitted.
        is_centred: True if `corners` are instead the centre x, y, and the width and height.
    """
    check("scores", scores, (None, None, None))
    images, classes, boxes = scores.shape
    check("corners", corners, (images, boxes, 4))
    limit = min(limit, boxes)
    out, counts = np.empty((images, classes, limit), np.int64), np.zeros((images, classes), np.int64)
    if out.size:
        run_alone(
            suppress_boxes, Items(factor=images * classes), scores.size * _NANOSECONDS_PER_NUMBER, threads,
            scratch=8 * boxes + 4 * _BOX_NUMBERS * (limit + LANES), corners=corners, is_centred=int(is_centred),
            scores=scores, out=out, counts=counts, classes=classes, boxes=boxes, limit=limit,
            threshold=threshold, least=least,
        )  # fmt: skip
    return out, counts


class NearestArguments(Arguments):
    """Planes [x_rows, x_columns] and results [rows, columns]. The row and column of each result's element are indices.

    `doubles` is 1 if each column is repeated once.
    """

    x: Address
    out: Address
    row_indices: Address
    column_indices: Address
    x_rows: int
    x_columns: int
    rows: int
    columns: int
    doubles: int


@native_op(NearestArguments)
def select_nearest(arguments: NearestArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Copy numbers of 4 bytes. Items are planes. A row of results that repeats the row before it is a copy of it."""
    columns, x_columns, doubles = arguments.columns, arguments.x_columns, arguments.doubles
    for plane in range(begin, end):
        x = arguments.x + 4 * plane * arguments.x_rows * x_columns
        plane_out = arguments.out + 4 * plane * arguments.rows * columns
        before = -1
        for row in range(arguments.rows):
            index = read_int64(arguments.row_indices + 8 * row)
            out, line = plane_out + 4 * row * columns, x + 4 * index * x_columns
            if index == before:
                for first in range(0, columns, LANES):
                    store(out + 4 * first, load(out + 4 * (first - columns), columns - first), columns - first)
            elif doubles:
                for first in range(0, x_columns, LANES):
                    numbers, left = load(line + 4 * first, x_columns - first), columns - 2 * first
                    store(out + 8 * first, repeated(numbers, 0), left)
                    if left > LANES:
                        store(out + 8 * first + 4 * LANES, repeated(numbers, 1), left - LANES)
            else:
                for column in range(columns):
                    place = read_int64(arguments.column_indices + 8 * column)
                    write_int32(out + 4 * column, read_int32(line + 4 * place))
            before = index
    return 0


class NearestElements:
    """The selection of rows and columns from planes: x[:, rows][:, :, columns], for numbers of 4 bytes.

    Args:
        shape: planes, rows and columns of x.

    Raises:
        IndexError: an index is outside the planes.
    """

    def __init__(self, shape: tuple[int, int, int], rows: NDArray[np.int64], columns: NDArray[np.int64]) -> None:
        for name, indices, extent in (("rows", rows, shape[1]), ("columns", columns, shape[2])):
            check(name, indices, (None,), np.dtype(np.int64))
            if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < extent:
                raise IndexError(f"{name} are from {indices.min()} to {indices.max()}, expected 0 to {extent - 1}")
        self._given, self._made = shape, (shape[0], len(rows), len(columns))
        doubles = len(columns) == 2 * shape[2] and bool(np.all(columns == np.arange(len(columns)) // 2))
        arguments = NearestArguments(
            x=Binding("x"), out=Binding("out"), row_indices=rows, column_indices=columns, x_rows=shape[1],
            x_columns=shape[2], rows=len(rows), columns=len(columns), doubles=int(doubles),
        )  # fmt: skip
        self._call = Call(select_nearest, arguments, Items(factor=shape[0]))

    @cached_property
    def _program(self) -> NodeProgram:
        return NodeProgram([[self._call]], math.prod(self._made) * _NANOSECONDS_PER_COPIED)

    def __call__(self, x: NDArray[Any], threads: Threads | None = None) -> NDArray[Any]:
        """Return the selected elements as a new array of x's type."""
        check("x", x, self._given, x.dtype)
        if x.dtype.itemsize != 4 or x.dtype.hasobject:
            raise ValueError(f"x is {x.dtype}, expected numbers of 4 bytes")
        out = np.empty(self._made, x.dtype)
        if out.size:
            self._program.run(threads, x=x, out=out)
        return out


class PickArguments(Arguments):
    """Rows of `width` numbers, `count` indices (int64) for each row, and the numbers at the indices."""

    x: Address
    indices: Address
    out: Address
    width: int
    count: int


_OUTSIDE = int(ErrorCode.INDEX_OUTSIDE_TABLE)
# Number of indices that are compared with the width at once.
_CHECKED = 8


@intrinsic("boolean", "int64", "int64")
def _are_inside(e: Emitter, address: Any, width: Any) -> Any:
    """Return True if each of the `_CHECKED` indices (int64) at an address is from 0 to width - 1."""
    indices = e.load(address, ir.VectorType(INT64, _CHECKED))
    outside = e.builder.icmp_unsigned(">=", indices, e.splat(width, _CHECKED))
    return e.builder.icmp_unsigned("==", e.builder.bitcast(outside, INT8), INT8(0))


@once
def pick_op(itemsize: int) -> NativeOp:
    """Return the operator for numbers of 4 or 8 bytes. Items are rows. Negative indices count from the end."""
    read, write = (read_int32, write_int32) if itemsize == 4 else (read_int64, write_int64)

    @inline
    def pick_plain(x: int, indices: int, out: int) -> None:
        for number in range(_CHECKED):
            write(out + itemsize * number, read(x + itemsize * read_int64(indices + 8 * number)))

    @inline
    def pick_any(x: int, indices: int, out: int, count: int, width: int) -> Any:
        for number in range(count):
            index = read_int64(indices + 8 * number)
            if index < 0:
                index += width
            if index < 0 or index >= width:
                return _OUTSIDE
            write(out + itemsize * number, read(x + itemsize * index))
        return 0

    def pick(arguments: PickArguments, context: int, begin: int, end: int, scratch: int) -> int:
        width, count = arguments.width, arguments.count
        whole = count // _CHECKED * _CHECKED
        for row in range(begin, end):
            x = arguments.x + itemsize * row * width
            indices, out = arguments.indices + 8 * row * count, arguments.out + itemsize * row * count
            for first in range(0, whole, _CHECKED):
                at, target = indices + 8 * first, out + itemsize * first
                if _are_inside(at, width):
                    pick_plain(x, at, target)
                elif pick_any(x, at, target, _CHECKED, width) != 0:
                    return _OUTSIDE
            if pick_any(x, indices + 8 * whole, out + itemsize * whole, count - whole, width) != 0:
                return _OUTSIDE
        return 0

    return native_op(PickArguments, name=f"pick_{itemsize}")(pick)


def picked(x: NDArray[Any], indices: NDArray[np.int64], *, threads: Threads | None = None) -> NDArray[Any]:
    """Return x[row, indices[row]] for every row.

    Args:
        x: numbers of 4 or 8 bytes, [rows, width].
        indices: [rows, count]; negative indices count from the end.

    Raises:
        StepError: an index is outside its row.
    """
    check("x", x, (None, None), x.dtype)
    check("indices", indices, (len(x), None), np.dtype(np.int64))
    if x.dtype.itemsize not in (4, 8) or x.dtype.hasobject:
        raise ValueError(f"x is {x.dtype}, expected numbers of 4 or 8 bytes")
    out = np.empty(indices.shape, x.dtype)
    if out.size:
        items, work = Items(factor=len(x)), out.size * _NANOSECONDS_PER_PICKED
        op, (count, width) = pick_op(x.dtype.itemsize), (indices.shape[1], x.shape[1])
        run_alone(op, items, work, threads, x=x, indices=indices, out=out, width=width, count=count)
    return out
