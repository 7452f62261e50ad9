"""Activation functions of ai.onnx, element by element. Narrow floats are computed in float32 and rounded once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..registry import Kernel, NodeSpec, register
from .support import optional, widened

Function = Callable[..., Any]


def _activation(function: Function, **defaults: float) -> Callable[[NodeSpec], Kernel]:
    """A factory for function(x, **attributes), with the operator's default attributes."""

    def factory(spec: NodeSpec) -> Kernel:
        values = {name: float(spec.attributes.get(name, default)) for name, default in defaults.items()}

        def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
            x = np.asarray(inputs[0])
            return (function(widened(x), **values).astype(x.dtype, copy=False),)

        return kernel

    return factory


def sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x)), without overflow for large |x|."""
    decay = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, decay) / (1 + decay)


def _leaky_relu(x: Any, alpha: float) -> Any:
    return np.where(x < 0, x * x.dtype.type(alpha), x)


def _elu(x: Any, alpha: float) -> Any:
    return np.where(x < 0, x.dtype.type(alpha) * np.expm1(np.minimum(x, 0)), x)


def _selu(x: Any, alpha: float, gamma: float) -> Any:
    return x.dtype.type(gamma) * _elu(x, alpha)


def _celu(x: Any, alpha: float) -> Any:
    scale = x.dtype.type(alpha)
    return np.maximum(x, 0) + np.minimum(0, scale * np.expm1(np.minimum(x, 0) / scale))


def _hard_sigmoid(x: Any, alpha: float, beta: float) -> Any:
    return np.clip(x * x.dtype.type(alpha) + x.dtype.type(beta), 0, 1)


def softplus(x: Any) -> Any:
    """log(1 + exp(x)), without overflow."""
    return np.log1p(np.exp(-np.abs(x))) + np.maximum(x, 0)


def _shrink(x: Any, lambd: float, bias: float) -> Any:
    zero, shift = x.dtype.type(0), x.dtype.type(bias)
    return np.where(x < -lambd, x + shift, np.where(x > lambd, x - shift, zero))


register("Sigmoid")(_activation(sigmoid))
register("LeakyRelu", since_version=6)(_activation(_leaky_relu, alpha=0.01))
register("Elu", since_version=6)(_activation(_elu, alpha=1.0))
register("Selu", since_version=6)(_activation(_selu, alpha=1.67326319217681884765625, gamma=1.05070102214813232421875))
register("Celu", since_version=12)(_activation(_celu, alpha=1.0))
register("HardSigmoid", since_version=6)(_activation(_hard_sigmoid, alpha=0.2, beta=0.5))
register("HardSwish", since_version=14)(_activation(lambda x: x * _hard_sigmoid(x, 1 / 6, 0.5)))
register("Softplus")(_activation(softplus))
register("Softsign")(_activation(lambda x: x / (1 + np.abs(x))))
register("Mish", since_version=18)(_activation(lambda x: x * np.tanh(softplus(x))))
register("Swish", since_version=24)(_activation(lambda x, alpha: x * sigmoid(x.dtype.type(alpha) * x), alpha=1.0))
register("ThresholdedRelu", since_version=10)(
    _activation(lambda x, alpha: np.where(x > alpha, x, x.dtype.type(0)), alpha=1.0)
)
register("Shrink", since_version=9)(_activation(_shrink, lambd=0.5, bias=0.0))


@register("PRelu", since_version=9)
def prelu(spec: NodeSpec) -> Kernel:
    """slope * x where x is negative; the slope is broadcast."""

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x, slope = inputs
        return (np.where(x < 0, x * slope, x),)

    return kernel


@register("Clip", since_version=6)
def clip_by_attributes(spec: NodeSpec) -> Kernel:
    """Limits as attributes, before operator set 11."""
    low, high = spec.attributes.get("min"), spec.attributes.get("max")

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        return (clipped(inputs[0], low, high),)

    return kernel


@register("Clip", since_version=11)
def clip(spec: NodeSpec) -> Kernel:
    """Limit to [min, max]; either may be absent."""

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        return (clipped(inputs[0], optional(inputs, 1), optional(inputs, 2)),)

    return kernel


def clipped(x: Any, low: Any, high: Any) -> Any:
    """x within [low, high], in x's type; where they cross, the upper limit wins, as the definition says."""
    if low is not None:
        x = np.maximum(x, np.asarray(low).astype(x.dtype, copy=False))
    return x if high is None else np.minimum(x, np.asarray(high).astype(x.dtype, copy=False))
