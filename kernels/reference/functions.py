"""The unary and binary functions that ops refer to by name, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Float64 = NDArray[np.float64]

_erfc = np.vectorize(math.erfc, otypes=[np.float64])

UNARY: dict[str, Callable[..., Any]] = {
    **{name: getattr(np, name) for name in ("abs", "clip", "exp", "log", "reciprocal", "sqrt", "square", "tanh")},
    "copy": lambda x: x,
    "cube": lambda x: x**3,
    "elu": lambda x, alpha: np.where(x < 0, alpha * np.expm1(x), x),
    "erf": np.vectorize(math.erf, otypes=[np.float64]),
    "gelu": lambda x: 0.5 * x * _erfc(-x / math.sqrt(2)),  # Hendrycks & Gimpel 2016, and their approximation:
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "hard_sigmoid": lambda x, alpha, beta: np.clip(alpha * x + beta, 0, 1),
    "hard_swish": lambda x: x * np.clip(x / 6 + 0.5, 0, 1),
    "leaky_relu": lambda x, alpha: np.where(x < 0, alpha * x, x),
    "neg": np.negative,
    "quick_gelu": lambda x, alpha: x / (1 + np.exp(-alpha * x)),
    "relu": lambda x: np.maximum(x, 0),
    "relu_squared": lambda x: np.maximum(x, 0) ** 2,
    "round_to_float16": lambda x: x.astype(np.float16).astype(np.float64),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "softcap": lambda x, cap: cap * np.tanh(x / cap),
    "softplus": lambda x: np.logaddexp(0, x),
}
_BINARY = ("add", "divide", "maximum", "minimum", "multiply", "power", "subtract")  # the names of NumPy's functions
BINARY: dict[str, Callable[..., Any]] = {
    **{name: getattr(np, name) for name in _BINARY},
    "prelu": lambda x, slope: np.where(x < 0, x * slope, x),
}


def norm(x: Array, weight: Array, epsilon: float, bias: Array | float = 0.0, centred: bool = False) -> Float64:
    """Return the RMS norm over the last axis, or the layer norm if `centred`; see `ir.Norm`."""
    wide = x.astype(np.float64)
    if centred:
        wide = wide - np.mean(wide, axis=-1, keepdims=True)
    result: Float64 = wide / np.sqrt(np.mean(wide * wide, axis=-1, keepdims=True) + epsilon) * weight + bias
    return result
