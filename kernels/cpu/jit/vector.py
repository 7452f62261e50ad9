"""Vectors of LANES numbers as Numba values, lowered to LLVM's generic vector types.

LLVM maps the vectors to the machine's registers (SSE, AVX2, AVX-512, NEON). So the kernels are portable, do not depend
on the autovectoriser, and add numbers in the same order for any register width: every operation works lane by lane, and
the only sum across lanes (`reduce_add`) is a fixed tree. `+ - * / & << >>` work between two vectors, or between a
vector and a number, which is first converted to the vector's element type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from .dsl import FLOATS, INTEGERS, VectorOf, cgutils, intrinsic, typed_intrinsic, types
from .emit import FLOAT_VECTOR, INT16, INT32, INT32_VECTOR, LANES as LANES, Emitter, constant, numbers
from .isa import isa

# Vectors, or numbers that are combined with them.
_FLOATS = FLOATS.or_number


def _address(e: Emitter, array_type: Any, array: Any, index: Any) -> Any:
    """Return the pointer to the vector that begins at an element of a one-dimensional array."""
    made = e.context.make_array(array_type)(e.context, e.builder, array)
    pointer = cgutils.get_item_pointer(e.context, e.builder, array_type, made, [index], wraparound=False)
    return e.builder.bitcast(pointer, FLOAT_VECTOR.as_pointer())


@typed_intrinsic
def load(array: Any, index: Any) -> Any:
    """Load LANES consecutive float32 numbers of a one-dimensional array, starting at an index. Nothing is checked."""

    def emit(e: Emitter, values: Any, start: Any) -> Any:
        return e.builder.load(_address(e, array, values, start), align=1)

    return FLOATS.type(array, types.int64), emit


@typed_intrinsic
def store(array: Any, index: Any, vector: Any) -> Any:
    """Store a float32 vector to LANES consecutive elements of an array, starting at an index. Nothing is checked."""

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


# Conversions from a narrower integer vector with the same values.
to_float32, to_int32 = _conversion(FLOATS), _conversion(INTEGERS)


def _bit_cast(target: VectorOf, given: VectorOf) -> Any:
    @intrinsic(target, given)
    def bit_cast(e: Emitter, vector: Any) -> Any:
        return e.builder.bitcast(vector, e.type_of(target))

    return bit_cast


# Reinterpretations of the same bits as another type of the same width.
bits_as_float32, bits_as_int32 = _bit_cast(FLOATS, INTEGERS), _bit_cast(INTEGERS, FLOATS)


@intrinsic(FLOATS, _FLOATS, _FLOATS, _FLOATS)
def multiply_add(e: Emitter, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c of float32 vectors or numbers, rounded once if the machine has FMA instructions, else twice."""
    return e.fast_multiply_add(a, b, c)


@intrinsic(FLOATS, FLOATS)
def reciprocal(e: Emitter, x: Any) -> Any:
    """Return 1 / x within one unit in the last place, for results that are normal numbers.

    A division blocks its port for sixteen cycles. AVX-512 has an estimate instruction, and one Newton step doubles the
    number of correct digits.
    """
    one = constant(FLOAT_VECTOR, 1.0)
    if isa() not in ("amx", "vnni"):
        return e.builder.fdiv(one, x)
    operands = [x, ir.Constant(FLOAT_VECTOR, None), INT16(-1)]
    found = e.call("llvm.x86.avx512.rcp14.ps.512", FLOAT_VECTOR, operands)
    error = e.fast_multiply_add(e.builder.fneg(x), found, one)
    return e.fast_multiply_add(found, error, found)


# Adding 1.5 * 2**23 rounds a float32 to an integer and leaves that integer in the low bits.
ROUND = 12582912.0
_ROUND_BITS = 0x4B400000
_BIAS, _MANTISSA_BITS = 127, 23


@intrinsic(FLOATS, FLOATS, FLOATS)
def times_power_of_two(e: Emitter, x: Any, rounded: Any) -> Any:
    """Return x * 2 ** k for x near 1 and rounded = k + ROUND, |k| < 252. The result may be denormal or infinite."""
    b = e.builder
    if isa() in ("amx", "vnni"):
        exponent = b.fsub(rounded, constant(FLOAT_VECTOR, ROUND))
        operands = [x, exponent, ir.Constant(FLOAT_VECTOR, None), INT16(-1), INT32(_CURRENT_ROUNDING)]
        return e.call("llvm.x86.avx512.mask.scalef.ps.512", FLOAT_VECTOR, operands)
    # A product with each half of the power is a normal number, except the last.
    exponent = b.sub(b.bitcast(rounded, INT32_VECTOR), constant(INT32_VECTOR, _ROUND_BITS))
    half = b.ashr(exponent, constant(INT32_VECTOR, 1))
    for part in (half, b.sub(exponent, half)):
        biased = b.add(part, constant(INT32_VECTOR, _BIAS))
        x = b.fmul(x, b.bitcast(b.shl(biased, constant(INT32_VECTOR, _MANTISSA_BITS)), FLOAT_VECTOR))
    return x


