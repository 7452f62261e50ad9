"""Instructions on tiles (see `cpu.tiles`) for micro-kernels, written through an Emitter."""

from __future__ import annotations

from typing import Any

from ..emit import INT8, INT64, POINTER, VOID, Emitter
from ..tiles import TILE_ROW_BYTES


def load_tile(e: Emitter, tile: int, address: Any, stride: Any = TILE_ROW_BYTES, *, streamed: bool = False) -> None:
    """Load a tile whose rows are `stride` bytes apart; `streamed`: it is not needed again soon."""
    name = "llvm.x86.tileloaddt164" if streamed else "llvm.x86.tileloadd64"
    e.call(name, VOID, [INT8(tile), e.builder.inttoptr(address, POINTER), _value(stride)])


def store_tile(e: Emitter, tile: int, address: Any, stride: Any = TILE_ROW_BYTES) -> None:
    """Store a tile with rows `stride` bytes apart."""
    e.call("llvm.x86.tilestored64", VOID, [INT8(tile), e.builder.inttoptr(address, POINTER), _value(stride)])


def clear_tile(e: Emitter, tile: int) -> None:
    """Fill a tile with zeros."""
    e.call("llvm.x86.tilezero", VOID, [INT8(tile)])


def add_bfloat_product(e: Emitter, total: int, a: int, b: int) -> None:
    """total += a @ b, bfloat16 into float32."""
    e.call("llvm.x86.tdpbf16ps", VOID, [INT8(total), INT8(a), INT8(b)])


def add_byte_product(e: Emitter, total: int, a: int, b: int, *, signed: bool) -> None:
    """total += a @ b, bytes into int32: those of a are signed, those of b if `signed`."""
    e.call("llvm.x86.tdpbssd" if signed else "llvm.x86.tdpbsud", VOID, [INT8(total), INT8(a), INT8(b)])


def _value(stride: Any) -> Any:
    return INT64(stride) if isinstance(stride, int) else stride
