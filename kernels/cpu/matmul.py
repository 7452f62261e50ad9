"""Products of activations with block-quantised or dense weights."""

from __future__ import annotations

from typing import Literal

import numpy as np

from ..block_matrix import BlockMatrix
from .checks import Float32, check, output
from .large import huge_array
from .products.activations import Quantized, quantize_call, quantized_in, quantized_size
from .products.calls import few_call
from .tape.context import ContextTable, Word
from .tape.eager import run_calls
from .tape.program import Rows
from .team import Team

# Rough cost on one thread, in nanoseconds, for deciding whether to share the work.
_NANOSECONDS_PER_WEIGHT = 0.05
_NANOSECONDS_PER_PRODUCT = 0.01
_NANOSECONDS_PER_ACTIVATION = 1.5

Activations = Literal["int8", "fp32"]


def matmul_nbits(
    x: Float32,
    matrix: BlockMatrix,
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
    if activations not in ("int8", "fp32"):
        raise ValueError(f"activations is {activations!r}, expected 'int8' or 'fp32'")
    if not tokens:
        return out
    context = ContextTable()
    context.count(Word.TOKENS, tokens)
    prepared = _quantized(x, matrix, context, team) if activations == "int8" else _padded(x, matrix)
    added = None if addend is None else Rows.of(addend)
    call = few_call(prepared, matrix, Rows.of(out), bias=bias, addend=added)
    weights = matrix.rows * matrix.columns
    work = weights * (_NANOSECONDS_PER_WEIGHT + _NANOSECONDS_PER_PRODUCT * tokens)
    run_calls([[call]], context, team=team, work=work)
    return out


def _quantized(x: Float32, matrix: BlockMatrix, context: ContextTable, team: Team | None) -> Quantized:
    memory = huge_array((quantized_size(matrix, len(x)),), np.uint8)
    prepared = quantized_in(memory, matrix, Word.TOKENS)
    work = x.size * _NANOSECONDS_PER_ACTIVATION
    run_calls([[quantize_call(Rows.of(x), prepared)]], context, team=team, work=work)
    return prepared


def _padded(x: Float32, matrix: BlockMatrix) -> Rows:
    if matrix.padded_columns == matrix.columns:
        return Rows.of(x)
    wide = np.zeros((x.shape[0], matrix.padded_columns), np.float32)
    wide[:, : matrix.columns] = x
    return Rows.of(wide)


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
