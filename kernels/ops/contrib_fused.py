"""Fused operators of com.microsoft: products with scale and activation, gated and biased activations, embeddings."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..registry import Kernel, KernelError, NodeSpec, register
from .activations import sigmoid
from .convolution import NO_LIMITS, conv, limited_conv, packed_convolution
from .matmul import gemm, product
from .movement import pad
from .support import from_function, optional, widened

MS = "com.microsoft"


def _activation(name: str, parameters: Sequence[float]) -> Callable[[Any], Any] | None:
    """An activation by name with its parameters, applied in place where NumPy can; None for none."""
    first, second = (*parameters, 0.0, 0.0)[:2]
    functions: dict[str, Callable[[Any], Any]] = {
        "Relu": lambda x: np.maximum(x, 0, out=x),
        "Sigmoid": sigmoid,
        "Tanh": lambda x: np.tanh(x, out=x),
        "LeakyRelu": lambda x: np.where(x < 0, x * x.dtype.type(first), x),
        "Clip": lambda x: np.clip(x, first, second, out=x),
        "HardSigmoid": lambda x: np.clip(x * x.dtype.type(first) + x.dtype.type(second), 0, 1),
    }
    if not name:
        return None
    if name not in functions:
        raise KernelError(f"the activation {name!r} is unknown")
    return functions[name]


@register("FusedMatMul", domain=MS)
@register("TransposeMatMul", domain=MS)
def fused_matmul(spec: NodeSpec) -> Kernel:
    """alpha * A' @ B', each transposed in its last two axes or its batch axes where asked for."""
    a = spec.attributes
    alpha = float(a.get("alpha", 1.0))
    flags = [(bool(a.get(f"trans{side}", 0)), bool(a.get(f"transBatch{side}", 0))) for side in "AB"]

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        left, right = (_transposed(x, *flag) for x, flag in zip(inputs, flags, strict=True))
        result = product(left, right, spec.options.get("team"))
        return (result * result.dtype.type(alpha) if alpha != 1.0 else result,)

    return kernel


def _transposed(x: Any, last: bool, batch: bool) -> Any:
    if batch and x.ndim > 2:
        x = np.moveaxis(x, 0, -2)
    return np.swapaxes(x, -1, -2) if last and x.ndim > 1 else x


def _with_activation(spec: NodeSpec, inner: Kernel, parameters: Sequence[float]) -> Kernel:
    activate = _activation(str(spec.attributes.get("activation", "")), parameters)

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        (result,) = inner(context, inputs)
        return (result if activate is None else activate(result),)

    return kernel


@register("FusedGemm", domain=MS)
def fused_gemm(spec: NodeSpec) -> Kernel:
    """Gemm and an activation."""
    parameters = [float(spec.attributes.get(f"activation_{name}", 0.0)) for name in ("alpha", "beta")]
    return _with_activation(spec, gemm(spec), parameters)


@register("FusedConv", domain=MS)
def fused_conv(spec: NodeSpec) -> Kernel:
    """Conv, an addend, and an activation."""
    parameters = [float(value) for value in spec.attributes.get("activation_params") or ()]
    limits = {"Relu": (0.0, math.inf), "Clip": (*parameters, 0.0, 0.0)[:2]}.get(spec.attributes.get("activation", ""))
    if limits is not None and not spec.has(3):
        return limited_conv(spec, (limits[0], limits[1]))
    if limits is not None or not spec.attributes.get("activation"):
        packed = packed_convolution(spec, NO_LIMITS if limits is None else (limits[0], limits[1]))
        if packed is not None:
            return packed
    inner = conv(spec)

    def added(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        (result,) = inner(context, inputs[:3])
        addend = optional(inputs, 3)
        return (result if addend is None else np.add(result, addend, out=result),)

    return _with_activation(spec, added, parameters)


@register("BiasGelu", domain=MS)
def bias_gelu(spec: NodeSpec) -> Kernel:
    """gelu(x + bias), exact."""
    from .elementwise import gelu_of

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        return (gelu_of(inputs[0] + inputs[1], approximate=False, team=spec.options.get("team")),)

    return kernel


register("GatedAdd", domain=MS)(from_function(lambda x, y, gate: x + y * gate))
register("ExpandDims", domain=MS)(
    from_function(lambda x, axis: np.expand_dims(x, int(np.asarray(axis).reshape(-1)[0])))
)
register("Inverse", domain=MS)(from_function(lambda x: np.linalg.inv(widened(x)).astype(x.dtype, copy=False)))
register("BiasAdd", domain=MS)(from_function(lambda x, bias, skip: x + bias + skip))
register("Pad", domain=MS)(pad)


@register("BiasSplitGelu", domain=MS)
def bias_split_gelu(spec: NodeSpec) -> Kernel:
    """The first half of x + bias times the gelu of the second."""
    from .elementwise import gelu_of

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        value, gate = np.split(inputs[0] + inputs[1], 2, axis=-1)
        return (value * gelu_of(gate, approximate=False, team=spec.options.get("team")),)

    return kernel


@register("EmbedLayerNormalization", domain=MS)
def embed_layer_normalization(spec: NodeSpec) -> Kernel:
    """Word, position and segment embeddings added and normalised; then each row's number of unmasked tokens."""
    epsilon = np.float32(spec.attributes.get("epsilon", 1e-12))

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        ids, segments, words, places, kinds, gamma, beta = inputs[:7]
        mask, positions = optional(inputs, 7), optional(inputs, 8)
        total = widened(words[ids]) + widened(places[np.arange(ids.shape[1]) if positions is None else positions])
        if segments is not None:
            total = total + widened(kinds[segments])
        centred = total - total.mean(axis=-1, keepdims=True)
        inverse = 1 / np.sqrt(np.mean(np.square(centred), axis=-1, keepdims=True) + epsilon)
        normed = (centred * inverse * gamma + beta).astype(words.dtype, copy=False)
        counts = np.zeros(len(ids)) if mask is None else np.asarray(mask).sum(axis=1)
        return normed, counts.astype(np.int32), total.astype(words.dtype, copy=False)

    return kernel
