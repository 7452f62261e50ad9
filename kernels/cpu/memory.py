"""Reading and writing memory by address inside kernels, and vectors of LANES numbers there.

Native operators get addresses (int64), because one signature must serve them all and machine code calls them. Nothing
is checked here: what writes the addresses down has checked the arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from .half import float_from_half, half_from_float, has_half_instructions
from .lazy import cgutils, intrinsic, types
from .vector import FLOAT32, INT32, LANES, UINT8, VectorOf, numba_type

_POINTER = ir.PointerType()
_INT16 = ir.IntType(16)
STACK_WORDS = 32


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _POINTER)


def _reader(result: Any) -> Callable[..., Any]:
    """An intrinsic that reads one value of a type at an address."""

    def read(typing_context: Any, address: Any) -> Any:
        def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return builder.load(_pointer(builder, args[0]), typ=context.get_value_type(numba_type(result)), align=1)

        return numba_type(result)(types.int64), lower

    return intrinsic(read)


def _writer(value: Any) -> Callable[..., Any]:
    """An intrinsic that writes one value of a type at an address."""

    def write(typing_context: Any, address: Any, written: Any) -> Any:
        def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            builder.store(args[1], _pointer(builder, args[0]), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, numba_type(value)), lower

    return intrinsic(write)


read_int64, read_int32, read_int8 = _reader("int64"), _reader("int32"), _reader("int8")
read_uint8, read_uint16 = _reader("uint8"), _reader("uint16")
read_float32, read_float64 = _reader("float32"), _reader("float64")
write_int64, write_int32, write_int8 = _writer("int64"), _writer("int32"), _writer("int8")
write_float32, write_float64 = _writer("float32"), _writer("float64")
# Vectors of LANES consecutive numbers.
load_float32, load_int32, load_uint8 = _reader(FLOAT32), _reader(INT32), _reader(UINT8)
load_int8 = _reader(VectorOf("int8"))
store_float32, store_int32 = _writer(FLOAT32), _writer(INT32)


def stack_array(element: str, size: int) -> Callable[[], Any]:
    """An intrinsic that returns an array of `size` numbers on the stack, for as long as the calling kernel runs."""

    def make(typing_context: Any) -> Any:
        array_type = types.Array(getattr(types, element), 1, "C")

        def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            from numba.np.arrayobj import populate_array

            number = context.get_data_type(array_type.dtype)
            memory = cgutils.alloca_once(builder, ir.ArrayType(number, size))
            array, itemsize = context.make_array(array_type)(context, builder), context.get_abi_sizeof(number)
            data = builder.bitcast(memory, array.data.type)
            count, step = ir.IntType(64)(size), ir.IntType(64)(itemsize)
            populate_array(array, data=data, shape=[count], strides=[step], itemsize=itemsize, meminfo=None)
            return array._getvalue()

        return array_type(), lower

    made: Callable[[], Any] = intrinsic(make)
    return made


def _load_word(builder: Any, table: Any, index: Any, type_: ir.Type) -> Any:
    offset = builder.shl(index, ir.IntType(64)(3))
    return builder.load(_pointer(builder, builder.add(table, offset)), typ=type_)


@intrinsic
def word(typing_context: Any, table: Any, index: Any) -> Any:
    """Entry `index` of a table of eight-byte words (arguments of an operator, a context): an integer or an address."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _load_word(builder, args[0], args[1], ir.IntType(64))

    return types.int64(types.int64, types.int64), lower


@intrinsic
def float_word(typing_context: Any, table: Any, index: Any) -> Any:
    """Entry `index` of such a table, written as float64, as the float32 that operators compute with."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.fptrunc(_load_word(builder, args[0], args[1], ir.DoubleType()), ir.FloatType())

    return types.float32(types.int64, types.int64), lower


@intrinsic
def stack_words(typing_context: Any) -> Any:
    """The address of STACK_WORDS words of 8 bytes, for as long as the calling kernel runs."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        memory = cgutils.alloca_once(builder, ir.ArrayType(ir.IntType(64), STACK_WORDS))
        return builder.ptrtoint(memory, ir.IntType(64))

    return types.int64(), lower


@intrinsic
def read_half(typing_context: Any, address: Any) -> Any:
    """float32 from the float16 at an address."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        bits = builder.load(_pointer(builder, args[0]), typ=_INT16, align=1)
        return float_from_half(builder, bits, has_half_instructions(context))

    return types.float32(types.int64), lower


@intrinsic
def write_half(typing_context: Any, address: Any, value: Any) -> Any:
    """float32 to float16 at an address, rounded to nearest even."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        bits = half_from_float(builder, args[1], has_half_instructions(context))
        builder.store(bits, _pointer(builder, args[0]), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), lower


@intrinsic
def load_half(typing_context: Any, address: Any) -> Any:
    """LANES float16 numbers as float32."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        bits = builder.load(_pointer(builder, args[0]), typ=ir.VectorType(_INT16, LANES), align=1)
        return float_from_half(builder, bits, has_half_instructions(context))

    return FLOAT32(types.int64), lower


@intrinsic
def store_half(typing_context: Any, address: Any, vector: Any) -> Any:
    """A float32 vector as float16, rounded to nearest even."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        bits = half_from_float(builder, args[1], has_half_instructions(context))
        builder.store(bits, _pointer(builder, args[0]), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, FLOAT32), lower


