"""RMS norm (Zhang & Sennrich 2019) and layer norm (Ba et al. 2016), alone or of a sum with the residual."""

from __future__ import annotations

from typing import Any

import numpy as np

from .checks import NO_MATRIX, NO_VECTOR, Float32, check, check_rows, output
from .functions import inline
from .jit import kernel
from .team import Team, run
from .vector import LANES, load_row, reduce_add, splat_float32, store_row

_NANOSECONDS_PER_ELEMENT = 0.5


@inline
def _mean(x: Any, token: int, group: int) -> Any:
    total = splat_float32(0.0)
    for first in range(0, x.shape[2], LANES):
        total = total + load_row(x, (token, group, first))
    return np.float32(reduce_add(total) / np.float32(x.shape[2]))


@inline
def _variance(x: Any, token: int, group: int, mean: float) -> Any:
    size = x.shape[2]
    total = splat_float32(0.0)
    whole = size // LANES * LANES
    for first in range(0, whole, LANES):
        deviation = load_row(x, (token, group, first)) - mean
        total = total + deviation * deviation
    result = reduce_add(total)
    for i in range(whole, size):
        result += (x[token, group, i] - mean) * (x[token, group, i] - mean)
    return np.float32(result / np.float32(size))


@inline
def _add(x: Any, residual: Any, bias: Any, token: int, out: Any, out_sum: Any) -> None:
    for first in range(0, x.shape[2], LANES):
        value = load_row(x, (token, 0, first)) + load_row(residual, (token, first))
        if bias.shape[0] > 0:
            value = value + load_row(bias, (first,))
        store_row(out_sum, (token, first), value)
        store_row(out, (token, 0, first), value)


@inline
def _normalize_row(
    x: Any, weight: Any, shift: Any, epsilon: float, centred: bool, out: Any, token: int, group: int
) -> None:
    mean = _mean(x, token, group) if centred else np.float32(0)
    inverse = np.float32(1) / np.sqrt(np.float32(_variance(x, token, group, mean) + epsilon))
    for first in range(0, x.shape[2], LANES):
        value = (load_row(x, (token, group, first)) - mean) * inverse * load_row(weight, (first,))
        if shift.shape[0] > 0:
            value = value + load_row(shift, (first,))
        store_row(out, (token, group, first), value)


@kernel(
    "void(float32[:,:,:], float32[:,::1], float32[::1], float32[::1], float32[::1], float32, boolean, "
    "float32[:,:,:], float32[:,::1], int64, int64)"
)
def normalize(
    x: Any, residual: Any, input_bias: Any, weight: Any, shift: Any, epsilon: float, centred: bool,
    out: Any, out_sum: Any, begin: int, end: int,
) -> None:  # fmt: skip
    """Rows [begin, end) of x [T, groups, F], each group alone; absent arrays have no entries.

    With a residual there is one group, and x + residual + input_bias is normalised, and written to out_sum.
    """
    for token in range(begin, end):
        if residual.shape[0] > 0:
            _add(x, residual, input_bias, token, out, out_sum)
            _normalize_row(out, weight, shift, epsilon, centred, out, token, 0)
        else:
            for group in range(x.shape[1]):
                _normalize_row(x, weight, shift, epsilon, centred, out, token, group)


def rms_norm(
    x: Float32, weight: Float32, epsilon: float, out: Float32 | None = None, *, team: Team | None = None
) -> Float32:
    """x / sqrt(mean(x ** 2) + epsilon) * weight over the last axis (SimplifiedLayerNormalization).

    Args:
        x: float32 [T, F], or [T, heads, F] to normalise each head; rows must be contiguous. weight: float32 [F].
        out: of the shape of x, with contiguous rows, or None; may be x itself.

    Raises:
        ValueError: a shape or type does not fit.
    """
    return _normalize(x, weight, None, epsilon, out, False, team)


def layer_norm(
    x: Float32,
    weight: Float32,
    bias: Float32 | None,
    epsilon: float,
    out: Float32 | None = None,
    *,
    team: Team | None = None,
) -> Float32:
    """(x - mean) / sqrt(variance + epsilon) * weight + bias over the last axis; arguments as in `rms_norm`."""
    return _normalize(x, weight, bias, epsilon, out, True, team)


def add_rms_norm(
    x: Float32,
    residual: Float32,
    weight: Float32,
    epsilon: float,
    out: Float32 | None = None,
    out_sum: Float32 | None = None,
    *,
    input_bias: Float32 | None = None,
    team: Team | None = None,
) -> tuple[Float32, Float32]:
    """RMS norm of s = x + residual + input_bias (SkipSimplifiedLayerNormalization, outputs 0 and 3).

    Args:
        x, residual: float32 [T, F]. weight, input_bias: float32 [F].
        out, out_sum: two float32 arrays [T, F], or None for new ones; either may be x or residual.

    Returns:
        (normalised, s).

    Raises:
        ValueError: a shape or type does not fit.
    """
    return _add_normalize(x, residual, input_bias, weight, None, epsilon, out, out_sum, False, team)


def add_layer_norm(
    x: Float32,
    residual: Float32,
    weight: Float32,
    bias: Float32 | None,
    epsilon: float,
    out: Float32 | None = None,
    out_sum: Float32 | None = None,
    *,
    input_bias: Float32 | None = None,
    team: Team | None = None,
) -> tuple[Float32, Float32]:
    """Layer norm of s = x + residual + input_bias (SkipLayerNormalization, outputs 0 and 3); see `add_rms_norm`."""
    return _add_normalize(x, residual, input_bias, weight, bias, epsilon, out, out_sum, True, team)


def _normalize(
    x: Float32, weight: Float32, shift: Float32 | None, epsilon: float, out: Float32 | None, centred: bool,
    team: Team | None,
) -> Float32:  # fmt: skip
    size = x.shape[-1]
    shape = (None, size) if x.ndim == 2 else (None, None, size)
    check_rows("x", x, shape)
    check("weight", weight, (size,))
    if shift is not None:
        check("bias", shift, (size,))
    if out is None:
        out = np.empty(x.shape, np.float32)
    elif out is not x:
        check_rows("out", out, x.shape)
    source, target = (x[:, None], out[:, None]) if x.ndim == 2 else (x, out)
    arguments = (source, NO_MATRIX, NO_VECTOR, weight, NO_VECTOR if shift is None else shift, epsilon, centred, target,
                 NO_MATRIX)  # fmt: skip
    run(team, normalize, arguments, x.shape[0], work=x.size * _NANOSECONDS_PER_ELEMENT)
    return out


def _add_normalize(
    x: Float32, residual: Float32, input_bias: Float32 | None, weight: Float32, shift: Float32 | None, epsilon: float,
    out: Float32 | None, out_sum: Float32 | None, centred: bool, team: Team | None,
) -> tuple[Float32, Float32]:  # fmt: skip
    size = x.shape[-1]
    check("x", x, (None, size))
    check("residual", residual, x.shape)
    for name, vector in (("weight", weight), ("bias", shift), ("input_bias", input_bias)):
        if vector is not None:
            check(name, vector, (size,))
    out, out_sum = output("out", out, x.shape), output("out_sum", out_sum, x.shape)
    arguments = (x[:, None], residual, NO_VECTOR if input_bias is None else input_bias, weight,
                 NO_VECTOR if shift is None else shift, epsilon, centred, out[:, None], out_sum)  # fmt: skip
    run(team, normalize, arguments, x.shape[0], work=2 * x.size * _NANOSECONDS_PER_ELEMENT)
    return out, out_sum
