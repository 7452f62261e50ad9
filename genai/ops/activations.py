"""Element-wise activation functions. Floats narrower than float32 are computed in float32 and rounded once."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import numpy as np

from genai.kernels.cpu.arrays.functions import gated
from genai.kernels.cpu.program.thread_pool import Threads

from ..onnx.node import MS, OURS
from .elementwise import compiled, exact_erf
from .registry import operator
from .shape_rules import same_as_input, shape_rule
from .support import widened


def _activation(name: str, since_version: int = 1) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that registers a function of x (float32 or wider) and casts its result to x's type."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def activation(x: Any, **attributes: float) -> Any:
            return function(widened(x), **attributes).astype(x.dtype, copy=False)

        operator(name, since_version=since_version)(activation)
        return function

    return add


def sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x)), without overflow for large |x|."""
    # In place, because the system may clear the memory of every large new array.
    decay = np.array(np.abs(x))
    np.exp(np.negative(decay, out=decay), out=decay)
    result = np.where(x >= 0, decay.dtype.type(1), decay)
    decay += decay.dtype.type(1)
    return np.divide(result, decay, out=result)


def leaky_relu(x: Any, *, alpha: float = 0.01) -> Any:
    """x, times alpha where x is negative."""
    return np.where(x < 0, x * x.dtype.type(alpha), x)


def _elu(x: Any, *, alpha: float = 1.0) -> Any:
    return np.where(x < 0, x.dtype.type(alpha) * np.expm1(np.minimum(x, 0)), x)


@_activation("Selu", 6)
def _selu(x: Any, *, alpha: float = 1.67326319217681884765625, gamma: float = 1.05070102214813232421875) -> Any:
    return x.dtype.type(gamma) * _elu(x, alpha=alpha)


@_activation("Celu", 12)
def _celu(x: Any, *, alpha: float = 1.0) -> Any:
    scale = x.dtype.type(alpha)
    return np.maximum(x, 0) + np.minimum(0, scale * np.expm1(np.minimum(x, 0) / scale))


def hard_sigmoid(x: Any, *, alpha: float = 0.2, beta: float = 0.5) -> Any:
    """alpha * x + beta, clipped to [0, 1]."""
    return np.clip(x * x.dtype.type(alpha) + x.dtype.type(beta), 0, 1)


@_activation("Softplus")
def softplus(x: Any) -> Any:
    """log(1 + exp(x)), without overflow."""
    return np.log1p(np.exp(-np.abs(x))) + np.maximum(x, 0)


@_activation("Shrink", 9)
def _shrink(x: Any, *, lambd: float = 0.5, bias: float = 0.0) -> Any:
    zero, shift = x.dtype.type(0), x.dtype.type(bias)
    return np.where(x < -lambd, x + shift, np.where(x > lambd, x - shift, zero))


operator("Sigmoid")(lambda x, *, threads: compiled("sigmoid", x, otherwise=sigmoid, threads=threads))


@operator("HardSwish", since_version=14)
@operator("HardSwish", domain=OURS)
def hard_swish(x: Any, *, threads: Threads | None) -> Any:
    """x * hard_sigmoid(x) with alpha = 1/6 (Howard et al. 2019)."""
    return compiled("hard_swish", x, otherwise=_hard_swish, threads=threads)


def _hard_swish(x: Any) -> Any:
    return x * hard_sigmoid(x, alpha=1 / 6)


@operator("LeakyRelu", since_version=6)
def _leaky_relu(x: Any, *, alpha: float = 0.01, threads: Threads | None) -> Any:
    return compiled("leaky_relu", x, alpha, otherwise=partial(leaky_relu, alpha=alpha), threads=threads)


@operator("Elu", since_version=6)
def _compiled_elu(x: Any, *, alpha: float = 1.0, threads: Threads | None) -> Any:
    return compiled("elu", x, alpha, otherwise=partial(_elu, alpha=alpha), threads=threads)


@operator("HardSigmoid", since_version=6)
def _hard_sigmoid(x: Any, *, alpha: float = 0.2, beta: float = 0.5, threads: Threads | None) -> Any:
    numpy_form = partial(hard_sigmoid, alpha=alpha, beta=beta)
    return compiled("hard_sigmoid", x, alpha, beta, otherwise=numpy_form, threads=threads)