@intrinsic
def store_as_int8(typing_context: Any, address: Any, vector: Any) -> Any:
    """A float32 vector of whole numbers within [-128, 127] as LANES bytes."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        narrow = builder.fptosi(args[1], ir.VectorType(ir.IntType(8), LANES))
        builder.store(narrow, _pointer(builder, args[0]), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, FLOAT32), lower


@intrinsic
def load_first_half(typing_context: Any, address: Any, count: Any) -> Any:
    """Up to LANES float16 numbers as float32, zeros after `count` of them; what lies behind is not touched."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        bits = load_masked(builder, args[0], ir.VectorType(_INT16, LANES), _first_lanes(builder, args[1]))
        return float_from_half(builder, bits, has_half_instructions(context))

    return FLOAT32(types.int64, types.int64), lower


def load_masked(builder: Any, address: Any, type_: Any, mask: Any) -> Any:
    """IR that loads the masked lanes of a vector, zeros elsewhere."""
    name = f"v{type_.count}{'f32' if type_.element == ir.FloatType() else 'i16'}"
    function = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(type_, [_POINTER, ir.IntType(32), mask.type, type_]),
        f"llvm.masked.load.{name}.p0",
    )
    return builder.call(function, [_pointer(builder, address), ir.IntType(32)(1), mask, ir.Constant(type_, None)])


@intrinsic
def load_first(typing_context: Any, address: Any, count: Any) -> Any:
    """Up to LANES float32 numbers, zeros after `count` of them; what lies behind is not touched."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return load_masked(builder, args[0], ir.VectorType(ir.FloatType(), LANES), _first_lanes(builder, args[1]))

    return FLOAT32(types.int64, types.int64), lower


@intrinsic
def store_first(typing_context: Any, address: Any, vector: Any, count: Any) -> Any:
    """Write the first `count` (at most LANES) lanes of a float32 vector."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        type_ = args[1].type
        function = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [type_, _POINTER, ir.IntType(32), ir.VectorType(ir.IntType(1), LANES)]),
            f"llvm.masked.store.v{LANES}f32.p0",
        )
        builder.call(function, [args[1], _pointer(builder, args[0]), ir.IntType(32)(1), _first_lanes(builder, args[2])])
        return context.get_dummy_value()

    return types.void(types.int64, FLOAT32, types.int64), lower


@intrinsic
def keep_first(typing_context: Any, vector: Any, count: Any, rest: Any) -> Any:
    """The first `count` lanes of a float32 vector; the others are the number `rest`."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        number = context.cast(builder, args[2], sig.args[2], types.float32)
        first = builder.insert_element(ir.Constant(args[0].type, ir.Undefined), number, ir.IntType(32)(0))
        others = builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES))
        return builder.select(_first_lanes(builder, args[1]), args[0], others)

    return FLOAT32(FLOAT32, types.int64, rest), lower


@intrinsic
def load_bfloat16(typing_context: Any, address: Any) -> Any:
    """LANES bfloat16 numbers as float32: they are the upper halves of float32 numbers."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        bits = builder.load(_pointer(builder, args[0]), typ=ir.VectorType(_INT16, LANES), align=1)
        wide = ir.VectorType(ir.IntType(32), LANES)
        shifted = builder.shl(builder.zext(bits, wide), ir.Constant(wide, [16] * LANES))
        return builder.bitcast(shifted, ir.VectorType(ir.FloatType(), LANES))

    return FLOAT32(types.int64), lower


@intrinsic
def read_bfloat16(typing_context: Any, address: Any) -> Any:
    """float32 from the bfloat16 at an address."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        wide = ir.IntType(32)
        bits = builder.zext(builder.load(_pointer(builder, args[0]), typ=_INT16, align=1), wide)
        return builder.bitcast(builder.shl(bits, wide(16)), ir.FloatType())

    return types.float32(types.int64), lower


def _first_lanes(builder: Any, count: Any) -> Any:
    """A mask of the lanes below `count`."""
    wide = ir.VectorType(ir.IntType(32), LANES)
    count = builder.trunc(count, ir.IntType(32))
    first = builder.insert_element(ir.Constant(wide, ir.Undefined), count, ir.IntType(32)(0))
    counts = builder.shuffle_vector(first, first, ir.Constant(wide, [0] * LANES))
    return builder.icmp_signed("<", ir.Constant(wide, list(range(LANES))), counts)


@intrinsic
def prefetch(typing_context: Any, address: Any) -> Any:
    """Ask for the cache line at an address; any address is allowed."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        integer = ir.IntType(32)
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), [_POINTER, integer, integer, integer]), "llvm.prefetch.p0"
        )
        builder.call(function, [_pointer(builder, args[0]), integer(0), integer(3), integer(1)])
        return context.get_dummy_value()

    return types.void(types.int64), lower
