"""Copies between arrays with any strides: in recorded programs, and of large arrays that are transposed or repeated."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..jit.arguments import Address, Arguments, Binding
from ..jit.dsl import inline
from ..jit.emit import INT32_VECTOR, LANES, Emitter, micro_kernel
from ..jit.memory import (
    load_float32,
    read_float32,
    read_int32,
    read_int64,
    store_first,
    store_float32,
    write_int32,
    write_int64,
)
from ..jit.native import NativeOp, native_op
from ..jit.variants import once
from ..jit.vector import splat_float32
from ..program.bound_program import NodeProgram, first_element
from ..program.calls import Call, Items
from ..program.thread_pool import Threads, fixed_address, recorder_of_thread, temporary
from .gemm.packing import transpose_lines

_WORD = 4
_AXES = 6
_NANOSECONDS_PER_WORD = 0.2
# NumPy copies smaller arrays in less time than a program takes to start.
_MIN_BYTES = 1 << 15
# Rows and columns that are worth transposing in squares.
_MIN_SIDE = 8
# Rows of an item, if an array has too few items for several threads, and the words that a thread takes at least.
_PIECE, _GRAIN = 128, 4096
_Ints: TypeAlias = tuple[int, ...]
_Kind: TypeAlias = Literal["rows", "repeated", "transposed", "words"]


class Axis(Arguments, kw_only=False):
    """The size of an axis, and the bytes between its neighbours in each array."""

    size: int
    x_step: int
    out_step: int


class CopyArguments(Arguments):
    """Arrays of 32-bit words. Items are indices of the first three axes, times pieces of `piece` rows."""

    x: Address
    out: Address
    first: Axis
    second: Axis
    third: Axis
    fourth: Axis
    rows: Axis
    columns: Axis
    pieces: int
    piece: int


def _emit_square(e: Emitter, source: Any, line_step: Any, out: Any, word_step: Any) -> None:
    lines = [e.load(e.at(source, e.builder.mul(line_step, line_step.type(m))), INT32_VECTOR) for m in range(LANES)]
    for word, vector in enumerate(e.transposed(lines)):
        e.store(vector, e.at(out, e.builder.mul(word_step, word_step.type(word))))


# Like `transpose_lines` for LANES lines of LANES words, without masks. Arguments: source, line_step, out, word_step.
_transpose_square = micro_kernel(_emit_square)


@inline
def _copy_row(x: int, out: int, x_step: int, count: int) -> None:
    if count >= LANES:
        # The last vector may overlap the vector before it, because a store with a mask takes several cycles.
        for first in range(0, count - LANES, LANES):
            store_float32(out + _WORD * first, load_float32(x + _WORD * first))
        last = _WORD * (count - LANES)
        store_float32(out + last, load_float32(x + last))
    else:
        for first in range(0, count - 1, 2):
            write_int64(out + _WORD * first, read_int64(x + _WORD * first))
        if count % 2 == 1:
            last = _WORD * (count - 1)
            write_int32(out + last, read_int32(x + last))


@inline
def _repeat_word(x: int, out: int, x_step: int, count: int) -> None:
    word = splat_float32(read_float32(x))
    if count >= LANES:
        for first in range(0, count - LANES, LANES):
            store_float32(out + _WORD * first, word)
        store_float32(out + _WORD * (count - LANES), word)
    else:
        store_first(out, word, count)


@inline
def _copy_words(x: int, out: int, x_step: int, out_step: int, count: int) -> None:
    for index in range(count):
        write_int32(out + index * out_step, read_int32(x + index * x_step))


@inline
def _transpose(x: int, out: int, line_step: int, word_step: int, lines: int, words: int) -> None:
    """Copy lines of words, which are rows in x and columns in the result."""
    for word in range(0, words, LANES):
        for line in range(0, lines, LANES):
            source, target = x + line * line_step + _WORD * word, out + word * word_step + _WORD * line
            if words - word >= LANES and lines - line >= LANES:
                _transpose_square((source, line_step, target, word_step))
            else:
                height, width = min(LANES, lines - line), min(LANES, words - word)
                transpose_lines((source, line_step, height, width, target, word_step))


@once
def copy_op(kind: _Kind) -> NativeOp:
    """Return the operator for one order of the words.

    Args:
        kind: the words of a row are adjacent in both arrays ("rows"), are one word of x ("repeated"), are adjacent in
            the result while columns are adjacent in x ("transposed"), or have any place ("words").
    """
    is_transposed, is_scattered = kind == "transposed", kind == "words"
    copy_row: Callable[[int, int, int, int], None] = _repeat_word if kind == "repeated" else _copy_row

    def copy(arguments: CopyArguments, context: int, begin: int, end: int, scratch: int) -> int:
        first, second, third, fourth = arguments.first, arguments.second, arguments.third, arguments.fourth
        row_count, x_row, out_row = arguments.rows.size, arguments.rows.x_step, arguments.rows.out_step
        count, x_step, out_step = arguments.columns.size, arguments.columns.x_step, arguments.columns.out_step
        for item in range(begin, end):
            outer = item // arguments.pieces
            begin_row = (item - outer * arguments.pieces) * arguments.piece
            rows = min(arguments.piece, row_count - begin_row)
            most = outer // third.size
            k = outer - most * third.size
            i = most // second.size
            j = most - i * second.size
            x = arguments.x + i * first.x_step + j * second.x_step + k * third.x_step + begin_row * x_row
            out = arguments.out + i * first.out_step + j * second.out_step + k * third.out_step + begin_row * out_row
            for plane in range(fourth.size):
                x_plane, out_plane = x + plane * fourth.x_step, out + plane * fourth.out_step
                if is_transposed:
                    _transpose(x_plane, out_plane, x_step, out_row, count, rows)
                else:
                    for row in range(rows):
                        if is_scattered:
                            _copy_words(x_plane + row * x_row, out_plane + row * out_row, x_step, out_step, count)
                        else:
                            copy_row(x_plane + row * x_row, out_plane + row * out_row, x_step, count)
        return 0

    return native_op(CopyArguments, name=f"copy_{kind}")(copy)


def copy_by_program(x: NDArray[Any], out: NDArray[Any], threads: Threads | None = None) -> bool:
    """Copy x to out, which has the same shape. Return False, without a copy, if the arrays are not supported."""
    if x.shape != out.shape or x.dtype != out.dtype or x.dtype.hasobject or not x.size:
        return False
    program = _program(x.shape, x.itemsize, x.strides, out.strides)
    if program is not None:
        addresses = {"x": first_element(x), "out": first_element(out)}
        program.run_bound(addresses, threads, 0, x.nbytes / _WORD * _NANOSECONDS_PER_WORD)
    return program is not None


@lru_cache(maxsize=512)
def _program(shape: _Ints, itemsize: int, x_steps: _Ints, out_steps: _Ints) -> NodeProgram | None:
    call = _call(shape, itemsize, (Binding("x"), x_steps), (Binding("out"), out_steps))
    return None if call is None else NodeProgram([[call]])


def _call(shape: _Ints, itemsize: int, x: tuple[Binding, _Ints], out: tuple[Binding, _Ints]) -> Call | None:
    """Return the call that copies an array to another, each given by the place of its first element and its strides.

    Returns None if there are too many axes, or if adjacent bytes are not whole words.
    """
    axes: list[tuple[int, int, int]] = []
    for size, step, out_step in [*zip(shape, x[1], out[1], strict=True), (itemsize, 1, 1)]:
        if axes and axes[-1][1:] == (size * step, size * out_step):
            axes[-1] = axes[-1][0] * size, step, out_step
        elif size > 1:
            axes.append((size, step, out_step))
    if not axes or axes[-1][0] % _WORD or axes[-1][1:] != (1, 1):
        return None
    words = axes.pop()[0] // _WORD
    if words > 1 or not axes:
        axes.append((words, _WORD, _WORD))
    kind = _ordered(axes)
    if len(axes) > _AXES:
        return None
    *outer, rows, columns = [(1, 0, 0)] * (_AXES - len(axes)) + axes
    count = outer[0][0] * outer[1][0] * outer[2][0]
    piece = _PIECE if count == 1 else rows[0]
    pieces = -(-rows[0] // piece)
    arguments = CopyArguments(
        x=x[0], out=out[0], first=Axis(*outer[0]), second=Axis(*outer[1]), third=Axis(*outer[2]),
        fourth=Axis(*outer[3]), rows=Axis(*rows), columns=Axis(*columns), pieces=pieces, piece=piece,
    )  # fmt: skip
    grain = max(1, _GRAIN // (outer[3][0] * min(piece, rows[0]) * columns[0]))
    return Call(copy_op(kind), arguments, Items(factor=count * pieces, grain=grain))


def _ordered(axes: list[tuple[int, int, int]]) -> _Kind:
    """Return the operator for these axes. If planes are transposed, their two axes become the last axes."""
    count, x_step, out_step = axes[-1]
    if out_step != _WORD:
        return "words"
    if x_step in (_WORD, 0):
        return "rows" if x_step else "repeated"
    for place, (size, step, _) in enumerate(axes[:-1]):
        if step == _WORD and min(size, count) >= _MIN_SIDE:
            axes.insert(-1, axes.pop(place))
            return "transposed"
    return "words"


def operand(x: NDArray[Any]) -> NDArray[Any]:
    """Return x in C order, for a program that reads it. A copy is used only by the running kernel."""
    return x if x.flags.c_contiguous else temporary(contiguous(x))


def contiguous(x: NDArray[Any]) -> NDArray[Any]:
    """Return x in C order, as np.ascontiguousarray does. While programs are recorded, a program makes the copy."""
    if x.flags.c_contiguous or (recorder_of_thread() is None and x.nbytes < _MIN_BYTES):
        return np.ascontiguousarray(x)
    out = np.empty(x.shape, x.dtype)
    return out if copy_by_program(x, out) else np.ascontiguousarray(x)


def reshaped(x: NDArray[Any], shape: Sequence[int]) -> NDArray[Any]:
    """Return x.reshape(shape), which is a view if possible, and otherwise a view of a copy by `contiguous`."""
    if not x.flags.c_contiguous:
        try:
            return x.reshape(shape, copy=False)
        except ValueError:  # a copy is needed, or the shape is wrong
            x = contiguous(x)
    return x.reshape(shape)


def concatenated(values: tuple[NDArray[Any], ...], axis: int) -> NDArray[Any] | None:
    """Join arrays by recorded programs; None if no programs are recorded, or the arrays are not supported."""
    if recorder_of_thread() is None or len({value.dtype for value in values}) != 1:
        return None
    first = values[0]
    if not -first.ndim <= axis < first.ndim or any(value.ndim != first.ndim for value in values):
        return None
    along = axis % first.ndim
    sizes = [value.shape[along] for value in values]
    out = np.empty((*first.shape[:along], sum(sizes), *first.shape[along + 1 :]), first.dtype)
    parts = np.split(out, np.cumsum(sizes)[:-1].tolist(), axis=along)
    return _used(out, all(copy_by_program(value, part) for value, part in zip(values, parts, strict=True)))


def tiled(x: NDArray[Any], repeats: Sequence[int], threads: Threads | None = None) -> NDArray[Any]:
    """Return np.tile(x, repeats) for one repeat per axis."""
    size = math.prod(repeats) * x.nbytes
    is_small = size < _MIN_BYTES and (recorder_of_thread() is None or not size)
    program = None
    if not is_small and not x.dtype.hasobject:
        program = _tiling(x.shape, x.itemsize, x.strides, tuple(repeats))
    if program is None:
        return np.tile(x, repeats)
    out = np.empty([count * extent for count, extent in zip(repeats, x.shape, strict=True)], x.dtype)
    addresses = {"x": first_element(x), "out": first_element(out)}
    program.run_bound(addresses, threads, 0, size / _WORD * _NANOSECONDS_PER_WORD)
    return out


@lru_cache(maxsize=256)
def _tiling(shape: _Ints, itemsize: int, x_steps: _Ints, repeats: _Ints) -> NodeProgram | None:
    """Return the program that copies x to every repeat; each axis becomes an axis of repeats and an axis of x."""
    sizes: list[int] = []
    steps: list[int] = []
    out_steps: list[int] = []
    step = itemsize
    for count, size, x_step in [*zip(repeats, shape, x_steps, strict=True)][::-1]:
        sizes += size, count
        steps += x_step, 0
        out_steps += step, step * size
        step *= size * count
    return _program(tuple(sizes[::-1]), itemsize, tuple(steps[::-1]), tuple(out_steps[::-1]))


def padded(x: NDArray[Any], pads: list[tuple[int, int]], mode: str, fill: Any = 0) -> NDArray[Any] | None:
    """Return np.pad(x, pads, mode) for the modes constant and reflect; None if the arrays are not supported or small.

    Small arrays are also padded while programs are recorded.
    """
    short = all(max(pair) < size or not any(pair) for pair, size in zip(pads, x.shape, strict=True))
    if mode not in ("constant", "reflect") or (mode == "reflect" and not short) or x.dtype.hasobject:
        return None
    if not x.size or (recorder_of_thread() is None and x.nbytes < _MIN_BYTES):
        return None
    program = _padding(x.shape, x.itemsize, x.strides, tuple(pads), mode == "reflect")
    if program is None:
        return None
    out = np.empty([before + size + after for (before, after), size in zip(pads, x.shape, strict=True)], x.dtype)
    number = fixed_address(np.full((), fill, x.dtype))
    addresses = {"x": first_element(x), "out": first_element(out), "fill": first_element(number)}
    program.run_bound(addresses, None, 0, out.nbytes / _WORD * _NANOSECONDS_PER_WORD)
    return out


@lru_cache(maxsize=256)
def _padding(
    shape: _Ints, itemsize: int, x_steps: _Ints, pads: tuple[tuple[int, int], ...], reflects: bool
) -> NodeProgram | None:
    """Return the program that pads one axis after another."""
    # Only the layout of this array is used.
    out = np.empty([b + size + a for (b, a), size in zip(pads, shape, strict=True)], np.dtype((np.void, itemsize)))
    inner = [slice(before, before + size) for (before, _), size in zip(pads, shape, strict=True)]

    def place(part: NDArray[Any]) -> tuple[Binding, _Ints]:
        return Binding("out", first_element(part) - first_element(out)), part.strides

    phases = [[_call(shape, itemsize, (Binding("x"), x_steps), place(out[tuple(inner)]))]]
    for axis, ((before, after), size) in enumerate(zip(pads, shape, strict=True)):
        # Axes that were padded before are whole.
        rows = np.moveaxis(out[(slice(None),) * axis + (slice(None), *inner[axis + 1 :])], axis, 0)
        last, lowest = before + size, before + size - 2 - after
        sides = [(rows[:before], rows[2 * before : before : -1])] if before else []
        sides += [(rows[last:], rows[last - 2 : lowest if lowest >= 0 else None : -1])] if after else []
        fill = Binding("fill"), (0,) * len(shape)
        phases.append([_call(p.shape, itemsize, place(m) if reflects else fill, place(p)) for p, m in sides])
    calls = [[call for call in phase if call is not None] for phase in phases]
    if any(len(found) < len(phase) for found, phase in zip(calls, phases, strict=True)):
        return None
    return NodeProgram([phase for phase in calls if phase])


def _used(out: NDArray[Any], done: bool) -> NDArray[Any] | None:
    """Return an array if all its parts were copied; otherwise, the memory is used for other arrays."""
    recorder = recorder_of_thread()
    if recorder is not None and not done:
        recorder.is_complete = False
    return out if done else None
