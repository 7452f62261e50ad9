"""The passes over blocks of weights that quantisation methods need: ranges, closest codes, and errors.

A weight in a block is (point - zero) * scale, where `point` is one of the values that codes represent. Methods try many
scales, and each scale needs two passes over the weights. In this module, a pass reads the weights once and keeps all
other data in registers. Blocks are consecutive rows of values; their scales and zeros are arrays with one number per
block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..jit.dsl import inline
from ..jit.memory import keep_first, load, read_float32, store, store_as_bytes, write_float32
from ..jit.native import LIBRARY, NativeFunction, kernel
from ..jit.vector import (
    LANES,
    absolute,
    floor,
    maximum,
    minimum,
    multiply_add,
    reduce_add,
    reduce_max,
    round_to_half,
    splat_float32,
    where_less,
)

Float32 = NDArray[np.float32]
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Points:
    """The values that codes represent.

    Args:
        values: float32 [L], ascending.
        whole: True if the values are consecutive integers from 0.
    """

    values: Float32
    whole: bool

    @cached_property
    def arguments(self) -> tuple[int, int]:
        """The number of points, and the address of the kernels' table: the points, then the midpoints between them."""
        return len(self.values), _at(self._table)

    @cached_property
    def _table(self) -> Float32:
        return np.concatenate([self.values, (self.values[1:] + self.values[:-1]) / 2], dtype=np.float32)

    @property
    def kernels(self) -> _Kernels:
        """The kernels that find the closest of these points."""
        return _WHOLE if self.whole else _OTHER


@inline
def _closest_whole(scaled: Any, points: int, table: int) -> Any:
    return floor(minimum(maximum(scaled + np.float32(0.5), np.float32(0)), np.float32(points - 1)))


@inline
def _closest(scaled: Any, points: int, table: int) -> Any:
    found = splat_float32(read_float32(table))
    for i in range(1, points):
        middle = splat_float32(read_float32(table + 4 * (points + i - 1)))
        found = where_less(middle, scaled, read_float32(table + 4 * i), found)
    return found


@inline
def _closest_code(scaled: Any, points: int, table: int) -> Any:
    found = splat_float32(np.float32(0))
    for i in range(1, points):
        middle = splat_float32(read_float32(table + 4 * (points + i - 1)))
        found = where_less(middle, scaled, np.float32(i), found)
    return found


@inline
def _inverse(scale: float) -> Any:
    """Return 1 / scale, or 0 if the quotient is not finite, so that every weight of the block maps to the zero."""
    quotient = splat_float32(np.float32(1)) / splat_float32(scale)
    return where_less(absolute(quotient), np.float32(np.inf), quotient, np.float32(0))


@dataclass(frozen=True)
class _Kernels:
    """The kernels for one kind of points."""

    codes: NativeFunction
    fit: NativeFunction
    keep: NativeFunction


def _made(kind: str, closest: Callable[..., Any], closest_code: Callable[..., Any]) -> _Kernels:
    def find_codes(
        values: int, blocks: int, size: int, scales: int, zeros: int, points: int, table: int, out: int
    ) -> int:
        for block in range(blocks):
            inverse, zero = _inverse(read_float32(scales + 4 * block)), read_float32(zeros + 4 * block)
            for j in range(0, size, LANES):
                scaled = load(values + 4 * j, size - j) * inverse + zero
                store_as_bytes(out + j, closest_code(scaled, points, table), size - j)
            values, out = values + 4 * size, out + size
        return 0

    def fit_scales(
        values: int, blocks: int, size: int, weights: int, period: int, scales: int, zeros: int, points: int,
        table: int, out: int,
    ) -> int:  # fmt: skip
        for block in range(blocks):
            scale, zero = read_float32(scales + 4 * block), read_float32(zeros + 4 * block)
            inverse, weigh = _inverse(scale), weights + 4 * size * (block % period)
            first = second = splat_float32(np.float32(0))
            for j in range(0, size, LANES):
                x = load(values + 4 * j, size - j)
                point = keep_first(closest(x * inverse + zero, points, table) - zero, size - j, np.float32(0))
                weighed = point
                if weights != 0:
                    weighed = point * load(weigh + 4 * j, size - j)
                first, second = multiply_add(x, weighed, first), multiply_add(point, weighed, second)
            across = reduce_add(second)
            if across > np.float32(0):
                scale = reduce_max(splat_float32(reduce_add(first)) / splat_float32(across))
            write_float32(out + 4 * block, scale)
            values += 4 * size
        return 0

    def keep_better(
        values: int, blocks: int, size: int, weights: int, period: int, scales: int, zeros: int, points: int,
        table: int, best_scales: int, best_zeros: int, best_errors: int,
    ) -> int:  # fmt: skip
        for block in range(blocks):
            scale, zero = read_float32(scales + 4 * block), read_float32(zeros + 4 * block)
            inverse, weigh = _inverse(scale), weights + 4 * size * (block % period)
            total = splat_float32(np.float32(0))
            for j in range(0, size, LANES):
                x = load(values + 4 * j, size - j)
                lost = x - (closest(x * inverse + zero, points, table) - zero) * scale
                lost = keep_first(lost, size - j, np.float32(0))
                weighed = lost
                if weights != 0:
                    weighed = lost * load(weigh + 4 * j, size - j)
                total = multiply_add(lost, weighed, total)
            error = reduce_add(total)
            if error < read_float32(best_errors + 4 * block):
                write_float32(best_scales + 4 * block, scale)
                write_float32(best_zeros + 4 * block, zero)
                write_float32(best_errors + 4 * block, error)
            values += 4 * size
        return 0

    made = []
    for function in (find_codes, fit_scales, keep_better):
        function.__name__ += f"_{kind}"
        made.append(kernel(function))
    return _Kernels(*made)


