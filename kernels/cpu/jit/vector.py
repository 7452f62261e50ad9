"""Vectors of LANES numbers as Numba values, lowered to LLVM's generic vector types.

LLVM maps them to whatever the machine has (SSE, AVX2, AVX-512, NEON), so the kernels are portable, do not hang on the
autovectoriser's mood, and add in the same order for any register width: every operation acts lane by lane, and the one
sum across lanes (`reduce_add`) is a fixed tree. `+ - * / & << >>` work between vectors, and between a vector and a
number, which is first converted to the vector's element type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from .dsl import FLOATS, INTEGERS, VectorOf, cgutils, intrinsic, typed_intrinsic, types
from .emit import FLOAT_VECTOR, INT16, LANES as LANES, Emitter, constant, numbers
from .isa import isa

# Vectors, or numbers beside them.
_FLOATS = FLOATS.or_number


def _address(e: Emitter, array_type: Any, array: Any, index: Any) -> Any:
    """Where the vector lies that begins with an element of an array of one axis."""
    made = e.context.make_array(array_type)(e.context, e.builder, array)
    pointer = cgutils.get_item_pointer(e.context, e.builder, array_type, made, [index], wraparound=False)
    return e.builder.bitcast(pointer, FLOAT_VECTOR.as_pointer())


@typed_intrinsic
def load(array: Any, index: Any) -> Any:
    """LANES consecutive float32 of an array of one axis, from an index on. Nothing is checked."""

    def emit(e: Emitter, values: Any, start: Any) -> Any:
        return e.builder.load(_address(e, array, values, start), align=1)

    return FLOATS.type(array, types.int64), emit


@typed_intrinsic
def store(array: Any, index: Any, vector: Any) -> Any:
    """Write a float32 vector to LANES consecutive elements of an array, from an index on. Nothing is checked."""

    def emit(e: Emitter, values: Any, start: Any, value: Any) -> None:
        e.builder.store(value, _address(e, array, values, start), align=1)

    return types.void(array, types.int64, vector), emit


def _splat_of(vector: VectorOf) -> Any:
    @intrinsic(vector, vector.or_number)
    def splat(e: Emitter, value: Any) -> Any:
        return value

    return splat


splat_float32, splat_int32 = _splat_of(FLOATS), _splat_of(INTEGERS)


def _conversion(target: VectorOf) -> Any:
    @typed_intrinsic
    def convert(vector: Any) -> Any:
        def emit(e: Emitter, value: Any) -> Any:
            signed, type_ = vector.element.signed, e.type_of(target)
            if target is FLOATS:
                return (e.builder.sitofp if signed else e.builder.uitofp)(value, type_)
            return (e.builder.sext if signed else e.builder.zext)(value, type_)

        return target.type(vector), emit

    return convert


# From a narrower integer vector, keeping the values.
to_float32, to_int32 = _conversion(FLOATS), _conversion(INTEGERS)


def _bit_cast(target: VectorOf, given: VectorOf) -> Any:
    @intrinsic(target, given)
    def bit_cast(e: Emitter, vector: Any) -> Any:
        return e.builder.bitcast(vector, e.type_of(target))

    return bit_cast


# The same bits, read as another type of the same width.
bits_as_float32, bits_as_int32 = _bit_cast(FLOATS, INTEGERS), _bit_cast(INTEGERS, FLOATS)


@intrinsic(FLOATS, _FLOATS, _FLOATS, _FLOATS)
def multiply_add(e: Emitter, a: Any, b: Any, c: Any) -> Any:
    """a * b + c of float32 vectors or numbers; one rounding where the machine has such an instruction, else two."""
    return e.fast_multiply_add(a, b, c)


@intrinsic(FLOATS, FLOATS)
def reciprocal(e: Emitter, x: Any) -> Any:
    """1 / x of numbers whose result is a normal one, within a unit in the last place.

    A division holds its port up for sixteen cycles; AVX-512 has an estimate, and one step of Newton doubles its digits.
    """
    one = constant(FLOAT_VECTOR, 1.0)
    if isa() not in ("amx", "vnni"):
        return e.builder.fdiv(one, x)
    operands = [x, ir.Constant(FLOAT_VECTOR, None), INT16(-1)]
    found = e.call("llvm.x86.avx512.rcp14.ps.512", FLOAT_VECTOR, operands)
    error = e.fast_multiply_add(e.builder.fneg(x), found, one)
    return e.fast_multiply_add(found, error, found)


def _chosen(comparison: str) -> Any:
    @intrinsic(FLOATS, FLOATS, _FLOATS)
    def choose(e: Emitter, a: Any, b: Any) -> Any:
        return e.builder.select(e.builder.fcmp_ordered(comparison, a, b), b, a)

    return choose


# The larger or smaller one of each lane; a NaN in the first operand stays.
maximum, minimum = _chosen("<"), _chosen(">")


@intrinsic(FLOATS, _FLOATS, _FLOATS, _FLOATS, _FLOATS)
def where_less(e: Emitter, a: Any, b: Any, chosen: Any, other: Any) -> Any:
    """`chosen` in the lanes where a < b, else `other`."""
    return e.builder.select(e.builder.fcmp_ordered("<", a, b), chosen, other)


def _function_of_one(name: str) -> Any:
    @intrinsic(FLOATS, FLOATS)
    def apply(e: Emitter, x: Any) -> Any:
        return e.lanewise(name, x)

    return apply


absolute, square_root, floor = map(_function_of_one, ("fabs", "sqrt", "floor"))


def _function_of_two(name: str) -> Any:
    @intrinsic(FLOATS, _FLOATS, _FLOATS)
    def apply(e: Emitter, a: Any, b: Any) -> Any:
        return e.lanewise(name, a, b)

    return apply


# As NumPy and ONNX have them: a NaN in either operand stays.
nan_maximum, nan_minimum = _function_of_two("maximum"), _function_of_two("minimum")
# a ** b, by the C library: exact, but one lane after the other.
power = _function_of_two("pow")


@intrinsic(FLOATS, FLOATS)
def round_to_half(e: Emitter, vector: Any) -> Any:
    """A float32 vector rounded to the nearest float16 numbers, ties to even."""
    return e.from_half(e.to_half(vector))


def _reduction(result: str, vector: VectorOf, combine: Callable[[Emitter, Any, Any], Any]) -> Any:
    @intrinsic(result, vector)
    def reduce(e: Emitter, value: Any) -> Any:
        lanes = LANES
        while lanes > 1:
            lanes //= 2
            halves = range(lanes), range(lanes, 2 * lanes)
            lower, upper = (e.builder.shuffle_vector(value, value, numbers(*half)) for half in halves)
            value = combine(e, lower, upper)
        return e.builder.extract_element(value, ir.IntType(32)(0))

    return reduce


# Over the lanes of a vector: upper half onto lower half, again and again. A NaN may or may not be the maximum.
reduce_add = _reduction("float32", FLOATS, lambda e, a, b: e.builder.fadd(a, b))
reduce_add_integers = _reduction("int32", INTEGERS, lambda e, a, b: e.builder.add(a, b))
reduce_max = _reduction("float32", FLOATS, lambda e, a, b: e.builder.select(e.builder.fcmp_ordered("<", a, b), b, a))
