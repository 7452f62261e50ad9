"""AMX tiles (eight registers of 16 rows of 64 bytes) and their products.

A tile product is C[16, 16] += A[16, k] B[k, 16], with bfloat16 operands and float32 sums (k = 32) or byte operands and
int32 sums (k = 64). A tile of B holds neighbouring values of k side by side: its row i is B[2i, 0], B[2i + 1, 0],
B[2i, 1], B[2i + 1, 1], ... (Intel 64 manual, volume 1, chapter "Programming with Intel AMX"). The functions that take
an Emitter are for micro-kernels, because tile numbers are encoded in the instructions; the other functions are
intrinsics. Each thread must configure its tiles before use and release them afterwards.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

from .dsl import FLOATS, intrinsic
from .emit import INT8, INT16, INT64, LANES, VOID, Emitter

TILE_ROWS = 16
TILE_ROW_BYTES = 64
TILE_BYTES = TILE_ROWS * TILE_ROW_BYTES

# The configuration for `configure_tiles`: palette 1, eight tiles of 16 rows of 64 bytes (Intel SDM, LDTILECFG).
TILE_CONFIG = np.zeros(64, np.uint8)
TILE_CONFIG[0] = 1
TILE_CONFIG[16:32].view(np.uint16)[:] = TILE_ROW_BYTES
TILE_CONFIG[48:56] = TILE_ROWS
TILE_CONFIG.flags.writeable = False


class _BFloat(ir.types.Type):  # type: ignore[misc]
    """LLVM's bfloat type, which llvmlite lacks."""

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash("bfloat")


def load_tile(e: Emitter, tile: int, address: Any, stride: Any = TILE_ROW_BYTES, *, streamed: bool = False) -> None:
    """Load a tile from rows that are `stride` bytes apart. `streamed` means that the rows are not needed again soon."""
    name = "llvm.x86.tileloaddt164" if streamed else "llvm.x86.tileloadd64"
    e.call(name, VOID, [INT8(tile), e.pointer(address), _value(stride)])


def store_tile(e: Emitter, tile: int, address: Any, stride: Any = TILE_ROW_BYTES) -> None:
    """Store a tile to rows that are `stride` bytes apart."""
    e.call("llvm.x86.tilestored64", VOID, [INT8(tile), e.pointer(address), _value(stride)])


def clear_tile(e: Emitter, tile: int) -> None:
    """Fill a tile with zeros."""
    e.call("llvm.x86.tilezero", VOID, [INT8(tile)])


def add_bfloat_product(e: Emitter, total: int, a: int, b: int) -> None:
    """Emit total += a @ b, with bfloat16 operands and float32 sums."""
    e.call("llvm.x86.tdpbf16ps", VOID, [INT8(total), INT8(a), INT8(b)])


def add_byte_product(e: Emitter, total: int, a: int, b: int, *, signed: bool) -> None:
    """Emit total += a @ b, with byte operands and int32 sums. `a` is signed, and so is `b` if `signed`."""
    e.call("llvm.x86.tdpbssd" if signed else "llvm.x86.tdpbsud", VOID, [INT8(total), INT8(a), INT8(b)])


def _value(stride: Any) -> Any:
    return INT64(stride) if isinstance(stride, int) else stride


@intrinsic(None, "int64")
def configure_tiles(e: Emitter, config: Any) -> None:
    """Configure this thread's tiles from the 64 bytes at an address (see TILE_CONFIG)."""
    e.call("llvm.x86.ldtilecfg", VOID, [e.pointer(config)])


@intrinsic(None)
def release_tiles(e: Emitter) -> None:
    """Release this thread's tiles."""
    e.call("llvm.x86.tilerelease", VOID, [])


def bfloats(e: Emitter, first: Any, second: Any) -> Any:
    """Convert two float32 vectors to one vector of bfloat16, the first in the lower half, rounded to nearest even."""
    pair = ir.VectorType(_BFloat(), 2 * LANES)
    found = e.call("llvm.x86.avx512bf16.cvtne2ps2bf16.512", pair, [second, first])
    return e.builder.bitcast(found, ir.VectorType(INT16, 2 * LANES))


def bfloat_pairs(e: Emitter, even: Any, odd: Any) -> Any:
    """Convert two float32 vectors to one vector of alternating bfloat16 bits: a row of a tile of B."""
    bits = bfloats(e, even, odd)
    return e.shuffle(bits, bits, [index for lane in range(LANES) for index in (lane, LANES + lane)])


@intrinsic(None, "int64", FLOATS, FLOATS)
def store_bfloats(e: Emitter, address: Any, first: Any, second: Any) -> None:
    """Store two float32 vectors as 32 bfloat16 numbers in order: a row of a tile of A."""
    e.store(bfloats(e, first, second), address)


@intrinsic(None, "int64", FLOATS, FLOATS)
def store_bfloat_pairs(e: Emitter, address: Any, even: Any, odd: Any) -> None:
    """Store two float32 vectors as alternating bfloat16 numbers: a row of a tile of B."""
    e.store(bfloat_pairs(e, even, odd), address)
