"""8-bit integer matmuls with zero points: a constant matrix is packed once; other matrices use BLAS.

With BLAS, products are exact because they are split into runs of terms whose sums are exact in float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from genai.kernels.cpu.arrays.blas import matmul
from genai.kernels.cpu.arrays.gemm.linear import IntegerLinear, IntegerMatMul
from genai.kernels.cpu.arrays.gemm.packing import pack_integer_weight
from genai.kernels.cpu.program.thread_pool import Threads

from .casting import requantized
from .matmul import MAX_BYTES
from .registry import NodeSpec, operator
from .support import widened

_BYTES = (np.int8, np.uint8)
# If neither matrix is constant, BLAS computes matmuls with fewer multiplications than this.
_MIN_PRODUCTS = 1 << 15


# Differences of 8-bit values have a magnitude of at most 255, and float32 represents integers up to 2 ** 24.
_LARGEST = 255
_EXACT = 1 << 24
# 256 * 255 * 255 < 2 ** 24, so sums of 256 terms are exact for any values.
BLOCK = 256


def exact_runs(terms: int, weights: Any = None) -> list[slice]:
    """Return runs of terms that can be summed exactly in one float32 product.

    Args:
        weights: one operand [terms, outputs]; if its values are small enough, runs are longer than `BLOCK`.
    """
    if terms <= BLOCK or weights is None:
        return [slice(first, first + BLOCK) for first in range(0, max(terms, 1), BLOCK)]
    starts = np.arange(0, terms, BLOCK)
    sums = np.add.reduceat(np.abs(weights), starts, axis=0, dtype=np.float64) * _LARGEST
    runs, first, total = [], 0, sums[0]
    for block, start in enumerate(starts.tolist()[1:], 1):
        total = total + sums[block]
        if total.max(initial=0) >= _EXACT:
            runs.append(slice(first, start))
            first, total = start, sums[block]
    return [*runs, slice(first, terms)]


class IntegerProduct:
    """An exact int32 product (a - a_zero) @ (b - b_zero) of 8-bit integers.

    A constant matrix is packed once for all nodes that share it. If a constant cannot be packed, it is converted to
    float32 for BLAS. Products that the packed form does not support, with a zero point per row of a, unpack it.

    Args:
        weight, zero: input indices of b and of its zero point.
        transposed: True if b is [N, K] instead of [K, N].

    Attributes:
        packed_inputs: inputs that are not read, because this object holds a packed copy.
    """

    def __init__(self, spec: NodeSpec, weight: int, zero: int, *, transposed: bool = False) -> None:
        self._threads = spec.options.get("threads")
        self._transposed = transposed
        self._right: tuple[Any, list[slice]] | None = None
        b, b_zero = (spec.constants[i] if spec.has(i) else None for i in (weight, zero))
        self._packed: IntegerLinear | None = None
        self.packed_inputs: tuple[int, ...] = ()
        self._computed: Any = None if self._threads is None else IntegerMatMul(self._threads)
        if b is None or (b_zero is None and spec.has(zero)):
            return
        b = b.T if transposed else b
        self._packed = _packed(spec, weight, b, b_zero, transposed)
        if self._packed is not None:
            self.packed_inputs = (weight,)
        else:
            layout = f"float32 in exact runs{'T' * transposed}"
            self._right = spec.pack((weight, zero), layout, lambda: _in_runs(_less(b, b_zero)))

    def __call__(self, a: Any, b: Any, a_zero: Any = None, b_zero: Any = None) -> Any:
        point, b_point = single_point(a_zero), single_point(b_zero)
        if self._packed is not None and point is not None and self._fits(a):
            return self._packed.sums(a.reshape(-1, a.shape[-1]), point).reshape(*a.shape[:-1], self._packed.columns)
        if self._packed is not None:
            b = self._packed.unpacked()
        elif self._transposed:
            b = b.T
        if self._right is None and point is not None and b_point is not None and self._both_fit(a, b):
            sums = self._computed.sums(_batched(a), point, _batched(b), b_point)
            return sums.reshape(*a.shape[:-1], b.shape[-1])
        right, runs = self._right or (_less(b, b_zero), None)
        return _exact_product(_less(a, a_zero, by_row=True), right, runs, self._threads)

    def as_floats(self, a: Any, b: Any, scale: Any, bias: Any = None, a_zero: Any = None, b_zero: Any = None) -> Any:
        """Return product * scale + bias as float32."""
        scaled = self.scaled(a, scale, bias, a_zero)
        if scaled is not None:
            return scaled
        result = self(a, b, a_zero, b_zero) * scale
        return (result if bias is None else result + bias).astype(np.float32, copy=False)

    def scaled(
        self, a: Any, scale: Any, bias: Any = None, a_zero: Any = None, *, addend: Any = None, function: str = "copy",
    ) -> Any:  # fmt: skip
        """Return function(product * scale + bias) + addend as float32.

        The scale is one number or one per column, and the bias is one number per column. Returns None if b is not
        packed, or if the scale or the bias has another shape.
        """
        point, scales = single_point(a_zero), self._per_column(scale)
        terms = None if bias is None else self._per_column(bias)
        if self._packed is None or point is None or scales is None or not self._fits(a):
            return None
        if bias is not None and (terms is None or np.size(bias) != self._packed.columns):
            return None
        columns = self._packed.columns
        shape = (*a.shape[:-1], columns)
        fits = addend is not None and addend.shape == shape and function == "copy"
        more = addend.reshape(-1, columns) if fits else None
        result = self._packed.scaled(a.reshape(-1, a.shape[-1]), point, scales, terms, more, function).reshape(shape)
        return result if fits or addend is None else result + addend

    def rounded(self, a: Any, factor: Any, y_zero: Any, a_zero: Any = None, b: Any = None, b_zero: Any = None) -> Any:
        """Return round(product * factor) + y_zero, saturated, in y_zero's type; None as in `scaled`."""
        point, b_point, y_point = single_point(a_zero), single_point(b_zero), single_point(y_zero)
        if point is None or y_point is None or y_zero.dtype not in _BYTES:
            return None
        if self._packed is not None:
            factors = self._per_column(factor)
            if factors is None or not self._fits(a):
                return None
            rounded = self._packed.rounded(a.reshape(-1, a.shape[-1]), point, factors, y_point, y_zero.dtype)
            return rounded.reshape(*a.shape[:-1], self._packed.columns)
        if self._right is not None or b is None or b_point is None or np.size(factor) != 1:
            return None
        if not self._both_fit(a, b):
            return None
        number = float(np.asarray(factor).reshape(-1)[0])
        rounded = self._computed.rounded(_batched(a), point, _batched(b), b_point, number, y_point, y_zero.dtype)
        return rounded.reshape(*a.shape[:-1], b.shape[-1])

    def _both_fit(self, a: Any, b: Any) -> bool:
        """Return True if two computed values are matrices, or equal batches of matrices, worth compiled code."""
        if self._computed is None or a.ndim != b.ndim or a.ndim < 2 or a.shape[:-2] != b.shape[:-2]:
            return False
        if a.dtype not in _BYTES or b.dtype not in _BYTES or a.shape[-1] != b.shape[-2] or not a.shape[-1]:
            return False
        return bool(a.size * b.shape[-1] >= _MIN_PRODUCTS and b.nbytes < MAX_BYTES)

    def _fits(self, a: Any) -> bool:
        return bool(self._packed is not None and a.dtype in _BYTES and a.ndim > 0 and a.shape[-1] == self._packed.terms)

    def _per_column(self, values: Any) -> Any:
        """Return one float32 number per column, or None if the shape does not fit."""
        if self._packed is None:
            return None
        numbers = np.asarray(values, np.float32)
        if numbers.size not in (1, self._packed.columns) or (numbers.ndim > 1 and numbers.shape[-1] != numbers.size):
            return None
        return np.ascontiguousarray(np.broadcast_to(numbers.reshape(-1), (self._packed.columns,)))


