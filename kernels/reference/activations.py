"""Activation functions: Gelu of ai.onnx, FastGelu, QuickGelu and BiasGelu of com.microsoft, SiLU and SwiGLU."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_erf = np.vectorize(math.erf, otypes=[np.float64])


def gelu(x: Array, *, approximate: str = "none") -> Array:
    """x Phi(x) (Hendrycks & Gimpel 2016); approximate is "none" (by erf) or "tanh"."""
    wide = x.astype(np.float64)
    if approximate == "tanh":
        bent = np.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3))
    else:
        bent = _erf(wide / math.sqrt(2))
    with np.errstate(invalid="ignore"):
        result: Array = 0.5 * wide * (1 + bent)
    return result.astype(x.dtype)


def bias_gelu(x: Array, bias: Array) -> Array:
    """com.microsoft::BiasGelu: gelu(x + bias)."""
    return gelu(x.astype(np.float64) + bias).astype(x.dtype)


def fast_gelu(x: Array, bias: Array | None = None) -> Array:
    """com.microsoft::FastGelu: the tanh form of gelu(x + bias)."""
    total = x.astype(np.float64)
    return gelu(total if bias is None else total + bias, approximate="tanh").astype(x.dtype)


def quick_gelu(x: Array, *, alpha: float = 1.702) -> Array:
    """com.microsoft::QuickGelu: x * sigmoid(alpha * x)."""
    wide = x.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        result: Array = wide / (1 + np.exp(-alpha * wide))
    return result.astype(x.dtype)


def silu(x: Array) -> Array:
    """x * sigmoid(x)."""
    return quick_gelu(x, alpha=1.0)


def swiglu(gate: Array, up: Array) -> Array:
    """silu(gate) * up (Shazeer 2020)."""
    with np.errstate(invalid="ignore"):
        return (silu(gate.astype(np.float64)) * up).astype(gate.dtype)
