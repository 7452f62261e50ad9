"""Convolution with constant kernels. Windows are packed in parts that fit in the cache, and then multiplied.

Images are float32, or 8-bit integers with a zero point. Integer sums are exact, and can be quantised to bytes again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....checks import Float32
from ...jit.arguments import Binding
from ...jit.native import NativeOp
from ...program.bound_program import BoundPrograms, NodeProgram
from ...program.calls import Call, Items
from ...program.thread_pool import Threads, fixed_address, own_memory
from ...rowwise.elementwise import check_function
from ..bytes import PadBytesArguments, pad_bytes
from ..copying import operand
from .micro import VECTOR_BYTES, WORD_BYTES, Kind, floats, integers
from .packing import HALF, PackedOperand, flip_to_unsigned, sums_call, zero_point_terms
from .product import FinishArguments, finish_op, fitting, limits, product_call, result_of
from .windows import Tables, Windows, pack_byte_windows, pack_windows, window_tables, windows_call

_FLOPS_PER_NANOSECOND, _NANOSECONDS_PER_PACKED_FLOAT = 100.0, 0.3
_PRODUCTS_PER_NANOSECOND, _NANOSECONDS_PER_PACKED_BYTE, _NANOSECONDS_PER_PADDED_BYTE = 200.0, 0.2, 0.05
# Bytes that a thread pads at least.
_PADDED_GRAIN = 4096
# Bytes of windows that are packed per thread at a time. They fit in the second-level cache together with the kernels.
_PART_BYTES = 1 << 19
_KEPT = 8
# Number of bytes after an image that gather instructions may read.
_SLACK = 64


class Convolution:
    """The convolution function(conv(x, kernels) + bias + addend) of padded images [N, C, ...].

    Args:
        kernels: return value of `pack_kernels`.
        bias: float32 [M].
        function, parameters: key of UNARY, and the function's parameters.
    """

    def __init__(
        self, threads: Threads, kernels: PackedOperand, bias: Float32 | None = None, function: str = "copy",
        parameters: tuple[float, ...] = (),
    ) -> None:  # fmt: skip
        self._threads, self._kernels, self._bias = threads, kernels, fitting("bias is", bias, (kernels.lines,))
        self._function, self._parameters = function, check_function(function, parameters)
        self._programs: BoundPrograms[tuple[NodeProgram, int]] = BoundPrograms(_KEPT)

    def __call__(self, x: Float32, windows: Windows, addend: Float32 | None = None) -> Float32:
        """Convolve x, float32 [N, C, ...], to [N, M, counts ...]. The addend is float32 with the result's shape."""
        shape = (len(x), self._kernels.lines, *windows.counts)
        if x.dtype != np.float32 or x.shape[1] * math.prod(windows.kernel) != self._kernels.words:
            raise ValueError(f"x is {x.dtype} {list(x.shape)}, but each kernel has {self._kernels.words} elements")
        x, addend = operand(x), fitting("addend is", addend, shape)
        out = np.empty(shape, np.float32)
        if not out.size:
            return out
        program, size = self._programs.get(self._made, x.shape[1:], windows, addend is not None)
        for image in range(len(x)):
            added = None if addend is None else addend[image]
            program.run(self._threads, image=x[image], out=out[image], addend=added, right=own_memory("right", size))
        return out

    def _made(self, extents: tuple[int, ...], windows: Windows, has_addend: bool) -> tuple[NodeProgram, int]:
        """Return the program, and the number of bytes of windows that are packed at a time."""
        kind, kernels, (p, q) = floats(), self._kernels, self._parameters
        tables = window_tables(extents, windows, kind.tiling)
        row_bytes, finish = windows.positions * WORD_BYTES, finish_op(kind, self._function)
        finishing = FinishArguments(
            out=Binding("out"), out_stride=row_bytes, width=windows.positions, row_bias=self._bias,
            addend=Binding("addend") if has_addend else None, addend_stride=row_bytes, p=p, q=q,
        )  # fmt: skip
        pack = pack_windows(kind.tiling)
        phases, size = _phases(kind, kernels, windows, tables, pack, 0, finish, finishing, WORD_BYTES, self._threads)
        flops = 2.0 * kernels.lines * kernels.words * windows.positions
        packed = kernels.words * windows.positions * _NANOSECONDS_PER_PACKED_FLOAT
        return NodeProgram(phases, flops / _FLOPS_PER_NANOSECOND + packed), size


