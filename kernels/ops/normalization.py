"""Normalisations over the last axis: ours for float32, the NumPy reference for anything else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..registry import Kernel, KernelError, NodeSpec, register
from .convolution import per_channel
from .support import checked_axis, optional, widened

MS = "com.microsoft"


def _rows(x: Any) -> Any:
    """[..., features] as contiguous float32 [tokens, features]."""
    return np.ascontiguousarray(x, np.float32).reshape(-1, x.shape[-1])


def _first_axis(spec: NodeSpec, rank: int) -> int:
    return checked_axis(int(spec.attributes.get("axis", -1)), rank)


def _standardized(x: Any, axes: tuple[int, ...], epsilon: float, *, centre: bool = True) -> tuple[Any, Any, Any]:
    """x less its mean over its deviation, computed in float32 at least; then the mean and 1 / deviation."""
    x = widened(x)
    mean = np.mean(x, axis=axes, keepdims=True) if centre else x.dtype.type(0)
    centred = x - mean if centre else x
    inverse = 1 / np.sqrt(np.mean(np.square(centred), axis=axes, keepdims=True) + x.dtype.type(epsilon))
    return centred * inverse, mean, inverse


@register("SimplifiedLayerNormalization")
@register("SimplifiedLayerNormalization", domain=MS)
@register("RMSNormalization", since_version=23)
def rms_normalization(spec: NodeSpec) -> Kernel:
    """x / sqrt(mean(x^2) + epsilon) * weight (Zhang & Sennrich 2019)."""
    from ..cpu.normalization import rms_norm

    epsilon = float(spec.attributes.get("epsilon", 1e-5))
    team = spec.options.get("team")

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x, weight = inputs[0], inputs[1]
        first = _first_axis(spec, x.ndim)
        if first == x.ndim - 1 and x.dtype == np.float32 and weight.shape == x.shape[-1:] and x.size:
            return (rms_norm(_rows(x), weight, epsilon, team=team).reshape(x.shape),)
        normed = _standardized(x, tuple(range(first, x.ndim)), epsilon, centre=False)[0]
        return ((normed.astype(x.dtype) * weight).astype(weight.dtype, copy=False),)

    return kernel


@register("SkipSimplifiedLayerNormalization", domain=MS)
def skip_rms_normalization(spec: NodeSpec) -> Kernel:
    """sum = input + skip (+ bias); output 0 is its RMS norm, output 3 the sum."""
    from ..cpu.normalization import add_rms_norm

    epsilon = float(spec.attributes.get("epsilon", 1e-5))
    team = spec.options.get("team")

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x, skip, weight = inputs[:3]
        input_bias = inputs[3] if len(inputs) > 3 else None
        normed, total = add_rms_norm(_rows(x), _rows(skip), weight, epsilon, input_bias=input_bias, team=team)
        return normed.reshape(x.shape), None, None, total.reshape(x.shape)

    return kernel


@register("LayerNormalization", since_version=1)
def layer_normalization(spec: NodeSpec) -> Kernel:
    """(x - mean) / sqrt(variance + epsilon) * scale + bias (Ba et al. 2016); then the mean and 1 / deviation."""
    from ..cpu.normalization import layer_norm

    epsilon = float(spec.attributes.get("epsilon", 1e-5))
    team = spec.options.get("team")
    wants_statistics = any(spec.outputs[1:])

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x, weight, bias = inputs[0], inputs[1], optional(inputs, 2)
        first = _first_axis(spec, x.ndim)
        plain = first == x.ndim - 1 and x.dtype == np.float32 and weight.shape == x.shape[-1:] and x.size
        if plain and not wants_statistics and (bias is None or bias.shape == weight.shape):
            return (layer_norm(_rows(x), weight, bias, epsilon, team=team).reshape(x.shape),)
        normed, mean, inverse = _standardized(x, tuple(range(first, x.ndim)), epsilon)
        normed = normed.astype(x.dtype) * weight
        return (normed if bias is None else normed + bias).astype(x.dtype, copy=False), mean, inverse

    return kernel


@register("BatchNormalization", since_version=7)
def batch_normalization(spec: NodeSpec) -> Kernel:
    """Per channel scale * (x - mean) / sqrt(variance + epsilon) + bias (Ioffe & Szegedy 2015).

    With training_mode the batch's own statistics are used, and the running ones returned.
    """
    epsilon, momentum = (float(spec.attributes.get(name, d)) for name, d in (("epsilon", 1e-5), ("momentum", 0.9)))
    training = bool(spec.attributes.get("training_mode", 0))
    if spec.version < 14 and any(spec.outputs[1:]):
        raise KernelError("BatchNormalization in the training form of operator sets before 14")
    if not spec.attributes.get("spatial", 1):
        raise KernelError("BatchNormalization with spatial=0")

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x, scale, bias, mean, variance = inputs[:5]
        wide = widened(x)
        running: tuple[Any, ...] = ()
        if training:
            axes = (0, *range(2, x.ndim))
            batch_mean, batch_variance = np.mean(wide, axis=axes), np.var(wide, axis=axes)
            running = tuple(
                (old * momentum + new * (1 - momentum)).astype(old.dtype)
                for old, new in ((mean, batch_mean), (variance, batch_variance))
            )
            mean, variance = batch_mean, batch_variance
        factor = widened(scale) / np.sqrt(widened(variance) + np.float32(epsilon))
        shift = widened(bias) - widened(mean) * factor
        result = wide * per_channel(factor, x.ndim) + per_channel(shift, x.ndim)
        return (result.astype(x.dtype, copy=False), *running)

    return kernel


@register("InstanceNormalization", since_version=6)
def instance_normalization(spec: NodeSpec) -> Kernel:
    """Per instance and channel (Ulyanov et al. 2016)."""
    epsilon = float(spec.attributes.get("epsilon", 1e-5))

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x, scale, bias = inputs[:3]
        normed = _standardized(x, tuple(range(2, x.ndim)), epsilon)[0]
        return ((normed * per_channel(scale, x.ndim) + per_channel(bias, x.ndim)).astype(x.dtype, copy=False),)

    return kernel


@register("GroupNormalization", since_version=18)
def group_normalization(spec: NodeSpec) -> Kernel:
    """Per instance and group of channels (Wu & He 2018); scale and bias per channel, before version 21 per group."""
    epsilon, groups = float(spec.attributes.get("epsilon", 1e-5)), int(spec.attributes["num_groups"])

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x, scale, bias = inputs[:3]
        if groups < 1 or x.ndim < 2 or x.shape[1] % groups:
            raise KernelError(f"GroupNormalization: {groups} groups do not divide data of shape {list(x.shape)}")
        grouped = x.reshape(x.shape[0], groups, -1)
        normed = _standardized(grouped, (2,), epsilon)[0].reshape(x.shape)
        if scale.shape == (groups,):
            scale, bias = (np.repeat(value, x.shape[1] // groups) for value in (scale, bias))
        return ((normed * per_channel(scale, x.ndim) + per_channel(bias, x.ndim)).astype(x.dtype, copy=False),)

    return kernel


@register("LRN")
def local_response_normalization(spec: NodeSpec) -> Kernel:
    """x / (bias + alpha / size * sum of squares over neighbouring channels) ** beta (Krizhevsky et al. 2012)."""
    size = int(spec.attributes["size"])
    alpha, beta, bias = (
        float(spec.attributes.get(name, default)) for name, default in (("alpha", 1e-4), ("beta", 0.75), ("bias", 1.0))
    )
    if size < 1:
        raise KernelError(f"LRN: size is {size}")

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x = inputs[0]
        channels = x.shape[1]
        sums = np.zeros((x.shape[0], channels + 1, *x.shape[2:]), np.float64)
        np.cumsum(np.square(x), axis=1, dtype=np.float64, out=sums[:, 1:])
        index = np.arange(channels)
        low = np.maximum(index - (size - 1) // 2, 0)
        high = np.minimum(index + size // 2 + 1, channels)
        window = sums[:, high] - sums[:, low]
        return ((x / (bias + alpha / size * window) ** beta).astype(x.dtype),)

    return kernel


@register("LpNormalization")
def lp_normalization(spec: NodeSpec) -> Kernel:
    """x over its 1- or 2-norm along an axis; 0 where the norm is 0."""
    axis, p = int(spec.attributes.get("axis", -1)), int(spec.attributes.get("p", 2))
    if p not in (1, 2):
        raise KernelError(f"LpNormalization: p is {p}, expected 1 or 2")

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x = widened(inputs[0])
        norm = np.sum(np.abs(x), axis, keepdims=True) if p == 1 else np.sqrt(np.sum(x * x, axis, keepdims=True))
        return (np.where(norm == 0, 0, x / np.where(norm == 0, 1, norm)).astype(inputs[0].dtype),)

    return kernel


@register("MeanVarianceNormalization", since_version=9)
def mean_variance_normalization(spec: NodeSpec) -> Kernel:
    """(x - mean) / (deviation + 1e-9) over the axes."""
    axes = tuple(int(axis) for axis in spec.attributes.get("axes", (0, 2, 3)))

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x = widened(inputs[0])
        centred = x - np.mean(x, axis=axes, keepdims=True)
        deviation = np.sqrt(np.mean(np.square(centred), axis=axes, keepdims=True))
        return ((centred / (deviation + x.dtype.type(1e-9))).astype(inputs[0].dtype, copy=False),)

    return kernel


@register("SkipLayerNormalization", domain=MS)
def skip_layer_normalization(spec: NodeSpec) -> Kernel:
    """sum = input + skip (+ bias); output 0 is its layer norm, output 3 the sum."""
    from ..cpu.normalization import add_layer_norm

    epsilon = float(spec.attributes.get("epsilon", 1e-5))
    team = spec.options.get("team")

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x, skip, weight = inputs[:3]
        bias, input_bias = (inputs[i] if len(inputs) > i else None for i in (3, 4))
        normed, total = add_layer_norm(_rows(x), _rows(skip), weight, bias, epsilon, input_bias=input_bias, team=team)
        return normed.reshape(x.shape), None, None, total.reshape(x.shape)

    return kernel
