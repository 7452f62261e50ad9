"""Products of activations with block-quantised or dense weights."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..formats import BlockQuantizedMatrix
from .block_products import int4_by_float32, int4_by_int8, int8_by_float32
from .checks import NO_CUBE, NO_MATRIX, NO_VECTOR, Float32, check, output
from .quantize import quantize_to_float32, quantize_to_int16
from .team import Team, run

# Rough cost on one thread, in nanoseconds, for deciding whether to share the work.
_NANOSECONDS_PER_WEIGHT = 0.03
_NANOSECONDS_PER_PRODUCT = 0.015
_NANOSECONDS_PER_ACTIVATION = 1.5

Activations = Literal["int8", "fp32"]


def matmul_nbits(
    x: Float32,
    matrix: BlockQuantizedMatrix,
    out: Float32 | None = None,
    *,
    bias: Float32 | None = None,
    addend: Float32 | None = None,
    activations: Activations = "int8",
    team: Team | None = None,
) -> Float32:
    """x @ matrix.T + bias + addend, as com.microsoft::MatMulNBits.

    A row of the result depends on that row of x only, to the last bit, whatever else is in the batch.

    Args:
        x: float32 [T, columns].
        out: float32 [T, rows], or None for a new array.
        bias: float32 [rows]. addend: float32 [T, rows], such as a low-rank adapter's share; may be `out` itself.
        activations: "int8" rounds x to 8 bits per row and block (accuracy level 4); "fp32" keeps it exact.

    Returns:
        out. Infinities and NaNs of a row reach all its results.

    Raises:
        ValueError: a shape or type does not fit.
    """
    tokens = x.shape[0]
    check("x", x, (None, matrix.columns))
    out = output("out", out, (tokens, matrix.rows))
    if bias is not None:
        check("bias", bias, (matrix.rows,))
    if addend is not None:
        check("addend", addend, (tokens, matrix.rows))
    if activations == "int8":
        prepared = _quantized(x, matrix, team)
    elif activations == "fp32":
        prepared = _padded(x, matrix), NO_MATRIX, NO_MATRIX
    else:
        raise ValueError(f"activations is {activations!r}, expected 'int8' or 'fp32'")
    if matrix.bits == 8:
        kernel = int8_by_float32
    else:
        kernel = int4_by_int8 if activations == "int8" else int4_by_float32
    arguments = (
        *prepared,
        matrix.data,
        matrix.scales,
        NO_CUBE if matrix.zero_points is None else matrix.zero_points,
        float(1 << (matrix.bits - 1)),
        NO_VECTOR if bias is None else bias,
        NO_MATRIX if addend is None else addend,
        out,
    )
    weights = matrix.rows * matrix.columns
    work = weights * (_NANOSECONDS_PER_WEIGHT + _NANOSECONDS_PER_PRODUCT * tokens)
    run(team, kernel, arguments, matrix.data.shape[0], work=work)
    return out


def _quantized(x: Float32, matrix: BlockQuantizedMatrix, team: Team | None) -> tuple[NDArray[Any], Float32, Float32]:
    """Integers [T, blocks * block_size] in the type that the kernel wants, their scales and sums [T, blocks]."""
    tokens, blocks, block_size = x.shape[0], matrix.blocks, matrix.block_size
    kernel, dtype = (quantize_to_int16, np.int16) if matrix.bits == 4 else (quantize_to_float32, np.float32)
    integers = np.empty((tokens, blocks * block_size), dtype)
    scales = np.empty((tokens, blocks), np.float32)
    sums = np.empty((tokens, blocks), np.float32)
    arguments = (x, x.view(np.int32), block_size, integers, scales, sums)
    run(team, kernel, arguments, tokens, work=x.size * _NANOSECONDS_PER_ACTIVATION)
    return integers, scales, sums


def _padded(x: Float32, matrix: BlockQuantizedMatrix) -> Float32:
    width = matrix.blocks * matrix.block_size
    if width == matrix.columns:
        return x
    wide = np.zeros((x.shape[0], width), np.float32)
    wide[:, : matrix.columns] = x
    return wide


def matmul_f32(
    x: Float32,
    weight: Float32,
    out: Float32 | None = None,
    *,
    layout: Literal["KN", "NK"] = "KN",
    bias: Float32 | None = None,
    addend: Float32 | None = None,
) -> Float32:
    """x @ weight + bias + addend through NumPy's BLAS, with its threads and its order of sums.

    Args:
        x: float32 [T, K].
        weight: float32 [K, N], or [N, K] if layout is "NK".
        out: float32 [T, N] or None. bias: float32 [N]. addend: float32 [T, N].

    Raises:
        ValueError: a shape or type does not fit.
    """
    if layout not in ("KN", "NK"):
        raise ValueError(f"layout is {layout!r}, expected 'KN' or 'NK'")
    columns = x.shape[-1]
    check("x", x, (None, columns))
    check("weight", weight, (columns, None) if layout == "KN" else (None, columns))
    rows = weight.shape[1 if layout == "KN" else 0]
    shape = (x.shape[0], rows)
    if bias is not None:
        check("bias", bias, (rows,))
    if addend is not None:
        check("addend", addend, shape)
        if addend is out:
            addend = addend.copy()
    out = output("out", out, shape)
    np.matmul(x, weight if layout == "KN" else weight.T, out=out)
    for term in (bias, addend):
        if term is not None:
            np.add(out, term, out=out)
    return out
