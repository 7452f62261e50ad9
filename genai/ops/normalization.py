"""Normalisation operators: compiled kernels for float32 over the last axis, NumPy for other types and axes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from genai.kernels.cpu.arrays.copying import operand
from genai.kernels.cpu.arrays.functions import norm, norm_of_sum
from genai.kernels.cpu.arrays.planes import scaled
from genai.kernels.cpu.program.thread_pool import Threads, fixed_address

from ..onnx.node import MS
from ..onnx.types import DataType, TensorType, Type
from .casting import dtype_of
from .registry import Kernel, KernelError, NodeSpec, Positive, from_function, operator, register
from .shape_rules import NodeTypes, data_type, shape_rule
from .support import checked_axis, mean as mean_of, per_channel, session_threads, widened


def _rows(x: Any) -> Any:
    """Reshape [..., features] to contiguous float32 [tokens, features]."""
    rows = operand(x) if x.dtype == np.float32 else np.ascontiguousarray(x, np.float32)
    return rows.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _standardized(x: Any, axes: tuple[int, ...], epsilon: float, *, centre: bool = True) -> tuple[Any, Any, Any]:
    """Return (x - mean) / deviation in float32 or wider, the mean and 1 / deviation."""
    x = widened(x)
    mean = mean_of(x, axes) if centre else x.dtype.type(0)
    centred = x - mean if centre else x
    inverse = 1 / np.sqrt(mean_of(np.square(centred), axes) + x.dtype.type(epsilon))
    return centred * inverse, mean, inverse


# The minimum number of elements per channel for which the compiled kernel is faster than NumPy.
_MIN_PLANE = 16


def _compiled(
    x: Any, scale: Any, bias: Any, threads: Threads | None, epsilon: float | None = None, groups: int = 0
) -> Any:
    """Return x * scale + bias per channel, or None if the compiled kernel does not support the input.

    Args:
        epsilon: addend of the variance, if each channel (or each group of channels) is normalised; None = it is not.
        groups: number of groups of channels; 0 = each channel is normalised separately.
    """
    if threads is None or x.dtype != np.float32 or x.ndim < 2 or x.size < _MIN_PLANE * x.shape[0] * x.shape[1]:
        return None
    factors, shifts = (np.ascontiguousarray(value, np.float32) for value in (scale, bias))
    if not x.flags.c_contiguous or not x.size or factors.shape != x.shape[1:2] or shifts.shape != factors.shape:
        return None
    if groups:
        ones, zeros = np.ones(groups, np.float32), np.zeros(groups, np.float32)
        x = scaled(x.reshape(len(x) * groups, -1), ones, zeros, epsilon=epsilon, threads=threads).reshape(x.shape)
        epsilon = None
    planes = x.reshape(x.shape[0] * x.shape[1], -1)
    return scaled(planes, factors, shifts, epsilon=epsilon, threads=threads).reshape(x.shape)


def _by_channel(normed: Any, scale: Any, bias: Any, dtype: Any) -> Any:
    return (normed * per_channel(scale, normed.ndim) + per_channel(bias, normed.ndim)).astype(dtype, copy=False)


def _is_plain(x: Any, weight: Any, first: int) -> bool:
    """Return True if compiled kernels support the input: float32, along the last axis."""
    return bool(first == x.ndim - 1 and x.dtype == np.float32 and weight.shape == x.shape[-1:] and x.size)


@operator("SimplifiedLayerNormalization")
@operator("SimplifiedLayerNormalization", domain=MS)
@operator("RMSNormalization", since_version=23)
def rms_normalization(
    x: Any, weight: Any, *, axis: int = -1, epsilon: float = 1e-5, threads: Threads | None, spec: NodeSpec
) -> Any:
    """x / sqrt(mean(x^2) + epsilon) * weight (Zhang & Sennrich 2019); then 1 / sqrt(mean(x^2) + epsilon)."""
    first = checked_axis(axis, x.ndim)
    if _is_plain(x, weight, first) and not any(spec.outputs[1:]):
        return norm(_rows(x), weight, epsilon, threads=threads).reshape(x.shape)
    normed, _, inverse = _standardized(x, tuple(range(first, x.ndim)), epsilon, centre=False)
    return (normed.astype(x.dtype) * weight).astype(weight.dtype, copy=False), inverse.astype(np.float32, copy=False)


@operator("SkipSimplifiedLayerNormalization", domain=MS)
def skip_rms_normalization(
    x: Any, skip: Any, weight: Any, input_bias: Any = None, *, epsilon: float = 1e-12, threads: Threads | None,
    spec: NodeSpec,
) -> Any:  # fmt: skip
    """RMS norm of input + skip (+ bias) as output 0, and the sum as output 3."""
    return _of_sum(x, skip, epsilon, False, threads, spec, weight=weight, input_bias=input_bias)


def _of_sum(
    x: Any, skip: Any, epsilon: float, centred: bool, threads: Threads | None, spec: NodeSpec, **vectors: Any
) -> tuple[Any, ...]:
    """Return the norm, mean, 1 / deviation and sum; norm and sum have x's type, and skip may be a single sequence."""
    wide = {name: np.ascontiguousarray(v, np.float32) for name, v in vectors.items() if v is not None}
    rows = _rows(x), _rows(np.broadcast_to(skip, x.shape))
    results = norm_of_sum(*rows, wide.pop("weight"), epsilon, **wide, centred=centred, threads=threads)
    normed, total = (rows.reshape(x.shape).astype(x.dtype, copy=False) for rows in results)
    if not any(spec.outputs[1:3]):
        return normed, None, None, total
    _, mean, inverse = _standardized(results[1].reshape(x.shape), (x.ndim - 1,), epsilon, centre=centred)
    return normed, np.zeros_like(inverse) + mean, inverse, total


