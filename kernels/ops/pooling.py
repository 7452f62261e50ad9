"""Pools over sliding windows, tap by tap, and over all spatial axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np

from ..registry import Kernel, KernelError, NodeSpec, register
from .support import checked_shape, from_function, widened
from .windows import Windows, WindowSpec


def _windows(spec: NodeSpec, window_spec: WindowSpec, x: Any) -> Windows:
    windows = window_spec.windows(x.shape[2:], spec.attributes["kernel_shape"])
    checked_shape(
        spec, (*x.shape[:2], *(a + b + c for a, b, c in zip(windows.begins, x.shape[2:], windows.ends, strict=True))), 8
    )
    return windows


def _lowest(dtype: Any) -> Any:
    return np.iinfo(dtype).min if dtype.kind in "iu" else dtype.type(-np.inf)


@register("MaxPool")
def max_pool(spec: NodeSpec) -> Kernel:
    """The largest of each window, and where it was in the flat input."""
    window_spec, by_column = WindowSpec(spec), bool(spec.attributes.get("storage_order", 0))
    wants_indices = len(spec.outputs) > 1 and spec.outputs[1] != ""

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x = inputs[0]
        windows = _windows(spec, window_spec, x)
        padded = windows.padded(x, _lowest(x.dtype))
        taps = list(windows.taps())
        best = padded[taps[0]].copy()
        if not wants_indices:
            for tap in taps[1:]:
                np.maximum(best, padded[tap], out=best)
            return (best,)
        chosen = np.zeros(best.shape, np.int64)
        for number, tap in enumerate(taps):
            value = padded[tap]
            # A place outside the input is never chosen, even where everything inside is as low.
            better = (value > best) | ((number == 0) & np.ones_like(value, bool))
            best[better], chosen[better] = value[better], number
        return best, _flat_indices(x, windows, chosen, by_column)

    return kernel


def _flat_indices(x: Any, windows: Windows, chosen: Any, by_column: bool) -> Any:
    """Indices into the flat input of the tap chosen per window."""
    offsets = np.array(list(product(*(range(size) for size in windows.kernel))), np.int64).reshape(
        -1, len(windows.kernel)
    )
    extents = x.shape[2:]
    steps = [1] * len(extents)
    order = range(len(extents) - 1) if by_column else range(len(extents) - 1, 0, -1)
    for axis in order:
        following = axis + 1 if by_column else axis - 1
        steps[following] = steps[axis] * extents[axis]
    flat = np.zeros(chosen.shape, np.int64)
    for axis, step in enumerate(steps):
        starts = np.arange(windows.counts[axis]) * windows.strides[axis] - windows.begins[axis]
        starts = starts.reshape([-1 if i == axis else 1 for i in range(len(extents))])
        flat += (starts + offsets[chosen, axis] * windows.dilations[axis]) * step
    planes = np.arange(x.shape[0] * x.shape[1]).reshape(*x.shape[:2], *[1] * len(extents))
    return flat + planes * math.prod(extents)


@register("AveragePool")
def average_pool(spec: NodeSpec) -> Kernel:
    """The mean of each window; pads count only where `count_include_pad` says so."""
    window_spec, include_pads = WindowSpec(spec), bool(spec.attributes.get("count_include_pad", 0))

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x = inputs[0]
        windows = _windows(spec, window_spec, x)
        total = _sum_of_taps(windows.padded(widened(x), 0), windows)
        counts = _counts(x.shape[2:], windows, include_pads)
        return ((total / counts.astype(total.dtype)).astype(x.dtype, copy=False),)

    return kernel


def _sum_of_taps(padded: Any, windows: Windows) -> Any:
    taps = windows.taps()
    total = padded[next(taps)].copy()
    for tap in taps:
        total += padded[tap]
    return total


def _counts(extents: Sequence[int], windows: Windows, include_pads: bool) -> Any:
    """How many elements each window averages: pads count or not, what lies beyond them never does."""
    ones = np.ones((1, 1, *extents))
    if include_pads:
        pads = [(0, 0), (0, 0), *zip(windows.begins, windows.ends, strict=True)]
        ones = np.pad(ones, pads, constant_values=1)
        begins = (0,) * len(extents)
        windows = Windows(windows.kernel, windows.strides, windows.dilations, begins, begins, windows.counts)
    return np.maximum(_sum_of_taps(windows.padded(ones, 0), windows), 1)


@register("LpPool", since_version=2)
def lp_pool(spec: NodeSpec) -> Kernel:
    """The p-norm of each window."""
    window_spec, p = WindowSpec(spec), int(spec.attributes.get("p", 2))
    if p < 1:
        raise KernelError(f"LpPool: p is {p}, expected at least 1")

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x = inputs[0]
        windows = _windows(spec, window_spec, x)
        powers = np.abs(widened(x)) ** p
        return ((_sum_of_taps(windows.padded(powers, 0), windows) ** (1.0 / p)).astype(x.dtype, copy=False),)

    return kernel


def _global(function: Callable[..., Any]) -> Callable[[Any], Any]:
    def pooled(x: Any) -> Any:
        result = function(widened(x), axis=tuple(range(2, x.ndim)), keepdims=True)
        return result.astype(x.dtype, copy=False)

    return pooled


register("GlobalAveragePool")(from_function(_global(np.mean)))
register("GlobalMaxPool")(from_function(_global(np.max)))


@register("GlobalLpPool", since_version=2)
def global_lp_pool(spec: NodeSpec) -> Kernel:
    """The p-norm over all spatial axes."""
    p = int(spec.attributes.get("p", 2))
    if p < 1:
        raise KernelError(f"GlobalLpPool: p is {p}, expected at least 1")

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x = inputs[0]
        powers = np.sum(np.abs(widened(x)) ** p, axis=tuple(range(2, x.ndim)), keepdims=True)
        return ((powers ** (1.0 / p)).astype(x.dtype, copy=False),)

    return kernel


@register("MaxRoiPool")
def max_roi_pool(spec: NodeSpec) -> Kernel:
    """The largest element of each bin of each region (Girshick 2015); empty bins give 0."""
    rows, columns = (int(size) for size in spec.attributes["pooled_shape"])
    scale = float(spec.attributes.get("spatial_scale", 1.0))

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x, regions = inputs
        result = np.zeros(checked_shape(spec, (len(regions), x.shape[1], rows, columns), 8), x.dtype)
        for number, region in enumerate(regions):
            image = int(region[0])
            if not 0 <= image < len(x):
                raise IndexError(f"MaxRoiPool: region {number} is of image {image}, there are {len(x)}")
            left, top, right, bottom = (int(np.floor(v * scale + 0.5)) for v in region[1:5].tolist())
            spans = (_bins(top, bottom, rows, x.shape[2]), _bins(left, right, columns, x.shape[3]))
            for i, (y0, y1) in enumerate(spans[0]):
                for j, (x0, x1) in enumerate(spans[1]):
                    if y1 > y0 and x1 > x0:
                        result[number, :, i, j] = x[image, :, y0:y1, x0:x1].max(axis=(1, 2))
        return (result,)

    return kernel


def _bins(first: int, last: int, count: int, extent: int) -> list[tuple[int, int]]:
    """Ranges of the bins along one axis, cut off at the edges."""
    size = max(last - first + 1, 1) / count
    return [
        (
            min(max(int(np.floor(i * size)) + first, 0), extent),
            min(max(int(np.ceil((i + 1) * size)) + first, 0), extent),
        )
        for i in range(count)
    ]
