"""Activation functions, alone or gating another projection (SwiGLU, GEGLU: Shazeer 2020).

SiLU, QuickGELU and the tanh form of GELU are one function, x * sigmoid(linear * x + cubic * x ** 3).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .checks import NO_MATRIX, Float32, check, check_rows, output
from .functions import exp, sigmoid
from .jit import kernel
from .team import Team, run
from .vector import LANES, load_row, maximum, minimum, multiply_add, store_row

_NANOSECONDS_PER_SIGMOID = 0.7
_NANOSECONDS_PER_ERF = 10.0
_NANOSECONDS_PER_ERFC = 1.0
# Elements in one item of work.
_CHUNK = 4096

# 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x ** 3))) = x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x ** 3))
_GELU_LINEAR = 2 * math.sqrt(2 / math.pi)
_GELU_CUBIC = 0.044715 * _GELU_LINEAR
_LARGE = 1e30
_SQRT_HALF = math.sqrt(0.5)
_ERFC_IS_ZERO = 15.0


@kernel("void(float32[:,:], float32[:,:], float32[:,::1], float32, float32, float32[:,::1], int64, int64)")
def sigmoid_unit(x: Any, gated: Any, addend: Any, linear: float, cubic: float, out: Any, begin: int, end: int) -> None:
    """Rows [begin, end) of x * sigmoid(linear * x + cubic * x ** 3) * gated + addend; absent arrays have no rows."""
    for row in range(begin, end):
        for first in range(0, x.shape[1], LANES):
            value = load_row(x, (row, first))
            # The square is bounded, so that no 0 * infinity arises; sigmoid is 0 or 1 long before.
            square = minimum(value * value, _LARGE)
            result = value * sigmoid(value * (square * cubic + linear))
            if gated.shape[0] > 0:
                result = result * load_row(gated, (row, first))
            if addend.shape[0] > 0:
                result = result + load_row(addend, (row, first))
            store_row(out, (row, first), result)


@kernel("void(float32[:,::1], float32[:,::1], int64, int64)")
def gelu_erf(x: Any, out: Any, begin: int, end: int) -> None:
    """Chunks [begin, end) of one row: 0.5 x (1 + erf(x / sqrt 2)) = max(x, 0) - |x| / 2 * erfc(|x| / sqrt 2).

    erfc by the Chebyshev fit of Numerical Recipes (Press et al., 6.2), whose relative error is below 1.2e-7.
    """
    for first in range(begin * _CHUNK, min(end * _CHUNK, x.shape[1]), LANES):
        value = load_row(x, (0, first))
        # Bounded, so that no 0 * infinity arises: erfc is 0 in float32 long before.
        size = minimum(maximum(value, 0.0 - value), _ERFC_IS_ZERO)
        z = size * _SQRT_HALF
        t = 1.0 / (z * 0.5 + 1.0)
        p = multiply_add(t, 0.17087277, -0.82215223)
        p = multiply_add(p, t, 1.48851587)
        p = multiply_add(p, t, -1.13520398)
        p = multiply_add(p, t, 0.27886807)
        p = multiply_add(p, t, -0.18628806)
        p = multiply_add(p, t, 0.09678418)
        p = multiply_add(p, t, 0.37409196)
        p = multiply_add(p, t, 1.00002368)
        p = multiply_add(p, t, -1.26551223)
        # The last term is 0, but NaN for -infinity, as the definition has it.
        tail = size * 0.5 * t * exp(p - z * z) - minimum(value, 0.0) * 0.0
        store_row(out, (0, first), maximum(value, 0.0) - tail)


@kernel("void(float32[::1], float32[::1], int64, int64)")
def erf_values(x: Any, out: Any, begin: int, end: int) -> None:
    """Chunks [begin, end) of the error function."""
    for i in range(begin * _CHUNK, min(end * _CHUNK, x.shape[0])):
        out[i] = math.erf(np.float64(x[i]))


def erf(x: Float32, *, team: Team | None = None) -> Float32:
    """The error function, element by element; x is float32 and contiguous, of any shape.

    Raises:
        ValueError: x is of another type, or not contiguous.
    """
    flat = x.reshape(-1)
    check("x", flat, (None,))
    out = np.empty(flat.shape, np.float32)
    chunks = -(-flat.size // _CHUNK)
    run(team, erf_values, (flat, out), chunks, work=flat.size * _NANOSECONDS_PER_ERF)
    return out.reshape(x.shape)


def swiglu(
    gate: Float32,
    up: Float32,
    out: Float32 | None = None,
    addend: Float32 | None = None,
    *,
    team: Team | None = None,
) -> Float32:
    """silu(gate) * up + addend.

    Args:
        gate, up: float32 [T, F]; each row must be contiguous, so halves of one [T, 2 F] array will do.
        out, addend: float32 [T, F] or None.

    Raises:
        ValueError: a shape or type does not fit.
    """
    return _gated(gate, up, out, addend, 1.0, 0.0, team)


def geglu(
    gate: Float32,
    up: Float32,
    out: Float32 | None = None,
    addend: Float32 | None = None,
    *,
    team: Team | None = None,
) -> Float32:
    """gelu(gate) * up + addend with the tanh form of GELU; otherwise as `swiglu`."""
    return _gated(gate, up, out, addend, _GELU_LINEAR, _GELU_CUBIC, team)


def silu(x: Float32, out: Float32 | None = None, *, team: Team | None = None) -> Float32:
    """x * sigmoid(x), element by element; x is float32 and contiguous, of any shape."""
    return _elementwise(x, out, 1.0, 0.0, team)


def quick_gelu(x: Float32, out: Float32 | None = None, *, alpha: float = 1.702, team: Team | None = None) -> Float32:
    """x * sigmoid(alpha * x), as com.microsoft::QuickGelu; x is float32 and contiguous, of any shape."""
    return _elementwise(x, out, alpha, 0.0, team)


def gelu(x: Float32, out: Float32 | None = None, approximate: bool = False, *, team: Team | None = None) -> Float32:
    """GELU (Hendrycks & Gimpel 2016), exact by erf or approximate by tanh; x is float32, contiguous, of any shape."""
    if approximate:
        return _elementwise(x, out, _GELU_LINEAR, _GELU_CUBIC, team)
    check("x", x, x.shape)
    out = output("out", out, x.shape)
    chunks = -(-x.size // _CHUNK)
    work = x.size * _NANOSECONDS_PER_ERFC
    run(team, gelu_erf, (x.reshape(1, -1), out.reshape(1, -1)), chunks, work=work)
    return out


def _gated(
    gate: Float32, up: Float32, out: Float32 | None, addend: Float32 | None, linear: float, cubic: float,
    team: Team | None,
) -> Float32:  # fmt: skip
    check_rows("gate", gate, (None, None))
    check_rows("up", up, gate.shape)
    out = output("out", out, gate.shape)
    if addend is not None:
        check("addend", addend, gate.shape)
    arguments = (gate, up, NO_MATRIX if addend is None else addend, linear, cubic, out)
    run(team, sigmoid_unit, arguments, gate.shape[0], work=gate.size * _NANOSECONDS_PER_SIGMOID)
    return out


def _elementwise(x: Float32, out: Float32 | None, linear: float, cubic: float, team: Team | None) -> Float32:
    check("x", x, x.shape)
    out = output("out", out, x.shape)
    rows, out_rows = x.reshape(-1, x.shape[-1]), out.reshape(-1, x.shape[-1])
    arguments = (rows, NO_MATRIX, NO_MATRIX, linear, cubic, out_rows)
    run(team, sigmoid_unit, arguments, rows.shape[0], work=x.size * _NANOSECONDS_PER_SIGMOID)
    return out
