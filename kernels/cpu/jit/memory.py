"""Reading and writing memory by address inside kernels, including vectors of LANES numbers.

Native operators take addresses (int64), because compiled code calls all operators with the same signature. Nothing is
checked here, because the code that passes the addresses has checked the arrays.
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
    """Make an intrinsic (address) that reads a value of LLVM's type `stored` and converts it."""

    @intrinsic(result, "int64")
    def read(e: Emitter, address: Any) -> Any:
        return convert(e, e.load(address, e.type_of(result) if stored is None else stored))

    return read


def _writer(given: Any, convert: Callable[[Emitter, Any], Any] = _as_stored) -> Any:
    """Make an intrinsic (address, value) that converts and writes a value."""

    @intrinsic(None, "int64", given)
    def write(e: Emitter, address: Any, value: Any) -> None:
        e.store(convert(e, value), address)

    return write


def _first_reader(result: Any, stored: Any, convert: Callable[[Emitter, Any], Any] = _as_stored) -> Any:
    """Make an intrinsic (address, count) that reads up to LANES numbers, then zeros, without accessing later memory."""

    @intrinsic(result, "int64", "int64")
    def read(e: Emitter, address: Any, count: Any) -> Any:
        return convert(e, e.load_masked(address, stored, e.first_lanes(count)))

    return read


def _first_writer(convert: Callable[[Emitter, Any], Any] = _as_stored) -> Any:
    """Make an intrinsic (address, float32 vector, count) that writes the first `count` (at most LANES) lanes."""

    @intrinsic(None, "int64", FLOATS, "int64")
    def write(e: Emitter, address: Any, vector: Any, count: Any) -> None:
        e.store_masked(convert(e, vector), address, e.first_lanes(count))

    return write


def _from_bfloat16(e: Emitter, bits: Any) -> Any:
    """Convert bfloat16 bits, which are the upper halves of float32 numbers."""
    wide, number = (INT32, FLOAT) if bits.type == INT16 else (INT32_VECTOR, FLOAT_VECTOR)
    return e.builder.bitcast(e.builder.shl(e.builder.zext(bits, wide), constant(wide, 16)), number)


def _to_bytes(e: Emitter, vector: Any) -> Any:
    """Convert whole numbers in the range of int8 or of uint8 to bytes."""
    return e.builder.trunc(e.builder.fptosi(vector, INT32_VECTOR), _BYTES)


read_int64, read_int32, read_int8, read_uint8 = map(_reader, ("int64", "int32", "int8", "uint8"))
read_float32, read_float64 = map(_reader, ("float32", "float64"))
write_int64, write_int32, write_int8 = map(_writer, ("int64", "int32", "int8"))
write_float32, write_float64 = map(_writer, ("float32", "float64"))
# Vectors of LANES consecutive numbers.
load_float32, load_int32 = _reader(FLOATS), _reader(INTEGERS)
load_uint8, load_int8 = _reader(VectorOf("uint8")), _reader(VectorOf("int8"))
store_float32, store_int32 = _writer(FLOATS), _writer(INTEGERS)
# float16 and bfloat16 read as float32; float32 written as float16, rounded to nearest even.
read_half, load_half = _reader("float32", INT16, Emitter.from_half), _reader(FLOATS, _SHORTS, Emitter.from_half)
read_bfloat16, load_bfloat16 = _reader("float32", INT16, _from_bfloat16), _reader(FLOATS, _SHORTS, _from_bfloat16)
write_half, store_half = _writer("float32", Emitter.to_half), _writer(FLOATS, Emitter.to_half)
# float32 vectors written as LANES bytes.
store_bytes, store_first_bytes = _writer(FLOATS, _to_bytes), _first_writer(_to_bytes)
load_first, load_first_half = _first_reader(FLOATS, FLOAT_VECTOR), _first_reader(FLOATS, _SHORTS, Emitter.from_half)
load_first_bytes, load_first_signed_bytes = (_first_reader(VectorOf(name), _BYTES) for name in ("uint8", "int8"))
store_first = _first_writer()
store_first_half = _first_writer(Emitter.to_half)


