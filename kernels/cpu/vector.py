"""Vectors of LANES numbers as Numba values, lowered to LLVM's generic vector types.

LLVM maps them to whatever the machine has (SSE, AVX2, AVX-512, NEON), so the kernels are portable, do not hang on the
autovectoriser's mood, and add in the same order for any register width: every operation acts lane by lane, and the one
sum across lanes (`reduce_add`) is a fixed tree. `+ - * / & << >>` work between vectors, and between a vector and a
number, which is first converted to the vector's element type.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.datamodel import models
from numba.core.imputils import lower_builtin
from numba.core.typing import signature
from numba.core.typing.templates import AbstractTemplate, infer_global
from numba.extending import intrinsic as numba_intrinsic
from numba.extending import register_model

from ..formats import TILE_ROWS
from .half import float_from_half, half_from_float, has_half_instructions

LANES = TILE_ROWS

# Numba's decorator has no types of its own.
intrinsic = cast(Callable[[Callable[..., Any]], Callable[..., Any]], numba_intrinsic)


class Vector(types.Type):
    """LANES numbers of one Numba type."""

    def __init__(self, element: Any) -> None:
        self.element = element
        super().__init__(name=f"vector({LANES} x {element})")

    @property
    def is_float(self) -> bool:
        """Whether the elements are floating-point numbers."""
        return isinstance(self.element, types.Float)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, vector: Vector) -> None:
        element = manager.lookup(vector.element).get_value_type()
        super().__init__(manager, vector, ir.VectorType(element, LANES))


FLOAT32, INT32, INT16, UINT8 = Vector(types.float32), Vector(types.int32), Vector(types.int16), Vector(types.uint8)

# Operator -> builder methods for integers and for floats.
_OPERATORS: dict[Any, tuple[str | None, str | None]] = {
    operator.add: ("add", "fadd"),
    operator.sub: ("sub", "fsub"),
    operator.mul: ("mul", "fmul"),
    operator.truediv: (None, "fdiv"),
    operator.and_: ("and_", None),
    operator.lshift: ("shl", None),
    operator.rshift: ("ashr", None),
}


def _splat(builder: Any, value: Any) -> Any:
    first = builder.insert_element(
        ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined), value, ir.Constant(ir.IntType(32), 0)
    )
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES))


def _as_vector(context: Any, builder: Any, value: Any, given: Any, vector: Vector) -> Any:
    """A value of type `given` as a vector; numbers are converted and repeated."""
    if isinstance(given, Vector):
        return value
    return _splat(builder, context.cast(builder, value, given, vector.element))


def _define_operator(operation: Any, methods: tuple[str | None, str | None]) -> None:
    @infer_global(operation)
    class _Typing(AbstractTemplate):  # type: ignore[misc]
        def generic(self, args: Any, kws: Any) -> Any:
            vectors = [given for given in args if isinstance(given, Vector)]
            if len(args) != 2 or not vectors or any(other != vectors[0] for other in vectors):
                return None
            if methods[vectors[0].is_float] is None:
                return None
            if all(isinstance(given, (Vector, types.Number)) for given in args):
                return signature(vectors[0], *args)
            return None

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        vector = sig.return_type
        operands = [
            _as_vector(context, builder, value, given, vector) for value, given in zip(args, sig.args, strict=True)
        ]
        return getattr(builder, str(methods[vector.is_float]))(*operands)

    for pair in ((Vector, Vector), (Vector, types.Number), (types.Number, Vector)):
        lower_builtin(operation, *pair)(lower)


for _operation, _methods in _OPERATORS.items():
    _define_operator(_operation, _methods)


def _address(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    """Address of array element args[0][args[1]]; the index is a tuple, unchecked."""
    array_type, index_type = sig.args[:2]
    array = context.make_array(array_type)(context, builder, args[0])
    indices = [
        context.cast(builder, index, given, types.intp)
        for index, given in zip(cgutils.unpack_tuple(builder, args[1]), index_type, strict=True)
    ]
    return cgutils.get_item_pointer(context, builder, array_type, array, indices, wraparound=False)


def _load(builder: Any, address: Any, type_: Any) -> Any:
    return builder.load(builder.bitcast(address, type_.as_pointer()), align=1)


@intrinsic
def load(typing_context: Any, array: Any, index: Any) -> Any:
    """LANES consecutive elements from array[index] on, as a vector of the array's type. Reads are not checked."""
    vector = Vector(array.dtype)

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _load(builder, _address(context, builder, sig, args), context.get_value_type(vector))

    return vector(array, index), lower


