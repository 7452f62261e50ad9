"""What this machine can do at most: kernels that do nothing but read memory, or nothing but multiply.

Other kernels' speed is quoted as a share of these. They are compiled on their own, at their first call: `jit.warm_up`
must not meet instructions that the machine lacks. Whoever calls one has asked for its instructions before.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import binding, ir

from .jit import Library
from .lazy import cgutils, intrinsic, types
from .vector import LANES, load, multiply_add, splat_int32, store

# Memory is read in this many places at a time: one place alone keeps too few requests under way.
STREAMS = 4
# int32 numbers that the parts of a buffer are counted in: 4 KiB.
ITEM = 1024
# int32 numbers in a cache line, and how far ahead of the reading lines are asked for.
_LINE = 16
_AHEAD = 32 * _LINE
_ROUNDS = 16

_library = Library(Path(__file__).resolve().parent.parent)


@intrinsic
def _prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of array[index], which may lie beyond its end."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        array_value = context.make_array(sig.args[0])(context, builder, args[0])
        address = builder.gep(array_value.data, [args[1]])
        pointer, integer = ir.PointerType(), ir.IntType(32)
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), [pointer, integer, integer, integer]), "llvm.prefetch.p0"
        )
        builder.call(function, [builder.bitcast(address, pointer), integer(0), integer(3), integer(1)])
        return context.get_dummy_value()

    return types.void(array, types.int64), lower


@_library.kernel("void(int32[::1], int32[::1], int64, int64)")
def read_memory(buffer: Any, total: Any, begin: int, end: int) -> None:
    """Read items [begin, end) of a buffer; total[0:LANES] becomes some sum of what was read, so that it must be."""
    size = (end - begin) // STREAMS * ITEM
    first = begin * ITEM
    second, third, fourth = first + size, first + 2 * size, first + 3 * size
    a = splat_int32(0)
    b = splat_int32(0)
    c = splat_int32(0)
    d = splat_int32(0)
    for i in range(0, size, LANES):
        for line in range(i + _AHEAD, i + _AHEAD + LANES, _LINE):
            _prefetch(buffer, first + line)
            _prefetch(buffer, second + line)
            _prefetch(buffer, third + line)
            _prefetch(buffer, fourth + line)
        a = a + load(buffer, (first + i,))
        b = b + load(buffer, (second + i,))
        c = c + load(buffer, (third + i,))
        d = d + load(buffer, (fourth + i,))
    for i in range(begin * ITEM + STREAMS * size, end * ITEM, LANES):
        a = a + load(buffer, (i,))
    store(total, (0,), a + b + (c + d))


@_library.kernel("void(int64, float32[::1])")
def multiply_float32(rounds: int, total: Any) -> None:
    """`rounds` times 12 independent multiply-adds of LANES numbers; see FLOAT32_OPERATIONS."""
    x = load(total, (0,))
    a0, a1, a2, a3, a4, a5 = x, x + 1.0, x + 2.0, x + 3.0, x + 4.0, x + 5.0
    a6, a7, a8, a9, a10, a11 = x + 6.0, x + 7.0, x + 8.0, x + 9.0, x + 10.0, x + 11.0
    for _ in range(rounds):
        a0 = multiply_add(a0, x, x)
        a1 = multiply_add(a1, x, x)
        a2 = multiply_add(a2, x, x)
        a3 = multiply_add(a3, x, x)
        a4 = multiply_add(a4, x, x)
        a5 = multiply_add(a5, x, x)
        a6 = multiply_add(a6, x, x)
        a7 = multiply_add(a7, x, x)
        a8 = multiply_add(a8, x, x)
        a9 = multiply_add(a9, x, x)
        a10 = multiply_add(a10, x, x)
        a11 = multiply_add(a11, x, x)
    store(total, (0,), ((a0 + a1) + (a2 + a3)) + ((a4 + a5) + (a6 + a7)) + ((a8 + a9) + (a10 + a11)))


FLOAT32_OPERATIONS = 2 * 12 * LANES


def _assembly(instructions: list[str], before: str = "", after: str = "") -> Callable[..., Any]:
    """An intrinsic (rounds, address): `instructions`, `rounds` times over, in x86-64 assembler.

    `before` runs once and may use the address as $2; `after` runs once.
    """
    registers = [f"~{{zmm{number}}}" for number in range(32)]
    text = "\n".join([before, "1:", *instructions, "dec $0", "jnz 1b", after])
    constraints = ",".join(["=&r", "0", "r", *registers, "~{memory}", "~{cc}"])

    def loop(typing_context: Any, rounds: Any, address: Any) -> Any:
        def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            binding.initialize_native_asmparser()
            integer = ir.IntType(64)
            block = ir.InlineAsm(ir.FunctionType(integer, [integer, integer]), text, constraints, side_effect=True)
            builder.call(block, args)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), lower

    return intrinsic(loop)


# Operations that one round of each loop counts: a multiplication and an addition are two.
VNNI_OPERATIONS = 2 * _ROUNDS * 64
AMX_INT8_OPERATIONS = 2 * 4 * 16 * 16 * 64
AMX_BF16_OPERATIONS = AMX_INT8_OPERATIONS // 2

_vnni = _assembly([f"vpdpbusd %zmm30, %zmm31, %zmm{number}" for number in range(_ROUNDS)])


def _tiles(instruction: str) -> Callable[..., Any]:
    """Products of tiles 4, 5 with 6, 7 added to tiles 0 to 3; the address is that of TILE_CONFIG."""
    zeros = "\n".join(["ldtilecfg ($2)", *(f"tilezero %tmm{tile}" for tile in range(8))])
    pairs = [(0, 4, 6), (1, 4, 7), (2, 5, 6), (3, 5, 7)]
    return _assembly([f"{instruction} %tmm{b}, %tmm{a}, %tmm{c}" for c, a, b in pairs], zeros, "tilerelease")


_amx_int8, _amx_bf16 = _tiles("tdpbssd"), _tiles("tdpbf16ps")

# Palette 1: eight tiles of 16 rows of 64 bytes (Intel SDM, LDTILECFG).
TILE_CONFIG = np.zeros(64, np.uint8)
TILE_CONFIG[0] = 1
TILE_CONFIG[16:32].view(np.uint16)[:] = 64
TILE_CONFIG[48:56] = 16
TILE_CONFIG.flags.writeable = False


@_library.kernel("void(int64, int64)")
def multiply_vnni(rounds: int, address: int) -> None:
    """`rounds` times _ROUNDS products of 64 bytes (AVX512-VNNI); see VNNI_OPERATIONS. The address is not used."""
    _vnni(rounds, address)


@_library.kernel("void(int64, int64)")
def multiply_amx_int8(rounds: int, address: int) -> None:
    """`rounds` times four products of int8 tiles; `address` is that of TILE_CONFIG."""
    _amx_int8(rounds, address)


@_library.kernel("void(int64, int64)")
def multiply_amx_bf16(rounds: int, address: int) -> None:
    """`rounds` times four products of bfloat16 tiles; `address` is that of TILE_CONFIG."""
    _amx_bf16(rounds, address)
