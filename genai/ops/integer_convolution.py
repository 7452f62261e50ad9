"""8-bit integer convolutions: constant kernels are packed once; other kernels are computed exactly with BLAS."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from genai.kernels.checks import Float32
from genai.kernels.cpu.arrays.blas import matmul
from genai.kernels.cpu.arrays.copying import operand
from genai.kernels.cpu.arrays.depthwise import depthwise_bytes
from genai.kernels.cpu.arrays.gemm.convolution import IntegerConvolution
from genai.kernels.cpu.arrays.gemm.packing import pack_integer_kernels
from genai.kernels.cpu.arrays.gemm.windows import Windows
from genai.kernels.cpu.program.bound_program import BoundPrograms
from genai.kernels.cpu.program.thread_pool import Threads

from ..onnx.node import MS
from ..onnx.types import Dim, TensorType, Type
from .casting import requantized
from .convolution import (
    NO_LIMITS,
    check_columns,
    check_groups,
    check_ranks,
    columns_of,
    convolve,
    depthwise_images,
    kernel_windows,
)
from .integer_products import exact_runs, single_point
from .pooling import PoolingWindows, WindowSpec, channels_first, channels_last as to_channels_last
from .registry import KernelError, NodeSpec, operator
from .shape_rules import NodeTypes, shape_rule
from .support import per_channel

_BYTES = (np.int8, np.uint8)
# If the bias is below this, its sum with a few taps is exact in float32.
_EXACT_BIAS = 1 << 23
# Number of shapes of images for which windows are stored.
_KEPT = 8


@operator("ConvInteger", since_version=10, convolution=lambda spec: PackedIntegerConvolution(spec, 1, 3))
def conv_integer(
    x: Any, weight: Any, x_zero: Any = None, w_zero: Any = None, *, convolution: PackedIntegerConvolution
) -> Any:
    """Convolve 8-bit integers minus their zero points, exactly, in int32."""
    return convolution(x, weight, x_zero, w_zero)


@operator("QLinearConv", since_version=10, convolution=lambda spec: PackedIntegerConvolution(spec, 3, 5, 8))
def qlinear_conv(
    x: Any, x_scale: Any, x_zero: Any, weight: Any, w_scale: Any, w_zero: Any, y_scale: Any, y_zero: Any,
    bias: Any = None, *, convolution: PackedIntegerConvolution,
) -> Any:  # fmt: skip
    """Convolve quantised values and quantise the result; the bias is int32 at scale x * w."""
    result = convolution.rounded(x, x_scale, x_zero, weight, w_scale, y_scale, y_zero, bias)
    if result is not None:
        return result
    factor = np.float32(x_scale) * w_scale / np.float32(y_scale)
    total = convolution(x, weight, x_zero, w_zero, bias)
    factor = per_channel(factor, x.ndim) if factor.size > 1 else factor.reshape(())
    return requantized(total, factor, y_zero, y_zero.dtype)


@operator("QLinearConv", domain=MS, convolution=lambda spec: PackedIntegerConvolution(spec, 3, 5, 8))
def qlinear_conv_of_channels(
    x: Any, *others: Any, channels_last: bool = False, convolution: PackedIntegerConvolution
) -> Any:
    """QLinearConv; with `channels_last`, data is [batch, ..., channels], as onnxruntime's optimiser writes it."""
    result = qlinear_conv(channels_first(x) if channels_last else x, *others, convolution=convolution)
    return to_channels_last(result) if channels_last else result


@shape_rule("QLinearConv")
def qlinear_conv_types(types: NodeTypes) -> list[Type | None]:
    """[batch, channels, ...] or [batch, ..., channels] in the type of the zero point; the other sizes are open."""
    point, shape, weight = types.tensor(7), types.shape(0), types.shape(3)
    if point is None:
        return []
    if not shape or not weight:
        return [TensorType(point.dtype)]
    axes: list[Dim] = [None] * (len(shape) - 2)
    sizes = (*axes, weight[0]) if types.attribute("channels_last", 0) else (weight[0], *axes)
    return [TensorType(point.dtype, (shape[0], *sizes))]


