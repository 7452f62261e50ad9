"""Ops as functions of arrays: activations, arithmetic, norms and softmax. `block_weights` contains ops with weights.

The calls are cached for each shape and format of the operands.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from ...checks import FLOAT32, Float32, check
from ..jit.arguments import Address, Arguments, Binding, BoundVector
from ..jit.dsl import inline
from ..jit.memory import keep_first, load, store
from ..jit.native import NativeOp, native_op
from ..jit.variants import once
from ..jit.vector import LANES, maximum, reduce_add, reduce_max, splat_float32
from ..jit.vector_math import exp_of_negative, log
from ..program.bound_program import NodeProgram, first_element, run_alone
from ..program.calls import Items, Rows
from ..program.step_table import StepField
from ..program.thread_pool import Threads
from ..rowwise.elementwise import binary, gate as gate_call, unary
from ..rowwise.norm import norm as norm_call

# Rough costs on one thread, in nanoseconds, used to decide whether to share the work.
_NANOSECONDS_PER_NORMALISED = 0.5
_NANOSECONDS_PER_EXPONENT = 0.5
_NANOSECONDS_PER_ACTIVATION = 0.7
_NANOSECONDS_PER_SUM = 0.25
# Maximum number of parts of a broadcast whose calls are separate.
_MAX_PARTS = 64


def activation(function: str, x: Float32, *parameters: float, threads: Threads | None = None) -> Float32:
    """Apply a function of UNARY elementwise.

    Args:
        x: float32 and contiguous, of any shape.
        parameters: parameters of the function.
    """
    x = np.asarray(x)  # NumPy returns scalars for arrays without axes
    shape, size = x.shape, x.size
    if x.dtype is not FLOAT32 or not x.flags.c_contiguous:
        check("x", x, shape)
    out = np.empty(shape, np.float32)
    addresses = {"x": first_element(x), "out": first_element(out)}
    _unary_program(function, size, parameters).run_bound(addresses, threads, 0, size * _NANOSECONDS_PER_ACTIVATION)
    return out


@lru_cache(maxsize=512)
def _unary_program(function: str, size: int, parameters: tuple[float, ...]) -> NodeProgram:
    x, out = (Rows(Binding(name), 4 * size, size, StepField.ONE) for name in ("x", "out"))
    return NodeProgram([[unary(function, x, out, *parameters)]])


def combined(function: str, a: Float32, b: Float32, *, threads: Threads | None = None) -> Float32 | None:
    """Apply a function of BINARY to two float32 arrays, one of which may be broadcast.

    Returns None unless both are contiguous, and each is a whole array, a vector for all rows, or a number for each row,
    or this is true for each part of the first axes.
    """
    a, b = np.asarray(a), np.asarray(b)  # NumPy returns scalars for arrays without axes
    found = _combined_program(function, a.shape, b.shape)
    if found is None or not (a.flags.c_contiguous and b.flags.c_contiguous):
        return None
    check("a", a, a.shape)
    check("b", b, b.shape)
    program, shape, rows = found
    out = np.empty(shape, np.float32)
    addresses = {"a": first_element(a), "b": first_element(b), "out": first_element(out)}
    program.run_bound(addresses, threads, rows, out.size * _NANOSECONDS_PER_SUM)
    return out


@lru_cache(maxsize=512)
def _combined_program(
    function: str, a: tuple[int, ...], b: tuple[int, ...]
) -> tuple[NodeProgram, tuple[int, ...], int] | None:
    """Return the program for operands of these shapes, the shape of the result, and the number of rows."""
    try:
        shape = np.broadcast_shapes(a, b)
    except ValueError:
        return None
    sides = [(1,) * (len(shape) - len(side)) + side for side in (a, b)]
    # Adjacent axes on which the same operands are broadcast are one axis.
    parts: list[tuple[int, tuple[bool, ...]]] = []
    for axis, extent in enumerate(shape):
        whole = tuple(side[axis] == extent for side in sides)
        if extent > 1 and parts and parts[-1][1] == whole:
            parts[-1] = parts[-1][0] * extent, whole
        elif extent > 1:
            parts.append((extent, whole))
    outer = parts[:-2]
    parts = parts or [(1, (True, True))]
    if 0 in shape or math.prod(size for size, _ in outer) > _MAX_PARTS:
        return None
    (rows, along), (width, across) = parts[-2:] if len(parts) > 1 else [(1, (True, True)), parts[0]]
    numbers = [width if has_columns else 1 for has_columns in across]
    steps = [4 * count if has_rows else 0 for count, has_rows in zip(numbers, along, strict=True)]
    # The bytes of a part of each operand.
    sizes = [4 * count * (rows if has_rows else 1) for count, has_rows in zip(numbers, along, strict=True)]
    calls = []
    for number, index in enumerate(np.ndindex(*(size for size, _ in outer))):
        operands = []
        for side, name in enumerate("ab"):
            place = 0
            for (size, whole), position in zip(outer, index, strict=True):
                place = place * size + position if whole[side] else place
            operands.append(Rows(Binding(name, place * sizes[side]), steps[side], numbers[side]))
        out = Rows(Binding("out", 4 * number * rows * width), 4 * width, width)
        calls.append(binary(function, operands[0], operands[1], out))
    return NodeProgram([calls]), shape, rows


def gated(function: str, gate: Float32, up: Float32, *, threads: Threads | None = None) -> Float32:
    """Return function(gate) * up, such as SwiGLU with "silu" and GEGLU with "gelu_tanh".

    Args:
        gate, up: float32 [T, F]. Only each row must be contiguous, so they can be halves of one [T, 2 F] array.
    """
    check("gate", gate, (None, None), by_rows=True)
    check("up", up, gate.shape, by_rows=True)
    out = np.empty(gate.shape, np.float32)
    rows = tuple((name, x.strides[0], x.shape[1]) for name, x in (("gate", gate), ("up", up), ("out", out)))
    _gate_program(function, rows).run(threads, len(gate), gate=first_element(gate), up=first_element(up), out=out)
    return out


@lru_cache(maxsize=512)
def _gate_program(function: str, rows: tuple[tuple[str, int, int], ...]) -> NodeProgram:
    gate, up, out = (Rows(Binding(name), stride, width) for name, stride, width in rows)
    return NodeProgram([[gate_call(function, gate, up, out)]], 0.0, rows[0][2] * _NANOSECONDS_PER_ACTIVATION)


def norm(
    x: Float32, weight: Float32, epsilon: float, *, bias: Float32 | None = None, centred: bool = False,
    threads: Threads | None = None,
) -> Float32:  # fmt: skip
    """Return x / sqrt(mean(x ** 2) + epsilon) * weight over the last axis, or the layer norm if `centred`, plus a bias.

    Args:
        x: float32 [T, F].
        weight, bias: float32 [F].
    """
    out = np.empty(x.shape, np.float32)
    _run_norm({"x": x, "out": out}, {"weight": weight, "bias": bias}, epsilon, centred, threads)
    return out


def norm_of_sum(
    x: Float32, residual: Float32, weight: Float32, epsilon: float, *, bias: Float32 | None = None,
    input_bias: Float32 | None = None, centred: bool = False, threads: Threads | None = None,
) -> tuple[Float32, Float32]:  # fmt: skip
    """Return the norm of s = x + residual + input_bias, and s. Otherwise this function equals `norm`.

    Args:
        residual: float32 [T, F].
        input_bias: float32 [F].
    """
    out, total = np.empty(x.shape, np.float32), np.empty(x.shape, np.float32)
    vectors = {"weight": weight, "bias": bias, "input_bias": input_bias}
    _run_norm({"x": x, "residual": residual, "out": out, "total": total}, vectors, epsilon, centred, threads)
    return out, total


def _run_norm(
    rows: Mapping[str, Float32], vectors: Mapping[str, Float32 | None], epsilon: float, centred: bool,
    threads: Threads | None,
) -> None:  # fmt: skip
    """Compute the norm of arrays that are passed by operand name."""
    x = rows["x"]
    width = x.shape[-1]
    check("x", x, (None, width))
    addresses = {}
    for name, array in rows.items():
        check(name, array, x.shape)
        addresses[name] = first_element(array)
    for name, vector in vectors.items():
        if vector is not None:
            check(name, vector, (width,))
            addresses[name] = first_element(vector)
    if x.size:
        program = _norm_program(width, tuple(addresses), epsilon, centred)
        program.run_bound(addresses, threads, len(x), x.size * _NANOSECONDS_PER_NORMALISED * (len(rows) // 2))


@lru_cache(maxsize=256)
def _norm_program(width: int, names: tuple[str, ...], epsilon: float, centred: bool) -> NodeProgram:
    operands: dict[str, Any] = {
        name: Rows(Binding(name), 4 * width, width) if name in _NORM_ROWS else BoundVector(name, size=width)
        for name in names
    }
    x, weight, out, skip = (operands.pop(name, None) for name in ("x", "weight", "out", "residual"))
    return NodeProgram([[norm_call(x, weight, epsilon, out, centred=centred, skip=skip, **operands)]])


_NORM_ROWS = ("x", "residual", "out", "total")


class SoftmaxArguments(Arguments):
    """Adjacent rows of `width` numbers."""

    x: Address
    out: Address
    width: int


@inline
def _largest_of(x: int, width: int) -> Any:
    """Return the largest of `width` numbers at an address."""
    largest = splat_float32(-np.inf)
    for first in range(0, width, LANES):
        left = width - first
        largest = maximum(largest, keep_first(load(x + 4 * first, left), left, -np.inf))
    return reduce_max(largest)


@inline
def softmax_of_row(x: int, out: int, width: int) -> None:
    """Write the softmax of `width` numbers at the address x to the address out, which may be equal."""
    top, total = _largest_of(x, width), splat_float32(0.0)
    for first in range(0, width, LANES):
        left = width - first
        weight = keep_first(exp_of_negative(load(x + 4 * first, left) - top), left, 0.0)
        store(out + 4 * first, weight, left)
        total = total + weight
    scale = np.float32(1.0) / reduce_add(total)
    for first in range(0, width, LANES):
        store(out + 4 * first, load(out + 4 * first, width - first) * scale, width - first)


@native_op(SoftmaxArguments)
def softmax(arguments: SoftmaxArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Compute softmax. Items are rows. A row that is all -infinity or contains NaN becomes NaN, as by definition."""
    width = arguments.width
    for row in range(begin, end):
        softmax_of_row(arguments.x + 4 * row * width, arguments.out + 4 * row * width, width)
    return 0