# The rounding mode of the processor's control register, as an operand of AVX-512 instructions.
_CURRENT_ROUNDING = 4


def _chosen(comparison: str) -> Any:
    @intrinsic(FLOATS, FLOATS, _FLOATS)
    def choose(e: Emitter, a: Any, b: Any) -> Any:
        return e.builder.select(e.builder.fcmp_ordered(comparison, a, b), b, a)

    return choose


# The larger or smaller number of each lane. A NaN in the first operand is preserved.
maximum, minimum = _chosen("<"), _chosen(">")


@intrinsic(FLOATS, _FLOATS, _FLOATS, _FLOATS, _FLOATS)
def where_less(e: Emitter, a: Any, b: Any, chosen: Any, other: Any) -> Any:
    """Return `chosen` in the lanes with a < b, and `other` in the other lanes."""
    return e.builder.select(e.builder.fcmp_ordered("<", a, b), chosen, other)


@intrinsic("int64", FLOATS, _FLOATS)
def lanes_above(e: Emitter, a: Any, b: Any) -> Any:
    """Return a bit for each lane, from the lowest bit up: 1 unless a <= b. A NaN in either operand gives 1."""
    above = e.builder.fcmp_unordered(">", a, b)
    return e.builder.zext(e.builder.bitcast(above, ir.IntType(LANES)), ir.IntType(64))


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


# As in NumPy and ONNX, a NaN in either operand is preserved.
nan_maximum, nan_minimum = _function_of_two("maximum"), _function_of_two("minimum")
# a ** b by the C library: exact, but computed one lane after the other.
power = _function_of_two("pow")


def _larger(e: Emitter, a: Any, b: Any) -> Any:
    found = e.builder.select(e.builder.fcmp_ordered(">", a, b), a, b)
    return e.builder.select(e.builder.fcmp_unordered("uno", a, a), a, found)


@intrinsic(FLOATS, FLOATS, FLOATS)
def larger(e: Emitter, a: Any, b: Any) -> Any:
    """Return the maximum with NaNs preserved. Unlike in `nan_maximum`, either zero may be the maximum of both zeros."""
    return _larger(e, a, b)


@intrinsic(FLOATS, FLOATS, FLOATS, "int64")
def every_other(e: Emitter, a: Any, b: Any, first: Any) -> Any:
    """Return every other lane of a and b, from the first (0) or the second (1) lane of a."""
    even, odd = (e.shuffle(a, b, range(start, 2 * LANES, 2)) for start in (0, 1))
    return e.builder.select(e.builder.icmp_signed("==", first, ir.IntType(64)(0)), even, odd)


@intrinsic(FLOATS, FLOATS, "int64")
def repeated(e: Emitter, vector: Any, half: Any) -> Any:
    """Return the lanes of the first (0) or the second (1) half of a vector, each twice in a row."""
    first, second = (e.shuffle(vector, vector, [start + i // 2 for i in range(LANES)]) for start in (0, LANES // 2))
    return e.builder.select(e.builder.icmp_signed("==", half, ir.IntType(64)(0)), first, second)


@intrinsic(FLOATS, FLOATS, FLOATS, "int64")
def interleaved(e: Emitter, a: Any, b: Any, half: Any) -> Any:
    """Return the lanes of the first (0) or the second (1) half of a and b in turns."""
    starts = (0, LANES // 2)
    first, second = (e.shuffle(a, b, [start + i // 2 + LANES * (i % 2) for i in range(LANES)]) for start in starts)
    return e.builder.select(e.builder.icmp_signed("==", half, ir.IntType(64)(0)), first, second)


@intrinsic(FLOATS, FLOATS)
def round_to_half(e: Emitter, vector: Any) -> Any:
    """Round a float32 vector to the nearest float16 numbers, ties to even."""
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


# Reductions over the lanes of a vector, which repeatedly fold the upper half onto the lower half. `reduce_max`
# may ignore a NaN; `reduce_larger` preserves it.
reduce_add = _reduction("float32", FLOATS, lambda e, a, b: e.builder.fadd(a, b))
reduce_add_integers = _reduction("int32", INTEGERS, lambda e, a, b: e.builder.add(a, b))
reduce_max = _reduction("float32", FLOATS, lambda e, a, b: e.builder.select(e.builder.fcmp_ordered("<", a, b), b, a))
reduce_larger = _reduction("float32", FLOATS, _larger)
