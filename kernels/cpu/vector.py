"""Vectors of LANES numbers as Numba values, lowered to LLVM's generic vector types.

LLVM maps them to whatever the machine has (SSE, AVX2, AVX-512, NEON), so the kernels are portable, do not hang on the
autovectoriser's mood, and add in the same order for any register width: every operation acts lane by lane, and the one
sum across lanes (`reduce_add`) is a fixed tree. `+ - * / & << >>` work between vectors, and between a vector and a
number, which is first converted to the vector's element type.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from llvmlite import ir

from ..formats import TILE_ROWS
from .half import float_from_half, half_from_float, has_half_instructions
from .isa import isa
from .lazy import cgutils, intrinsic, types

LANES = TILE_ROWS


class VectorOf:
    """LANES numbers of a Numba type, given by its name; stands for the type where signatures are written."""

    def __init__(self, element: str) -> None:
        self.element = element

    @cached_property
    def type(self) -> Any:
        """Numba's type."""
        from .vector_types import Vector

        return Vector(getattr(types, self.element))

    def __call__(self, *arguments: Any) -> Any:
        """The signature of a function that returns such a vector."""
        return self.type(*[numba_type(argument) for argument in arguments])


FLOAT32, INT32, INT16, UINT8 = VectorOf("float32"), VectorOf("int32"), VectorOf("int16"), VectorOf("uint8")


def numba_type(given: Any) -> Any:
    """A Numba type: itself, by its name, or the one that a VectorOf stands for."""
    if isinstance(given, str):
        return getattr(types, given)
    return given.type if isinstance(given, VectorOf) else given


def _splat(builder: Any, value: Any) -> Any:
    first = builder.insert_element(
        ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined), value, ir.Constant(ir.IntType(32), 0)
    )
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES))


def as_vector(context: Any, builder: Any, value: Any, given: Any, vector: Any) -> Any:
    """IR of a value of type `given` as a vector; numbers are converted and repeated."""
    if isinstance(value.type, ir.VectorType):
        return value
    return _splat(builder, context.cast(builder, value, given, numba_type(vector).element))


def _indices(context: Any, builder: Any, sig: Any, args: Any) -> list[Any]:
    """The index tuple args[1] as machine integers."""
    parts = zip(cgutils.unpack_tuple(builder, args[1]), sig.args[1], strict=True)
    return [context.cast(builder, index, given, types.intp) for index, given in parts]


def _address(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    """Address of array element args[0][args[1]]; the index is a tuple, unchecked."""
    array = context.make_array(sig.args[0])(context, builder, args[0])
    indices = _indices(context, builder, sig, args)
    return cgutils.get_item_pointer(context, builder, sig.args[0], array, indices, wraparound=False)


def _rest_of_row(context: Any, builder: Any, sig: Any, args: Any) -> tuple[Any, Any]:
    """How many elements the row has from that place on, and whether they fill a vector."""
    array = context.make_array(sig.args[0])(context, builder, args[0])
    size = cgutils.unpack_tuple(builder, array.shape)[-1]
    rest = builder.sub(size, _indices(context, builder, sig, args)[-1])
    return rest, builder.icmp_signed(">=", rest, rest.type(LANES))


def _load(builder: Any, address: Any, type_: Any) -> Any:
    return builder.load(builder.bitcast(address, type_.as_pointer()), align=1)


def _store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.bitcast(address, value.type.as_pointer()), align=1)


@intrinsic
def load(typing_context: Any, array: Any, index: Any) -> Any:
    """LANES consecutive elements from array[index] on, as a vector of the array's type. Nothing is checked."""
    vector = VectorOf(str(array.dtype)).type

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _load(builder, _address(context, builder, sig, args), context.get_value_type(vector))

    return vector(array, index), lower


