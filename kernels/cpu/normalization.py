"""RMS norm and layer norm on arrays, alone or of a sum with the residual."""

from __future__ import annotations

import numpy as np

from .checks import NO_MATRIX, NO_VECTOR, Float32, check, check_rows, output
from .rowwise.arrays import normalize
from .rowwise.norm import norm_op
from .team import Team, run

_NANOSECONDS_PER_ELEMENT = 0.5


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
    arguments = (norm_op(centred, False).address, source, NO_MATRIX, NO_VECTOR, weight,
                 NO_VECTOR if shift is None else shift, epsilon, target, NO_MATRIX)  # fmt: skip
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
    arguments = (norm_op(centred, True).address, x[:, None], residual, NO_VECTOR if input_bias is None else input_bias,
                 weight, NO_VECTOR if shift is None else shift, epsilon, out[:, None], out_sum)  # fmt: skip
    run(team, normalize, arguments, x.shape[0], work=2 * x.size * _NANOSECONDS_PER_ELEMENT)
    return out, out_sum
