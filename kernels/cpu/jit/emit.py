"""Direct emission of LLVM instructions, for intrinsics and for micro-kernels that need exact machine code.

A micro-kernel is one intrinsic. Python loops are unrolled while the code is generated; `loop` emits loops that remain
loops. A vector has 16 lanes and fills one AVX-512 register. On machines without AVX-512, LLVM uses two AVX2 registers,
or four SSE or NEON registers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from llvmlite import ir

from ...weight_layout import TILE_ROWS
from .dsl import Intrinsic, cgutils, numba_type, types

LANES = TILE_ROWS
POINTER, VOID = ir.PointerType(), ir.VoidType()
INT1, INT8, INT16, INT32, INT64, FLOAT = (*(ir.IntType(bits) for bits in (1, 8, 16, 32, 64)), ir.FloatType())
INT32_VECTOR, FLOAT_VECTOR = ir.VectorType(INT32, LANES), ir.VectorType(FLOAT, LANES)
_SHORT_NAMES = {FLOAT: "f32", INT8: "i8", INT16: "i16", INT32: "i32"}
# The exponent biases differ by 112: after shifting, a half is too small by this factor.
_BIAS_FACTOR = float(2**112)
_INFINITY_BITS = 0x7F800000
_SMALLEST_NORMAL_HALF = 0x38800000  # 2 ** -14 as float32 bits
_FIRST_OVERFLOW = 0x477FF000  # 65520.0, which rounds to infinity
_HALF_ULP_AT_HALF = 0x3F000000  # 0.5: at this magnitude a float32 has the resolution of a denormal half


def constant(type_: Any, value: float) -> Any:
    """Return a constant number, or a vector of equal numbers."""
    return ir.Constant(type_, [value] * type_.count if isinstance(type_, ir.VectorType) else value)


def numbers(*values: int) -> Any:
    """Return a constant vector of these int32 numbers."""
    return ir.Constant(ir.VectorType(INT32, len(values)), list(values))


class Emitter:
    """An IRBuilder with the few instructions that kernels need. Addresses are int64 values."""

    def __init__(self, context: Any, builder: Any) -> None:
        self.context, self.builder = context, builder

    @cached_property
    def native_half(self) -> bool:
        """True if the machine converts float16 in hardware."""
        return has_half_instructions(self.context)

    def type_of(self, given: Any) -> Any:
        """Return LLVM's type for one of Numba's (see `numba_type`)."""
        return self.context.get_value_type(numba_type(given))

    def vector(self, value: Any, given: Any, wanted: Any) -> Any:
        """Return a vector unchanged, or a number of type `given` converted and repeated."""
        if isinstance(value.type, ir.VectorType):
            return value
        return self.splat(self.context.cast(self.builder, value, given, numba_type(wanted).element))

    def at(self, address: Any, offset: Any = 0) -> Any:
        """Return address + offset, where the offset is a Python number or a value."""
        if isinstance(offset, int):
            return address if offset == 0 else self.builder.add(address, INT64(offset))
        return self.builder.add(address, offset)

    def pointer(self, address: Any) -> Any:
        return self.builder.inttoptr(address, POINTER)

    def load(self, address: Any, type_: Any, *, align: int = 1) -> Any:
        return self.builder.load(self.pointer(address), typ=type_, align=align)

    def store(self, value: Any, address: Any, *, align: int = 1) -> None:
        self.builder.store(value, self.pointer(address), align=align)

    def load_halves(self, address: Any, lanes: int = LANES) -> Any:
        """Load float16 numbers as float32."""
        return self.from_half(self.load(address, ir.VectorType(INT16, lanes)))

    def from_half(self, bits: Any) -> Any:
        """Convert float16 bits (i16, or a vector of i16) to float32."""
        b, number = self.builder, _like(bits.type, FLOAT)
        if self.native_half:
            return b.fpext(b.bitcast(bits, _like(bits.type, ir.HalfType())), number)
        wide = _like(bits.type, INT32)
        bits = b.zext(bits, wide)
        shifted = b.shl(b.and_(bits, constant(wide, 0x7FFF)), constant(wide, 13))
        scaled = b.fmul(b.bitcast(shifted, number), constant(number, _BIAS_FACTOR))
        special = b.icmp_unsigned(">=", shifted, constant(wide, 0x7C00 << 13))
        magnitude = b.select(special, b.or_(shifted, constant(wide, _INFINITY_BITS)), b.bitcast(scaled, wide))
        sign = b.shl(b.and_(bits, constant(wide, 0x8000)), constant(wide, 16))
        return b.bitcast(b.or_(magnitude, sign), number)

    def to_half(self, value: Any) -> Any:
        """Convert float32 (a number or a vector) to float16 bits, rounded to nearest even."""
        b, narrow = self.builder, _like(value.type, INT16)
        if self.native_half:
            return b.bitcast(b.fptrunc(value, _like(value.type, ir.HalfType())), narrow)
        wide = _like(value.type, INT32)
        bits = b.bitcast(value, wide)
        magnitude = b.and_(bits, constant(wide, 0x7FFFFFFF))
        result = b.select(
            b.icmp_unsigned("<", magnitude, constant(wide, _SMALLEST_NORMAL_HALF)),
            _denormal_half(b, magnitude, value.type),
            _normal_half(b, magnitude),
        )
        overflow = b.icmp_unsigned(">=", magnitude, constant(wide, _FIRST_OVERFLOW))
        result = b.select(overflow, constant(wide, 0x7C00), result)
        is_nan = b.icmp_unsigned(">", magnitude, constant(wide, _INFINITY_BITS))
        result = b.select(is_nan, constant(wide, 0x7E00), result)
        sign = b.and_(b.lshr(bits, constant(wide, 16)), constant(wide, 0x8000))
        return b.trunc(b.or_(result, sign), narrow)

    def first_lanes(self, count: Any) -> Any:
        """Return a mask of the lanes below `count`."""
        return self.builder.icmp_signed("<", numbers(*range(LANES)), self.splat(self.builder.trunc(count, INT32)))

    def load_masked(self, address: Any, type_: Any, mask: Any) -> Any:
        """Load the lanes of a mask, with zeros in the other lanes. No other memory is accessed."""
        name = f"llvm.masked.load.v{type_.count}{_SHORT_NAMES[type_.element]}.p0"
        return self.call(name, type_, [self.pointer(address), INT32(1), mask, ir.Constant(type_, None)])

    def store_masked(self, value: Any, address: Any, mask: Any) -> None:
        name = f"llvm.masked.store.v{value.type.count}{_SHORT_NAMES[value.type.element]}.p0"
        self.call(name, VOID, [value, self.pointer(address), INT32(1), mask])

    def splat(self, value: Any, lanes: int = LANES) -> Any:
        """Return a vector that repeats one number."""
        vector = ir.VectorType(value.type, lanes)
        first = self.builder.insert_element(ir.Constant(vector, ir.Undefined), value, INT32(0))
        return self.builder.shuffle_vector(first, first, numbers(*[0] * lanes))

    def shuffle(self, first: Any, second: Any, lanes: Sequence[int]) -> Any:
        """Return lanes of two vectors, by their indices in the concatenation of both."""
        return self.builder.shuffle_vector(first, second, numbers(*lanes))

    def call(self, name: str, result: Any, arguments: Sequence[Any]) -> Any:
        """Call an LLVM intrinsic or a C function."""
        type_ = ir.FunctionType(result, [argument.type for argument in arguments])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, type_, name), arguments)

    def lanewise(self, name: str, *operands: Any) -> Any:
        """Call an LLVM intrinsic on float32 vectors, lane by lane."""
        type_ = operands[0].type
        return self.call(f"llvm.{name}.v{type_.count}f32", type_, operands)

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        """Return a * b + c, rounded once, with a library call if necessary: every machine returns the same result."""
        return self.lanewise("fma", a, b, c)

    def fast_multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        """Return a * b + c, rounded once if the machine has a fused instruction, otherwise twice."""
        return self.lanewise("fmuladd", a, b, c)

    def prefetch(self, address: Any, level: int = 1) -> None:
        """Prefetch a cache line into the first-level cache (level 1) or the second-level cache (level 2)."""
        self.call("llvm.prefetch.p0", VOID, [self.pointer(address), INT32(0), INT32(4 - level), INT32(1)])

    def opaque(self, value: Any) -> Any:
        """Return an int64 unchanged, but hide from LLVM how it was computed."""
        return self.builder.asm(ir.FunctionType(INT64, [INT64]), "", "=r,0", [value], side_effect=False)

    def transposed(self, vectors: Sequence[Any]) -> list[Any]:
        """Transpose a matrix of sixteen row vectors by swapping squares of decreasing size."""
        vectors, size = list(vectors), LANES // 2
        while size:
            upper = [lane if lane & size == 0 else LANES + lane - size for lane in range(LANES)]
            lower = [lane + size if lane & size == 0 else LANES + lane for lane in range(LANES)]
            for i in (i for i in range(LANES) if i & size == 0):
                a, b = vectors[i], vectors[i + size]
                vectors[i], vectors[i + size] = self.shuffle(a, b, upper), self.shuffle(a, b, lower)
            size //= 2
        return vectors

    @contextmanager
    def loop(self, count: Any, carried: Sequence[Any] = (), step: int = 1) -> Iterator[tuple[Any, list[Any]]]:
        """Emit a loop over `count` >= 1 in steps. Yields the index and the carried values, which the block replaces.

        The values of the last iteration are the results, which can be used after the block.
        """
        builder = self.builder
        before, body = builder.block, builder.append_basic_block("loop")
        after = builder.append_basic_block("loop.end")
        builder.branch(body)
        builder.position_at_end(body)
        index, *phis = (builder.phi(type_) for type_ in (INT64, *(value.type for value in carried)))
        values = list(phis)
        yield index, values
        counted = builder.add(index, INT64(step))
        for phi, first, last in zip((index, *phis), (INT64(0), *carried), (counted, *values), strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(last, builder.block)
        builder.cbranch(builder.icmp_signed("<", counted, count), body, after)
        builder.position_at_end(after)


def micro_kernel(emit: Callable[..., None]) -> Any:
    """Make emit(emitter, *arguments) callable from kernels, with one tuple of int64 arguments and no result."""

    def typing(arguments: Any) -> Any:
        return types.void(arguments), lambda e, packed: emit(e, *cgutils.unpack_tuple(e.builder, packed))

    return Intrinsic(emit, typing, ["arguments"])


# A float16 is passed as its 16 bits, because Numba has no float16 on CPUs. Machines with conversion instructions (x86
# with F16C, all of AArch64) use them. Elsewhere LLVM would call a library routine that Numba does not link, so the
# conversion is integer arithmetic: round to nearest even, including denormals, infinities and NaNs.


def has_half_instructions(context: Any) -> bool:
    """Return True if the machine that code is generated for converts float16 in hardware."""
    triple, _, features = context.codegen().magic_tuple()
    return "aarch64" in triple or "arm64" in triple or "+f16c" in features.split(",")


def _normal_half(builder: Any, magnitude: Any) -> Any:
    """Drop 13 bits of the mantissa, ties to even, and change the exponent's bias."""
    wide = magnitude.type
    is_odd = builder.and_(builder.lshr(magnitude, constant(wide, 13)), constant(wide, 1))
    rounded = builder.add(builder.add(magnitude, constant(wide, 0xFFF)), is_odd)
    return builder.lshr(builder.sub(rounded, constant(wide, 112 << 23)), constant(wide, 13))


def _denormal_half(builder: Any, magnitude: Any, number: Any) -> Any:
    """Add 0.5, which makes the floating-point unit round to a multiple of the smallest half, and subtract it again."""
    half = constant(magnitude.type, _HALF_ULP_AT_HALF)
    total = builder.fadd(builder.bitcast(magnitude, number), builder.bitcast(half, number))
    return builder.sub(builder.bitcast(total, magnitude.type), half)


def _like(shape: Any, element: Any) -> Any:
    """Return `element`, or a vector of it with as many lanes as `shape`."""
    return ir.VectorType(element, shape.count) if isinstance(shape, ir.VectorType) else element
