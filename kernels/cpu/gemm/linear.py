"""x @ weight with a constant float32 weight, and what follows it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..checks import Float32
from ..large import Arena
from ..rowwise.unary import UNARY
from ..tape.program import Call, Hole, Items
from ..tape.replay import Crew, Replay
from .finish import finish_op
from .micro import floats
from .packing import Packed, pack_right, pack_rows
from .product import product_call
from .tiling import WORD_BYTES

# Rows that are packed at a time, which bounds the memory for them.
_ROWS_AT_ONCE = 2048
_FLOPS_PER_NANOSECOND = 100.0
_NANOSECONDS_PER_PACKED = 0.5
# Row counts whose calls are kept.
_KEPT = 16


def pack_weight(crew: Crew, weight: NDArray[np.float32], arena: Arena | None = None) -> Packed:
    """[K, N] in the form that `Linear` multiplies.

    Args:
        arena: where it gets its memory; None = on its own.

    Raises:
        ValueError: the weight spans too much memory.
    """
    return pack_right(crew, weight, floats().tiling, arena)


class Linear:
    """function(x @ weight + bias + addend).

    A row of the result depends on that row alone, to the last bit, whatever the number of rows and threads.

    Args:
        weight: what `pack_weight` made.
        bias: float32 [N]. function, parameters: as in `rowwise.unary`.

    Raises:
        ValueError: the bias does not fit.
    """

    def __init__(
        self,
        crew: Crew,
        weight: Packed,
        bias: Float32 | None = None,
        function: str = "copy",
        parameters: tuple[float, ...] = (),
    ) -> None:
        if bias is not None and bias.shape != (weight.lines,):
            raise ValueError(f"bias is {list(bias.shape)}, expected [{weight.lines}]")
        self._crew, self._weight = crew, weight
        self._bias = None if bias is None else np.ascontiguousarray(bias, np.float32)
        self._function, self._parameters = function, (*parameters, 0.0, 0.0)[:2]
        if len(parameters) != len(UNARY[function].parameters):
            raise ValueError(f"{function} takes {UNARY[function].parameters}, not {parameters}")
        self._replays: dict[tuple[int, int, bool], Replay] = {}

    def __call__(self, x: Float32, addend: Float32 | None = None) -> Float32:
        """x: float32 [M, K]; addend: float32 [M, N].

        Raises:
            ValueError: a shape or type does not fit.
        """
        words, columns = self._weight.words, self._weight.lines
        if x.ndim != 2 or x.shape[1] != words or x.dtype != np.float32:
            raise ValueError(f"x is {x.dtype} {list(x.shape)}, the weight has {words} rows")
        rows = len(x)
        if addend is not None and (addend.shape != (rows, columns) or addend.dtype != np.float32):
            raise ValueError(f"addend is {addend.dtype} {list(addend.shape)}, expected {[rows, columns]}")
        if x.strides[1] != WORD_BYTES:
            x = np.ascontiguousarray(x)
        addend = None if addend is None else np.ascontiguousarray(addend)
        out = np.empty((rows, columns), np.float32)
        for first in range(0, rows, _ROWS_AT_ONCE):
            count = min(_ROWS_AT_ONCE, rows - first)
            replay = self._replay(count, x.strides[0], addend is not None)
            addresses = {
                "x": x.ctypes.data + first * x.strides[0],
                "out": out.ctypes.data + first * out.strides[0],
                "left": self._crew.buffer("left", count * words * WORD_BYTES),
                "addend": 0 if addend is None else addend.ctypes.data + first * addend.strides[0],
            }
            self._crew.run(replay, addresses)
        return out

    def _replay(self, rows: int, stride: int, has_addend: bool) -> Replay:
        key = (rows, stride, has_addend)
        found = self._replays.get(key)
        if found is None:
            if len(self._replays) >= _KEPT:
                self._replays = {}
            found = self._replays[key] = self._made(rows, stride, has_addend)
        return found

    def _made(self, rows: int, stride: int, has_addend: bool) -> Replay:
        kind, weight = floats(), self._weight
        row_bytes, panels = weight.lines * WORD_BYTES, -(-rows // kind.tiling.rows)
        given = (Hole("x"), stride, rows, panels, weight.words, Hole("left"))
        finish_arguments = (
            Hole("out"), row_bytes, weight.lines, 0 if self._bias is None else self._bias.ctypes.data, 0,
            Hole("addend") if has_addend else 0, row_bytes, *self._parameters,
        )  # fmt: skip
        product = product_call(
            kind, Hole("left"), rows, weight.data.ctypes.data, len(weight.data), weight.words,
            finish_op(kind.tiling, self._function), finish_arguments,
            threads=self._crew.threads, held=(weight, self._bias),
        )  # fmt: skip
        flops = 2.0 * rows * weight.words * weight.lines
        work = flops / _FLOPS_PER_NANOSECOND + rows * weight.words * _NANOSECONDS_PER_PACKED
        return Replay([[Call(pack_rows, given, Items(factor=panels))], [product]], work)