class PackedIntegerConvolution:
    """An exact int32 convolution of 8-bit integers minus their zero points.

    Constant kernels in one group are packed once; other kernels are converted to float32 for BLAS.

    Args:
        weight, zero: input indices of the kernels and of their zero points (one number, or one per output channel).
        bias: input index of an int32 bias; 0 = none.
    """

    def __init__(self, spec: NodeSpec, weight: int, zero: int, bias: int = 0) -> None:
        self._spec, self._windows = spec, WindowSpec(spec)
        self._groups, self._threads = int(spec.attributes.get("group", 1)), spec.options.get("threads")
        if self._groups < 1:
            raise KernelError(f"{spec.op_type}: group is {self._groups}, but it must be at least 1")
        self._kernels: tuple[Any, list[slice]] | None = None
        self._packed = None
        self._places: BoundPrograms[tuple[PoolingWindows, Windows, list[tuple[int, int]]]] = BoundPrograms(_KEPT)
        self._scaling: _Scaling | None = None
        self._terms: Float32 | None = None
        kernels, point = (spec.constants[i] if spec.has(i) else None for i in (weight, zero))
        if kernels is None or (point is None and spec.has(zero)):
            return
        self._packed = _packed(spec, weight, point, bias) if self._groups == 1 else None
        if self._packed is None:
            self._kernels = spec.pack((weight, zero), "kernels in exact runs", lambda: _kernels_in_runs(kernels, point))
            terms = spec.constants[bias] if bias and spec.has(bias) else None
            if bias and (terms is not None or not spec.has(bias)):
                self._terms = _terms(terms, len(kernels))
        if bias:
            x_scale, x_zero, w_scale, y_scale, y_zero = (spec.constants[index] for index in (1, 2, 4, 6, 7))
            if not any(value is None for value in (x_scale, x_zero, w_scale, y_scale, y_zero)):
                self._scaling = _scaling(x_scale, x_zero, w_scale, y_scale, y_zero, len(kernels))

    def __call__(self, x: Any, weight: Any, x_zero: Any = None, w_zero: Any = None, bias: Any = None) -> Any:
        windows, compiled, pads = self._places.get(self._placed, x.shape, weight.shape)
        point = single_point(x_zero)
        if self._packed is not None and point is not None and x.dtype in _BYTES:
            return self._packed.sums(x, pads, compiled, point)
        total = self._by_blas(x, weight, windows, x_zero, w_zero)
        return total if bias is None else total + per_channel(bias, x.ndim)

    def rounded(
        self, x: Any, x_scale: Any, x_zero: Any, weight: Any, w_scale: Any, y_scale: Any, y_zero: Any, bias: Any
    ) -> Any:
        """Return the results of QLinearConv.

        Returns None if the kernels are not constant, or if the shape or type of a value is not supported.
        """
        known = self._scaling or _scaling(x_scale, x_zero, w_scale, y_scale, y_zero, len(weight))
        if known is None or x.dtype not in _BYTES:
            return None
        if self._packed is None:
            return self._rounded_depthwise(x, weight, known, bias)
        _, windows, pads = self._places.get(self._placed, x.shape, weight.shape)
        return self._packed.rounded(x, pads, windows, known.x_zero, known.factors, known.y_zero, known.dtype)

    def _rounded_depthwise(self, x: Any, weight: Any, known: _Scaling, bias: Any) -> Any:
        """Compute `rounded` for depthwise kernels in float32, which is exact here; None if they are not depthwise."""
        threads = self._threads
        if threads is None or self._kernels is None or len(self._kernels[1]) != 1 or x.ndim != 4:
            return None
        windows, _, _ = self._places.get(self._placed, x.shape, weight.shape)
        kernels = self._kernels[0]
        if kernels.shape[:2] != (x.shape[1], 1) or windows.dilations != (1, 1) or not x.size:
            return None
        terms = self._terms if self._terms is not None else _terms(bias, len(kernels))
        if terms is None:
            return None
        first, second = windows.strides
        found = depthwise_bytes(
            operand(x).reshape(-1, *x.shape[2:]), np.ascontiguousarray(kernels[:, 0]), terms,
            (windows.counts[0], windows.counts[1]), x_zero=known.x_zero, factors=known.factors, out_zero=known.y_zero,
            dtype=known.dtype, strides=(first, second), pads=(windows.begins[0], windows.begins[1]), threads=threads,
        )  # fmt: skip
        return found.reshape(*x.shape[:2], *windows.counts)

    def _placed(
        self, shape: tuple[int, ...], kernels: tuple[int, ...]
    ) -> tuple[PoolingWindows, Windows, list[tuple[int, int]]]:
        """Return the windows, in both forms, and the pads of each axis."""
        x, weight = (np.broadcast_to(np.int8(0), sizes) for sizes in (shape, kernels))
        check_ranks(self._spec, x, weight)
        check_groups(x, weight, self._groups)
        windows = self._windows.windows(shape[2:], kernels[2:])
        check_columns(self._spec, x, len(weight), windows)
        return windows, kernel_windows(windows), windows.widths(shape[2:])

    def _by_blas(self, x: Any, weight: Any, windows: PoolingWindows, x_zero: Any, w_zero: Any) -> Any:
        kernels, runs = self._kernels or _kernels_in_runs(weight, w_zero)
        data = x.astype(np.float32)
        if x_zero is not None:
            data -= np.asarray(x_zero).astype(np.float32).reshape(())
        if len(runs) == 1:
            sums = depthwise_images(data, kernels, None, windows, NO_LIMITS, self._threads)
            sums = convolve(data, kernels, windows, self._groups, self._threads) if sums is None else sums
            return sums.astype(np.int32)
        return _convolve_in_runs(data, kernels, windows, self._groups, runs, self._threads)


