"""Convolutions as matrix products: windows are copied to columns (im2col) and multiplied by BLAS."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any, TypeAlias

import numpy as np

from genai.kernels.cpu.arrays.blas import matmul
from genai.kernels.cpu.arrays.copying import operand
from genai.kernels.cpu.arrays.depthwise import depthwise, finish_channels
from genai.kernels.cpu.arrays.gemm.convolution import Convolution
from genai.kernels.cpu.arrays.gemm.packing import pack_kernels
from genai.kernels.cpu.arrays.gemm.windows import Windows, window_columns
from genai.kernels.cpu.arrays.overlaps import overlapped
from genai.kernels.cpu.program.thread_pool import Threads, fixed_address

from ..onnx.node import MS
from ..onnx.types import TensorType, Type
from .pooling import PoolingWindows, WindowSpec, added_windows
from .registry import Kernel, KernelError, NodeSpec, Positive, from_function, operator, register
from .shape_rules import NodeTypes, shape_rule, times
from .support import checked_shape, optional, per_channel, widened

Limits: TypeAlias = tuple[float, float]
NO_LIMITS: Limits = (-math.inf, math.inf)
# Transposed convolutions multiply small images together, up to this number of positions.
_POSITIONS = 512


def convolve(x: Any, weight: Any, windows: PoolingWindows, groups: int, threads: Threads | None = None) -> Any:
    """Convolve [N, C, ...] with [M, C / groups, kernel ...] to [N, M, counts ...]."""
    batch, channels = x.shape[:2]
    outputs = weight.shape[0]
    check_groups(x, weight, groups)
    positions = math.prod(windows.counts)
    if windows.is_pointwise and groups == 1:
        product = matmul(weight.reshape(outputs, channels), x.reshape(batch, channels, positions), threads)
    elif weight.shape[1] == 1 and outputs == channels:
        # A depthwise convolution adds one tap at a time, so it needs no im2col columns.
        padded, scales = (
            windows.padded(x, 0),
            weight.reshape(1, outputs, math.prod(weight.shape[2:]), *[1] * len(windows.counts)),
        )
        result = np.zeros((batch, channels, *windows.counts), np.result_type(x, weight))
        part = np.empty_like(result)
        for index, tap in enumerate(windows.taps()):
            result += np.multiply(padded[tap], scales[:, :, index], out=part)
        return result
    else:
        columns = columns_of(windows.padded(x, 0), windows, threads)
        columns = columns.reshape(batch, groups, math.prod(weight.shape[1:]), positions)
        kernels = weight.reshape(groups, outputs // groups, columns.shape[2])
        product = matmul(kernels, columns, threads)
    return product.reshape(batch, outputs, *windows.counts)


def check_groups(x: Any, weight: Any, groups: int) -> None:
    if x.shape[1] != weight.shape[1] * groups or weight.shape[0] % groups:
        raise KernelError(
            f"Conv: the input has {x.shape[1]} channels in {groups} groups, which do not match a weight of shape "
            f"{list(weight.shape)}"
        )


def columns_of(x: Any, windows: PoolingWindows, threads: Threads | None) -> Any:
    """Return [N, C, taps, positions ...]: the elements under each window."""
    return window_columns(x, kernel_windows(windows), threads)


def kernel_windows(windows: PoolingWindows) -> Any:
    """Convert windows for compiled code, without pads: the data is already padded, or the compiled code pads it."""
    return Windows(windows.kernel, windows.strides, windows.dilations, windows.counts)


def depthwise_images(
    x: Any, weight: Any, bias: Any, windows: PoolingWindows, limits: Limits, threads: Threads | None
) -> Any:
    """Compute a float32 depthwise convolution of images with bias and limits; None if the inputs do not fit."""
    fits = x.ndim == 4 and weight.shape[1] == 1 and weight.shape[0] == x.shape[1] and windows.dilations == (1, 1)
    if not fits or not x.size or not (x.dtype == weight.dtype == np.float32):
        return None
    first, second = windows.strides
    addend = fixed_address(np.zeros(len(weight), np.float32)) if bias is None else bias
    out = depthwise(
        operand(x).reshape(-1, *x.shape[2:]), operand(weight[:, 0]), np.ascontiguousarray(addend, np.float32),
        (windows.counts[0], windows.counts[1]), strides=(first, second), pads=(windows.begins[0], windows.begins[1]),
        limits=limits, threads=threads,
    )  # fmt: skip
    return out.reshape(*x.shape[:2], *windows.counts)


def _finish(result: Any, bias: Any, limits: Limits, threads: Threads | None) -> None:
    """Add the bias and clip to the limits, in place."""
    if bias is None and limits == NO_LIMITS:
        return
    if result.dtype == np.float32 and result.flags.c_contiguous and result.size and result.ndim > 2:
        addend = None if bias is None else np.ascontiguousarray(bias, np.float32)
        finish_channels(result.reshape(math.prod(result.shape[:2]), -1), addend, limits, threads=threads)
        return
    if bias is not None:
        result += per_channel(bias, result.ndim)
    if limits != NO_LIMITS:
        np.clip(result, *limits, out=result)


def conv(spec: NodeSpec, limits: Limits = NO_LIMITS) -> Kernel:
    """Cross-correlation of any spatial rank, with groups, dilations and bias; results are clipped to `limits`."""
    if (groups := int(spec.attributes.get("group", 1))) < 1:
        raise KernelError(f"Conv: group is {groups}, but it must be at least 1")
    packed = packed_convolution(spec, limits)
    if packed is not None:
        return packed
    return _Convolution(spec, limits)


register("Conv")(conv)


class _Convolution:
    """The kernel for a node whose kernels are not packed.

    Attributes:
        is_native: see `dependence.is_native`; this is known for depthwise convolutions of images.
    """

    def __init__(self, spec: NodeSpec, limits: Limits) -> None:
        self._windows, self._groups = WindowSpec(spec), int(spec.attributes.get("group", 1))
        self._limits, self._threads = limits, spec.options.get("threads")
        weight = spec.constants[1]
        self.is_native = weight is not None and weight.ndim == 4 and len(weight) == self._groups
        self._spec = replace(spec, constants=())

    def __call__(self, context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x, weight, bias = inputs[0], inputs[1], optional(inputs, 2)
        check_ranks(self._spec, x, weight)
        windows = self._windows.windows(x.shape[2:], weight.shape[2:])
        check_columns(self._spec, x, len(weight), windows)
        result = depthwise_images(x, weight, bias, windows, self._limits, self._threads)
        if result is None:
            result = convolve(widened(x), widened(weight), windows, self._groups, self._threads)
            _finish(result, bias, self._limits, self._threads)
        return (result.astype(x.dtype, copy=False),)


class PackedConvolution:
    """The kernel for a node that has constant float32 kernels in one group.

    Attributes:
        packed: inputs that the kernel does not read, because it holds a packed copy.
        calls_blas: False.
    """

    calls_blas = False

    def __init__(self, spec: NodeSpec, convolution: Any, kernel: tuple[int, ...], packed: tuple[int, ...]) -> None:
        self._spec, self._windows = replace(spec, constants=()), WindowSpec(spec)
        self._convolution, self._kernel, self.packed = convolution, kernel, packed

    def __call__(self, context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x, addend = inputs[0], optional(inputs, 3)
        if x.ndim != len(self._kernel) or x.shape[1] != self._kernel[1] or x.dtype != np.float32:
            raise KernelError(
                f"Conv: the input is {x.dtype}{list(x.shape)}, which does not match float32 kernels of shape "
                f"{list(self._kernel)}"
            )
        windows = self._windows.windows(x.shape[2:], self._kernel[2:])
        check_columns(self._spec, x, self._kernel[0], windows)
        if addend is not None:
            addend = np.broadcast_to(addend, (len(x), self._kernel[0], *windows.counts))
        return (self._convolution(windows.padded(x, 0), kernel_windows(windows), addend),)


def packed_convolution(spec: NodeSpec, limits: Limits) -> PackedConvolution | None:
    """Return a convolution with packed kernels; None without threads or if the kernels cannot be packed."""
    threads, weight = spec.options.get("threads"), spec.constants[1]
    if threads is None or weight is None or weight.dtype != np.float32 or weight.ndim < 3 or not weight.size:
        return None
    if tuple(spec.attributes.get("kernel_shape") or weight.shape[2:]) != weight.shape[2:]:
        return None  # the unpacked kernel raises the error when it runs
    bias = spec.constants[2] if spec.has(2) else None
    if int(spec.attributes.get("group", 1)) != 1 or (spec.has(2) and (bias is None or bias.dtype != np.float32)):
        return None
    if bias is not None and bias.shape != (len(weight),):
        raise KernelError(
            f"Conv: the bias has shape {list(bias.shape)}, but it must have one value for each of the "
            f"{len(weight)} kernels"
        )
    kernels = spec.pack((1,), "float32 kernels", lambda: pack_kernels(weight))
    function, parameters = ("copy", ()) if limits == NO_LIMITS else ("clip", limits)
    convolution = Convolution(threads, kernels, bias, function, parameters)
    return PackedConvolution(spec, convolution, weight.shape, (1, 2) if bias is not None else (1,))


def check_ranks(spec: NodeSpec, x: Any, weight: Any) -> None:
    if x.ndim < 2 or x.ndim != weight.ndim:
        raise KernelError(
            f"{spec.op_type}: the data has shape {list(x.shape)} and the weight has shape {list(weight.shape)}, "
            "but both must have the same rank, at least 2"
        )
    stated = spec.attributes.get("kernel_shape")
    if stated is not None and tuple(stated) != weight.shape[2:]:
        raise KernelError(
            f"{spec.op_type}: kernel_shape is {list(stated)}, but the weight has shape {list(weight.shape)}"
        )


def check_columns(spec: NodeSpec, x: Any, outputs: int, windows: PoolingWindows) -> None:
    """Check the sizes of the im2col columns, the largest value that a convolution allocates, and of the output."""
    checked_shape(spec, (*x.shape[:2], math.prod(windows.kernel), *windows.counts), 4)
    checked_shape(spec, (x.shape[0], outputs, *windows.counts), 4)


def conv_transpose(
    x: Any, weight: Any, bias: Any = None, *, group: Positive = 1, spec: NodeSpec, threads: Threads | None = None,
) -> Any:  # fmt: skip
    """The gradient of Conv: each input element adds its kernel to the output."""
    check_ranks(spec, x, weight)
    _check_transposed(x, weight.shape, group)
    windows, begins, sizes = _transposed_windows(spec, x, weight.shape)
    parts = _products(widened(x), widened(weight), windows, group, threads)
    result = added_windows(parts, windows, begins, sizes, bias, threads)
    return result.astype(x.dtype, copy=False)


def _transposed_windows(
    spec: NodeSpec, x: Any, shape: tuple[int, ...]
) -> tuple[Windows, tuple[int, ...], tuple[int, ...]]:
    """Return the windows that kernels [C, M / groups, ...] are added to, and the result's start and sizes."""
    attributes, rank, kernel = spec.attributes, x.ndim - 2, shape[2:]
    steps, gaps = (_filled(name, attributes.get(name), rank, 1) for name in ("strides", "dilations"))
    reach = [gap * (size - 1) + 1 for gap, size in zip(gaps, kernel, strict=True)]
    begins, sizes = transposed_sizes(spec, x.shape[2:], steps, reach)
    outputs = shape[1] * int(attributes.get("group", 1))
    checked_shape(spec, (x.shape[0], outputs, *sizes), 4)
    checked_shape(spec, (x.shape[0], outputs, math.prod(kernel), *x.shape[2:]), 4)
    return Windows(tuple(kernel), steps, gaps, tuple(x.shape[2:])), tuple(begins), tuple(sizes)


