"""Linear layers x @ weight with a constant weight, and matmuls of two computed 8-bit matrices.

Operands are float32, or 8-bit integers with a zero point. Integer sums are exact.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....checks import Float32
from ...jit.arguments import Binding
from ...program.bound_program import BoundPrograms, NodeProgram, first_element
from ...program.thread_pool import Threads, own_memory
from ...rowwise.elementwise import check_function
from .micro import VECTOR_BYTES, WORD_BYTES, floats, integers
from .packing import (
    HALF,
    PackedOperand,
    byte_rows_call,
    flip_to_unsigned,
    matrix_tables,
    rows_call,
    unpacked_integer_weight,
    zero_point_terms,
)
from .product import FinishArguments, finish_op, fitting, limits, product_call, result_of
from .windows import pack_byte_windows, windows_call

# Number of rows that are packed at a time, which limits the memory for packed rows.
_FLOAT_ROWS_AT_ONCE, _BYTE_ROWS_AT_ONCE = 2048, 4096
_FLOPS_PER_NANOSECOND, _NANOSECONDS_PER_PACKED_FLOAT = 100.0, 0.5
_PRODUCTS_PER_NANOSECOND, _NANOSECONDS_PER_PACKED_BYTE = 200.0, 0.2
_COMPUTED_PRODUCTS_PER_NANOSECOND, _NANOSECONDS_PER_PACKED_OPERAND = 150.0, 0.3
_INT32 = np.dtype(np.int32)
_BYTES = (np.int8, np.uint8)
# Number of bytes after a matrix that gather instructions may read.
_SLACK = 64


class DenseLinear:
    """The linear layer function(x @ weight + bias + addend).

    A row of the result depends only on its row of x: it is bit-identical for any number of rows and threads.

    Args:
        weight: return value of `pack_weight`.
        bias: float32 [N].
        function, parameters: key of UNARY, and the function's parameters.
    """

    def __init__(
        self, threads: Threads, weight: PackedOperand, bias: Float32 | None = None, function: str = "copy",
        parameters: tuple[float, ...] = (),
    ) -> None:  # fmt: skip
        self._threads, self._weight, self._bias = threads, weight, fitting("bias is", bias, (weight.lines,))
        self._function, self._parameters = function, check_function(function, parameters)
        self._programs: BoundPrograms[NodeProgram] = BoundPrograms()

    def __call__(self, x: Float32, addend: Float32 | None = None) -> Float32:
        """Compute the layer for x, float32 [M, K], and addend, float32 [M, N]."""
        words, columns = self._weight.words, self._weight.lines
        if x.ndim != 2 or x.shape[1] != words or x.dtype != np.float32:
            raise ValueError(f"x is {x.dtype} {list(x.shape)}, but the weight has {words} rows")
        rows = len(x)
        addend = fitting("addend is", addend, (rows, columns))
        if x.strides[1] != WORD_BYTES:
            x = np.ascontiguousarray(x)
        out = np.empty((rows, columns), np.float32)
        for first in range(0, rows, _FLOAT_ROWS_AT_ONCE):
            count = min(_FLOAT_ROWS_AT_ONCE, rows - first)
            program = self._programs.get(self._made, count, x.strides[0], addend is not None)
            added = None if addend is None else addend[first:]
            left = own_memory("left", count * words * WORD_BYTES)
            program.run(self._threads, x=first_element(x[first:]), out=out[first:], left=left, addend=added)
        return out

    def _made(self, rows: int, stride: int, has_addend: bool) -> NodeProgram:
        kind, weight, left = floats(), self._weight, Binding("left")
        p, q = self._parameters
        finishing = FinishArguments(
            out=Binding("out"), out_stride=weight.lines * WORD_BYTES, width=weight.lines, column_bias=self._bias,
            addend=Binding("addend") if has_addend else None, addend_stride=weight.lines * WORD_BYTES, p=p, q=q,
        )  # fmt: skip
        packing = rows_call(Binding("x"), stride, rows, weight.words, kind.tiling, left)
        product = product_call(
            kind, left, rows, weight.data, len(weight.data), weight.words, finish_op(kind, self._function),
            finishing, threads=self._threads.count,
        )  # fmt: skip
        flops = 2.0 * rows * weight.words * weight.lines
        nanoseconds = flops / _FLOPS_PER_NANOSECOND + rows * weight.words * _NANOSECONDS_PER_PACKED_FLOAT
        return NodeProgram([[packing], [product]], nanoseconds)


class IntegerLinear:
    """The linear layer (x - x_zero) @ (weight - w_zero), modulo 2 ** 32.

    Args:
        weight: return value of `pack_integer_weight`.
        w_zero: zero points of the weight, either a single one or one per column; None = 0.

    Raises:
        ValueError: the number of zero points is wrong.
    """

    def __init__(self, threads: Threads, weight: PackedOperand, w_zero: NDArray[Any] | None = None) -> None:
        self._threads, self._weight = threads, weight
        # The result subtracts x_zero times the sums.
        self._factors, self._sums = zero_point_terms(weight, w_zero)
        self._programs: BoundPrograms[NodeProgram] = BoundPrograms()
        self.columns, self.terms = weight.lines, weight.terms

    def unpacked(self) -> NDArray[Any]:
        """Return the weight [K, N] as it was before packing, in a new array."""
        return unpacked_integer_weight(self._weight)

    def sums(self, x: NDArray[Any], x_zero: int) -> NDArray[np.int32]:
        """Return the sums, int32 [M, N], for x, int8 or uint8 [M, K]."""
        return self._run(x, x_zero, _INT32)

    def scaled(
        self, x: NDArray[Any], x_zero: int, scales: Float32, bias: Float32 | None = None,
        addend: Float32 | None = None, function: str = "copy",
    ) -> Float32:  # fmt: skip
        """Return function(sums * scales [N] + bias [N] + addend [M, N]) as float32. `function` is a key of UNARY."""
        return self._run(x, x_zero, np.dtype(np.float32), scales, bias, addend=addend, function=function)

    def rounded(self, x: NDArray[Any], x_zero: int, scales: Float32, point: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return round(sums * scales) + point, saturated, as int8 or uint8."""
        return self._run(x, x_zero, dtype, scales, None, point)

    def _run(
        self, x: NDArray[Any], x_zero: int, dtype: np.dtype[Any], scales: Float32 | None = None,
        bias: Float32 | None = None, point: int = 0, addend: Float32 | None = None, function: str = "copy",
    ) -> NDArray[Any]:  # fmt: skip
        weight = self._weight
        if x.ndim != 2 or x.shape[1] != weight.terms or x.dtype not in _BYTES:
            raise ValueError(f"x is {x.dtype} {list(x.shape)}, but the weight has {weight.terms} rows")
        scales, bias = (fitting(*one, (weight.lines,)) for one in (("scales are", scales), ("bias is", bias)))
        x, addend = np.ascontiguousarray(x), fitting("addend is", addend, (len(x), weight.lines))
        moved = x_zero - (HALF if x.dtype == np.uint8 else 0)
        column_terms = self._sums * np.int32(-moved) if moved else None
        out = np.empty((len(x), weight.lines), dtype)
        for first in range(0, len(x), _BYTE_ROWS_AT_ONCE):
            count = min(_BYTE_ROWS_AT_ONCE, len(x) - first)
            absent = moved == 0, bias is None, addend is None
            program = self._programs.get(self._made, count, dtype, x.dtype, absent, point, function)
            program.run(
                self._threads, x=x[first:], out=out[first:], column_terms=column_terms, scales=scales, bias=bias,
                left=own_memory("left", integers().tiling.left_bytes(count, weight.words)),
                row_sums=own_memory("row sums", count * WORD_BYTES), addend=None if addend is None else addend[first:],
            )  # fmt: skip
        return out

    def _made(
        self, rows: int, dtype: np.dtype[Any], x_type: np.dtype[Any], absent: tuple[bool, bool, bool], point: int,
        function: str,
    ) -> NodeProgram:  # fmt: skip
        """Return the program. `absent` is True for each term that is missing: terms per column, bias, addend."""
        kind, weight, result = integers(), self._weight, result_of(dtype)
        left, sums = Binding("left"), Binding("row_sums")
        packing = byte_rows_call(Binding("x"), x_type, rows, weight.terms, kind.tiling, left, sums)
        names = ("column_terms", "bias", "addend")
        column_terms, bias, addend = (None if no else Binding(name) for no, name in zip(absent, names, strict=True))
        finishing = FinishArguments(
            out=Binding("out"), out_stride=weight.lines * dtype.itemsize, width=weight.lines, row_sums=sums,
            column_factors=self._factors, column_terms=column_terms, column_bias=bias, addend=addend,
            column_scales=None if result == "int32" else Binding("scales"), addend_stride=weight.lines * WORD_BYTES,
            **limits(dtype, point),
        )  # fmt: skip
        product = product_call(
            kind, left, rows, weight.data, len(weight.data), weight.words,
            finish_op(kind, function, result), finishing, threads=self._threads.count,
        )  # fmt: skip
        nanoseconds = rows * weight.terms * (weight.lines / _PRODUCTS_PER_NANOSECOND + _NANOSECONDS_PER_PACKED_BYTE)
        return NodeProgram([[packing], [product]], nanoseconds)