@intrinsic
def load_float32(typing_context: Any, array: Any, index: Any) -> Any:
    """LANES consecutive elements as float32: from float32, uint8, or uint16 (which holds float16 bits)."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        value = _load(
            builder,
            _address(context, builder, sig, args),
            ir.VectorType(context.get_value_type(array.dtype), LANES),
        )
        return _to_float(context, builder, value, array.dtype)

    return FLOAT32(array, index), lower


@intrinsic
def get_float32(typing_context: Any, array: Any, index: Any) -> Any:
    """One element as float32, for arrays as in `load_float32`."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _to_float(context, builder, builder.load(_address(context, builder, sig, args)), array.dtype)

    return types.float32(array, index), lower


def _to_float(context: Any, builder: Any, value: Any, element: Any) -> Any:
    if element == types.float32:
        return value
    if element == types.uint16:
        return float_from_half(builder, value, has_half_instructions(context))
    target = ir.VectorType(ir.FloatType(), LANES) if isinstance(value.type, ir.VectorType) else ir.FloatType()
    return builder.uitofp(value, target)


@intrinsic
def store(typing_context: Any, array: Any, index: Any, vector: Any) -> Any:
    """Write a vector to LANES consecutive elements; a float32 vector into a uint16 array becomes float16 bits."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        value = _to_storage(context, builder, args[2], array.dtype)
        address = _address(context, builder, sig, args)
        builder.store(value, builder.bitcast(address, value.type.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(array, index, vector), lower


@intrinsic
def set_float32(typing_context: Any, array: Any, index: Any, value: Any) -> Any:
    """Write one float32 into a float32 array, or as float16 bits into a uint16 array."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.store(_to_storage(context, builder, args[2], array.dtype), _address(context, builder, sig, args))
        return context.get_dummy_value()

    return types.void(array, index, types.float32), lower


def _to_storage(context: Any, builder: Any, value: Any, element: Any) -> Any:
    return half_from_float(builder, value, has_half_instructions(context)) if element == types.uint16 else value


def _splat_of(vector: Vector) -> Callable[..., Any]:
    def splat(typing_context: Any, value: Any) -> Any:
        def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return _as_vector(context, builder, args[0], sig.args[0], vector)

        return vector(value), lower

    return intrinsic(splat)


splat_float32, splat_int32, splat_int16 = _splat_of(FLOAT32), _splat_of(INT32), _splat_of(INT16)


def _conversion(target: Vector) -> Callable[..., Any]:
    def convert(typing_context: Any, vector: Any) -> Any:
        def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            signed = vector.element.signed
            type_ = context.get_value_type(target)
            if target.is_float:
                return (builder.sitofp if signed else builder.uitofp)(args[0], type_)
            return (builder.sext if signed else builder.zext)(args[0], type_)

        return target(vector), lower

    return intrinsic(convert)


# From a narrower integer vector, keeping the values.
to_float32, to_int32, to_int16 = _conversion(FLOAT32), _conversion(INT32), _conversion(INT16)


def _bit_cast(target: Vector) -> Callable[..., Any]:
    def bit_cast(typing_context: Any, vector: Any) -> Any:
        def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return builder.bitcast(args[0], context.get_value_type(target))

        return target(vector), lower

    return intrinsic(bit_cast)


# The same bits, read as another type of the same width.
bits_as_float32, bits_as_int32 = _bit_cast(FLOAT32), _bit_cast(INT32)


@intrinsic
def multiply_add(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c of float32 vectors or numbers; one rounding where the machine has such an instruction, else two."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        operands = [
            _as_vector(context, builder, value, given, FLOAT32) for value, given in zip(args, sig.args, strict=True)
        ]
        type_ = operands[0].type
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(type_, [type_] * 3), f"llvm.fmuladd.v{LANES}f32"
        )
        return builder.call(function, operands)

    return FLOAT32(a, b, c), lower


def _selection(comparison: str) -> Callable[..., Any]:
    def select(typing_context: Any, a: Any, b: Any) -> Any:
        def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            other = _as_vector(context, builder, args[1], sig.args[1], FLOAT32)
            return builder.select(builder.fcmp_ordered(comparison, args[0], other), other, args[0])

        return FLOAT32(a, b), lower

    return intrinsic(select)


# Of a float32 vector and another (or a number), lane by lane; a NaN in the first operand stays.
maximum, minimum = _selection("<"), _selection(">")


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
reduce_max = _reduction(lambda builder, a, b: builder.select(builder.fcmp_ordered("<", a, b), b, a))
