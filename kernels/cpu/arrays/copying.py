"""Copies between arrays with any strides, for programs that are recorded. NumPy copies large arrays faster."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..jit.arguments import Address, Arguments, Binding
from ..jit.memory import load, read_int32, store, write_int32
from ..jit.native import native_op
from ..jit.vector import LANES
from ..program.bound_program import NodeProgram, first_element
from ..program.calls import Call, Items
from ..program.thread_pool import fixed_address, recorder_of_thread, temporary

_WORD = 4
_AXES = 4
_NANOSECONDS_PER_WORD = 0.5


class Steps(Arguments, kw_only=False):
    """The bytes between neighbours on each axis."""

    first: int
    second: int
    third: int
    last: int


class CopyArguments(Arguments):
    """Arrays of 32-bit words with four axes."""

    x: Address
    out: Address
    sizes: Steps
    x_steps: Steps
    out_steps: Steps


@native_op(CopyArguments)
def copy_words(arguments: CopyArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Copy words between arrays with any strides. Items are indices of the first axis."""
    sizes, x_steps, out_steps = arguments.sizes, arguments.x_steps, arguments.out_steps
    count, x_step, out_step = sizes.last, x_steps.last, out_steps.last
    for i in range(begin, end):
        for j in range(sizes.second):
            for k in range(sizes.third):
                x = arguments.x + i * x_steps.first + j * x_steps.second + k * x_steps.third
                out = arguments.out + i * out_steps.first + j * out_steps.second + k * out_steps.third
                if x_step == _WORD and out_step == _WORD:
                    for first in range(0, count, LANES):
                        store(out + _WORD * first, load(x + _WORD * first, count - first), count - first)
                else:
                    for index in range(count):
                        write_int32(out + index * out_step, read_int32(x + index * x_step))
    return 0


def copy_recorded(x: NDArray[Any], out: NDArray[Any]) -> bool:
    """Copy x to out, which has the same shape. Return False, without a copy, if the arrays are not supported."""
    if x.shape != out.shape or x.dtype != out.dtype or x.dtype.hasobject or x.itemsize % _WORD or not x.size:
        return False
    program = _program(x.shape, x.itemsize // _WORD, x.strides, out.strides)
    if program is not None:
        addresses = {"x": first_element(x), "out": first_element(out)}
        program.run_bound(addresses, None, 0, x.nbytes / _WORD * _NANOSECONDS_PER_WORD)
    return program is not None


@lru_cache(maxsize=512)
def _program(
    shape: tuple[int, ...], words: int, x_steps: tuple[int, ...], out_steps: tuple[int, ...]
) -> NodeProgram | None:
    """Return the program; None if there are too many axes after adjacent axes are merged."""
    axes: list[tuple[int, int, int]] = []
    for size, step, out_step in [*zip(shape, x_steps, out_steps, strict=True), (words, _WORD, _WORD)]:
        if axes and axes[-1][1:] == (size * step, size * out_step):
            axes[-1] = axes[-1][0] * size, step, out_step
        elif size > 1:
            axes.append((size, step, out_step))
    if len(axes) > _AXES:
        return None
    axes = [(1, 0, 0)] * (_AXES - len(axes)) + axes
    sizes, sources, targets = (Steps(*numbers) for numbers in zip(*axes, strict=True))
    arguments = CopyArguments(x=Binding("x"), out=Binding("out"), sizes=sizes, x_steps=sources, out_steps=targets)
    return NodeProgram([[Call(copy_words, arguments, Items(factor=axes[0][0]))]])


def operand(x: NDArray[Any]) -> NDArray[Any]:
    """Return x in C order, for a program that reads it. A copy is used only by the running kernel."""
    return x if x.flags.c_contiguous else temporary(contiguous(x))


def contiguous(x: NDArray[Any]) -> NDArray[Any]:
    """Return x in C order. While programs are recorded, the copy is made by a program if possible."""
    if recorder_of_thread() is None or x.flags.c_contiguous:
        return np.ascontiguousarray(x)
    out = np.empty(x.shape, x.dtype)
    return out if copy_recorded(x, out) else np.ascontiguousarray(x)


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
    return _used(out, all(copy_recorded(value, part) for value, part in zip(values, parts, strict=True)))


def padded(x: NDArray[Any], pads: list[tuple[int, int]], mode: str, fill: Any = 0) -> NDArray[Any] | None:
    """Return np.pad(x, pads, mode) for the modes constant and reflect; None as for `concatenated`."""
    short = all(max(pair) < size or not any(pair) for pair, size in zip(pads, x.shape, strict=True))
    if recorder_of_thread() is None or mode not in ("constant", "reflect") or (mode == "reflect" and not short):
        return None
    out = np.empty([before + size + after for (before, after), size in zip(pads, x.shape, strict=True)], x.dtype)
    inner = [slice(before, before + size) for (before, _), size in zip(pads, x.shape, strict=True)]
    done = copy_recorded(x, out[tuple(inner)])
    number = fixed_address(np.full((), fill, x.dtype)) if mode == "constant" else x
    for axis, ((before, after), size) in enumerate(zip(pads, x.shape, strict=True)):
        # Axes that were padded before are whole.
        rows = np.moveaxis(out[(slice(None),) * axis + (slice(None), *inner[axis + 1 :])], axis, 0)
        last = before + size
        for part, mirrored in (
            (rows[:before], rows[2 * before : before : -1]),
            (rows[last:], rows[last - 2 : last - 2 - after : -1] if last - 2 - after >= 0 else rows[last - 2 :: -1]),
        ):
            if part.size:
                source = np.broadcast_to(number, part.shape) if mode == "constant" else mirrored
                done = done and copy_recorded(source, part)
    return _used(out, done)


def _used(out: NDArray[Any], done: bool) -> NDArray[Any] | None:
    """Return an array if all its parts were copied; otherwise, the memory is used for other arrays."""
    recorder = recorder_of_thread()
    if recorder is not None and not done:
        recorder.is_complete = False
    return out if done else None
