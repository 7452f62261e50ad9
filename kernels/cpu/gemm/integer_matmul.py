"""Products of 8-bit matrices both of which are computed at the run: exact sums, or bytes again."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..tape.program import Call, Hole, Items
from ..tape.replay import Crew, Replay
from .integer_finish import Result, finish_integers_op
from .integer_packing import HALF, WORD, flip_of, flip_to_unsigned, pack_byte_rows
from .micro import integers
from .packing import matrix_tables
from .product import product_call
from .tiling import VECTOR_BYTES, WORD_BYTES
from .windows import PIECE_WORDS, pack_byte_windows

_PRODUCTS_PER_NANOSECOND = 150.0
_NANOSECONDS_PER_PACKED = 0.3
# Bytes behind a matrix that gathering may touch.
_SLACK = 64
_KEPT = 16


class IntegerMatMul:
    """(a - a_zero) @ (b - b_zero) of a [B, M, K] and b [B, K, N], int8 or uint8 each, modulo 2 ** 32."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._replays: dict[tuple[Any, ...], tuple[Replay, Any]] = {}

    def sums(self, a: NDArray[Any], a_zero: int, b: NDArray[Any], b_zero: int) -> NDArray[np.int32]:
        """int32 [B, M, N]."""
        return self._run(a, a_zero, b, b_zero, "int32", np.dtype(np.int32), 1.0, 0)

    def rounded(
        self, a: NDArray[Any], a_zero: int, b: NDArray[Any], b_zero: int, factor: float, point: int, dtype: Any
    ) -> NDArray[Any]:
        """round(sums * factor) + point, saturated, as int8 or uint8."""
        return self._run(a, a_zero, b, b_zero, "bytes", np.dtype(dtype), factor, point)

    def _run(
        self,
        a: NDArray[Any],
        a_zero: int,
        b: NDArray[Any],
        b_zero: int,
        result: Result,
        dtype: np.dtype[Any],
        factor: float,
        point: int,
    ) -> NDArray[Any]:
        bytes_ = (np.int8, np.uint8)
        if a.ndim != 3 or b.ndim != 3 or a.shape[::2] != (len(b), b.shape[1]):
            raise ValueError(f"matrices {list(a.shape)} and {list(b.shape)} do not fit")
        if a.dtype not in bytes_ or b.dtype not in bytes_:
            raise ValueError(f"matrices are {a.dtype} and {b.dtype}, expected int8 or uint8")
        batch, rows, terms = a.shape
        columns, words = b.shape[2], integers().tiling.words(terms)
        out = np.empty((batch, rows, columns), dtype)
        if not out.size:
            return out
        a = np.ascontiguousarray(a)
        a_moved = a_zero - (HALF if a.dtype == np.uint8 else 0)
        b_moved = b_zero + (HALF if b.dtype == np.int8 else 0)
        b_sums = b.sum(axis=1, dtype=np.int32)
        column_terms = (b_sums - np.int32(terms * b_zero)) * np.int32(-a_moved)
        key = (a.shape, columns, a.dtype, b.dtype, result, dtype, point)
        if key not in self._replays:
            if len(self._replays) >= _KEPT:
                self._replays = {}
            self._replays[key] = self._made(batch, rows, terms, columns, a.dtype, b.dtype, result, dtype, point)
        replay, panels = self._replays[key]
        factors = np.full(columns, -b_moved, np.int32)
        scales = np.full(columns, factor, np.float32)
        source = self._crew.memory("source", b.size + _SLACK)
        source[: b.size].view(b.dtype).reshape(b.shape)[...] = b
        self._crew.run(replay, {
            "a": a.ctypes.data, "b": source.ctypes.data, "out": out.ctypes.data, "factors": factors.ctypes.data,
            "scales": scales.ctypes.data, "column terms": column_terms.ctypes.data,
            "left": self._crew.buffer("left", integers().tiling.left_bytes(batch * rows, words)),
            "row sums": self._crew.buffer("row sums", batch * rows * WORD_BYTES),
            "right": self._crew.buffer("right", batch * panels * words * integers().tiling.vectors * VECTOR_BYTES),
        })  # fmt: skip
        return out

    def _made(
        self,
        batch: int,
        rows: int,
        terms: int,
        columns: int,
        a_type: np.dtype[Any],
        b_type: np.dtype[Any],
        result: Result,
        dtype: np.dtype[Any],
        point: int,
    ) -> tuple[Replay, int]:
        """The calls, and the panels of a right operand."""
        kind = integers()
        tiling, words = kind.tiling, kind.tiling.words(terms)
        bases, offsets = matrix_tables(np.empty((terms, columns), np.uint8), tiling, words * WORD)
        left_panels, panels = -(-rows // tiling.rows), tiling.panels(columns)
        right_bytes = panels * words * tiling.vectors * VECTOR_BYTES
        low, high = (np.iinfo(dtype).min, np.iinfo(dtype).max) if result == "bytes" else (0, 0)
        packing, products = [], []
        for index in range(batch):
            left = Hole("left", index * rows * words * WORD_BYTES)
            row_sums = Hole("row sums", index * rows * WORD_BYTES)
            given: tuple[Any, ...] = (
                Hole("a", index * rows * terms), terms, rows, left_panels, terms, left, row_sums, flip_of(a_type),
                words, tiling.is_tiled,
            )  # fmt: skip
            packing.append(Call(pack_byte_rows, given, Items(factor=left_panels)))
            right = Hole("right", index * right_bytes)
            given = (
                Hole("b", index * terms * columns), bases.ctypes.data, offsets.ctypes.data, words, 0, columns, right,
                flip_to_unsigned(b_type),
            )  # fmt: skip
            items = Items(factor=panels * -(-words // PIECE_WORDS))
            packing.append(Call(pack_byte_windows(tiling), given, items, held=(bases, offsets)))
            finish_arguments = (
                Hole("out", index * rows * columns * dtype.itemsize), columns * dtype.itemsize, columns, row_sums,
                Hole("factors"), 0, Hole("column terms", index * columns * WORD_BYTES), 0,
                0 if result == "int32" else Hole("scales"), 0, 0.0, 0.0, float(point), float(low), float(high), 0, 0,
            )  # fmt: skip
            finish = finish_integers_op(tiling, result, "copy")
            products.append(product_call(kind, left, rows, right, panels, words, finish, finish_arguments, threads=1))
        work = batch * terms * columns * (rows / _PRODUCTS_PER_NANOSECOND + _NANOSECONDS_PER_PACKED)
        return Replay([packing, products], work), panels
