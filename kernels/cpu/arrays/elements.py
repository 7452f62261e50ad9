"""Logic, comparisons, choices and lookups of small arrays in recorded programs.

Attention masks are computed by a few such operators, which take less time in NumPy than the calls between them. In a
recorded program they take no calls. All functions are exact, so that results do not depend on who computes them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..jit.arguments import Address, Arguments, Binding
from ..jit.dsl import inline
from ..jit.memory import (
    read_float32,
    read_int32,
    read_int64,
    read_uint8,
    write_float32,
    write_int8,
    write_int32,
    write_int64,
)
from ..jit.native import native_op
from ..program.bound_program import NodeProgram, first_element
from ..program.calls import Call, Items
from ..program.thread_pool import fixed_address, recorder_of_thread

# The functions of one, two or three elements, which are read as integers.
_EQUAL, _LESS, _LESS_OR_EQUAL, _AND, _OR, _XOR, _NOT, _WHERE, _COPY, _TO_FLOAT, _FLOAT_TO_BOOL, _PICK = range(12)
# Comparisons of float32.
_FLOATS_EQUAL, _FLOATS_LESS, _FLOATS_LESS_OR_EQUAL = range(12, 15)
_FUNCTIONS = {"Equal": _EQUAL, "Less": _LESS, "LessOrEqual": _LESS_OR_EQUAL}
_OF_FLOATS = {"Equal": _FLOATS_EQUAL, "Less": _FLOATS_LESS, "LessOrEqual": _FLOATS_LESS_OR_EQUAL}
_SWAPPED = {"Greater": "Less", "GreaterOrEqual": "LessOrEqual"}
_LOGIC = {"And": _AND, "Or": _OR, "Xor": _XOR, "Not": _NOT}
_INTEGERS = frozenset(map(np.dtype, (np.bool_, np.int32, np.int64)))
_WORDS = _INTEGERS | {np.dtype(np.float32)}
_BOOL, _FLOAT32 = np.dtype(np.bool_), np.dtype(np.float32)
_AXES = 4
# The kernel computes one element after the other, so NumPy is faster for larger results.
_MOST_ELEMENTS = 4096
_NANOSECONDS_PER_ELEMENT = 3.0


class ElementsAxis(Arguments, kw_only=False):
    """The size of an axis, and the bytes between its neighbours in each operand."""

    size: int
    a: int
    b: int
    c: int


class ElementsArguments(Arguments):
    """Operands with any strides, the bytes of their elements, and a result in C order.

    `step` is the number of bytes between the elements that the integers of `a` select from `b`, for _PICK.
    """

    function: int
    a: Address
    b: Address
    c: Address
    out: Address
    a_bytes: int
    b_bytes: int
    out_bytes: int
    step: int
    first: ElementsAxis
    second: ElementsAxis
    third: ElementsAxis
    fourth: ElementsAxis


@inline
def _read(address: int, size: int) -> Any:
    if size == 1:
        return np.int64(1 if read_uint8(address) != 0 else 0)
    if size == 4:
        return np.int64(read_int32(address))
    return read_int64(address)


@inline
def _write(address: int, size: int, value: int) -> None:
    if size == 1:
        write_int8(address, value)
    elif size == 4:
        write_int32(address, value)
    else:
        write_int64(address, value)


@inline
def _of_two(function: int, a: int, b: int) -> Any:
    if function == _EQUAL:
        return 1 if a == b else 0
    if function == _LESS:
        return 1 if a < b else 0
    if function == _LESS_OR_EQUAL:
        return 1 if a <= b else 0
    if function == _AND:
        return a & b
    if function == _OR:
        return a | b
    return a ^ b


@inline
def _of_floats(function: int, a: float, b: float) -> Any:
    if function == _FLOATS_EQUAL:
        return 1 if a == b else 0
    if function == _FLOATS_LESS:
        return 1 if a < b else 0
    return 1 if a <= b else 0


@inline
def _compute(arguments: ElementsArguments, a_at: int, b_at: int, c_at: int, out: int) -> None:
    """Compute one element from the operands' addresses."""
    function, out_bytes, b_bytes = arguments.function, arguments.out_bytes, arguments.b_bytes
    a = _read(a_at, arguments.a_bytes)
    if function <= _XOR:
        _write(out, out_bytes, _of_two(function, a, _read(b_at, b_bytes)))
    elif function == _NOT:
        write_int8(out, 1 - a)
    elif function == _WHERE:
        _write(out, out_bytes, _read(b_at if a != 0 else c_at, out_bytes))
    elif function == _COPY:
        _write(out, out_bytes, (1 if a != 0 else 0) if out_bytes == 1 else a)
    elif function == _TO_FLOAT:
        write_float32(out, np.float32(a))
    elif function == _FLOAT_TO_BOOL:
        write_int8(out, 1 if a & 0x7FFFFFFF != 0 else 0)
    elif function == _PICK:
        _write(out, out_bytes, _read(b_at + a * arguments.step, out_bytes))
    else:
        write_int8(out, _of_floats(function, read_float32(a_at), read_float32(b_at)))


