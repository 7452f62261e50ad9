"""x @ weight of 8-bit integers less their zero points, with a constant weight: exact sums, and what follows them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..large import Arena
from ..tape.program import Call, Hole, Items
from ..tape.replay import Crew, Replay
from .integer_finish import Result, finish_integers_op
from .integer_packing import HALF, PackedBytes, flip_of, pack_byte_rows, pack_right_bytes
from .micro import integers
from .product import product_call
from .tiling import WORD_BYTES

_ROWS_AT_ONCE = 4096
_PRODUCTS_PER_NANOSECOND = 200.0
_NANOSECONDS_PER_PACKED = 0.2
_KEPT = 16


def pack_integer_weight(crew: Crew, weight: NDArray[Any], arena: Arena | None = None) -> PackedBytes:
    """[K, N] of int8 or uint8 in the form that `IntegerLinear` multiplies.

    Args:
        arena: where it gets its memory; None = on its own.

    Raises:
        ValueError: the weight spans too much memory.
    """
    return pack_right_bytes(crew, weight, integers().tiling, arena)


class IntegerLinear:
    """(x - x_zero) @ (weight - w_zero), modulo 2 ** 32.

    Args:
        weight: what `pack_integer_weight` made.
        w_zero: its zero point, one or one per column; None = 0.

    Raises:
        ValueError: the zero points do not fit.
    """

    def __init__(self, crew: Crew, weight: PackedBytes, w_zero: NDArray[Any] | None = None) -> None:
        points = np.zeros((), np.int32) if w_zero is None else np.asarray(w_zero).astype(np.int32)
        if points.size not in (1, weight.lines):
            raise ValueError(f"{points.size} zero points for {weight.lines} columns")
        moved = np.broadcast_to(points.reshape(-1) + np.int32(weight.moved), (weight.lines,))
        self._crew, self._weight = crew, weight
        self._factors = np.ascontiguousarray(-moved) if np.any(moved) else None
        # Of the columns less their zero points: what one step of x_zero takes away.
        self._sums = weight.sums - np.int32(weight.terms) * moved
        self._replays: dict[tuple[Any, ...], Replay] = {}

    @property
    def columns(self) -> int:
        """N."""
        return self._weight.lines

    @property
    def terms(self) -> int:
        """K."""
        return self._weight.terms

    def sums(self, x: NDArray[Any], x_zero: int) -> NDArray[np.int32]:
        """x: int8 or uint8 [M, K]; to int32 [M, N]."""
        found: NDArray[Any] = self._run(x, x_zero, "int32", np.dtype(np.int32))
        return found

    def scaled(
        self,
        x: NDArray[Any],
        x_zero: int,
        scales: NDArray[np.float32],
        bias: NDArray[np.float32] | None = None,
        addend: NDArray[np.float32] | None = None,
        function: str = "copy",
    ) -> NDArray[np.float32]:
        """function(sums * scales [N] + bias [N] + addend [M, N]) as float32; function: as in `rowwise.unary`."""
        kind = np.dtype(np.float32)
        found: NDArray[Any] = self._run(x, x_zero, "float32", kind, scales, bias, addend=addend, function=function)
        return found

    def rounded(
        self, x: NDArray[Any], x_zero: int, scales: NDArray[np.float32], point: int, dtype: np.dtype[Any]
    ) -> NDArray[Any]:
        """round(sums * scales) + point, saturated, as int8 or uint8."""
        found: NDArray[Any] = self._run(x, x_zero, "bytes", dtype, scales, None, point)
        return found

    def _run(
        self,
        x: NDArray[Any],
        x_zero: int,
        result: Result,
        dtype: np.dtype[Any],
        scales: NDArray[np.float32] | None = None,
        bias: NDArray[np.float32] | None = None,
        point: int = 0,
        addend: NDArray[np.float32] | None = None,
        function: str = "copy",
    ) -> Any:
        weight = self._weight
        if x.ndim != 2 or x.shape[1] != weight.terms or x.dtype not in (np.int8, np.uint8):
            raise ValueError(f"x is {x.dtype} {list(x.shape)}, the weight has {weight.terms} rows")
        for name, terms in (("scales", scales), ("bias", bias)):
            if terms is not None and (terms.shape != (weight.lines,) or terms.dtype != np.float32):
                raise ValueError(f"{name} are {terms.dtype} {list(terms.shape)}, expected float32 [{weight.lines}]")
        if addend is not None and (addend.shape != (len(x), weight.lines) or addend.dtype != np.float32):
            raise ValueError(f"addend is {addend.dtype} {list(addend.shape)}, expected {[len(x), weight.lines]}")
        x = np.ascontiguousarray(x)
        addend = None if addend is None else np.ascontiguousarray(addend)
        scales, bias = (None if terms is None else np.ascontiguousarray(terms) for terms in (scales, bias))
        moved = x_zero - (HALF if x.dtype == np.uint8 else 0)
        column_terms = self._sums * np.int32(-moved) if moved else None
        out = np.empty((len(x), weight.lines), dtype)
        for first in range(0, len(x), _ROWS_AT_ONCE):
            count = min(_ROWS_AT_ONCE, len(x) - first)
            key = (count, result, dtype, x.dtype, moved == 0, bias is None, addend is None, point, function)
            replay = self._replays.get(key)
            if replay is None:
                if len(self._replays) >= _KEPT:
                    self._replays = {}
                replay = self._replays[key] = self._made(*key)
            addresses = {
                "x": x.ctypes.data + first * x.strides[0],
                "out": out.ctypes.data + first * out.strides[0],
                "left": self._crew.buffer("left", integers().tiling.left_bytes(count, weight.words)),
                "row sums": self._crew.buffer("row sums", count * WORD_BYTES),
                "column terms": 0 if column_terms is None else column_terms.ctypes.data,
                "scales": 0 if scales is None else scales.ctypes.data,
                "bias": 0 if bias is None else bias.ctypes.data,
                "addend": 0 if addend is None else addend.ctypes.data + first * addend.strides[0],
            }
            self._crew.run(replay, addresses)
        return out

    def _made(
        self,
        rows: int,
        result: Result,
        dtype: np.dtype[Any],
        x_type: np.dtype[Any],
        no_terms: bool,
        no_bias: bool,
        no_addend: bool,
        point: int,
        function: str,
    ) -> Replay:
        kind, weight, factors = integers(), self._weight, self._factors
        panels = -(-rows // kind.tiling.rows)
        given = (
            Hole("x"), weight.terms, rows, panels, weight.terms, Hole("left"), Hole("row sums"), flip_of(x_type),
            weight.words, kind.tiling.is_tiled,
        )  # fmt: skip
        low, high = (np.iinfo(dtype).min, np.iinfo(dtype).max) if result == "bytes" else (0, 0)
        finish_arguments = (
            Hole("out"), weight.lines * dtype.itemsize, weight.lines, Hole("row sums"),
            0 if factors is None else factors.ctypes.data, 0, 0 if no_terms else Hole("column terms"), 0,
            0 if result == "int32" else Hole("scales"), 0 if no_bias else Hole("bias"), 0.0, 0.0,
            float(point), float(low), float(high), 0 if no_addend else Hole("addend"), weight.lines * WORD_BYTES,
        )  # fmt: skip
        product = product_call(
            kind, Hole("left"), rows, weight.data.ctypes.data, len(weight.data), weight.words,
            finish_integers_op(kind.tiling, result, function), finish_arguments,
            threads=self._crew.threads, held=(weight, factors),
        )  # fmt: skip
        work = rows * weight.terms * (weight.lines / _PRODUCTS_PER_NANOSECOND + _NANOSECONDS_PER_PACKED)
        return Replay([[Call(pack_byte_rows, given, Items(factor=panels))], [product]], work)
