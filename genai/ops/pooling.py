"""Windows that slide over the spatial axes of [batch, channels, ...], and pooling over the windows, tap by tap."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate, product
from operator import add, mul
from typing import Any, TypeAlias

import numpy as np

from genai.kernels.cpu.arrays import copying
from genai.kernels.cpu.arrays.gemm.windows import Windows
from genai.kernels.cpu.arrays.overlaps import overlapped
from genai.kernels.cpu.arrays.pooling import MAX_SCRATCH, pooled, scratch_bytes
from genai.kernels.cpu.program.thread_pool import Threads, fixed_address, temporary

from ..onnx.node import MS
from ..onnx.types import TensorType, Type
from .reduction import extreme, is_compiled, over_last_axes
from .registry import KernelError, NodeSpec, Positive, operator
from .shape_rules import NodeTypes, shape_rule
from .support import checked_shape, mean, per_channel, session_threads, widened

# Pooling loops over taps in Python, so the number of taps is limited; practical kernels have fewer.
MAX_TAPS = 1 << 18
# Before this operator set, the mean of windows that are larger than the padded input also counts elements after the
# pads, as in onnxruntime, if pads count and sizes are rounded down.
COUNTS_END_WITH_PADS = 19


@dataclass(frozen=True)
class PoolingWindows:
    """Kernel size, stride, dilation, pads before and after, and number of windows, per spatial axis."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begins: tuple[int, ...]
    ends: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def is_pointwise(self) -> bool:
        """True if each window is a single unpadded element at stride 1."""
        return {*self.kernel, *self.strides} <= {1} and not any((*self.begins, *self.ends))

    def taps(self) -> Iterator[tuple[slice, ...]]:
        """Yield, per position in the kernel, its slices of the padded array, including those of the leading axes."""
        lasts = [(count - 1) * stride for count, stride in zip(self.counts, self.strides, strict=True)]
        for offsets in product(*(range(size) for size in self.kernel)):
            starts = [offset * dilation for offset, dilation in zip(offsets, self.dilations, strict=True)]
            spans = zip(starts, lasts, self.strides, strict=True)
            yield slice(None), slice(None), *(slice(first, first + last + 1, step) for first, last, step in spans)

    def within(self, extents: Sequence[int]) -> PoolingWindows:
        """Return the same windows without the taps that only cover padding."""
        begins, sizes = [], []
        for i, extent in enumerate(extents):
            dilation, begin = self.dilations[i], self.begins[i]
            last_start = max(self.counts[i] - 1, 0) * self.strides[i] - begin
            first = min(max(-(last_start // dilation), 0), begin // dilation, self.kernel[i] - 1)
            begins.append(begin - first * dilation)
            sizes.append(max(min(-(-(extent + begin) // dilation), self.kernel[i]) - first, 1))
        return replace(self, kernel=tuple(sizes), begins=tuple(begins))

    def widths(self, extents: Sequence[int]) -> list[tuple[int, int]]:
        """Return the pads before and after each axis of these extents; pads include all elements that windows need."""
        pads = []
        for i, extent in enumerate(extents):
            needed = (self.counts[i] - 1) * self.strides[i] + self.dilations[i] * (self.kernel[i] - 1) + 1
            pads.append((self.begins[i], max(needed - extent - self.begins[i], 0)))
        return pads

    def padded(self, x: Any, value: Any) -> Any:
        """Return x with the pads of `widths`, filled with a value."""
        widths = self.widths(x.shape[2:])
        if not any(before or after for before, after in widths):
            return x
        recorded = copying.padded(x, [(0, 0), (0, 0), *widths], "constant", value)
        if recorded is not None:
            return temporary(recorded)
        inner = tuple(slice(before, before + size) for (before, _), size in zip(widths, x.shape[2:], strict=True))
        extents = (span.stop + after for span, (_, after) in zip(inner, widths, strict=True))
        result = np.full((*x.shape[:2], *extents), value, x.dtype)
        result[(slice(None), slice(None), *inner)] = x
        return result


class WindowSpec:
    """The windows that the attributes of a convolution or pool define.

    Args:
        may_exceed: True if a window may be larger than the padded input, as in pools; False for convolutions.
    """

    def __init__(self, spec: NodeSpec, *, may_exceed: bool = False) -> None:
        attributes = spec.attributes
        self._name, self._may_exceed = spec.op_type, may_exceed
        self._strides, self._dilations = attributes.get("strides"), attributes.get("dilations")
        self._pads, self._auto_pad = attributes.get("pads"), str(attributes.get("auto_pad", "NOTSET"))
        self._ceil = bool(attributes.get("ceil_mode", 0))
        # Most runs have the sizes of an earlier run.
        self._windows_of = lru_cache(maxsize=8)(self._windows)
        if self._auto_pad not in ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"):
            raise KernelError(f"{self._name}: auto_pad {self._auto_pad!r} is unknown")
        for name in ("strides", "dilations", "kernel_shape"):
            if any(int(value) < 1 for value in attributes.get(name) or ()):
                raise KernelError(f"{self._name}: {name} is {attributes[name]}, but every value must be at least 1")
        if any(int(value) < 0 for value in self._pads or ()):
            raise KernelError(f"{self._name}: pads is {self._pads}, but no value can be negative")

    def windows(self, extents: Sequence[int], kernel: Sequence[int]) -> PoolingWindows:
        """Return the windows over an input of these spatial extents."""
        return self._windows_of(tuple(extents), tuple(kernel))

    def _windows(self, extents: tuple[int, ...], kernel: tuple[int, ...]) -> PoolingWindows:
        rank = len(extents)
        sizes, strides, dilations = (
            self._per_axis(values, rank) for values in (kernel, self._strides, self._dilations)
        )
        if any(size < 1 for size in sizes):
            raise KernelError(f"{self._name}: a kernel of shape {list(sizes)} has no elements")
        reach = [dilation * (size - 1) + 1 for size, dilation in zip(sizes, dilations, strict=True)]
        begins, ends = self._padding(extents, reach, strides)
        counts = []
        for extent, begin, end, size, stride in zip(extents, begins, ends, reach, strides, strict=True):
            room = extent + begin + end - size
            # A negative quotient is rounded towards zero, as in ONNX's shape inference and onnxruntime.
            rounds_up = room < 0 or (self._ceil and self._auto_pad == "NOTSET")
            count = (-(-room // stride) if rounds_up else room // stride) + 1
            if count < 0 or (room < 0 and not self._may_exceed):
                raise KernelError(
                    f"{self._name}: a window of {size} elements is larger than the padded axis, which has "
                    f"{room + size} elements"
                )
            # With ceil_mode, a last window that would start in the padding at the end is omitted.
            counts.append(count - (self._ceil and (count - 1) * stride >= extent + begin))
        windows = PoolingWindows(sizes, strides, dilations, tuple(begins), tuple(ends), tuple(counts))
        walked = windows.within(extents) if self._may_exceed else windows
        if math.prod(walked.kernel) > MAX_TAPS:
            raise KernelError(f"{self._name}: a kernel of shape {list(sizes)} exceeds the limit of {MAX_TAPS} elements")
        return windows

    def _per_axis(self, values: Any, rank: int) -> tuple[int, ...]:
        numbers = (1,) * rank if values is None else tuple(int(value) for value in values)
        if len(numbers) != rank:
            raise KernelError(
                f"{self._name}: an attribute is {list(numbers)}, but it must have one value for each of the "
                f"{rank} spatial axes"
            )
        return numbers

    def _padding(
        self, extents: Sequence[int], reach: Sequence[int], strides: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        rank = len(extents)
        if self._auto_pad == "VALID" or (self._auto_pad == "NOTSET" and self._pads is None):
            return [0] * rank, [0] * rank
        if self._auto_pad == "NOTSET":
            pads = [int(pad) for pad in self._pads or ()]
            if len(pads) != 2 * rank:
                raise KernelError(
                    f"{self._name}: pads is {pads}, but it must have two values for each of the {rank} spatial axes"
                )
            return pads[:rank], pads[rank:]
        totals = [
            max((-(-extent // stride) - 1) * stride + size - extent, 0)
            for extent, size, stride in zip(extents, reach, strides, strict=True)
        ]
        smaller, larger = [total // 2 for total in totals], [total - total // 2 for total in totals]
        return (smaller, larger) if self._auto_pad == "SAME_UPPER" else (larger, smaller)


def added_windows(
    parts: Any, windows: Windows, begins: Sequence[int], sizes: Sequence[int], bias: Any = None,
    threads: Threads | None = None,
) -> Any:  # fmt: skip
    """Add windows [N, M, taps, counts ...] at their positions, and a bias [M], to [N, M, sizes ...] from `begins`."""
    if parts.dtype == np.float32 and parts.size and sizes:
        addend = None if bias is None else np.ascontiguousarray(bias, np.float32)
        return overlapped(np.ascontiguousarray(parts), windows, tuple(begins), tuple(sizes), addend, threads)
    axes = zip(windows.counts, windows.strides, windows.dilations, windows.kernel, begins, sizes, strict=True)
    room = [max((count - 1) * s + d * (size - 1) + 1, begin + kept) for count, s, d, size, begin, kept in axes]
    result = np.zeros((*parts.shape[:2], *room), parts.dtype)
    taps = PoolingWindows(windows.kernel, windows.strides, windows.dilations, (), (), windows.counts).taps()
    for index, tap in enumerate(taps):
        result[tap] += parts[:, :, index]
    result = result[(slice(None), slice(None), *map(slice, begins, map(add, begins, sizes)))]
    return np.ascontiguousarray(result) if bias is None else result + per_channel(bias, result.ndim)


WindowMaker: TypeAlias = Callable[[Any], tuple[PoolingWindows, PoolingWindows]]


def _windows(
    spec: NodeSpec, window_spec: WindowSpec, kernel: Any, shape: tuple[int, ...]
) -> tuple[PoolingWindows, PoolingWindows]:
    """Return the windows, and the same windows without taps that only cover padding."""
    windows = window_spec.windows(shape[2:], kernel)
    walked = windows.within(shape[2:])
    padded = (a + b + c for (a, c), b in zip(walked.widths(shape[2:]), shape[2:], strict=True))
    checked_shape(spec, (*shape[:2], *padded), 8)
    checked_shape(spec, (*shape[:2], *windows.counts), 8)
    return windows, walked


def window_maker(spec: NodeSpec) -> WindowMaker:
    """Return a function from an input to its windows, and to the same windows without taps that only cover padding."""
    if "kernel_shape" not in spec.attributes:
        raise KernelError(f"{spec.op_type} needs the attribute 'kernel_shape'")
    made = partial(_windows, spec, WindowSpec(spec, may_exceed=True), spec.attributes["kernel_shape"])
    found = lru_cache(maxsize=8)(made)
    return lambda x: found(x.shape)


@operator("MaxPool", make_windows=window_maker)
def max_pool(
    x: Any, *, storage_order: bool = False, make_windows: WindowMaker, spec: NodeSpec, threads: Threads | None = None
) -> Any:
    """The max of each window, and its index in the flat input. NaN counts as larger than every number."""
    _, windows = make_windows(x)
    if x.size == 0 or 0 in windows.counts:
        best = np.full((*x.shape[:2], *windows.counts), extreme(x.dtype, lowest=True), x.dtype)
        return best, np.zeros(best.shape, np.int64)
    if not any(spec.outputs[1:]):
        compiled = _compiled(x, windows, None, threads)
        if compiled is not None:
            return compiled
    padded = windows.padded(x, extreme(x.dtype, lowest=True))
    taps = list(windows.taps())
    best = padded[taps[0]].copy()
    if not any(spec.outputs[1:]):
        for tap in taps[1:]:
            np.maximum(best, padded[tap], out=best)
        return best
    # Padding is never selected, even if all elements of the window equal the padding value or are NaN.
    inside = windows.padded(np.ones((1, 1, *x.shape[2:]), bool), False)
    chosen = np.full(best.shape, -1, np.int64)
    for number, tap in enumerate(taps):
        value = padded[tap]
        # A comparison with NaN is false. The first NaN of a window is selected, and nothing replaces it.
        better = inside[tap] & ((chosen < 0) | (~(value <= best) & (best == best)))
        best[better], chosen[better] = value[better], number
    return best, _flat_indices(x, windows, chosen, storage_order)


def _compiled(x: Any, windows: PoolingWindows, counts: Any, threads: Threads | None) -> Any:
    """Return the max of each window, or the sum divided by counts; None if the kernel does not support the windows."""
    if x.dtype != np.float32 or x.ndim not in (3, 4) or {*windows.dilations} != {1} or 0 in (x.size, *windows.counts):
        return None
    ones = (1,) * (4 - x.ndim)
    kernel, strides, sizes = ((*ones, *values) for values in (windows.kernel, windows.strides, windows.counts))
    pads: Any = (*(0 for _ in ones), *windows.begins)
    if scratch_bytes(x.shape[-1], sizes[1], kernel[1], strides[1], pads[1]) > MAX_SCRATCH:
        return None
    planes = copying.operand(x).reshape(-1, *ones, *x.shape[2:])
    counts = None if counts is None else counts.reshape(sizes)
    found = pooled(planes, kernel, sizes, strides=strides, pads=pads, counts=counts, threads=threads)
    return found.reshape(*x.shape[:2], *windows.counts)


@operator("NhwcMaxPool", domain=MS, make_windows=window_maker)
def nhwc_max_pool(x: Any, *, make_windows: WindowMaker, spec: NodeSpec) -> Any:
    """The max of each window of [batch, ..., channels]."""
    return channels_last(max_pool(channels_first(x), make_windows=make_windows, spec=spec))


def channels_first(x: Any) -> Any:
    """Return [batch, ..., channels] as [batch, channels, ...]."""
    return np.ascontiguousarray(np.moveaxis(x, -1, 1))


def channels_last(x: Any) -> Any:
    """Return [batch, channels, ...] as [batch, ..., channels]."""
    return np.ascontiguousarray(np.moveaxis(x, 1, -1))


@shape_rule("NhwcMaxPool")
def nhwc_max_pool_types(types: NodeTypes) -> list[Type | None]:
    """[batch, ..., channels]; the sizes of the axes between them depend on the windows."""
    source, shape = types.source, types.shape(0)
    if not shape:
        return [TensorType(source.dtype)]
    return [TensorType(source.dtype, (shape[0], *(None for _ in shape[1:-1]), shape[-1]))]


@operator("MaxpoolWithMask", domain=MS, make_windows=window_maker)
def max_pool_with_mask(x: Any, mask: Any, *, make_windows: WindowMaker) -> Any:
    """The max of each window, in which each row ends at the first 0 of the mask, as in onnxruntime.

    With two or three spatial axes, the mask's first element never ends a row. A window without elements gives the
    lowest float32.
    """
    if x.ndim not in (3, 4, 5):
        raise KernelError(f"MaxpoolWithMask: x has shape {list(x.shape)}, expected 1 to 3 spatial axes")
    if mask.shape != (1, 1, *x.shape[2:]):
        expected = [1, 1, *x.shape[2:]]
        raise KernelError(f"MaxpoolWithMask: the mask has shape {list(mask.shape)}, expected {expected}")
    windows, _ = make_windows(x)
    best = np.full((*x.shape[:2], *windows.counts), np.finfo(x.dtype).min, x.dtype)
    if not best.size or not x.size:
        return best
    ends = mask == 0
    if x.ndim > 3:
        ends[(0,) * ends.ndim] = False
    padded, inside = windows.padded(x, 0), windows.padded(np.ones_like(ends), False)
    ends, alive = windows.padded(ends, False), np.ones(())
    for number, tap in enumerate(windows.taps()):
        if number % windows.kernel[-1] == 0:
            alive = np.ones((1, 1, *windows.counts), bool)
        alive = alive & ~ends[tap]
        np.copyto(best, padded[tap], where=alive & inside[tap] & (padded[tap] > best))
    return best


@shape_rule("MaxpoolWithMask")
def max_pool_with_mask_types(types: NodeTypes) -> list[Type | None]:
    """[batch, channels, ...]; the spatial sizes depend on the windows."""
    source, shape = types.source, types.shape(0)
    if not shape:
        return [TensorType(source.dtype)]
    return [TensorType(source.dtype, (*shape[:2], *(None for _ in shape[2:])))]


def _flat_indices(x: Any, windows: PoolingWindows, chosen: Any, by_column: bool) -> Any:
    """Return the flat input index of each window's selected tap."""
    offsets = np.indices(windows.kernel).reshape(len(windows.kernel), -1)
    extents = x.shape[2:]
    # Axes in order of increasing distance between neighbours in memory, and that distance for each axis.
    axes = range(len(extents)) if by_column else range(len(extents))[::-1]
    steps = accumulate([extents[axis] for axis in axes[:-1]], mul, initial=1)
    flat = np.zeros(chosen.shape, np.int64)
    for axis, step in zip(axes, steps, strict=True):
        starts = np.arange(windows.counts[axis]) * windows.strides[axis] - windows.begins[axis]
        starts = starts.reshape([-1 if i == axis else 1 for i in range(len(extents))])
        flat += (starts + offsets[axis][chosen] * windows.dilations[axis]) * step
    planes = np.arange(x.shape[0] * x.shape[1]).reshape(*x.shape[:2], *[1] * len(extents))
    return flat + planes * math.prod(extents)


def _counts_taps(spec: NodeSpec) -> bool:
    attributes, is_old = spec.attributes, spec.version < COUNTS_END_WITH_PADS
    return bool(is_old and attributes.get("count_include_pad", 0) and not attributes.get("ceil_mode", 0))


@operator("AveragePool", make_windows=window_maker, counts_taps=_counts_taps)
def average_pool(
    x: Any, *, count_include_pad: bool = False, counts_taps: bool = False, make_windows: WindowMaker,
    threads: Threads | None = None,
) -> Any:  # fmt: skip
    """The mean of each window; pads count only if `count_include_pad` is true. `counts_taps`: see `mean_counts`."""
    windows, walked = make_windows(x)
    dtype = np.float32 if x.dtype == np.float32 else np.float64
    counts = mean_counts(x.shape[2:], windows, count_include_pad, dtype, counts_taps=counts_taps)
    compiled = _compiled(x, walked, fixed_address(counts), threads)
    if compiled is not None:
        return compiled
    total = _sum_of_taps(widened(x), walked)
    return (total / counts.astype(total.dtype, copy=False)).astype(x.dtype, copy=False)


def _sum_of_taps(x: Any, windows: PoolingWindows) -> Any:
    if x.size == 0 or 0 in windows.counts:
        return np.zeros((*x.shape[:2], *windows.counts), x.dtype)
    padded, taps = windows.padded(x, 0), windows.taps()
    total = padded[next(taps)].copy()
    for tap in taps:
        total += padded[tap]
    return total


@lru_cache(maxsize=64)
def mean_counts(
    extents: tuple[int, ...], windows: PoolingWindows, include_pads: bool, dtype: Any, *, counts_taps: bool = False
) -> Any:
    """Return the number of elements in each window's mean; pads count if requested, elements after the pads never.

    With `counts_taps`, the number is that of the kernel. The result is a read-only array, which later calls return
    again.
    """
    total = np.ones((1,) * len(extents))
    for axis, extent in enumerate(extents):
        dilation, begin = windows.dilations[axis], windows.begins[axis]
        first, end = (-begin, extent + windows.ends[axis]) if include_pads else (0, extent)
        starts = np.arange(windows.counts[axis]) * windows.strides[axis] - begin
        lowest = np.maximum(-((starts - first) // dilation), 0)
        highest = np.minimum((end - 1 - starts) // dilation, windows.kernel[axis] - 1)
        inside = np.maximum(highest - lowest + 1, windows.kernel[axis] if counts_taps else 0)
        total = total * inside.reshape([-1 if i == axis else 1 for i in range(len(extents))])
    counts = np.maximum(total, 1).astype(dtype)
    counts.flags.writeable = False
    return counts


@operator("LpPool", since_version=2, make_windows=window_maker)
def lp_pool(x: Any, *, p: Positive = 2, make_windows: WindowMaker) -> Any:
    """The p-norm of each window."""
    powers = _sum_of_taps(np.abs(widened(x)) ** p, make_windows(x)[1])
    return (powers ** (1.0 / p)).astype(x.dtype, copy=False)


def _global(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    def pooled(x: Any, *, threads: Threads | None) -> Any:
        if threads is not None and x.ndim > 2 and is_compiled(x):
            return over_last_axes(name, x, 2, keepdims=True, threads=threads)
        result = function(widened(x), axis=tuple(range(2, x.ndim)), keepdims=True)
        return result.astype(x.dtype, copy=False)

    return pooled


operator("GlobalAveragePool", threads=session_threads)(_global(mean, "ReduceMean"))
operator("GlobalMaxPool", threads=session_threads)(_global(np.max, "ReduceMax"))


@operator("GlobalLpPool", since_version=2)
def global_lp_pool(x: Any, *, p: Positive = 2) -> Any:
    """The p-norm over all spatial axes."""
    powers = np.sum(np.abs(widened(x)) ** p, axis=tuple(range(2, x.ndim)), keepdims=True)
    return (powers ** (1.0 / p)).astype(x.dtype, copy=False)


@operator("MaxRoiPool")
def max_roi_pool(
    x: Any, regions: Any, *, pooled_shape: tuple[int, ...], spatial_scale: float = 1.0, spec: NodeSpec
) -> Any:
    """The max of each bin of each region (Girshick 2015); empty bins give 0."""
    rows, columns = pooled_shape
    result = np.zeros(checked_shape(spec, (len(regions), x.shape[1], rows, columns), 8), x.dtype)
    for number, region in enumerate(regions):
        image = int(region[0])
        if not 0 <= image < len(x):
            raise IndexError(f"MaxRoiPool: region {number} refers to image {image}, but the input has {len(x)} images")
        left, top, right, bottom = (int(np.floor(v * spatial_scale + 0.5)) for v in region[1:5].tolist())
        spans = (_bins(top, bottom, rows, x.shape[2]), _bins(left, right, columns, x.shape[3]))
        for i, (y0, y1) in enumerate(spans[0]):
            for j, (x0, x1) in enumerate(spans[1]):
                if y1 > y0 and x1 > x0:
                    result[number, :, i, j] = x[image, :, y0:y1, x0:x1].max(axis=(1, 2))
    return result


def _bins(first: int, last: int, count: int, extent: int) -> list[tuple[int, int]]:
    """Return the ranges of the bins along one axis, clipped to the image."""
    size = max(last - first + 1, 1) / count
    edges = ((int(np.floor(i * size)) + first, int(np.ceil((i + 1) * size)) + first) for i in range(count))
    return [(min(max(begin, 0), extent), min(max(end, 0), extent)) for begin, end in edges]
