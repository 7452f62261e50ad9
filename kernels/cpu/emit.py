"""Writing LLVM instructions directly, for micro-kernels that must come out as planned.

A micro-kernel is one intrinsic: Python loops unroll while the code is made, `loop` makes the loops that stay. Vectors
have 16 lanes, one AVX-512 register; LLVM takes two AVX2 registers, or four of SSE or NEON, where that is what there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from .half import float_from_half, has_half_instructions
from .lazy import cgutils, intrinsic, types

LANES = 16
POINTER, VOID = ir.PointerType(), ir.VoidType()
INT1, INT8, INT16, INT32, INT64, FLOAT = (*(ir.IntType(bits) for bits in (1, 8, 16, 32, 64)), ir.FloatType())
INT32_VECTOR, FLOAT_VECTOR = ir.VectorType(INT32, LANES), ir.VectorType(FLOAT, LANES)


def constant(type_: Any, value: float) -> Any:
    """A number, or a vector of equal numbers."""
    return ir.Constant(type_, [value] * type_.count if isinstance(type_, ir.VectorType) else value)


class Emitter:
    """An IRBuilder with the few instructions that the micro-kernels are made of. Addresses are int64 values."""

    def __init__(self, context: Any, builder: Any) -> None:
        self.context, self.builder = context, builder
        self._native_half = has_half_instructions(context)

    def at(self, address: Any, offset: Any = 0) -> Any:
        """address + offset, a Python number or a value."""
        if isinstance(offset, int):
            return address if offset == 0 else self.builder.add(address, INT64(offset))
        return self.builder.add(address, offset)

    def load(self, address: Any, type_: Any, *, align: int = 1) -> Any:
        return self.builder.load(self.builder.inttoptr(address, POINTER), typ=type_, align=align)

    def store(self, value: Any, address: Any, *, align: int = 1) -> None:
        self.builder.store(value, self.builder.inttoptr(address, POINTER), align=align)

    def load_halves(self, address: Any, lanes: int = LANES) -> Any:
        """float16 numbers as float32."""
        return float_from_half(self.builder, self.load(address, ir.VectorType(INT16, lanes)), self._native_half)

    def splat(self, value: Any, lanes: int = LANES) -> Any:
        """A vector of one number."""
        vector = ir.VectorType(value.type, lanes)
        first = self.builder.insert_element(ir.Constant(vector, ir.Undefined), value, INT32(0))
        return self.builder.shuffle_vector(first, first, constant(ir.VectorType(INT32, lanes), 0))

    def call(self, name: str, result: Any, arguments: Sequence[Any]) -> Any:
        """Call an LLVM intrinsic, or a C function."""
        type_ = ir.FunctionType(result, [argument.type for argument in arguments])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, type_, name), arguments)

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        """a * b + c with one rounding, also where that takes a library call: results are the same everywhere."""
        return self.call(f"llvm.fma.v{a.type.count}f32", a.type, [a, b, c])

    def prefetch(self, address: Any, level: int = 1) -> None:
        """Ask for a cache line: 1 = into the first-level cache, 2 = into the second."""
        pointer = self.builder.inttoptr(address, POINTER)
        self.call("llvm.prefetch.p0", VOID, [pointer, INT32(0), INT32(4 - level), INT32(1)])

    @contextmanager
    def loop(self, count: Any, carried: Sequence[Any]) -> Iterator[tuple[Any, list[Any], Callable[..., None]]]:
        """`count` >= 1 rounds. Yields the index, the carried values, and a function to call with their next values.

        Those of the last round are the results: they may be used after the block.
        """
        builder = self.builder
        before, body = builder.block, builder.append_basic_block("loop")
        after = builder.append_basic_block("loop.end")
        builder.branch(body)
        builder.position_at_end(body)
        index = builder.phi(INT64)
        index.add_incoming(INT64(0), before)
        values = []
        for value in carried:
            phi = builder.phi(value.type)
            phi.add_incoming(value, before)
            values.append(phi)
        following: list[Any] = []
        yield index, values, lambda *updated: following.extend(updated)
        counted = builder.add(index, INT64(1))
        index.add_incoming(counted, builder.block)
        for phi, value in zip(values, following, strict=True):
            phi.add_incoming(value, builder.block)
        builder.cbranch(builder.icmp_signed("<", counted, count), body, after)
        builder.position_at_end(after)


def micro_kernel(emit: Callable[..., None]) -> Any:
    """Make emit(emitter, *arguments) callable from kernels, with one tuple of int64 arguments and no result."""

    def typing(typing_context: Any, arguments: Any) -> Any:
        def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            emit(Emitter(context, builder), *cgutils.unpack_tuple(builder, args[0]))
            return context.get_dummy_value()

        return types.void(arguments), lower

    return intrinsic(typing)