def _phases(
    kind: Kind, kernels: PackedOperand, windows: Windows, tables: Tables, pack: NativeOp, flip: int, finish: NativeOp,
    finishing: FinishArguments, itemsize: int, threads: Threads,
) -> tuple[list[list[Call]], int]:  # fmt: skip
    """Return the phases, which pack windows of "image" to "right" and multiply them in parts, and the bytes of a part.

    If the arguments for finishing have factors per column, these factors are the sums of the windows' bytes.

    Args:
        finishing: arguments for all positions.
        itemsize: bytes of a result.
    """
    phases, positions, right, tiling = [], windows.positions, Binding("right"), kind.tiling
    panels, panel_bytes = tiling.panels(positions), kernels.words * tiling.vectors * VECTOR_BYTES
    # The parts are of equal size and fit in the threads' caches.
    parts = -(-panels // max(threads.count, _PART_BYTES * threads.count // panel_bytes))
    together = -(-panels // parts)
    for first in range(0, panels, together):
        count = min(together, panels - first)
        packing = windows_call(
            pack, Binding("image"), tables, kernels.words, positions, right, count, first=first, flip=flip
        )
        skipped, addend, window_sums = first * tiling.columns, finishing.addend, finishing.column_factors
        told = replace(
            finishing, out=finishing.out + skipped * itemsize, width=positions - skipped,
            addend=None if addend is None else addend + skipped * itemsize,
            column_factors=None if window_sums is None else window_sums + skipped * WORD_BYTES,
        )  # fmt: skip
        product = product_call(
            kind, kernels.data, kernels.lines, right, count, kernels.words, finish, told, threads=threads.count
        )
        phases.append([packing])
        if window_sums is not None:
            sums = window_sums + skipped * WORD_BYTES
            phases.append([sums_call(right, count, kernels.words, kernels.terms, tiling, sums)])
        phases.append([product])
    return phases, together * panel_bytes


class IntegerConvolution:
    """The convolution conv(x - x_zero, kernels - w_zero) + bias of images [N, C, ...], modulo 2 ** 32.

    If a zero point of the packed kernels is not 0, the bytes of each window are added up, and the zero point times
    this sum is subtracted from the product.

    Args:
        kernels: return value of `pack_integer_kernels`.
        bias: int32 [M].
        w_zero: zero points of the kernels, either a single one or one per kernel; None = 0.

    Raises:
        ValueError: the number of terms of the bias or of zero points is wrong.
    """

    def __init__(
        self, threads: Threads, kernels: PackedOperand, bias: NDArray[np.int32] | None = None,
        w_zero: NDArray[Any] | None = None,
    ) -> None:  # fmt: skip
        if bias is not None and bias.shape != (kernels.lines,):
            raise ValueError(f"bias is {list(bias.shape)}, expected [{kernels.lines}]")
        self._threads, self._kernels = threads, kernels
        self._factors, self._sums = zero_point_terms(kernels, w_zero)
        self._bias = np.zeros(kernels.lines, np.int32) if bias is None else bias.astype(np.int32)
        self._programs: BoundPrograms[tuple[NodeProgram, int, int]] = BoundPrograms(_KEPT)
        self._row_terms: BoundPrograms[NDArray[np.int32]] = BoundPrograms(_KEPT)

    def sums(
        self, x: NDArray[Any], pads: Sequence[tuple[int, int]], windows: Windows, x_zero: int
    ) -> NDArray[np.int32]:
        """Convolve int8 or uint8 x [N, C, ...] to int32 [N, M, counts ...]. Each axis has (before, after) `pads`."""
        return self._run(x, pads, windows, x_zero, np.dtype(np.int32))

    def rounded(
        self, x: NDArray[Any], pads: Sequence[tuple[int, int]], windows: Windows, x_zero: int, factors: Float32,
        point: int, dtype: np.dtype[Any],
    ) -> NDArray[Any]:  # fmt: skip
        """Return round(sums * factors [M]) + point, saturated, as int8 or uint8."""
        return self._run(x, pads, windows, x_zero, dtype, factors, point)

    def _run(
        self, x: NDArray[Any], pads: Sequence[tuple[int, int]], windows: Windows, x_zero: int, dtype: np.dtype[Any],
        factors: Float32 | None = None, point: int = 0,
    ) -> NDArray[Any]:  # fmt: skip
        kernels = self._kernels
        if x.dtype not in (np.int8, np.uint8) or x.shape[1] * math.prod(windows.kernel) != kernels.terms:
            raise ValueError(f"x is {x.dtype} {list(x.shape)}, but each kernel has {kernels.terms} elements")
        factors = fitting("factors are", factors, (kernels.lines,))
        out = np.empty((len(x), kernels.lines, *windows.counts), dtype)
        if not out.size:
            return out
        moved = x_zero + (HALF if x.dtype == np.int8 else 0)
        row_terms = self._row_terms.get(lambda point: self._bias - np.int32(point) * self._sums, moved)
        program, padded_bytes, size = self._programs.get(
            self._made, x.shape[1:], tuple(pads), windows, dtype, x.dtype, x_zero, point
        )
        tiling = integers().tiling
        window_bytes = tiling.panels(windows.positions) * tiling.columns * WORD_BYTES
        constants = [None if array is None else fixed_address(array) for array in (row_terms, factors)]
        for index, source in enumerate(operand(x)):
            program.run(
                self._threads, x=source, out=out[index], row_terms=constants[0], factors=constants[1],
                image=own_memory("image", padded_bytes) if padded_bytes else source, right=own_memory("right", size),
                window_sums=None if self._factors is None else own_memory("window sums", window_bytes),
            )  # fmt: skip
        return out

    def _made(
        self, shape: tuple[int, ...], pads: Sequence[tuple[int, int]], windows: Windows, dtype: np.dtype[Any],
        x_type: np.dtype[Any], x_zero: int, point: int,
    ) -> tuple[NodeProgram, int, int]:  # fmt: skip
        """Return the program, the bytes of the padded image (0 = none), and the bytes of a part of the windows."""
        kind, kernels, positions, result = integers(), self._kernels, windows.positions, result_of(dtype)
        extents = (shape[0], *[size + sum(pad) for size, pad in zip(shape[1:], pads, strict=True)])
        padding, padded_bytes = [], 0
        if extents != shape or {*windows.kernel, *windows.strides} != {1}:  # else, the positions are consecutive
            padding, padded_bytes = [padding_call(shape, extents, pads, x_zero)], math.prod(extents) + _SLACK
        taps, offsets = window_tables(extents, windows, kind.tiling)
        bases = np.zeros(kernels.words * WORD_BYTES, np.int32)
        bases[: len(taps)] = taps
        finishing = FinishArguments(
            out=Binding("out"), out_stride=positions * dtype.itemsize, width=positions, row_terms=Binding("row_terms"),
            row_scales=None if result == "int32" else Binding("factors"), row_sums=self._factors,
            column_factors=None if self._factors is None else Binding("window_sums"), **limits(dtype, point),
        )  # fmt: skip
        phases, size = _phases(
            kind, kernels, windows, (bases, offsets), pack_byte_windows(kind.tiling), flip_to_unsigned(x_type),
            finish_op(kind, "copy", result), finishing, dtype.itemsize, self._threads,
        )  # fmt: skip
        costs = kernels.lines / _PRODUCTS_PER_NANOSECOND + _NANOSECONDS_PER_PACKED_BYTE
        nanoseconds = kernels.terms * positions * costs + padded_bytes * _NANOSECONDS_PER_PADDED_BYTE
        return NodeProgram([padding, *phases] if padding else phases, nanoseconds), padded_bytes, size


def padding_call(shape: tuple[int, ...], extents: tuple[int, ...], pads: Sequence[tuple[int, int]], fill: int) -> Call:
    """Return the call that copies "x" [C, ...] to "image" and pads it with a byte."""
    flat = 3 - len(pads)  # missing axes have one slice, and one row
    slices, rows, width = (1,) * flat + extents[1:]
    x_slices, x_rows, x_width = (1,) * flat + shape[1:]
    front, top, left = (0,) * flat + tuple(before for before, _ in pads)
    word = int.from_bytes(bytes([fill % 256]) * 4, "little", signed=True)
    arguments = PadBytesArguments(
        x=Binding("x"), out=Binding("image"), x_slices=x_slices, x_rows=x_rows, x_width=x_width, slices=slices,
        rows=rows, width=width, front=front, top=top, left=left, fill=word,
    )  # fmt: skip
    return Call(pad_bytes, arguments, Items(factor=shape[0] * slices * rows, grain=max(1, _PADDED_GRAIN // width)))