_WHOLE = _made("whole", _closest_whole, _closest_whole)
_OTHER = _made("other", _closest, _closest_code)


@kernel
def find_ranges(values: int, blocks: int, size: int, low: int, high: int) -> int:
    """Find the min and max of every block."""
    for block in range(blocks):
        start = read_float32(values)
        least = most = splat_float32(start)
        for j in range(0, size, LANES):
            x = keep_first(load(values + 4 * j, size - j), size - j, start)
            least, most = minimum(least, x), maximum(most, x)
        write_float32(low + 4 * block, -reduce_max(splat_float32(np.float32(0)) - least))
        write_float32(high + 4 * block, reduce_max(most))
        values += 4 * size
    return 0


@kernel
def round_halves(numbers: int, count: int, out: int) -> int:
    """Round numbers to float16, except numbers that float16 represents with reduced precision or not at all."""
    for j in range(0, count, LANES):
        x = load(numbers + 4 * j, count - j)
        rounded = round_to_half(x)
        off, most = absolute(rounded - x), absolute(x) * np.float32(2.0**-11)
        store(out + 4 * j, where_less(most, off, x, rounded), count - j)
    return 0


def prepare(points: Points) -> None:
    """Compile the kernels that round to these points together, before several threads need them one after another."""
    LIBRARY.prepare([find_ranges, round_halves, points.kernels.codes])


def ranges(values: Float32) -> tuple[Float32, Float32]:
    """Return the min and max of values [..., size], float32 [...] each. The values must not contain NaN."""
    values = _floats(values)
    low, high = np.empty(values.shape[:-1], np.float32), np.empty(values.shape[:-1], np.float32)
    find_ranges(*_blocks(values), _at(low), _at(high))
    return low, high


def rounded_to_half(numbers: Float32) -> Float32:
    """Return scales rounded to float16, except those that float16 represents with reduced precision or not at all.

    The scales must not contain NaN.
    """
    numbers = _floats(numbers)
    found = np.empty_like(numbers)
    round_halves(_at(numbers), numbers.size, _at(found))
    return found


def closest_codes(values: Float32, scales: Float32, zeros: Float32, points: Points) -> Bytes:
    """Return the index of the point closest to value / scale + zero, uint8 [..., size].

    Args:
        values: float32 [..., size].
        scales, zeros: float32 [...]. With a scale of 0, every value maps to the zero.
    """
    values, scales, zeros = _floats(values), _floats(scales), _floats(zeros)
    _check(values, scales, zeros)
    found = np.empty(values.shape, np.uint8)
    points.kernels.codes(*_blocks(values), _at(scales), _at(zeros), *points.arguments, _at(found))
    return found


class WeighedBlocks:
    """Blocks for which candidate scales are tried.

    Args:
        values: float32 [..., size].
        weights: float32 [blocks, size], weights of the errors, repeated over the blocks; None = all equal.
        points: values that codes represent.

    Attributes:
        scales, zeros, errors: float32 [...], the best scales and zeros so far, and their errors sum(w (x - s p) ** 2).
    """

    def __init__(self, values: Float32, weights: Float32 | None, points: Points) -> None:
        self.values, self._points = _floats(values), points
        self._weights = None if weights is None else _floats(weights).reshape(-1, weights.shape[-1])
        size, blocks = self.values.shape[-1], self.values.size // self.values.shape[-1]
        if self._weights is not None and (self._weights.shape[-1] != size or blocks % len(self._weights)):
            raise ValueError(f"weights {list(self._weights.shape)} do not match values {list(self.values.shape)}")
        weigh = (0, 1) if self._weights is None else (_at(self._weights), len(self._weights))
        self._arguments = (*_blocks(self.values), *weigh)
        self.scales, self.zeros = (
            np.zeros(self.values.shape[:-1], np.float32),
            np.zeros(self.values.shape[:-1], np.float32),
        )
        self.errors = np.full(self.values.shape[:-1], np.inf, np.float32)
        self._best = (_at(self.scales), _at(self.zeros), _at(self.errors))

    def fitted(self, scales: Float32, zeros: Float32) -> Float32:
        """Return the scales with the least error for the codes that the given scales produce.

        The scales are sum(w x p) / sum(w p ** 2), where p is the closest point minus the zero.
        """
        scales, zeros = _floats(scales), _floats(zeros)
        _check(self.values, scales, zeros)
        found = np.empty_like(scales)
        self._points.kernels.fit(*self._arguments, _at(scales), _at(zeros), *self._points.arguments, _at(found))
        return found

    def keep_better(self, scales: Float32, zeros: Float32) -> None:
        """Keep these scales and zeros for the blocks in which they reduce the error."""
        scales, zeros = _floats(scales), _floats(zeros)
        _check(self.values, scales, zeros)
        self._points.kernels.keep(*self._arguments, _at(scales), _at(zeros), *self._points.arguments, *self._best)


def _floats(array: Any) -> Float32:
    return np.ascontiguousarray(array, np.float32)


def _at(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


def _blocks(values: Float32) -> tuple[int, int, int]:
    """Return the address, number and size of blocks."""
    return _at(values), values.size // values.shape[-1], values.shape[-1]


def _check(values: Float32, *others: Float32) -> None:
    for other in others:
        if other.shape != values.shape[:-1]:
            raise ValueError(f"factors {list(other.shape)} do not match values {list(values.shape)}")