def _check_transposed(x: Any, shape: tuple[int, ...], group: int) -> None:
    if x.shape[1] != shape[0] or x.shape[1] % group:
        raise KernelError(
            f"ConvTranspose: the input has {x.shape[1]} channels in {group} groups, which do not match a weight "
            f"of shape {list(shape)}"
        )


class PackedTransposed:
    """The kernel for a ConvTranspose with constant float32 kernels in one group.

    Each element of the input is multiplied by all kernels, and the products are added at their positions.

    Attributes:
        packed: inputs that the kernel does not read, because it holds a packed copy.
        calls_blas: False.
    """

    calls_blas = False

    def __init__(self, spec: NodeSpec, weight: Any, bias: Any, threads: Threads) -> None:
        self._spec, self._shape, self._bias, self._threads = replace(spec, constants=()), weight.shape, bias, threads
        kernels = spec.pack((1,), "float32 transposed kernels", lambda: pack_kernels(_as_pointwise(weight)))
        self._convolution = Convolution(threads, kernels, None, "copy", ())
        self.packed = (1,) if bias is None else (1, 2)

    def __call__(self, context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x, spec, shape, bias = inputs[0], self._spec, self._shape, self._bias
        if x.ndim != len(shape) or x.dtype != np.float32:
            raise KernelError(
                f"ConvTranspose: the input is {x.dtype}{list(x.shape)}, which does not match float32 kernels of shape "
                f"{list(shape)}"
            )
        _check_transposed(x, shape, 1)
        windows, begins, sizes = _transposed_windows(spec, x, shape)
        result = np.empty((len(x), shape[1], *sizes), np.float32)
        bias = None if bias is None else fixed_address(bias)
        images = x.reshape(*x.shape[:2], windows.positions)
        together = max(_POSITIONS // max(windows.positions, 1), 1)
        for first in range(0, len(x), together):
            some = images[first : first + together]
            columns = some if len(some) == 1 else some.transpose(1, 0, 2).reshape(1, shape[0], -1)
            pointwise = Windows((1,), (1,), (1,), columns.shape[2:])
            parts = self._convolution(columns, pointwise, None)
            parts = parts.reshape(shape[1], math.prod(windows.kernel), len(some), *windows.counts)
            out = result[first : first + together]
            overlapped(np.moveaxis(parts, 2, 0), windows, begins, sizes, bias, self._threads, out=out)
        return (result,)


def _as_pointwise(weight: Any) -> Any:
    """Return kernels [C, M, ...] as the kernels [M * taps, C, 1] of a convolution."""
    return np.ascontiguousarray(weight.reshape(len(weight), -1).T)[:, :, None]


_unpacked_transposed = from_function(conv_transpose)


@register("ConvTranspose")
def transposed(spec: NodeSpec) -> Kernel:
    """The gradient of Conv: each input element adds its kernel to the output."""
    return packed_transposed(spec) or _unpacked_transposed(spec)


def packed_transposed(spec: NodeSpec) -> PackedTransposed | None:
    """Return a kernel with packed weights; None without threads or if the weights cannot be packed."""
    threads, weight, attributes = spec.options.get("threads"), spec.constants[1], spec.attributes
    if threads is None or weight is None or weight.dtype != np.float32 or weight.ndim < 3 or not weight.size:
        return None
    rank, strides = weight.ndim - 2, attributes.get("strides")
    bias = spec.constants[2] if spec.has(2) else None
    stated = tuple(attributes.get("kernel_shape") or weight.shape[2:]) == weight.shape[2:]
    valid = all(len(values) == rank and min(values) > 0 for values in (strides, attributes.get("dilations")) if values)
    if not (stated and valid) or int(attributes.get("group", 1)) != 1 or min(attributes.get("pads") or (0,)) < 0:
        return None  # the unpacked kernel computes the node, or raises the error when it runs
    if spec.has(2) and (bias is None or bias.dtype != np.float32 or bias.shape != weight.shape[1:2]):
        return None
    return PackedTransposed(spec, weight, bias, threads)


@operator("ConvTransposeWithDynamicPads", domain=MS)
def conv_transpose_with_dynamic_pads(
    x: Any, weight: Any, pads: Any = None, bias: Any = None, *, group: Positive = 1, strides: tuple[int, ...] = (),
    dilations: tuple[int, ...] = (), spec: NodeSpec, threads: Threads | None = None,
) -> Any:  # fmt: skip
    """ConvTranspose whose pads are an input."""
    rank = x.ndim - 2
    if pads is None or pads.shape != (2 * rank,) or np.any(pads < 0):
        given = None if pads is None else pads.tolist()
        raise KernelError(f"{spec.op_type}: the pads are {given}, expected {2 * rank} numbers of at least 0")
    padded = replace(spec, attributes={**spec.attributes, "pads": pads.tolist()})
    return conv_transpose(x, weight, bias, group=group, spec=padded, threads=threads)


@shape_rule("ConvTransposeWithDynamicPads")
def conv_transpose_with_dynamic_pads_types(types: NodeTypes) -> list[Type | None]:
    """[batch, channels, ...]; the spatial sizes depend on the pads."""
    source, shape, weight = types.source, types.shape(0), types.shape(1)
    if not shape or weight is None or len(weight) != len(shape):
        return [TensorType(source.dtype)]
    channels = times(weight[1], types.attribute("group", 1))
    return [TensorType(source.dtype, (shape[0], channels, *(None for _ in shape[2:])))]


def _products(x: Any, weight: Any, windows: Windows, groups: int, threads: Threads | None) -> Any:
    """Return each element of x times the kernels, [N, M, taps, ...]."""
    batch, per_group = len(x), x.shape[1] // groups
    images = x.reshape(batch, groups, per_group, windows.positions)
    kernels = weight.reshape(groups, per_group, math.prod(weight.shape[1:]))
    if per_group == 1:
        parts = np.multiply(kernels.transpose(0, 2, 1), images)
    else:
        parts = matmul(kernels.transpose(0, 2, 1), images, threads)
    return parts.reshape(batch, groups * weight.shape[1], math.prod(windows.kernel), *windows.counts)


def transposed_sizes(
    spec: NodeSpec, extents: Sequence[int], strides: Sequence[int], reach: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return the start indices of ConvTranspose's output within the full result, and the output's sizes.

    Args:
        reach: per axis, the number of results that an input is added to, and the results between them.
    """
    attributes, rank = spec.attributes, len(extents)
    full = [(extent - 1) * s + size for extent, s, size in zip(extents, strides, reach, strict=True)]
    extra = _filled("output_padding", attributes.get("output_padding"), rank, 0)
    output_shape, auto_pad = attributes.get("output_shape"), str(attributes.get("auto_pad", "NOTSET"))
    if output_shape is None and auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        output_shape = [extent * stride for extent, stride in zip(extents, strides, strict=True)]
    if output_shape is not None:
        sizes = [int(size) for size in output_shape][-rank:]
        totals = [max(f + e - size, 0) for f, e, size in zip(full, extra, sizes, strict=True)]
        return [total // 2 if auto_pad == "SAME_UPPER" else total - total // 2 for total in totals], sizes
    pads = attributes.get("pads") if auto_pad == "NOTSET" else None
    begins, ends = ([int(pad) for pad in side] for side in ((pads[:rank], pads[rank:]) if pads else [[0] * rank] * 2))
    sizes = [f + e - b - end for f, e, b, end in zip(full, extra, begins, ends, strict=True)]
    return begins, list(checked_shape(spec, sizes, 1))


def _filled(name: str, values: Any, rank: int, least: int) -> tuple[int, ...]:
    numbers = tuple(int(value) for value in values) if values else (least,) * rank
    if len(numbers) != rank or any(value < least for value in numbers):
        raise KernelError(f"ConvTranspose: {name} is {list(numbers)}, which is not valid for {rank} spatial axes")
    return numbers


@operator("DeformConv", since_version=19, window_spec=WindowSpec)
def deform_conv(
    data: Any, kernels: Any, offsets: Any, bias: Any = None, mask: Any = None, *, group: int = 1,
    offset_group: int = 1, window_spec: WindowSpec, spec: NodeSpec,
) -> Any:  # fmt: skip
    """Deformable convolution (Dai et al. 2017), with an optional weight per tap, the mask (Zhu et al. 2019)."""
    x, weight, offset = widened(data), widened(kernels), widened(offsets)
    if x.ndim != 4 or weight.ndim != 4 or offset.ndim != 4:
        raise KernelError("DeformConv: data, weights and offsets must have two spatial axes")
    windows = window_spec.windows(x.shape[2:], weight.shape[2:])
    batch, channels = x.shape[:2]
    taps, counts = weight.shape[2] * weight.shape[3], windows.counts
    fits = channels == weight.shape[1] * group and channels % offset_group == 0 and len(weight) % group == 0
    if not fits or offset.shape != (batch, 2 * offset_group * taps, *counts):
        raise KernelError(
            f"DeformConv: data of shape {list(x.shape)}, weights of shape {list(weight.shape)} and offsets of "
            f"shape {list(offset.shape)} do not match group={group} and offset_group={offset_group}"
        )
    checked_shape(spec, (batch, channels, taps, *counts), 8 * 4)
    moves = offset.reshape(batch, offset_group, taps, 2, *counts)
    columns = np.empty((batch, channels, taps, *counts), x.dtype)
    starts = zip(counts, windows.strides, windows.begins, strict=True)
    grid = [np.arange(count) * stride - begin for count, stride, begin in starts]
    for tap, (row, column) in enumerate(product(*(range(size) for size in weight.shape[2:]))):
        rows = grid[0][:, None] + row * windows.dilations[0] + moves[:, :, tap, 0]
        columns_at = grid[1] + column * windows.dilations[1] + moves[:, :, tap, 1]
        columns[:, :, tap] = _interpolated(x, rows, columns_at)
    if mask is not None:
        weights = widened(mask).reshape(batch, offset_group, 1, taps, *counts)
        columns = (columns.reshape(batch, offset_group, channels // offset_group, taps, *counts) * weights).reshape(
            columns.shape
        )
    columns = columns.reshape(batch, group, channels // group * taps, math.prod(counts))
    matrix = weight.reshape(group, len(weight) // group, math.prod(weight.shape[1:]))
    result = (matrix @ columns).reshape(batch, len(weight), *counts)
    return (result if bias is None else result + per_channel(widened(bias), 4)).astype(data.dtype, copy=False)


def _interpolated(x: Any, rows: Any, columns: Any) -> Any:
    """Interpolate images at positions [batch, groups, ...] bilinearly to [batch, channels, ...]; zeros outside."""
    batch, channels, height, width = x.shape
    groups = rows.shape[1]
    images = x.reshape(batch, groups, channels // groups, height * width)
    result: Any = 0
    rows, columns = np.clip(rows, -2, height + 1), np.clip(columns, -2, width + 1)
    for down, right in product((0, 1), (0, 1)):
        line, column = np.floor(rows) + down, np.floor(columns) + right
        weight = (1 - np.abs(rows - line)) * (1 - np.abs(columns - column))
        weight = np.where((line >= 0) & (line < height) & (column >= 0) & (column < width), weight, 0)
        line, column = np.clip(line, 0, height - 1), np.clip(column, 0, width - 1)
        index = (line * width + column).astype(np.int64).reshape(batch, groups, 1, -1)
        values = np.take_along_axis(images, np.broadcast_to(index, (*images.shape[:3], index.shape[-1])), axis=3)
        result = result + values * weight.reshape(batch, groups, 1, -1)
    return result.reshape(batch, channels, *rows.shape[2:])