class IntegerMatMul:
    """The matmul (a - a_zero) @ (b - b_zero) of a [B, M, K] and b [B, K, N], int8 or uint8, modulo 2 ** 32."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._programs: BoundPrograms[tuple[NodeProgram, int]] = BoundPrograms()

    def sums(self, a: NDArray[Any], a_zero: int, b: NDArray[Any], b_zero: int) -> NDArray[np.int32]:
        """Return the sums, int32 [B, M, N]."""
        return self._run(a, a_zero, b, b_zero, _INT32)

    def rounded(
        self, a: NDArray[Any], a_zero: int, b: NDArray[Any], b_zero: int, factor: float, point: int, dtype: Any
    ) -> NDArray[Any]:
        """Return round(sums * factor) + point, saturated, as int8 or uint8."""
        return self._run(a, a_zero, b, b_zero, np.dtype(dtype), factor, point)

    def _run(
        self, a: NDArray[Any], a_zero: int, b: NDArray[Any], b_zero: int, dtype: np.dtype[Any], factor: float = 1.0,
        point: int = 0,
    ) -> NDArray[Any]:  # fmt: skip
        if a.ndim != 3 or b.ndim != 3 or a.shape[::2] != (len(b), b.shape[1]):
            raise ValueError(f"matrices {list(a.shape)} and {list(b.shape)} do not match")
        if a.dtype not in _BYTES or b.dtype not in _BYTES:
            raise ValueError(f"matrices are {a.dtype} and {b.dtype}, expected int8 or uint8")
        (batch, rows, terms), columns, tiling = a.shape, b.shape[2], integers().tiling
        words = tiling.words(terms)
        out = np.empty((batch, rows, columns), dtype)
        if not out.size:
            return out
        a = np.ascontiguousarray(a)
        a_moved = a_zero - (HALF if a.dtype == np.uint8 else 0)
        b_moved = b_zero + (HALF if b.dtype == np.int8 else 0)
        sums = np.ascontiguousarray(b.sum(axis=1, dtype=np.int32))  # sum() may keep the order of a view's axes
        column_terms = (sums - np.int32(terms * b_zero)) * np.int32(-a_moved)
        program, panels = self._programs.get(self._made, a.shape, columns, a.dtype, b.dtype, dtype, point)
        source = own_memory("source", b.size + _SLACK)
        source[: b.size].view(b.dtype).reshape(b.shape)[...] = b
        program.run(
            self._threads, a=a, b=source, out=out, column_terms=column_terms,
            factors=np.full(columns, -b_moved, np.int32), scales=np.full(columns, factor, np.float32),
            left=own_memory("left", tiling.left_bytes(batch * rows, words)),
            row_sums=own_memory("row sums", batch * rows * WORD_BYTES),
            right=own_memory("right", batch * panels * words * tiling.vectors * VECTOR_BYTES),
        )  # fmt: skip
        return out

    def _made(
        self, shape: tuple[int, int, int], columns: int, a_type: np.dtype[Any], b_type: np.dtype[Any],
        dtype: np.dtype[Any], point: int,
    ) -> tuple[NodeProgram, int]:  # fmt: skip
        """Return the program, and the number of panels of a right operand."""
        (batch, rows, terms), kind, result = shape, integers(), result_of(dtype)
        tiling, words = kind.tiling, kind.tiling.words(terms)
        tables = matrix_tables(np.empty((terms, columns), np.uint8), tiling, words * WORD_BYTES)
        panels, pack, flip = tiling.panels(columns), pack_byte_windows(tiling), flip_to_unsigned(b_type)
        right_bytes = panels * words * tiling.vectors * VECTOR_BYTES
        packing, products = [], []
        for index in range(batch):
            left = Binding("left", index * rows * words * WORD_BYTES)
            row_sums = Binding("row_sums", index * rows * WORD_BYTES)
            source = Binding("a", index * rows * terms)
            packing.append(byte_rows_call(source, a_type, rows, terms, tiling, left, row_sums))
            right, source = Binding("right", index * right_bytes), Binding("b", index * terms * columns)
            packing.append(windows_call(pack, source, tables, words, columns, right, panels, flip=flip))
            finishing = FinishArguments(
                out=Binding("out", index * rows * columns * dtype.itemsize), out_stride=columns * dtype.itemsize,
                width=columns, row_sums=row_sums, column_factors=Binding("factors"),
                column_terms=Binding("column_terms", index * columns * WORD_BYTES),
                column_scales=None if result == "int32" else Binding("scales"), **limits(dtype, point),
            )  # fmt: skip
            finish = finish_op(kind, "copy", result)
            products.append(product_call(kind, left, rows, right, panels, words, finish, finishing, threads=1))
        costs = rows / _COMPUTED_PRODUCTS_PER_NANOSECOND + _NANOSECONDS_PER_PACKED_OPERAND
        return NodeProgram([packing, products], batch * terms * columns * costs), panels
