"""The micro-kernels: a tile of sums gets the products of a block of words.

Every sum is a chain over K in order, whatever the tile's height and the blocks' size, so that results do not depend on
how a product is cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

from ..emit import FLOAT, FLOAT_VECTOR, INT32, INT32_VECTOR, INT64, LANES, Emitter, constant, micro_kernel
from ..isa import isa
from ..products.dot import Dot, dot_for
from ..products.tile_ops import add_byte_product, load_tile, store_tile
from .tiling import TILED, TILINGS, VECTOR_BYTES, WORD_BYTES, Tiling

# How far ahead the right panel is asked for; it may come from memory.
_PREFETCH_BYTES = 2048


class Kind(Protocol):
    """What a word is."""

    @property
    def name(self) -> str: ...

    @property
    def tiling(self) -> Tiling: ...

    @property
    def vector(self) -> Any:
        """The type of a vector of sums."""

    def spread(self, e: Emitter, address: Any) -> Any:
        """The word of a left row, for `add`."""

    def add(self, e: Emitter, sums: Any, left: Any, right: Any) -> Any:
        """Sums plus the products of a left word with a vector of right ones."""

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class Floats:
    """A word is a float32 number."""

    isa: str
    vector = FLOAT_VECTOR

    @property
    def name(self) -> str:
        return f"float32_{self.isa}"

    @property
    def tiling(self) -> Tiling:
        return TILINGS[self.isa]

    def spread(self, e: Emitter, address: Any) -> Any:
        return e.splat(e.load(address, FLOAT))

    def add(self, e: Emitter, sums: Any, left: Any, right: Any) -> Any:
        # Fused where the machine can, else two instructions: a library call per product would be no use.
        return e.call("llvm.fmuladd.v16f32", FLOAT_VECTOR, [left, right, sums])


@dataclass(frozen=True)
class Bytes:
    """A word is four bytes along K: signed ones on the left, unsigned ones on the right; sums are exact."""

    isa: str
    dot: Dot
    vector = INT32_VECTOR

    @property
    def name(self) -> str:
        return f"bytes_{self.isa}"

    @property
    def tiling(self) -> Tiling:
        return TILED if self.isa == "amx" else TILINGS[self.isa]

    def spread(self, e: Emitter, address: Any) -> Any:
        return e.load(address, INT32)

    def add(self, e: Emitter, sums: Any, left: Any, right: Any) -> Any:
        return self.dot.total(e, self.dot.add(e, self.dot.start(e, sums), right, left))


@cache
def floats() -> Floats:
    """float32 products on this machine."""
    return Floats(isa())


@cache
def integers() -> Bytes:
    """8-bit products on this machine."""
    return Bytes(isa(), dot_for(isa(), 8))


@cache
def micro(kind: Kind, rows: int) -> Any:
    """The micro-kernel of tiles of so many rows.

    Its arguments: addresses of the left and right panel's words; how many (at least 1); the address of the sums
    [rows][vectors]; whether they begin at 0; bytes between left rows (of `tiled_micro`).
    """
    vectors = kind.tiling.vectors

    def emit(e: Emitter, left: Any, right: Any, words: Any, sums_at: Any, fresh: Any, stride: Any) -> None:
        b = e.builder
        places = [e.at(sums_at, i * VECTOR_BYTES) for i in range(rows * vectors)]
        is_fresh, none = b.icmp_signed("!=", fresh, INT64(0)), constant(kind.vector, 0)
        sums = [b.select(is_fresh, none, e.load(place, kind.vector, align=VECTOR_BYTES)) for place in places]
        with e.loop(words, sums) as (index, running, following):
            left_at = e.at(left, b.mul(index, INT64(rows * WORD_BYTES)))
            right_at = e.at(right, b.mul(index, INT64(vectors * VECTOR_BYTES)))
            for v in range(vectors):
                e.prefetch(e.at(right_at, v * VECTOR_BYTES + _PREFETCH_BYTES))
            columns = [
                e.load(e.at(right_at, v * VECTOR_BYTES), kind.vector, align=VECTOR_BYTES) for v in range(vectors)
            ]
            sums = list(running)
            for m in range(rows):
                word = kind.spread(e, e.at(left_at, m * WORD_BYTES))
                for v in range(vectors):
                    sums[m * vectors + v] = kind.add(e, sums[m * vectors + v], word, columns[v])
            following(*sums)
        for value, place in zip(sums, places, strict=True):
            e.store(value, place, align=VECTOR_BYTES)

    return micro_kernel(emit)


@cache
def tiled_micro(tile_rows: int) -> Any:
    """The same of bytes with AMX, for one or two tiles of rows; sums are never fresh, words a multiple of 16."""
    row_bytes = TILED.vectors * VECTOR_BYTES

    def emit(e: Emitter, left: Any, right: Any, words: Any, sums_at: Any, fresh: Any, stride: Any) -> None:
        b, columns = e.builder, TILED.vectors
        totals = {(m, v): m * columns + v for m in range(tile_rows) for v in range(columns)}
        below = b.mul(stride, INT64(LANES))
        lefts, rights = range(4, 4 + tile_rows), range(6, 6 + columns)
        for (m, v), tile in totals.items():
            load_tile(e, tile, e.at(sums_at, m * LANES * row_bytes + v * VECTOR_BYTES), row_bytes)
        with e.loop(b.udiv(words, INT64(LANES)), []) as (index, _, _following):
            left_at = e.at(left, b.mul(index, INT64(VECTOR_BYTES)))
            right_at = e.at(right, b.mul(index, INT64(LANES * row_bytes)))
            for line in range(LANES * columns):
                e.prefetch(e.at(right_at, line * VECTOR_BYTES + _PREFETCH_BYTES))
            for v, tile in enumerate(rights):
                load_tile(e, tile, e.at(right_at, v * VECTOR_BYTES), row_bytes)
            for m, tile in enumerate(lefts):
                load_tile(e, tile, left_at if m == 0 else e.at(left_at, below), stride)
                for v, other in enumerate(rights):
                    add_byte_product(e, totals[m, v], tile, other, signed=False)
        for (m, v), tile in totals.items():
            store_tile(e, tile, e.at(sums_at, m * LANES * row_bytes + v * VECTOR_BYTES), row_bytes)

    return micro_kernel(emit)