@operator("Swish", since_version=24)
def _swish(x: Any, *, alpha: float = 1.0, threads: Threads | None) -> Any:
    return quick_gelu(x, alpha=alpha, threads=threads)


_activation("Softsign")(lambda x: x / (1 + np.abs(x)))
_activation("Mish", 18)(lambda x: x * np.tanh(softplus(x)))
_activation("ThresholdedRelu", 10)(lambda x, *, alpha=1.0: np.where(x > alpha, x, x.dtype.type(0)))


@operator("Clip", since_version=6)
def clip_by_attributes(x: Any, *, min: float | None = None, max: float | None = None, threads: Threads | None) -> Any:
    """Clip as defined before operator set 11, with the limits as attributes."""
    return clipped(x, min, max, threads=threads)


@operator("Clip", since_version=11)
def clipped(x: Any, low: Any = None, high: Any = None, *, threads: Threads | None) -> Any:
    """Clip x to [low, high], in x's type. If low > high, the result is high, as ONNX defines."""
    if x.dtype == np.float32 and np.size(low) == np.size(high) == 1:
        limits = [default if limit is None else float(limit) for limit, default in ((low, -math.inf), (high, math.inf))]
        if not any(map(math.isnan, limits)):
            return compiled("clip", x, *limits, otherwise=abs, threads=threads)
    if low is not None:
        x = np.maximum(x, np.asarray(low).astype(x.dtype, copy=False))
    return x if high is None else np.minimum(x, np.asarray(high).astype(x.dtype, copy=False))


_ROOT, _TANH_SCALE = math.sqrt(2), math.sqrt(2 / math.pi)


def gelu_of(x: Any, *, approximate: bool, threads: Threads | None) -> Any:
    """GELU in x's type, exact (erf) or with tanh (Hendrycks & Gimpel 2016); float64 input is computed in float64."""
    if x.dtype == np.float64:
        return x * (0.5 * (1 + (np.tanh(_TANH_SCALE * (x + 0.044715 * x**3)) if approximate else exact_erf(x / _ROOT))))
    return compiled("gelu_tanh" if approximate else "gelu", x, threads=threads)


@operator("Gelu", since_version=20)
@operator("Gelu", domain=MS)
def gelu(x: Any, *, approximate: str = "none", threads: Threads | None) -> Any:
    """GELU; the attribute `approximate` selects erf ("none") or tanh ("tanh")."""
    return gelu_of(x, approximate=approximate == "tanh", threads=threads)


@operator("QuickGelu", domain=MS)
def quick_gelu(x: Any, *, alpha: float = 1.702, threads: Threads | None) -> Any:
    """x * sigmoid(alpha * x)."""

    def in_numpy(x: Any) -> Any:
        return x * sigmoid(x.dtype.type(alpha) * x)

    return compiled("quick_gelu", x, alpha, otherwise=in_numpy, threads=threads)


@operator("FastGelu", domain=MS)
def fast_gelu(x: Any, bias: Any = None, *, threads: Threads | None) -> Any:
    """GELU of x (+ bias), approximated with tanh."""
    return gelu_of(x if bias is None else x + bias, approximate=True, threads=threads)


operator("BiasGelu", domain=MS)(lambda x, bias, *, threads: gelu_of(x + bias, approximate=False, threads=threads))


@operator("BiasSplitGelu", domain=MS)
def bias_split_gelu(x: Any, bias: Any, *, threads: Threads | None) -> Any:
    """The first half of x + bias times the GELU of the second half."""
    value, gate = np.split(x + bias, 2, axis=-1)
    return value * gelu_of(gate, approximate=False, threads=threads)


@operator("SwiGLU", domain=OURS)
def swiglu(gate: Any, up: Any, *, threads: Threads | None) -> Any:
    """gate * sigmoid(gate) * up (Shazeer 2020)."""
    rows = (np.ascontiguousarray(x, np.float32).reshape(-1, gate.shape[-1]) for x in (gate, up))
    return gated("silu", *rows, threads=threads).reshape(gate.shape)


shape_rule("Gelu", "FastGelu", "QuickGelu", "BiasGelu")(same_as_input)