@intrinsic
def store(typing_context: Any, array: Any, index: Any, vector: Any) -> Any:
    """Write a vector to LANES consecutive elements of its type, from array[index] on. Nothing is checked."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _store(builder, args[2], _address(context, builder, sig, args))
        return context.get_dummy_value()

    return types.void(array, index, vector), lower


@intrinsic
def load_row(typing_context: Any, array: Any, index: Any) -> Any:
    """Up to LANES elements of a row (the last axis) from array[index] on, as float32; zeros beyond its end.

    The array holds float32, or uint16 that are the bits of float16.
    """

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        address = _address(context, builder, sig, args)
        rest, fills = _rest_of_row(context, builder, sig, args)
        type_ = ir.VectorType(context.get_value_type(array.dtype), LANES)
        buffer = cgutils.alloca_once(builder, type_)
        with builder.if_else(fills, likely=True) as (whole, part):
            with whole:
                loaded, loaded_in = _load(builder, address, type_), builder.basic_block
            with part:
                builder.store(ir.Constant(type_, None), buffer)
                cgutils.memcpy(builder, builder.bitcast(buffer, address.type), address, rest)
                copied, copied_in = builder.load(buffer), builder.basic_block
        value = builder.phi(type_)
        value.add_incoming(loaded, loaded_in)
        value.add_incoming(copied, copied_in)
        if array.dtype == types.uint16:
            return float_from_half(builder, value, has_half_instructions(context))
        return value

    return FLOAT32(array, index), lower


@intrinsic
def store_row(typing_context: Any, array: Any, index: Any, vector: Any) -> Any:
    """Write a float32 vector to a row (see `load_row`) from array[index] on; lanes beyond its end are dropped."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        address = _address(context, builder, sig, args)
        rest, fills = _rest_of_row(context, builder, sig, args)
        value = args[2]
        if array.dtype == types.uint16:
            value = half_from_float(builder, value, has_half_instructions(context))
        buffer = cgutils.alloca_once(builder, value.type)
        with builder.if_else(fills, likely=True) as (whole, part):
            with whole:
                _store(builder, value, address)
            with part:
                builder.store(value, buffer)
                cgutils.memcpy(builder, address, builder.bitcast(buffer, address.type), rest)
        return context.get_dummy_value()

    return types.void(array, index, vector), lower


def _splat_of(vector: VectorOf) -> Callable[..., Any]:
    def splat(typing_context: Any, value: Any) -> Any:
        def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return as_vector(context, builder, args[0], sig.args[0], vector)

        return vector(value), lower

    return intrinsic(splat)


splat_float32, splat_int32, splat_int16 = _splat_of(FLOAT32), _splat_of(INT32), _splat_of(INT16)


def _conversion(target: VectorOf) -> Callable[..., Any]:
    def convert(typing_context: Any, vector: Any) -> Any:
        def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            signed = vector.element.signed
            type_ = context.get_value_type(target.type)
            if target.type.is_float:
                return (builder.sitofp if signed else builder.uitofp)(args[0], type_)
            return (builder.sext if signed else builder.zext)(args[0], type_)

        return target(vector), lower

    return intrinsic(convert)


# From a narrower integer vector, keeping the values.
to_float32, to_int32, to_int16 = _conversion(FLOAT32), _conversion(INT32), _conversion(INT16)


def _bit_cast(target: VectorOf) -> Callable[..., Any]:
    def bit_cast(typing_context: Any, vector: Any) -> Any:
        def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return builder.bitcast(args[0], context.get_value_type(target.type))

        return target(vector), lower

    return intrinsic(bit_cast)


# The same bits, read as another type of the same width.
bits_as_float32, bits_as_int32 = _bit_cast(FLOAT32), _bit_cast(INT32)


@intrinsic
def multiply_add(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c of float32 vectors or numbers; one rounding where the machine has such an instruction, else two."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        operands = [
            as_vector(context, builder, value, given, FLOAT32) for value, given in zip(args, sig.args, strict=True)
        ]
        type_ = operands[0].type
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(type_, [type_] * 3), f"llvm.fmuladd.v{LANES}f32"
        )
        return builder.call(function, operands)

    return FLOAT32(a, b, c), lower


@intrinsic
def reciprocal(typing_context: Any, x: Any) -> Any:
    """1 / x of numbers whose result is a normal one, within a unit in the last place.

    A division holds its port up for sixteen cycles; AVX-512 has an estimate, and one step of Newton doubles its digits.
    """

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        (value,) = args
        type_, one = value.type, _splat(builder, ir.Constant(ir.FloatType(), 1.0))
        if isa() not in ("amx", "vnni"):
            return builder.fdiv(one, value)
        estimate = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(type_, [type_, type_, ir.IntType(16)]), "llvm.x86.avx512.rcp14.ps.512"
        )
        multiply_add = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(type_, [type_] * 3), f"llvm.fmuladd.v{LANES}f32"
        )
        found = builder.call(estimate, [value, ir.Constant(type_, None), ir.Constant(ir.IntType(16), -1)])
        error = builder.call(multiply_add, [builder.fneg(value), found, one])
        return builder.call(multiply_add, [found, error, found])

    return FLOAT32(x), lower


