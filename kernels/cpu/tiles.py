"""Tiles of AMX: eight registers of 16 rows of 64 bytes, and products of them.

A tile product is C[16, 16] += A[16, k] B[k, 16], in float32 of bfloat16 (k = 32). A tile of B holds neighbouring k
side by side: its row i is B[2i, 0], B[2i + 1, 0], B[2i, 1], B[2i + 1, 1], ... (Intel 64 manual, volume 1, chapter
"Programming with Intel AMX"). Functions named emit_* write LLVM IR inside an intrinsic, because tile numbers are
parts of the instructions; the rest are intrinsics. Tiles must be configured by each thread before, and released
after.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from .lazy import cgutils, intrinsic, types
from .vector import FLOAT32, LANES

TILE_ROWS = 16
TILE_ROW_BYTES = 64
TILE_BYTES = TILE_ROWS * TILE_ROW_BYTES

_POINTER, _VOID, _INT8, _INT64 = ir.PointerType(), ir.VoidType(), ir.IntType(8), ir.IntType(64)


class _BFloat(ir.types.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite does not name."""

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash("bfloat")


def tile_config() -> NDArray[np.uint8]:
    """What `configure_tiles` loads: palette 1, eight tiles of 16 rows of 64 bytes."""
    config = np.zeros(64, np.uint8)
    config[0] = 1
    config[16:32].view(np.uint16)[:] = TILE_ROW_BYTES
    config[48:56] = TILE_ROWS
    return config


def _call(builder: Any, name: str, types_: list[Any], arguments: list[Any]) -> None:
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_VOID, types_), f"llvm.x86.{name}")
    builder.call(function, arguments)


def emit_zero(builder: Any, tile: int) -> None:
    """Clear a tile."""
    _call(builder, "tilezero", [_INT8], [_INT8(tile)])


def emit_load(builder: Any, tile: int, address: Any, stride: Any) -> None:
    """Load a tile whose rows are `stride` bytes apart."""
    arguments = [_INT8(tile), builder.inttoptr(address, _POINTER), stride]
    _call(builder, "tileloadd64", [_INT8, _POINTER, _INT64], arguments)


def emit_store(builder: Any, tile: int, address: Any, stride: Any) -> None:
    """Store a tile with rows `stride` bytes apart."""
    arguments = [_INT8(tile), builder.inttoptr(address, _POINTER), stride]
    _call(builder, "tilestored64", [_INT8, _POINTER, _INT64], arguments)


def emit_product(builder: Any, c: int, a: int, b: int) -> None:
    """Tile c += tile a * tile b: bfloat16 in, float32 out."""
    _call(builder, "tdpbf16ps", [_INT8] * 3, [_INT8(c), _INT8(a), _INT8(b)])


@intrinsic
def configure_tiles(typing_context: Any, config: Any) -> Any:
    """Make this thread's tiles ready, as the 64 bytes at an address say (see `tile_config`)."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _call(builder, "ldtilecfg", [_POINTER], [builder.inttoptr(args[0], _POINTER)])
        return context.get_dummy_value()

    return types.void(types.int64), lower


@intrinsic
def release_tiles(typing_context: Any) -> Any:
    """Give this thread's tiles back."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _call(builder, "tilerelease", [], [])
        return context.get_dummy_value()

    return types.void(), lower


def _bfloats(builder: Any, first: Any, second: Any) -> Any:
    """Two float32 vectors as one of bfloat16 bits, the first in the lower half; rounded to nearest even."""
    floats, pair = first.type, ir.VectorType(_BFloat(), 2 * LANES)
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(pair, [floats, floats]), "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
    )
    return builder.bitcast(builder.call(function, [second, first]), ir.VectorType(ir.IntType(16), 2 * LANES))


@intrinsic
def store_bfloats(typing_context: Any, address: Any, first: Any, second: Any) -> Any:
    """Two float32 vectors as 32 bfloat16 in order: a row of a tile of A."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.store(_bfloats(builder, args[1], args[2]), builder.inttoptr(args[0], _POINTER), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, FLOAT32, FLOAT32), lower


@intrinsic
def store_bfloat_pairs(typing_context: Any, address: Any, even: Any, odd: Any) -> Any:
    """Two float32 vectors as bfloat16 in turn: a row of a tile of B."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        bits = _bfloats(builder, args[1], args[2])
        order = [index for lane in range(LANES) for index in (lane, LANES + lane)]
        mask = ir.Constant(ir.VectorType(ir.IntType(32), 2 * LANES), order)
        builder.store(builder.shuffle_vector(bits, bits, mask), builder.inttoptr(args[0], _POINTER), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, FLOAT32, FLOAT32), lower


@intrinsic
def read_bfloat(typing_context: Any, address: Any) -> Any:
    """float32 from the bfloat16 at an address."""

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        bits = builder.load(builder.inttoptr(args[0], _POINTER), typ=ir.IntType(16), align=1)
        wide = builder.shl(builder.zext(bits, ir.IntType(32)), ir.IntType(32)(16))
        return builder.bitcast(wide, ir.FloatType())

    return types.float32(types.int64), lower