@native_op(SoftmaxArguments)
def log_softmax(arguments: SoftmaxArguments, context: int, begin: int, end: int, scratch: int) -> int:
    """Compute log(softmax). Items are rows. A row that is all -infinity or contains NaN becomes NaN."""
    width = arguments.width
    # Two rows at a time, because each operation waits for the one before it. The last row may repeat.
    for row in range(begin, end, 2):
        first_row, other_row = 4 * row * width, 4 * min(row + 1, end - 1) * width
        a, b = arguments.x + first_row, arguments.x + other_row
        a_out, b_out = arguments.out + first_row, arguments.out + other_row
        a_top = b_top = splat_float32(-np.inf)
        for first in range(0, width, LANES):
            left = width - first
            a_top = maximum(a_top, keep_first(load(a + 4 * first, left), left, -np.inf))
            b_top = maximum(b_top, keep_first(load(b + 4 * first, left), left, -np.inf))
        a_most, b_most = splat_float32(reduce_max(a_top)), splat_float32(reduce_max(b_top))
        a_total = b_total = splat_float32(0.0)
        for first in range(0, width, LANES):
            left = width - first
            a_total = a_total + keep_first(exp_of_negative(load(a + 4 * first, left) - a_most), left, 0.0)
            b_total = b_total + keep_first(exp_of_negative(load(b + 4 * first, left) - b_most), left, 0.0)
        a_shift, b_shift = log(splat_float32(reduce_add(a_total))), log(splat_float32(reduce_add(b_total)))
        for first in range(0, width, LANES):
            left = width - first
            store(a_out + 4 * first, load(a + 4 * first, left) - a_most - a_shift, left)
            store(b_out + 4 * first, load(b + 4 * first, left) - b_most - b_shift, left)
    return 0


