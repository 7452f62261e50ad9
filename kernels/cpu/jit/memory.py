"""Reading and writing memory by address inside kernels, and vectors of LANES numbers there.

Native operators get addresses (int64), because one signature must serve them all and machine code calls them. Nothing
is checked here: what writes the addresses down has checked the arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from .arguments import size
from .dsl import FLOATS, INTEGERS, VectorOf, cgutils, inline, intrinsic, typed_intrinsic, types
from .emit import FLOAT, FLOAT_VECTOR, INT8, INT16, INT32, INT32_VECTOR, INT64, LANES, Emitter, constant

_BYTES, _SHORTS = ir.VectorType(INT8, LANES), ir.VectorType(INT16, LANES)


def _as_stored(e: Emitter, value: Any) -> Any:
    return value


def _reader(result: Any, stored: Any = None, convert: Callable[[Emitter, Any], Any] = _as_stored) -> Any:
    """An intrinsic (address): what lies there, of LLVM's type `stored`, converted."""

    @intrinsic(result, "int64")
    def read(e: Emitter, address: Any) -> Any:
        return convert(e, e.load(address, e.type_of(result) if stored is None else stored))

    return read


def _writer(given: Any, convert: Callable[[Emitter, Any], Any] = _as_stored) -> Any:
    """An intrinsic (address, value)."""

    @intrinsic(None, "int64", given)
    def write(e: Emitter, address: Any, value: Any) -> None:
        e.store(convert(e, value), address)

    return write


def _first_reader(result: Any, stored: Any, convert: Callable[[Emitter, Any], Any] = _as_stored) -> Any:
    """An intrinsic (address, count): up to LANES numbers, zeros after so many; what lies behind is not touched."""

    @intrinsic(result, "int64", "int64")
    def read(e: Emitter, address: Any, count: Any) -> Any:
        return convert(e, e.load_masked(address, stored, e.first_lanes(count)))

    return read


def _first_writer(convert: Callable[[Emitter, Any], Any] = _as_stored) -> Any:
    """An intrinsic (address, float32 vector, count): writes the first `count` (at most LANES) lanes."""

    @intrinsic(None, "int64", FLOATS, "int64")
    def write(e: Emitter, address: Any, vector: Any, count: Any) -> None:
        e.store_masked(convert(e, vector), address, e.first_lanes(count))

    return write


def _from_bfloat16(e: Emitter, bits: Any) -> Any:
    """They are the upper halves of float32 numbers."""
    wide, number = (INT32, FLOAT) if bits.type == INT16 else (INT32_VECTOR, FLOAT_VECTOR)
    return e.builder.bitcast(e.builder.shl(e.builder.zext(bits, wide), constant(wide, 16)), number)


def _to_bytes(e: Emitter, vector: Any) -> Any:
    """Of whole numbers, each within int8 or within uint8."""
    return e.builder.trunc(e.builder.fptosi(vector, INT32_VECTOR), _BYTES)


read_int64, read_int32, read_int8, read_uint8 = map(_reader, ("int64", "int32", "int8", "uint8"))
read_float32, read_float64 = map(_reader, ("float32", "float64"))
write_int64, write_int32, write_int8 = map(_writer, ("int64", "int32", "int8"))
write_float32, write_float64 = map(_writer, ("float32", "float64"))
# Vectors of LANES consecutive numbers.
load_float32, load_int32 = _reader(FLOATS), _reader(INTEGERS)
load_uint8, load_int8 = _reader(VectorOf("uint8")), _reader(VectorOf("int8"))
store_float32, store_int32 = _writer(FLOATS), _writer(INTEGERS)
# float16 and bfloat16 as float32; float32 as float16, rounded to nearest even.
read_half, load_half = _reader("float32", INT16, Emitter.from_half), _reader(FLOATS, _SHORTS, Emitter.from_half)
read_bfloat16, load_bfloat16 = _reader("float32", INT16, _from_bfloat16), _reader(FLOATS, _SHORTS, _from_bfloat16)
write_half, store_half = _writer("float32", Emitter.to_half), _writer(FLOATS, Emitter.to_half)
# float32 vectors as LANES bytes.
store_bytes, store_first_bytes = _writer(FLOATS, _to_bytes), _first_writer(_to_bytes)
load_first, load_first_half = _first_reader(FLOATS, FLOAT_VECTOR), _first_reader(FLOATS, _SHORTS, Emitter.from_half)
load_first_bytes, store_first = _first_reader(VectorOf("uint8"), _BYTES), _first_writer()