def _packed(spec: NodeSpec, weight: int, b: Any, b_zero: Any, transposed: bool) -> IntegerLinear | None:
    """Return the compiled product with a constant matrix, or None if it does not support the matrix."""
    threads = spec.options.get("threads")
    if threads is None or b.ndim != 2 or b.dtype not in _BYTES or not 0 < b.nbytes < MAX_BYTES:
        return None
    if b_zero is not None and np.size(b_zero) not in (1, b.shape[1]):
        return None
    arena, layout = spec.options.get("arena"), f"bytes in panels{'T' * transposed}"
    matrix = spec.pack((weight,), layout, lambda: pack_integer_weight(threads, b, arena))
    return IntegerLinear(threads, matrix, b_zero)


def _batched(x: Any) -> Any:
    return x.reshape(-1, *x.shape[-2:])


def single_point(zero_point: Any) -> int | None:
    """Return a zero point that is a single number (0 if absent), or None."""
    if zero_point is None:
        return 0
    return int(np.asarray(zero_point).reshape(-1)[0]) if np.size(zero_point) == 1 else None


def _less(values: Any, zero_point: Any, *, by_row: bool = False) -> Any:
    result = values.astype(np.float32)
    if zero_point is not None and np.any(zero_point):
        point = np.asarray(zero_point).astype(np.float32)
        result -= point.reshape(*point.shape, 1) if by_row and point.ndim == 1 and point.size > 1 else point
    return result


def _in_runs(right: Any) -> tuple[Any, list[slice]]:
    """Return a matrix, or a batch of matrices, and runs of its rows that can be summed exactly in float32."""
    terms = right.shape[-2] if right.ndim > 1 else len(right)
    return right, exact_runs(terms, np.moveaxis(right, -2, 0).reshape(terms, -1) if right.ndim > 1 else None)


def _exact_product(left: Any, right: Any, runs: list[slice] | None, threads: Threads | None) -> Any:
    """Multiply run by run and add the results as integers."""
    if right.ndim == 1:
        return _exact_product(left, right[:, None], runs, threads)[..., 0]
    first, *rest = runs or exact_runs(right.shape[-2])
    total = matmul(left[..., first], right[..., first, :], threads).astype(np.int32)
    for run in rest:
        total += matmul(left[..., run], right[..., run, :], threads).astype(np.int32)
    return total


@operator("MatMulInteger", since_version=10, multiply=lambda spec: IntegerProduct(spec, 1, 3))
def matmul_integer(a: Any, b: Any, a_zero: Any = None, b_zero: Any = None, *, multiply: IntegerProduct) -> Any:
    """Multiply 8-bit integers minus their zero points, in int32."""
    return multiply(a, b, a_zero, b_zero)


@operator("QLinearMatMul", since_version=10, multiply=lambda spec: IntegerProduct(spec, 3, 5))
def qlinear_matmul(
    a: Any, a_scale: Any, a_zero: Any, b: Any, b_scale: Any, b_zero: Any, y_scale: Any, y_zero: Any, *,
    multiply: IntegerProduct,
) -> Any:  # fmt: skip
    """Multiply quantised matrices and quantise the result."""
    rows = a_scale.reshape(-1, 1) if a_scale.size > 1 else a_scale
    factor = widened(rows) * widened(b_scale) / widened(y_scale)
    rounded = multiply.rounded(a, factor, y_zero, a_zero, b, b_zero)
    return requantized(multiply(a, b, a_zero, b_zero), factor, y_zero, y_zero.dtype) if rounded is None else rounded
