"""Conversion of records to numbers in registers: integers of any bit width as bytes, grid look-ups, and factors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from ...weight_layout import BLOCKS_PER_RECORD, GROUP_BYTES, GROUP_COLUMNS, FactorType, RecordLayout, planes
from ..jit.emit import FLOAT_VECTOR, INT8, INT32, INT32_VECTOR, LANES, Emitter, constant

# The memory of a grid: float32 [16], the values of the integers, then uint8 [16], the bytes that matmuls multiply.
GRID_ENTRIES = 16
GRID_TABLE = 4 * GRID_ENTRIES
_BYTES, _HALF_BYTES = ir.VectorType(INT8, 4 * LANES), ir.VectorType(INT8, 2 * LANES)
_HALF = ir.VectorType(INT32, LANES // 2)
_EXPONENT_BITS, _SMALLEST_EXPONENT = 23, 0x00400000


def has_plain_records(layout: RecordLayout) -> bool:
    """Return True if records hold two blocks of 4 or 8 bits with float factors, which can be converted to tiles."""
    floats = layout.factors in ("half", "float") and layout.offsets in ("none", layout.factors)
    return (
        floats and layout.bits in (4, 8) and layout.blocks == BLOCKS_PER_RECORD and not (layout.grid or layout.is_group)
    )


def sub_block_groups(layout: RecordLayout) -> int:
    """Return the number of groups of four columns in a sub-block."""
    return layout.sub_block // GROUP_COLUMNS


def unpacked(e: Emitter, address: Any, layout: RecordLayout) -> list[tuple[Any, int]]:
    """Load a sub-block as vectors of four unsigned bytes per lane, each with the index of its first column."""
    b, groups = e.builder, sub_block_groups(layout)
    parts: list[list[Any]] = [[] for _ in range(groups)]
    low = 0
    for width in planes(layout.bits):
        vectors = [e.load(e.at(address, GROUP_BYTES * v), INT32_VECTOR) for v in range(groups * width // 8)]
        if not vectors:
            vectors = [_half_vector(e, address)]
        for group in range(groups):
            vector, shift = vectors[group % len(vectors)], group // len(vectors) * width - low
            if shift:
                move, count = (b.lshr, shift) if shift > 0 else (b.shl, -shift)
                vector = move(vector, constant(INT32_VECTOR, count))
            if width < 8:
                mask = ((1 << width) - 1 << low) * 0x01010101
                vector = b.and_(vector, constant(INT32_VECTOR, mask))
            parts[group].append(vector)
        address, low = e.at(address, GROUP_BYTES * groups * width // 8), low + width
    return [(_either(e, parts[group]), GROUP_COLUMNS * group) for group in range(groups)]


def _half_vector(e: Emitter, address: Any) -> Any:
    """Load four groups of one bit. Rows 8 to 15 use the high nibbles of the same bytes."""
    half = e.load(address, _HALF)
    both = e.builder.shuffle_vector(half, half, ir.Constant(INT32_VECTOR, [i % (LANES // 2) for i in range(LANES)]))
    return e.builder.lshr(both, ir.Constant(INT32_VECTOR, [4 * (i // (LANES // 2)) for i in range(LANES)]))


def _either(e: Emitter, parts: Sequence[Any]) -> Any:
    whole, *others = parts
    for part in others:
        whole = e.builder.or_(whole, part)
    return whole


def factor(e: Emitter, address: Any, kind: FactorType, *, high: bool = False) -> Any:
    """Load sixteen scales or offsets as float32. For nibbles, `high` selects the high nibbles."""
    b = e.builder
    if kind == "float":
        return e.load(address, FLOAT_VECTOR)
    if kind == "half":
        return e.load_halves(address)
    raw = e.load(address, ir.VectorType(INT8, LANES))
    if kind == "signed":
        return b.sitofp(b.sext(raw, INT32_VECTOR), FLOAT_VECTOR)
    wide = b.zext(raw, INT32_VECTOR)
    if kind == "exponent":
        shifted = b.shl(wide, constant(INT32_VECTOR, _EXPONENT_BITS))
        smallest = constant(INT32_VECTOR, _SMALLEST_EXPONENT)  # 2 ** -127, which is denormal in float32
        return b.bitcast(b.select(b.icmp_unsigned("<", shifted, smallest), smallest, shifted), FLOAT_VECTOR)
    if kind == "nibbles":
        four = constant(INT32_VECTOR, 4)
        wide = b.lshr(wide, four) if high else b.and_(wide, constant(INT32_VECTOR, 15))
    return b.sitofp(wide, FLOAT_VECTOR)


def load_table(e: Emitter, grid: Any) -> Any:
    """Load the sixteen bytes of a grid into every quarter of a vector of bytes."""
    sixteen = e.load(e.at(grid, GRID_TABLE), ir.VectorType(INT8, GRID_ENTRIES))
    lanes = ir.Constant(ir.VectorType(INT32, 4 * LANES), list(range(GRID_ENTRIES)) * (4 * LANES // GRID_ENTRIES))
    return e.builder.shuffle_vector(sixteen, sixteen, lanes)


def looked_up(e: Emitter, table: Any, codes: Any, isa: str) -> Any:
    """Look up bytes of a table (see `load_table`) by the bytes of a vector, which are below 16."""
    b = e.builder
    indices = b.bitcast(codes, _BYTES)
    if isa in ("amx", "vnni"):
        found = e.call("llvm.x86.avx512.pshuf.b.512", _BYTES, [table, indices])
    elif isa == "avx2":
        halves = []
        for first in (0, 2 * LANES):
            mask = ir.Constant(ir.VectorType(INT32, 2 * LANES), list(range(first, first + 2 * LANES)))
            halves.append(
                e.call(
                    "llvm.x86.avx2.pshuf.b",
                    _HALF_BYTES,
                    [b.shuffle_vector(part, part, mask) for part in (table, indices)],
                )
            )
        both = ir.Constant(ir.VectorType(INT32, 4 * LANES), list(range(4 * LANES)))
        found = b.shuffle_vector(*halves, both)
    else:
        entries = [_everywhere(e, table, entry, _BYTES) for entry in range(GRID_ENTRIES)]
        found = _chosen(e, entries, indices, _BYTES)
    return b.bitcast(found, INT32_VECTOR)


def looked_up_floats(e: Emitter, grid: Any, codes: Any, isa: str) -> Any:
    """Look up numbers of a grid, float32 [16], by lanes of integers below 16."""
    if isa in ("amx", "vnni"):
        return e.call("llvm.x86.avx512.permvar.sf.512", FLOAT_VECTOR, [grid, codes])
    entries = [_everywhere(e, grid, entry, FLOAT_VECTOR) for entry in range(GRID_ENTRIES)]
    return _chosen(e, entries, codes, INT32_VECTOR)


def _everywhere(e: Emitter, table: Any, entry: int, type_: Any) -> Any:
    """Return one entry of a vector in all lanes."""
    indices = ir.Constant(ir.VectorType(INT32, type_.count), [entry] * type_.count)
    return e.builder.shuffle_vector(table, table, indices)


def _chosen(e: Emitter, entries: Sequence[Any], indices: Any, type_: Any) -> Any:
    """Select entries by numbers below 16, lane by lane. Each bit halves the remaining entries."""
    b, left = e.builder, list(entries)
    for bit in range(4):
        is_set = b.icmp_unsigned("!=", b.and_(indices, constant(type_, 1 << bit)), constant(type_, 0))
        left = [b.select(is_set, high, low) for low, high in zip(left[0::2], left[1::2], strict=True)]
    return left[0]
