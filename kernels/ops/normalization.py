"""Normalisations over the last axis: ours for float32, the NumPy reference for anything else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..registry import Kernel, KernelError, NodeSpec, register

MS = "com.microsoft"


def _rows(x: Any) -> Any:
    """[..., features] as contiguous float32 [tokens, features]."""
    return np.ascontiguousarray(x, np.float32).reshape(-1, x.shape[-1])


def _last_axis_only(spec: NodeSpec) -> None:
    if int(spec.attributes.get("axis", -1)) != -1:
        raise KernelError(f"{spec.op_type} over axis {spec.attributes['axis']}: only the last axis is supported")


@register("SimplifiedLayerNormalization")
@register("SimplifiedLayerNormalization", domain=MS)
@register("RMSNormalization", since_version=23)
def rms_normalization(spec: NodeSpec) -> Kernel:
    """x / sqrt(mean(x^2) + epsilon) * weight (Zhang & Sennrich 2019)."""
    from ..cpu.normalization import rms_norm

    _last_axis_only(spec)
    epsilon = float(spec.attributes.get("epsilon", 1e-5))
    team = spec.options.get("team")

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x, weight = inputs[0], inputs[1]
        return (rms_norm(_rows(x), weight, epsilon, team=team).reshape(x.shape),)

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
    """(x - mean) / sqrt(variance + epsilon) * scale + bias (Ba et al. 2016)."""
    from ..cpu.normalization import layer_norm

    _last_axis_only(spec)
    epsilon = float(spec.attributes.get("epsilon", 1e-5))
    team = spec.options.get("team")
    if any(spec.outputs[1:]):
        raise KernelError("LayerNormalization: mean and inverse deviation as outputs are not supported")

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x, weight = inputs[:2]
        bias = inputs[2] if len(inputs) > 2 else None
        return (layer_norm(_rows(x), weight, bias, epsilon, team=team).reshape(x.shape),)

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