@intrinsic(None, "int64", FLOATS)
def stream_float32(e: Emitter, address: Any, vector: Any) -> None:
    """Write a vector past the caches, without reading the cache line first, to a multiple of 4 * LANES.

    Other threads see the numbers after an atomic operation of this thread, such as a barrier of a program.
    """
    written = e.builder.store(vector, e.pointer(address), align=4 * LANES)
    written.set_metadata("nontemporal", e.builder.module.add_metadata([INT32(1)]))


def _array(e: Emitter, array_type: Any, data: Any, shape: Sequence[Any]) -> Any:
    """Return Numba's array for C-contiguous numbers at an address or a pointer."""
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
    """Make an intrinsic that returns an array of `size` numbers on the stack, valid while the calling kernel runs."""

    @typed_intrinsic
    def make() -> Any:
        type_ = types.Array(getattr(types, element), 1, "C")

        def emit(e: Emitter) -> Any:
            memory = cgutils.alloca_once(e.builder, ir.ArrayType(e.context.get_data_type(type_.dtype), size))
            return _array(e, type_, memory, [INT64(size)])

        return type_(), emit

    return make


def array_at(element: str, axes: int) -> Any:
    """Make an intrinsic (address, *shape) that returns the C-contiguous array with one or two axes at an address."""

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
    """Return entry `index` of a table of int64 (such as a context): an integer or an address."""
    return e.load(e.at(table, e.builder.shl(index, INT64(3))), INT64)


@intrinsic(FLOATS, "int64", "int64", "int64")
def load_within(e: Emitter, address: Any, begin: Any, end: Any) -> Any:
    """Load the float32 lanes from `begin` to `end`, with zeros in the other lanes, without accessing other memory."""
    mask = e.builder.and_(e.first_lanes(end), e.builder.not_(e.first_lanes(begin)))
    return e.load_masked(address, FLOAT_VECTOR, mask)


@intrinsic(FLOATS, FLOATS, "int64", FLOATS.or_number)
def keep_first(e: Emitter, vector: Any, count: Any, rest: Any) -> Any:
    """Return the first `count` lanes of a float32 vector, and the number `rest` in the other lanes."""
    return e.builder.select(e.first_lanes(count), vector, rest)


@intrinsic(None, "int64")
def prefetch(e: Emitter, address: Any) -> None:
    """Prefetch the cache line at an address; any address is allowed."""
    e.prefetch(address)


@intrinsic(None, "int64")
def prefetch_second(e: Emitter, address: Any) -> None:
    """Prefetch a cache line into the second-level cache."""
    e.prefetch(address, 2)


@typed_intrinsic
def copy_arguments(arguments: Any, target: Any) -> Any:
    """Copy arguments to memory, so that the copy can be changed."""

    def emit(e: Emitter, source: Any, target: Any) -> None:
        for index in range(size(arguments.declaration)):
            e.store(e.load(e.at(source, 8 * index), INT64), e.at(target, 8 * index))

    return types.void(arguments, types.int64), emit


def _row_reader(whole: Any, first: Any) -> Any:
    """Make a helper (address, left) that reads the next numbers of a row with `left` remaining numbers, then zeros."""

    @inline
    def load(address: int, left: int) -> Any:
        if left >= LANES:
            return whole(address)
        return first(address, left)

    return load


def _row_writer(whole: Any, first: Any) -> Any:
    """Make a helper (address, vector, left) that writes the next numbers of a row and drops lanes beyond its end."""

    @inline
    def store(address: int, vector: Any, left: int) -> None:
        if left >= LANES:
            whole(address, vector)
        else:
            first(address, vector, left)

    return store


load, load_bytes = _row_reader(load_float32, load_first), _row_reader(load_uint8, load_first_bytes)
load_halves = _row_reader(load_half, load_first_half)
# `store_as_bytes` accepts whole numbers in the range of int8 or of uint8.
store, store_as_bytes = _row_writer(store_float32, store_first), _row_writer(store_bytes, store_first_bytes)
store_halves = _row_writer(store_half, store_first_half)
