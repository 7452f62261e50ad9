"""SimplifiedLayerNormalization and LayerNormalization, and the forms of com.microsoft that add a residual first."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def simplified_layer_normalization(x: Array, scale: Array, *, epsilon: float = 1e-5) -> Array:
    """x / sqrt(mean(x ** 2) + epsilon) * scale over the last axis (RMS norm)."""
    return _rms(x.astype(np.float64), scale, epsilon).astype(x.dtype)


def layer_normalization(x: Array, scale: Array, bias: Array | None = None, *, epsilon: float = 1e-5) -> Array:
    """(x - mean) / sqrt(variance + epsilon) * scale + bias over the last axis."""
    return _centred(x.astype(np.float64), scale, bias, epsilon).astype(x.dtype)


def skip_simplified_layer_normalization(
    x: Array, skip: Array, gamma: Array, bias: Array | None = None, *, epsilon: float = 1e-12
) -> tuple[Array, Array]:
    """RMS norm of s = x + skip + bias; returns outputs 0 (normalised) and 3 (s)."""
    total = _total(x, skip, bias)
    with np.errstate(invalid="ignore"):
        return _rms(total, gamma, epsilon).astype(x.dtype), total.astype(x.dtype)


def skip_layer_normalization(
    x: Array, skip: Array, gamma: Array, beta: Array | None = None, bias: Array | None = None, *, epsilon: float = 1e-12
) -> tuple[Array, Array]:
    """Layer norm of s = x + skip + bias; returns outputs 0 (normalised) and 3 (s)."""
    total = _total(x, skip, bias)
    return _centred(total, gamma, beta, epsilon).astype(x.dtype), total.astype(x.dtype)


def _total(x: Array, skip: Array, bias: Array | None) -> NDArray[np.float64]:
    total: NDArray[np.float64] = x.astype(np.float64) + skip
    return total if bias is None else total + bias


def _rms(x: NDArray[np.float64], scale: Array, epsilon: float) -> NDArray[np.float64]:
    result: NDArray[np.float64] = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon) * scale
    return result


def _centred(x: NDArray[np.float64], scale: Array, bias: Array | None, epsilon: float) -> NDArray[np.float64]:
    deviation = x - np.mean(x, axis=-1, keepdims=True)
    result = _rms(deviation, scale, epsilon)
    return result if bias is None else result + bias