@native_op(ElementsArguments)
def compute_elements(arguments: ElementsArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Compute a function of small operands. There is one item."""
    out, out_bytes = arguments.out, arguments.out_bytes
    first, second, third, fourth = arguments.first, arguments.second, arguments.third, arguments.fourth
    for i in range(first.size):
        for j in range(second.size):
            for k in range(third.size):
                a = arguments.a + i * first.a + j * second.a + k * third.a
                b = arguments.b + i * first.b + j * second.b + k * third.b
                c = arguments.c + i * first.c + j * second.c + k * third.c
                for index in range(fourth.size):
                    _compute(arguments, a + index * fourth.a, b + index * fourth.b, c + index * fourth.c, out)
                    out += out_bytes
    return 0


def compared(name: str, a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.bool_] | None:
    """Compare integers or float32 by an ONNX operator.

    All functions return None if no program is recorded or nothing fits.
    """
    if name in _SWAPPED:
        name, a, b = _SWAPPED[name], b, a
    if recorder_of_thread() is None or a.dtype not in _WORDS or b.dtype != a.dtype:
        return None
    return _computed((_OF_FLOATS if a.dtype == _FLOAT32 else _FUNCTIONS)[name], _BOOL, a, b)


def logical(name: str, *values: NDArray[Any]) -> NDArray[np.bool_] | None:
    """Combine booleans by an ONNX operator; see `compared`."""
    if recorder_of_thread() is None or any(value.dtype != _BOOL for value in values):
        return None
    return _computed(_LOGIC[name], _BOOL, *values)


def chosen(condition: NDArray[Any], x: NDArray[Any], y: NDArray[Any]) -> NDArray[Any] | None:
    """Return x where a condition is true, and y elsewhere; see `compared`."""
    if recorder_of_thread() is None or condition.dtype != _BOOL or x.dtype not in _WORDS or x.dtype != y.dtype:
        return None
    return _computed(_WHERE, x.dtype, condition, x, y)


def converted(x: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any] | None:
    """Convert integers to another type or to float32, or float32 to bool; see `compared`."""
    if recorder_of_thread() is None:
        return None
    if x.dtype == _FLOAT32:
        return _computed(_FLOAT_TO_BOOL, _BOOL, x) if dtype == _BOOL else None
    if x.dtype not in _INTEGERS or dtype not in _WORDS:
        return None
    return _computed(_TO_FLOAT if dtype == _FLOAT32 else _COPY, dtype, x)


def picked_slices(x: NDArray[Any], indices: NDArray[Any], axis: int) -> NDArray[Any] | None:
    """Return np.take(x, indices, axis) for indices that are the same in all runs; see `compared`."""
    size = x.shape[axis]
    if recorder_of_thread() is None or x.dtype not in _WORDS or indices.dtype.kind != "i" or not indices.size:
        return None
    if indices.min() < -size or indices.max() >= size:
        return None
    numbers = fixed_address(np.where(indices < 0, indices + size, indices).astype(np.int64).reshape(-1))
    outer, inner = math.prod(x.shape[:axis]), math.prod(x.shape[axis + 1 :])
    if not x.flags.c_contiguous:
        return None
    inside, item = (outer, numbers.size, inner), x.itemsize
    slices = np.ndarray(inside, x.dtype, x, strides=(size * inner * item, 0, item))
    wide = np.ndarray(inside, np.int64, numbers, strides=(0, 8, 0))
    found = _computed(_PICK, x.dtype, wide, slices, step=inner * item)
    return None if found is None else found.reshape(*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])


def _computed(function: int, dtype: np.dtype[Any], *operands: NDArray[Any], step: int = 0) -> NDArray[Any] | None:
    if not all(isinstance(value, np.ndarray) for value in operands):
        return None  # NumPy returns numbers for results without axes
    try:
        shape = np.broadcast_shapes(*[value.shape for value in operands])
    except ValueError:
        return None  # NumPy reports the shapes
    if not 0 < math.prod(shape) <= _MOST_ELEMENTS:
        return None
    wide = [np.broadcast_to(value, shape) for value in operands]
    axes = _joined_axes(shape, [value.strides for value in wide])
    if axes is None:
        return None
    out = np.empty(shape, dtype)
    sizes = tuple(value.itemsize for value in operands[:2])
    program = _program(function, len(operands), axes, sizes, dtype.itemsize, step)
    names = dict(zip("abc", map(first_element, operands), strict=False))
    program.run_bound({**names, "out": first_element(out)}, None, 0, out.size * _NANOSECONDS_PER_ELEMENT)
    return out


def _joined_axes(
    shape: Sequence[int], strides: Sequence[Sequence[int]]
) -> tuple[tuple[int, tuple[int, ...]], ...] | None:
    """Return the size and the strides of each axis after adjacent axes are joined; None if there are too many."""
    axes: list[tuple[int, tuple[int, ...]]] = []
    for size, steps in zip(shape, zip(*strides, strict=True), strict=True):
        if min(steps) < 0:
            return None
        if axes and axes[-1][1] == tuple(size * step for step in steps):
            axes[-1] = axes[-1][0] * size, steps
        elif size > 1:
            axes.append((size, steps))
    return tuple(axes) if len(axes) <= _AXES else None


@lru_cache(maxsize=512)
def _program(
    function: int, count: int, axes: tuple[tuple[int, tuple[int, ...]], ...], sizes: tuple[int, ...], out_bytes: int,
    step: int,
) -> NodeProgram:  # fmt: skip
    """Return the program of a function of `count` operands, with bindings for a, b, c and out."""
    one: tuple[int, tuple[int, ...]] = (1, ())
    given = [ElementsAxis(size, *[*steps, 0, 0, 0][:3]) for size, steps in [one] * (_AXES - len(axes)) + [*axes]]
    places = [Binding(name) if number < count else None for number, name in enumerate("abc")]
    arguments = ElementsArguments(
        function=function, a=places[0], b=places[1], c=places[2], out=Binding("out"), a_bytes=sizes[0],
        b_bytes=sizes[-1], out_bytes=out_bytes, step=step, first=given[0], second=given[1], third=given[2],
        fourth=given[3],
    )  # fmt: skip
    return NodeProgram([[Call(compute_elements, arguments, Items(factor=1))]])
