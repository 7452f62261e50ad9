"""Convolution with constant float32 kernels: windows are packed in parts that stay in the cache, and multiplied."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checks import Float32
from ..tape.program import Call, Hole, Items
from ..tape.replay import Crew, Replay
from .finish import finish_op
from .micro import floats
from .packing import Packed, pack_left
from .product import product_call
from .tiling import VECTOR_BYTES, WORD_BYTES, Tiling
from .windows import PIECE_WORDS, pack_windows

_FLOPS_PER_NANOSECOND = 100.0
_NANOSECONDS_PER_PACKED = 0.3
# Bytes of packed windows at a time, for each thread: what its second cache holds beside the kernels.
_PART_BYTES = 1 << 19
_KEPT = 8


@dataclass(frozen=True)
class Windows:
    """Where windows lie in an image that has its pads: per spatial axis the kernel's size, steps, and their number."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def positions(self) -> int:
        """How many windows."""
        return math.prod(self.counts)


def pack_kernels(kernels: NDArray[np.float32]) -> Packed:
    """[M, C, kernel ...] in the form that `Convolution` multiplies."""
    return pack_left(kernels.reshape(len(kernels), -1), floats().tiling)


class Convolution:
    """function(conv(x, kernels) + bias + addend) of images [N, C, ...] that have their pads.

    Args:
        kernels: what `pack_kernels` made. bias: float32 [M].
        function, parameters: as in `rowwise.unary`.

    Raises:
        ValueError: the bias does not fit.
    """

    def __init__(
        self,
        crew: Crew,
        kernels: Packed,
        bias: Float32 | None = None,
        function: str = "copy",
        parameters: tuple[float, ...] = (),
    ) -> None:
        if bias is not None and bias.shape != (kernels.lines,):
            raise ValueError(f"bias is {list(bias.shape)}, expected [{kernels.lines}]")
        self._crew, self._kernels = crew, kernels
        self._bias = None if bias is None else np.ascontiguousarray(bias, np.float32)
        self._function, self._parameters = function, (*parameters, 0.0, 0.0)[:2]
        self._replays: dict[tuple[Any, ...], tuple[Replay, int]] = {}

    def __call__(self, x: Float32, windows: Windows, addend: Float32 | None = None) -> Float32:
        """x: float32 [N, C, ...]; addend: float32 [N, M, counts ...]; to [N, M, counts ...].

        Raises:
            ValueError: a shape or type does not fit.
        """
        outputs = self._kernels.lines
        shape = (len(x), outputs, *windows.counts)
        if x.dtype != np.float32 or x.shape[1] * math.prod(windows.kernel) != self._kernels.words:
            raise ValueError(f"x is {x.dtype} {list(x.shape)}, kernels have {self._kernels.words} elements")
        if addend is not None and (addend.shape != shape or addend.dtype != np.float32):
            raise ValueError(f"addend is {addend.dtype} {list(addend.shape)}, expected {list(shape)}")
        x = np.ascontiguousarray(x)
        addend = None if addend is None else np.ascontiguousarray(addend)
        out = np.empty(shape, np.float32)
        if not out.size:
            return out
        replay, size = self._replay(x.shape[1:], windows, addend is not None)
        for image in range(len(x)):
            addresses = {
                "image": x.ctypes.data + image * x.strides[0],
                "out": out.ctypes.data + image * out.strides[0],
                "addend": 0 if addend is None else addend.ctypes.data + image * addend.strides[0],
                "right": self._crew.buffer("right", size),
            }
            self._crew.run(replay, addresses)
        return out

    def _replay(self, extents: tuple[int, ...], windows: Windows, has_addend: bool) -> tuple[Replay, int]:
        key = (extents, windows, has_addend)
        found = self._replays.get(key)
        if found is None:
            if len(self._replays) >= _KEPT:
                self._replays = {}
            found = self._replays[key] = self._made(extents, windows, has_addend)
        return found

    def _made(self, extents: tuple[int, ...], windows: Windows, has_addend: bool) -> tuple[Replay, int]:
        """The calls, and the bytes of packed windows at a time."""
        tiling, kernels, threads = floats().tiling, self._kernels, self._crew.threads
        tables = window_tables(extents, windows, tiling)
        panels, panel_bytes = tiling.panels(windows.positions), kernels.words * tiling.vectors * VECTOR_BYTES
        together = part_panels(panels, panel_bytes, threads)
        phases = []
        for first in range(0, panels, together):
            count = min(together, panels - first)
            phases += [
                [self._packing(tables, first, count, windows)],
                [self._product(first, count, windows, has_addend)],
            ]
        flops = 2.0 * kernels.lines * kernels.words * windows.positions
        work = flops / _FLOPS_PER_NANOSECOND + kernels.words * windows.positions * _NANOSECONDS_PER_PACKED
        return Replay(phases, work), together * panel_bytes

    def _packing(self, tables: Sequence[NDArray[np.int32]], first: int, count: int, windows: Windows) -> Call:
        bases, offsets = tables
        words = self._kernels.words
        arguments = (
            Hole("image"), bases.ctypes.data, offsets.ctypes.data, words, first, windows.positions, Hole("right")
        )  # fmt: skip
        return Call(
            pack_windows(floats().tiling), arguments, Items(factor=count * -(-words // PIECE_WORDS)), held=tables
        )

    def _product(self, first: int, count: int, windows: Windows, has_addend: bool) -> Call:
        kind, kernels = floats(), self._kernels
        row_bytes, skipped = windows.positions * WORD_BYTES, first * kind.tiling.columns
        finish_arguments = (
            Hole("out", skipped * WORD_BYTES), row_bytes, windows.positions - skipped,
            0, 0 if self._bias is None else self._bias.ctypes.data,
            Hole("addend", skipped * WORD_BYTES) if has_addend else 0, row_bytes, *self._parameters,
        )  # fmt: skip
        return product_call(
            kind, kernels.data.ctypes.data, kernels.lines, Hole("right"), count, kernels.words,
            finish_op(kind.tiling, self._function), finish_arguments,
            threads=self._crew.threads, held=(kernels, self._bias),
        )  # fmt: skip


def part_panels(panels: int, panel_bytes: int, threads: int) -> int:
    """How many panels to pack at a time: equal parts of no more than fit into the threads' caches."""
    parts = -(-panels // max(threads, _PART_BYTES * threads // panel_bytes))
    return -(-panels // parts)


def window_tables(
    extents: tuple[int, ...], windows: Windows, tiling: Tiling
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Per tap and per position where it lies, in elements; positions are filled up with the first one."""
    steps = [math.prod(extents[axis + 1 :]) for axis in range(len(extents))]
    inside = zip(windows.kernel, _times(steps[1:], windows.dilations), strict=True)
    taps = _sums([(extents[0], steps[0]), *inside])
    places = _sums(list(zip(windows.counts, _times(steps[1:], windows.strides), strict=True)))
    offsets = np.zeros(tiling.panels(len(places)) * tiling.columns, np.int32)
    offsets[: len(places)] = places
    return taps.astype(np.int32), offsets


def _times(steps: Sequence[int], factors: Sequence[int]) -> list[int]:
    return [step * factor for step, factor in zip(steps, factors, strict=True)]


def _sums(axes: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    """Offsets of a grid of (count, step) axes, in order."""
    total = np.zeros(1, np.int64)
    for count, step in axes:
        total = (total[:, None] + np.arange(count, dtype=np.int64) * step).reshape(-1)
    return total