@operator("LayerNormalization")
def layer_normalization(
    x: Any, weight: Any, bias: Any = None, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1,
    threads: Threads | None, spec: NodeSpec,
) -> Any:  # fmt: skip
    """(x - mean) / sqrt(variance + epsilon) * scale + bias (Ba et al. 2016); then the mean and 1 / deviation."""
    first, has_bias = checked_axis(axis, x.ndim), bias is not None
    if _is_plain(x, weight, first) and not any(spec.outputs[1:]) and (not has_bias or bias.shape == weight.shape):
        return norm(_rows(x), weight, epsilon, bias=bias, centred=True, threads=threads).reshape(x.shape)
    normed, *statistics = _standardized(x, tuple(range(first, x.ndim)), epsilon)
    normed = normed.astype(x.dtype) * weight
    if any(spec.outputs[1:]):  # otherwise stash_type is not checked, as in onnxruntime
        statistics = [value.astype(dtype_of(stash_type), copy=False) for value in statistics]
    mean, inverse = statistics
    return (normed + bias if has_bias else normed).astype(x.dtype, copy=False), mean, inverse


@register("BatchNormalization", since_version=7)
def batch_normalization(spec: NodeSpec) -> Kernel:
    """scale * (x - mean) / sqrt(variance + epsilon) + bias per channel (Ioffe & Szegedy 2015).

    With training_mode, the batch's own statistics are used, and the updated running statistics are returned.
    """
    if spec.version < 14 and any(spec.outputs[1:]):
        raise KernelError("BatchNormalization: the training form of opsets before 14 is not supported")
    if not spec.attributes.get("spatial", 1):
        raise KernelError("BatchNormalization: spatial=0 is not supported")
    if spec.attributes.get("training_mode", 0) or any(value is None for value in spec.constants[1:5]):
        return from_function(_batch_normalized, threads=session_threads)(spec)
    # The statistics are constants, so each channel's factor and shift are computed once.
    epsilon = float(spec.attributes.get("epsilon", 1e-5))
    factor, shift = _factor_and_shift(*map(spec.constant, range(1, 5)), epsilon=epsilon)
    threads = session_threads(spec)
    return lambda context, inputs: (_scaled(inputs[0], fixed_address(factor), fixed_address(shift), threads),)


def _factor_and_shift(scale: Any, bias: Any, mean: Any, variance: Any, *, epsilon: float) -> tuple[Any, Any]:
    factor = widened(scale) / np.sqrt(widened(variance) + np.float32(epsilon))
    return factor, widened(bias) - widened(mean) * factor


def _scaled(x: Any, factor: Any, shift: Any, threads: Threads | None) -> Any:
    found = _compiled(x, factor, shift, threads)
    return _by_channel(widened(x), factor, shift, x.dtype) if found is None else found


def _batch_normalized(
    x: Any, scale: Any, bias: Any, mean: Any, variance: Any, *, epsilon: float = 1e-5, momentum: float = 0.9,
    training_mode: bool = False, threads: Threads | None,
) -> Any:  # fmt: skip
    wide, running = widened(x), ()
    if training_mode:
        axes = (0, *range(2, x.ndim))
        centred = wide - mean_of(wide, axes)
        statistics = mean_of(wide, axes, keepdims=False), mean_of(np.square(centred), axes, keepdims=False)
        running = tuple(
            (old * momentum + new * (1 - momentum)).astype(old.dtype)
            for old, new in zip((mean, variance), statistics, strict=True)
        )
        mean, variance = statistics
    factor, shift = _factor_and_shift(scale, bias, mean, variance, epsilon=epsilon)
    return _scaled(x, factor, shift, threads), *running


@operator("InstanceNormalization", since_version=6, threads=session_threads)
def instance_normalization(x: Any, scale: Any, bias: Any, *, epsilon: float = 1e-5, threads: Threads | None) -> Any:
    """Normalise each instance and channel (Ulyanov et al. 2016)."""
    found = _compiled(x, scale, bias, threads, epsilon)
    if found is not None:
        return found
    return _by_channel(_standardized(x, tuple(range(2, x.ndim)), epsilon)[0], scale, bias, x.dtype)