@dataclass(frozen=True)
class _Scaling:
    """The factor of the sums for each kernel, the zero points, and the type of the results."""

    factors: Float32
    x_zero: int
    y_zero: int
    dtype: np.dtype[Any]


def _scaling(x_scale: Any, x_zero: Any, w_scale: Any, y_scale: Any, y_zero: Any, kernels: int) -> _Scaling | None:
    """Return the scaling of QLinearConv; None if it is not one number per image and one number per kernel or tensor."""
    factor = np.float32(x_scale) * w_scale / np.float32(y_scale)
    point, y_point = single_point(x_zero), single_point(y_zero)
    if point is None or y_point is None or y_zero.dtype not in _BYTES or np.size(factor) not in (1, kernels):
        return None
    factors = np.broadcast_to(np.asarray(factor, np.float32).reshape(-1), (kernels,))
    return _Scaling(np.ascontiguousarray(factors), point, y_point, y_zero.dtype)


def _terms(bias: Any, kernels: int) -> Float32 | None:
    """Return the bias as float32; None if its sums with a few taps are not exact in float32."""
    if bias is None:
        return np.zeros(kernels, np.float32)
    found: Float32 | None = bias.astype(np.float32) if np.abs(bias).max(initial=0) < _EXACT_BIAS else None
    return found


def _kernels_in_runs(weight: Any, zero: Any) -> tuple[Any, list[slice]]:
    """Return kernels as float32 minus their zero points, and runs of terms that can be summed exactly in float32."""
    kernels = weight.astype(np.float32)
    if zero is not None and np.any(zero):
        points = np.asarray(zero).astype(np.float32)
        kernels -= points.reshape(-1, *[1] * (weight.ndim - 1)) if points.size > 1 else points.reshape(())
    taps = math.prod(weight.shape[1:])
    return kernels, exact_runs(taps, kernels.reshape(len(kernels), taps).T)


def _convolve_in_runs(
    x: Any, weight: Any, windows: PoolingWindows, groups: int, runs: list[slice], threads: Threads | None
) -> Any:
    batch, outputs, positions = len(x), len(weight), math.prod(windows.counts)
    taps = math.prod(weight.shape[1:])
    columns = columns_of(windows.padded(x, 0), windows, threads).reshape(batch, groups, taps, positions)
    kernels = weight.reshape(groups, outputs // groups, taps)
    total = np.zeros((batch, groups, outputs // groups, positions), np.int32)
    for part in runs:
        total += matmul(kernels[..., part], columns[:, :, part], threads).astype(np.int32)
    return total.reshape(batch, outputs, *windows.counts)


def _packed(spec: NodeSpec, weight: int, w_zero: Any, bias: int) -> Any:
    """Return the compiled convolution with constant kernels, or None if it does not support them."""
    kernels, threads = spec.constants[weight], spec.options.get("threads")
    terms = spec.constants[bias] if bias and spec.has(bias) else None
    if threads is None or kernels is None or kernels.ndim < 3 or not kernels.size:
        return None
    if (bias and spec.has(bias) and terms is None) or kernels.dtype not in _BYTES:
        return None
    if w_zero is not None and np.size(w_zero) not in (1, len(kernels)):
        return None
    packed = spec.pack((weight,), "kernels of bytes", lambda: pack_integer_kernels(kernels))
    return IntegerConvolution(threads, packed, terms, w_zero)
