"""Convolution of 8-bit integers less their zero points with constant kernels: exact sums, or bytes again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..large import huge_array
from ..tape.program import Call, Hole, Items
from ..tape.replay import Crew, Replay
from .convolution import Windows, part_panels, window_tables
from .integer_finish import Result, finish_integers_op
from .integer_packing import HALF, WORD, PackedBytes, flip_to_unsigned, pack_left_bytes
from .micro import integers
from .product import product_call
from .tiling import VECTOR_BYTES
from .windows import PIECE_WORDS, pack_byte_windows

_PRODUCTS_PER_NANOSECOND = 200.0
_NANOSECONDS_PER_PACKED = 0.2
_KEPT = 8
# Bytes behind an image that gathering may touch.
_SLACK = 64


def pack_integer_kernels(kernels: NDArray[Any]) -> PackedBytes:
    """[M, C, kernel ...] of int8 or uint8 in the form that `IntegerConvolution` multiplies."""
    return pack_left_bytes(np.ascontiguousarray(kernels.reshape(len(kernels), -1)), integers().tiling)


def supported(dtype: Any, w_zero: Any) -> bool:
    """Whether kernels of this type and zero points become signed bytes with zero point 0."""
    return bool(dtype in (np.int8, np.uint8) and np.all(np.asarray(w_zero) == (HALF if dtype == np.uint8 else 0)))


class IntegerConvolution:
    """conv(x - x_zero, kernels - their zero point) + bias of images [N, C, ...], modulo 2 ** 32; see `supported`.

    Args:
        kernels: what `pack_integer_kernels` made.
        bias: int32 [M].

    Raises:
        ValueError: the bias does not fit.
    """

    def __init__(self, crew: Crew, kernels: PackedBytes, bias: NDArray[np.int32] | None = None) -> None:
        if bias is not None and bias.shape != (kernels.lines,):
            raise ValueError(f"bias is {list(bias.shape)}, expected [{kernels.lines}]")
        self._crew, self._kernels = crew, kernels
        self._bias = np.zeros(kernels.lines, np.int32) if bias is None else bias.astype(np.int32)
        self._replays: dict[tuple[Any, ...], tuple[Replay, int]] = {}

    def sums(
        self, x: NDArray[Any], pads: Sequence[tuple[int, int]], windows: Windows, x_zero: int
    ) -> NDArray[np.int32]:
        """x: int8 or uint8 [N, C, ...]; pads: before and after, per spatial axis; to int32 [N, M, counts ...]."""
        found: NDArray[Any] = self._run(x, pads, windows, x_zero, "int32", np.dtype(np.int32))
        return found

    def rounded(
        self,
        x: NDArray[Any],
        pads: Sequence[tuple[int, int]],
        windows: Windows,
        x_zero: int,
        factors: NDArray[np.float32],
        point: int,
        dtype: np.dtype[Any],
    ) -> NDArray[Any]:
        """round(sums * factors [M]) + point, saturated, as int8 or uint8."""
        found: NDArray[Any] = self._run(x, pads, windows, x_zero, "bytes", dtype, factors, point)
        return found

    def _run(
        self,
        x: NDArray[Any],
        pads: Sequence[tuple[int, int]],
        windows: Windows,
        x_zero: int,
        result: Result,
        dtype: np.dtype[Any],
        factors: NDArray[np.float32] | None = None,
        point: int = 0,
    ) -> Any:
        kernels = self._kernels
        if x.dtype not in (np.int8, np.uint8) or x.shape[1] * math.prod(windows.kernel) != kernels.terms:
            raise ValueError(f"x is {x.dtype} {list(x.shape)}, kernels have {kernels.terms} elements")
        if factors is not None and (factors.shape != (kernels.lines,) or factors.dtype != np.float32):
            raise ValueError(f"factors are {factors.dtype} {list(factors.shape)}, expected float32 [{kernels.lines}]")
        out = np.empty((len(x), kernels.lines, *windows.counts), dtype)
        if not out.size:
            return out
        moved = x_zero + (HALF if x.dtype == np.int8 else 0)
        row_terms = self._bias - np.int32(moved) * kernels.sums
        factors = None if factors is None else np.ascontiguousarray(factors)
        extents = tuple(size + sum(pad) for size, pad in zip(x.shape[2:], pads, strict=True))
        replay, size = self._replay((x.shape[1], *extents), windows, result, dtype, x.dtype, point)
        image = huge_array((x.shape[1] * math.prod(extents) + _SLACK,), x.dtype)
        inner = tuple(slice(before, before + size) for (before, _), size in zip(pads, x.shape[2:], strict=True))
        padded = image[:-_SLACK].reshape(x.shape[1], *extents)
        if any(map(any, pads)):
            padded[...] = x_zero
        for index, source in enumerate(x):
            padded[(slice(None), *inner)] = source
            addresses = {
                "image": image.ctypes.data,
                "out": out.ctypes.data + index * out.strides[0],
                "right": self._crew.buffer("right", size),
                "row terms": row_terms.ctypes.data,
                "factors": 0 if factors is None else factors.ctypes.data,
            }
            self._crew.run(replay, addresses)
        return out

    def _replay(self, *key: Any) -> tuple[Replay, int]:
        found = self._replays.get(key)
        if found is None:
            if len(self._replays) >= _KEPT:
                self._replays = {}
            found = self._replays[key] = self._made(*key)
        return found

    def _made(
        self,
        extents: tuple[int, ...],
        windows: Windows,
        result: Result,
        dtype: np.dtype[Any],
        x_type: np.dtype[Any],
        point: int,
    ) -> tuple[Replay, int]:
        """The calls, and the bytes of packed windows at a time."""
        kind, kernels = integers(), self._kernels
        tiling, words = kind.tiling, kernels.words
        taps, offsets = window_tables(extents, windows, tiling)
        bases = np.zeros(words * WORD, np.int32)
        bases[: len(taps)] = taps
        panels, panel_bytes = tiling.panels(windows.positions), words * tiling.vectors * VECTOR_BYTES
        together = part_panels(panels, panel_bytes, self._crew.threads)
        low, high = (np.iinfo(dtype).min, np.iinfo(dtype).max) if result == "bytes" else (0, 0)
        phases = []
        for first in range(0, panels, together):
            count, skipped = min(together, panels - first), first * tiling.columns
            given = (
                Hole("image"), bases.ctypes.data, offsets.ctypes.data, words, first, windows.positions, Hole("right"),
                flip_to_unsigned(x_type),
            )  # fmt: skip
            items = Items(factor=count * -(-words // PIECE_WORDS))
            finish_arguments = (
                Hole("out", skipped * dtype.itemsize), windows.positions * dtype.itemsize, windows.positions - skipped,
                0, 0, Hole("row terms"), 0, 0 if result == "int32" else Hole("factors"), 0, 0, 0.0, 0.0,
                float(point), float(low), float(high), 0, 0,
            )  # fmt: skip
            product = product_call(
                kind, kernels.data.ctypes.data, kernels.lines, Hole("right"), count, words,
                finish_integers_op(tiling, result, "copy"), finish_arguments,
                threads=self._crew.threads, held=(kernels,),
            )  # fmt: skip
            phases += [[Call(pack_byte_windows(tiling), given, items, held=(bases, offsets))], [product]]
        work = kernels.terms * windows.positions * (kernels.lines / _PRODUCTS_PER_NANOSECOND + _NANOSECONDS_PER_PACKED)
        return Replay(phases, work), together * panel_bytes