class SoftmaxColumnsArguments(Arguments):
    """Matrices [width, inner] of numbers. Items are matrices times `pieces` of LANES columns."""

    x: Address
    out: Address
    width: int
    inner: int
    pieces: int


@once
def softmax_columns_op(logarithm: bool) -> NativeOp:
    """Return the operator that computes softmax, or its logarithm, of each column."""

    @inline
    def finish_softmax(x: int, out: int, top: Any, total: Any, left: int) -> None:
        store(out, load(out, left) / total, left)

    @inline
    def finish_logarithm(x: int, out: int, top: Any, total: Any, left: int) -> None:
        store(out, load(x, left) - top - total, left)

    finish = finish_logarithm if logarithm else finish_softmax

    def softmax_columns(arguments: SoftmaxColumnsArguments, context: int, begin: int, end: int, scratch: int) -> int:
        width, inner, pieces = arguments.width, arguments.inner, arguments.pieces
        for item in range(begin, end):
            first = item % pieces * LANES
            left, place = inner - first, 4 * (item // pieces * width * inner + first)
            x, out = arguments.x + place, arguments.out + place
            top, total = splat_float32(-np.inf), splat_float32(0.0)
            for row in range(width):
                top = maximum(top, load(x + 4 * row * inner, left))
            for row in range(width):
                weight = exp_of_negative(load(x + 4 * row * inner, left) - top)
                if not logarithm:
                    store(out + 4 * row * inner, weight, left)
                total = total + weight
            last = log(total) if logarithm else total
            for row in range(width):
                finish(x + 4 * row * inner, out + 4 * row * inner, top, last, left)
        return 0

    name = "log_softmax_columns" if logarithm else "softmax_columns"
    return native_op(SoftmaxColumnsArguments, name=name)(softmax_columns)


def softmax_columns(threads: Threads | None, x: Float32, *, logarithm: bool = False) -> Float32:
    """Return the softmax of float32 x [matrices, width, inner] along axis 1, or its logarithm.

    A column that is all -infinity or contains NaN becomes NaN.
    """
    check("x", x, (None, None, None))
    out = np.empty(x.shape, np.float32)
    if x.size:
        matrices, width, inner = x.shape
        pieces, work = -(-inner // LANES), x.size * _NANOSECONDS_PER_EXPONENT
        op, items = softmax_columns_op(logarithm), Items(factor=matrices * pieces)
        run_alone(op, items, work, threads, x=x, out=out, width=width, inner=inner, pieces=pieces)
    return out


def softmax_rows(threads: Threads | None, x: Float32, *, logarithm: bool = False) -> Float32:
    """Return the softmax of float32 x along the last axis, or its logarithm.

    A row that is all -infinity or contains NaN becomes NaN.
    """
    if x.dtype != np.float32 or not x.ndim:
        raise ValueError(f"x is {x.dtype} {list(x.shape)}, expected float32 with an axis")
    x = np.ascontiguousarray(x)
    out = np.empty(x.shape, np.float32)
    if x.size:
        width, nanoseconds = x.shape[-1], x.size * _NANOSECONDS_PER_EXPONENT
        op = log_softmax if logarithm else softmax
        run_alone(op, Items(factor=x.size // width), nanoseconds, threads, x=x, out=out, width=width)
    return out