def _selection(comparison: str) -> Callable[..., Any]:
    def select(typing_context: Any, a: Any, b: Any) -> Any:
        def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            other = as_vector(context, builder, args[1], sig.args[1], FLOAT32)
            return builder.select(builder.fcmp_ordered(comparison, args[0], other), other, args[0])

        return FLOAT32(a, b), lower

    return intrinsic(select)


# Of a float32 vector and another (or a number), lane by lane; a NaN in the first operand stays.
maximum, minimum = _selection("<"), _selection(">")


def _llvm_function(name: str, operands: int) -> Callable[..., Any]:
    """An intrinsic of LLVM, lane by lane, on float32 vectors (or numbers beside a vector)."""

    def apply(*given: Any) -> Any:
        def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            values = [
                as_vector(context, builder, value, type_, FLOAT32) for value, type_ in zip(args, sig.args, strict=True)
            ]
            type_ = values[0].type
            function = cgutils.get_or_insert_function(
                builder.module, ir.FunctionType(type_, [type_] * operands), f"llvm.{name}.v{LANES}f32"
            )
            return builder.call(function, values)

        return FLOAT32(*given), lower

    def unary(typing_context: Any, a: Any) -> Any:
        return apply(a)

    def binary(typing_context: Any, a: Any, b: Any) -> Any:
        return apply(a, b)

    return intrinsic(unary if operands == 1 else binary)


absolute, square_root = _llvm_function("fabs", 1), _llvm_function("sqrt", 1)
# As NumPy and ONNX have them: a NaN in either operand stays.
nan_maximum, nan_minimum = _llvm_function("maximum", 2), _llvm_function("minimum", 2)
# a ** b, by the C library: exact, but one lane after the other.
power = _llvm_function("pow", 2)


@intrinsic
def where_less(typing_context: Any, a: Any, b: Any, chosen: Any, other: Any) -> Any:
    """`chosen` in the lanes where a < b, else `other`; float32 vectors or numbers."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        left, right, yes, no = (
            as_vector(context, builder, value, given, FLOAT32) for value, given in zip(args, sig.args, strict=True)
        )
        return builder.select(builder.fcmp_ordered("<", left, right), yes, no)

    return FLOAT32(a, b, chosen, other), lower


@intrinsic
def round_to_half(typing_context: Any, vector: Any) -> Any:
    """A float32 vector rounded to the nearest float16 numbers, ties to even."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        native = has_half_instructions(context)
        return float_from_half(builder, half_from_float(builder, args[0], native), native)

    return FLOAT32(FLOAT32), lower


def _reduction(combine: Callable[[Any, Any, Any], Any]) -> Callable[..., Any]:
    def reduce(typing_context: Any, vector: Any) -> Any:
        def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            value, lanes = args[0], LANES
            while lanes > 1:
                lanes //= 2
                value = combine(builder, _part(builder, value, 0, lanes), _part(builder, value, lanes, lanes))
            return builder.extract_element(value, ir.Constant(ir.IntType(32), 0))

        return vector.element(vector), lower

    return intrinsic(reduce)


def _part(builder: Any, value: Any, first: int, lanes: int) -> Any:
    mask = ir.Constant(ir.VectorType(ir.IntType(32), lanes), list(range(first, first + lanes)))
    return builder.shuffle_vector(value, value, mask)


# Over the lanes of a float32 vector: upper half onto lower half, again and again. A NaN may or may not be the maximum.
reduce_add = _reduction(lambda builder, a, b: builder.fadd(a, b))
reduce_add_integers = _reduction(lambda builder, a, b: builder.add(a, b))
reduce_max = _reduction(lambda builder, a, b: builder.select(builder.fcmp_ordered("<", a, b), b, a))


def _nan_reduction(name: str) -> Callable[..., Any]:
    def combine(builder: Any, a: Any, b: Any) -> Any:
        function_type = ir.FunctionType(a.type, [a.type] * 2)
        function = cgutils.get_or_insert_function(builder.module, function_type, f"llvm.{name}.v{a.type.count}f32")
        return builder.call(function, [a, b])

    return _reduction(combine)


# Of these a NaN in any lane is the result.
reduce_nan_max, reduce_nan_min = _nan_reduction("maximum"), _nan_reduction("minimum")