def _array(e: Emitter, array_type: Any, data: Any, shape: Sequence[Any]) -> Any:
    """Numba's array of C-contiguous numbers at an address or a pointer."""
    from numba.np.arrayobj import populate_array

    array = e.context.make_array(array_type)(e.context, e.builder)
    itemsize = e.context.get_abi_sizeof(e.context.get_data_type(array_type.dtype))
    strides = [INT64(itemsize)]
    for extent in reversed(shape[1:]):
        strides.insert(0, e.builder.mul(strides[0], extent))
    move = e.builder.inttoptr if isinstance(data.type, ir.IntType) else e.builder.bitcast
    populate_array(
        array, data=move(data, array.data.type), shape=shape, strides=strides, itemsize=itemsize, meminfo=None
    )
    return array._getvalue()


def stack_array(element: str, size: int) -> Any:
    """An intrinsic that returns an array of `size` numbers on the stack, for as long as the calling kernel runs."""

    @typed_intrinsic
    def make() -> Any:
        type_ = types.Array(getattr(types, element), 1, "C")

        def emit(e: Emitter) -> Any:
            memory = cgutils.alloca_once(e.builder, ir.ArrayType(e.context.get_data_type(type_.dtype), size))
            return _array(e, type_, memory, [INT64(size)])

        return type_(), emit

    return make


def array_at(element: str, axes: int) -> Any:
    """An intrinsic (address, *shape) that returns the C-contiguous array of one or two axes at an address."""

    def made(*given: Any) -> Any:
        type_ = types.Array(getattr(types, element), axes, "C")
        return type_(*[types.int64] * len(given)), lambda e, address, *shape: _array(e, type_, address, shape)

    def vector(address: Any, size: Any) -> Any:
        return made(address, size)

    def matrix(address: Any, rows: Any, columns: Any) -> Any:
        return made(address, rows, columns)

    return typed_intrinsic(vector if axes == 1 else matrix)


@intrinsic("int64", "int64", "int64")
def entry(e: Emitter, table: Any, index: Any) -> Any:
    """Entry `index` of a table of int64 (such as a context): an integer or an address."""
    return e.load(e.at(table, e.builder.shl(index, INT64(3))), INT64)


@intrinsic(FLOATS, FLOATS, "int64", FLOATS.or_number)
def keep_first(e: Emitter, vector: Any, count: Any, rest: Any) -> Any:
    """The first `count` lanes of a float32 vector; the others are the number `rest`."""
    return e.builder.select(e.first_lanes(count), vector, rest)


@intrinsic(None, "int64")
def prefetch(e: Emitter, address: Any) -> None:
    """Ask for the cache line at an address; any address is allowed."""
    e.prefetch(address)


@intrinsic(None, "int64")
def prefetch_second(e: Emitter, address: Any) -> None:
    """The same, into the second-level cache."""
    e.prefetch(address, 2)


@typed_intrinsic
def copy_arguments(arguments: Any, target: Any) -> Any:
    """Write a view of arguments to memory: a copy that may be changed."""

    def emit(e: Emitter, source: Any, target: Any) -> None:
        for index in range(size(arguments.declaration)):
            e.store(e.load(e.at(source, 8 * index), INT64), e.at(target, 8 * index))

    return types.void(arguments, types.int64), emit


def _row_reader(whole: Any, first: Any) -> Any:
    """A helper (address, left): the next numbers of a row of which `left` are left; zeros beyond its end."""

    @inline
    def load(address: int, left: int) -> Any:
        if left >= LANES:
            return whole(address)
        return first(address, left)

    return load


def _row_writer(whole: Any, first: Any) -> Any:
    """A helper (address, vector, left); lanes beyond the row's end are dropped."""

    @inline
    def store(address: int, vector: Any, left: int) -> None:
        if left >= LANES:
            whole(address, vector)
        else:
            first(address, vector, left)

    return store


load, load_bytes = _row_reader(load_float32, load_first), _row_reader(load_uint8, load_first_bytes)
load_halves = _row_reader(load_half, load_first_half)
# The latter of whole numbers, each within int8 or within uint8.
store, store_as_bytes = _row_writer(store_float32, store_first), _row_writer(store_bytes, store_first_bytes)