@operator("GroupNormalization", since_version=18, threads=session_threads)
def group_normalization(
    x: Any, scale: Any, bias: Any, *, num_groups: int, epsilon: float = 1e-5, threads: Threads | None
) -> Any:
    """Normalise each instance and channel group (Wu & He 2018); before version 21, scale and bias are per group."""
    if num_groups < 1 or x.ndim < 2 or x.shape[1] % num_groups:
        raise KernelError(
            f"GroupNormalization: the channels of data of shape {list(x.shape)} cannot be divided into "
            f"{num_groups} groups"
        )
    if scale.shape == (num_groups,):
        scale, bias = (np.repeat(value, x.shape[1] // num_groups) for value in (scale, bias))
    found = _compiled(x, scale, bias, threads, epsilon, num_groups)
    if found is not None:
        return found
    grouped = x.reshape(x.shape[0], num_groups, math.prod(x.shape[1:]) // num_groups)
    normed = _standardized(grouped, (2,), epsilon)[0].reshape(x.shape)
    return _by_channel(normed, scale, bias, x.dtype)


@operator("LRN")
def local_response_normalization(
    x: Any, *, size: Positive, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0
) -> Any:
    """x / (bias + alpha / size * sum of squares over neighbouring channels) ** beta (Krizhevsky et al. 2012)."""
    channels = x.shape[1]
    sums = np.zeros((x.shape[0], channels + 1, *x.shape[2:]), np.float64)
    np.cumsum(np.square(x), axis=1, dtype=np.float64, out=sums[:, 1:])
    index = np.arange(channels)
    low = np.maximum(index - (size - 1) // 2, 0)
    high = np.minimum(index + size // 2 + 1, channels)
    return (x / (bias + alpha / size * (sums[:, high] - sums[:, low])) ** beta).astype(x.dtype)


@operator("LpNormalization")
def lp_normalization(x: Any, *, axis: int = -1, p: Literal[1, 2] = 2) -> Any:
    """x divided by its 1- or 2-norm along an axis; 0 where the norm is 0."""
    wide = widened(x)
    size = np.sum(np.abs(wide), axis, keepdims=True) if p == 1 else np.sqrt(np.sum(wide * wide, axis, keepdims=True))
    return np.where(size == 0, 0, wide / np.where(size == 0, 1, size)).astype(x.dtype)


@operator("MeanVarianceNormalization", since_version=9)
def mean_variance_normalization(x: Any, *, axes: tuple[int, ...] = (0, 2, 3)) -> Any:
    """(x - mean) / (deviation + 1e-9) over the axes."""
    wide = widened(x)
    centred = wide - mean_of(wide, axes)
    deviation = np.sqrt(mean_of(np.square(centred), axes))
    return (centred / (deviation + wide.dtype.type(1e-9))).astype(x.dtype, copy=False)


@operator("SkipLayerNormalization", domain=MS)
def skip_layer_normalization(
    x: Any, skip: Any, weight: Any, bias: Any = None, input_bias: Any = None, *, epsilon: float = 1e-12,
    threads: Threads | None, spec: NodeSpec,
) -> Any:  # fmt: skip
    """Layer norm of input + skip (+ bias) as output 0, and the sum as output 3."""
    return _of_sum(x, skip, epsilon, True, threads, spec, weight=weight, bias=bias, input_bias=input_bias)


@shape_rule("LayerNormalization", domain="")
def layer_normalization_types(types: NodeTypes) -> list[Type | None]:
    """The normalised input, mean and inverse deviation."""
    source = types.source
    statistics = replace(
        statistics_type(source, types.attribute("axis", -1)), dtype=data_type(types.attribute("stash_type", 1))
    )
    return [source, statistics, statistics]


def statistics_type(source: TensorType, axis: int) -> TensorType:
    """The type of means or deviations: float32, in the input's shape with size 1 for `axis` and all axes after it."""
    shape = source.shape
    if not shape or not -len(shape) <= axis < len(shape):
        return TensorType(DataType.FLOAT)
    start = axis % len(shape)
    return TensorType(DataType.FLOAT, (*shape[:start], *(1 for _ in shape[start:])))


@shape_rule("SimplifiedLayerNormalization", domain="")
@shape_rule("SimplifiedLayerNormalization")
def simplified_layer_normalization_types(types: NodeTypes) -> list[Type | None]:
    """The normalised input in the scale's element type, and the inverse deviations."""
    source, scale = types.source, types.tensor(1)
    normalised = replace(source, dtype=scale.dtype if scale else source.dtype)
    return [normalised, statistics_type(source, types.attribute("axis", -1))]


@shape_rule("SkipSimplifiedLayerNormalization", "SkipLayerNormalization")
def skip_layer_normalization_types(types: NodeTypes) -> list[Type | None]:
    """The normalised sum, mean, inverse deviation, and the sum itself."""
    source = types.source
    statistics = statistics_type(source, -1)
    return [source, statistics, statistics, source]
