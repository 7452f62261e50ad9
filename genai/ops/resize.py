"""Resize and GridSample: interpolation of an image at coordinates between its pixels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import product
from typing import Any, Literal

import numpy as np

from genai.kernels.cpu.arrays.interpolation import Interpolation
from genai.kernels.cpu.arrays.selection import NearestElements

from ..onnx.node import MS
from ..onnx.types import TensorType, Type
from .registry import KernelError, NodeSpec, operator, register
from .shape_rules import NodeTypes, shape_rule
from .support import checked_axis, checked_indices, checked_shape, optional, session_threads, widened


@dataclass(frozen=True)
class _Axis:
    """An axis: sizes before and after resizing, scale, and the region of interest of tf_crop_and_resize.

    Attributes:
        ratio: the scale if it is a ratio of sizes, which is exact; None if the node has the input `scales`.
    """

    before: int
    after: int
    scale: float
    ratio: Fraction | None = None
    start: float = 0.0
    end: float = 1.0


@register("Upsample", since_version=7)
@register("Resize", since_version=10)
class Resize:
    """The kernel for Resize and Upsample: nearest, linear or cubic interpolation along any axes."""

    def __init__(self, spec: NodeSpec) -> None:
        a = spec.attributes
        self.spec = spec
        self.mode = str(a.get("mode", "nearest"))
        old = spec.op_type == "Upsample" or spec.version < 11
        self.where = str(a.get("coordinate_transformation_mode", "asymmetric" if old else "half_pixel"))
        self.nearest = str(a.get("nearest_mode", "simple" if old else "round_prefer_floor"))
        self.cubic = float(a.get("cubic_coeff_a", -0.75))
        # Most runs have the sizes of an earlier run.
        self._layout_of = lru_cache(maxsize=8)(self._layout)
        self.exclude_outside = bool(a.get("exclude_outside", 0))
        self.extrapolation = float(a.get("extrapolation_value", 0.0))
        self.antialias = bool(a.get("antialias", 0)) and self.mode != "nearest"
        self.policy = str(a.get("keep_aspect_ratio_policy", "stretch"))
        self.axes = a.get("axes")
        self.scales_at = 1 if old else 2
        self.threads = session_threads(spec)
        modes = ("nearest", "linear", "bilinear", "cubic")
        for name, value, known in (
            ("mode", self.mode, modes),
            ("nearest_mode", self.nearest, _ROUNDINGS),
            ("coordinate_transformation_mode", self.where, _COORDINATES),
        ):
            if value not in known:
                raise KernelError(f"{spec.op_type}: {name} {value!r} is unknown")

    def __call__(self, context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x = inputs[0]
        shape, taps, nearest, steps = self._layout_of(
            x.shape, *[None if value is None else tuple(value.reshape(-1).tolist()) for value in inputs[1:4]]
        )
        if shape == x.shape and self.where != "tf_crop_and_resize":
            return (x,)  # for any scales: onnxruntime returns the input if the shape does not change
        if 0 in shape:
            return (np.zeros(shape, x.dtype),)
        if nearest is not None and x.dtype.itemsize == 4 and x.dtype.kind in "fiu":
            planes = np.ascontiguousarray(x).reshape(-1, *x.shape[-2:])
            return (nearest(planes, self.threads).reshape(shape),)
        is_integer = x.dtype.kind in "iu"
        if is_integer and self.mode != "cubic" and not self.antialias:
            result = _corners(x, {axis: axis_taps for axis, (axis_taps, _) in taps.items()})
        else:
            result = x.astype(np.float64) if is_integer else widened(x)
            by_numpy = list(taps.items())
            if steps and result.dtype == np.float32:
                for step in steps:
                    result = step(np.ascontiguousarray(result).reshape(step.given), self.threads)
                result, by_numpy = result.reshape(shape), []
            # Images are resized row by row, so the last axis comes first; antialiased integers are rounded after each.
            for axis, (axis_taps, _) in reversed(by_numpy):
                result = _combined(result, axis_taps, axis)
                if is_integer:
                    result = self._whole(result, x.dtype)
        for axis, (_, beyond) in taps.items():
            if beyond.any():
                is_beyond = beyond.reshape([-1 if i == axis else 1 for i in range(x.ndim)])
                result = np.where(is_beyond, result.dtype.type(self.extrapolation), result)
        if is_integer:
            result = np.trunc(result)
            if x.dtype.itemsize < 8:  # cubic curves overshoot
                result = np.clip(result, np.iinfo(x.dtype).min, np.iinfo(x.dtype).max)
        return (np.ascontiguousarray(result).astype(x.dtype, copy=False),)

    def _whole(self, values: Any, dtype: Any) -> Any:
        """Convert to integers as in onnxruntime: round if antialiased, else remove rounding errors for truncation."""
        exact, info = np.round(values, 9 if self.antialias else 4), np.iinfo(dtype)
        return np.clip(np.floor(exact + 0.5), info.min, info.max) if self.antialias else exact

    def _layout(
        self, before: tuple[int, ...], *inputs: tuple[Any, ...] | None
    ) -> tuple[tuple[int, ...], dict[int, Any], NearestElements | None, list[Interpolation]]:
        """Return the shape of the result, the taps of each axis that changes, and kernels for numbers of 4 bytes.

        The kernel that selects elements is None if other axes than the last two change, or if elements are not only
        selected. The kernels that interpolate run one after the other; there are none if elements are selected.

        Args:
            inputs: the numbers in each of the node's inputs after the first.
        """
        plans = self._plans(before, inputs)
        shape = list(before)
        for axis, plan in plans.items():
            shape[axis] = plan.after
        after = checked_shape(self.spec, shape, 4)
        if 0 in after or (after == before and self.where != "tf_crop_and_resize"):
            return after, {}, None, []
        taps = {
            axis: self._taps(plan)
            for axis, plan in plans.items()
            if plan.before != plan.after
            or (plan.scale != 1.0 and not self.antialias)  # onnxruntime's filter skips axes that keep their size
            or self.where == "tf_crop_and_resize"
        }
        first = len(before) - 2
        is_selection = self.mode == "nearest" and self.where != "tf_crop_and_resize"
        if self.threads is None or not is_selection or first < 0 or min(taps) < first:
            interpolates = self.threads is not None and self.mode != "nearest"
            return after, taps, None, _interpolations(before, taps) if interpolates else []
        rows, columns = (
            taps[axis][0][0][0] if axis in taps else np.arange(before[axis]) for axis in (first, first + 1)
        )
        images = math.prod(before[:first]), before[first], before[first + 1]
        return after, taps, NearestElements(images, rows, columns), []

    def _plans(self, before: tuple[int, ...], inputs: Sequence[Any]) -> dict[int, _Axis]:
        attribute = self.spec.attributes.get("scales")
        scales = attribute if attribute is not None else optional(inputs, self.scales_at - 1)
        sizes, roi = optional(inputs, 2), optional(inputs, 0) if self.scales_at == 2 else None
        axes = [checked_axis(int(a), len(before)) for a in (range(len(before)) if self.axes is None else self.axes)]
        scales = [] if scales is None else np.asarray(scales, np.float64).reshape(-1).tolist()
        ratios: list[Fraction | None] = [None] * len(axes)
        if not all(map(math.isfinite, scales)):
            raise KernelError(f"{self.spec.op_type}: the scales {scales} are not finite")
        if scales:
            afters = [_scaled(before[a], s) for a, s in zip(axes, scales, strict=False)]
        elif sizes is not None:
            if any(before[axis] == 0 for axis in axes):
                raise KernelError(f"{self.spec.op_type}: an axis of size 0 cannot be resized")
            afters, known = _by_sizes([before[axis] for axis in axes], [int(size) for size in sizes], self.policy)
            scales, ratios = [float(np.float32(ratio)) for ratio in known], [*known]
        else:
            raise KernelError(f"{self.spec.op_type}: neither scales nor sizes are given")
        if len(afters) != len(axes) or any(after < 0 for after in afters) or any(s <= 0 for s in scales):
            raise KernelError(
                f"{self.spec.op_type}: the scales {scales} or sizes {afters} are not valid for the axes {axes}"
            )
        regions = [(0.0, 1.0)] * len(axes)
        if self.where == "tf_crop_and_resize" and roi is not None and len(roi) == 2 * len(axes):
            regions = [(float(roi[i]), float(roi[i + len(axes)])) for i in range(len(axes))]
        return {
            axis: _Axis(before[axis], after, scale, ratio, *region)
            for axis, after, scale, ratio, region in zip(axes, afters, scales, ratios, regions, strict=True)
        }

    def _taps(self, plan: _Axis) -> tuple[list[tuple[Any, Any]], Any]:
        """Return (elements, weights) pairs to sum for each position, and a mask of positions outside the input.

        The weights of nearest elements are None. Only tf_crop_and_resize has positions outside the input.
        """
        # float32, the type of the scales, ensures that coordinates that should be whole numbers are whole numbers.
        numbers = np.arange(plan.after, dtype=np.float64 if self.antialias else np.float32)
        coordinates = _COORDINATES[self.where](numbers, plan).astype(np.float64)
        beyond = np.zeros(plan.after, bool)
        if self.where == "tf_crop_and_resize":
            beyond = (coordinates < 0) | (coordinates > plan.before - 1)
        if self.mode == "nearest" and plan.ratio is not None and self.where in _EXACT and self.nearest in _WHOLE:
            numerators, denominator = _EXACT[self.where](np.arange(plan.after), plan, plan.ratio)
            index = _WHOLE[self.nearest](numerators, denominator)
            return [(np.clip(index, 0, plan.before - 1), None)], beyond
        if self.mode == "nearest":
            index = _ROUNDINGS[self.nearest](coordinates, plan.scale)
            return [(np.clip(index, 0, plan.before - 1).astype(np.int64), None)], beyond
        if self.mode != "cubic" and not self.antialias:
            coordinates = np.clip(coordinates, 0, max(plan.before - 1, 0))
        stretch = max(1.0, 1.0 / plan.scale) if self.antialias else 1.0
        reach = (2 if self.mode == "cubic" else 1) * stretch
        first = np.floor(coordinates - reach).astype(np.int64) + (0 if self.antialias else 1)
        offsets = np.arange(int(np.ceil(2 * reach)) + (2 if self.antialias else 0))
        index = first[:, None] + offsets
        distance = np.abs(coordinates[:, None] - index) / stretch
        weights = cubic(distance, self.cubic) if self.mode == "cubic" else np.maximum(1 - distance, 0)
        if self.exclude_outside:
            weights = np.where((index < 0) | (index >= plan.before), 0, weights)
        total = weights.sum(axis=1, keepdims=True)
        if self.exclude_outside or self.antialias:
            weights = weights / np.where(total == 0, 1, total)
        index = np.clip(index, 0, plan.before - 1)
        used = [k for k in range(len(offsets)) if np.any(weights[:, k])]
        return [(index[:, k], weights[:, k]) for k in used], beyond


def _scaled(extent: int, scale: float) -> int:
    """Return floor(extent * scale) in float32, as onnxruntime does: 3 elements scaled by 5/3 become 5."""
    return int(np.float32(extent) * np.float32(scale))


def _by_sizes(extents: Sequence[int], sizes: Sequence[Any], policy: str) -> tuple[list[int], list[Fraction]]:
    """Return the resulting sizes and scales, given the input `sizes`."""
    ratios = [Fraction(size, extent) for extent, size in zip(extents, sizes, strict=True)]
    if policy == "stretch" or not ratios:
        return list(sizes), ratios
    ratio = min(ratios) if policy == "not_larger" else max(ratios)
    return [math.floor(extent * ratio + Fraction(1, 2)) for extent in extents], [ratio] * len(ratios)


@shape_rule("Resize", "Upsample", domain="")
def resized_types(types: NodeTypes) -> list[Type | None]:
    """The input with some axes scaled or resized to given sizes."""
    source, shape, node = types.source, types.shape(0), types.node
    if not shape:
        return [TensorType(source.dtype)]
    old = node.op_type == "Upsample" or len(node.inputs) == 2
    attribute, axes = node.attribute("scales", None), node.attribute("axes", None) or range(len(shape))
    scales, sizes = types.constant(1 if old else 2) if attribute is None else attribute, types.value(3)
    positions = [int(axis) % len(shape) for axis in axes]
    before: list[Any] = [shape[axis] for axis in positions]
    after: list[Any] = [None] * len(positions)
    factors = np.zeros(0) if scales is None else np.asarray(scales)
    if factors.shape == (len(positions),) and factors.dtype.kind == "f":
        known = [isinstance(dim, int) and np.isfinite(factor) for dim, factor in zip(before, factors, strict=True)]
        after = [_scaled(before[i], factors[i]) if known[i] else None for i in range(len(positions))]
    elif sizes is not None and len(sizes.dims) == len(positions):
        policy = str(node.attribute("keep_aspect_ratio_policy", "stretch"))
        if policy == "stretch":
            after = list(sizes.dims)
        elif all(isinstance(dim, int) and dim for dim in (*before, *sizes.dims)):
            after, _ = _by_sizes(before, sizes.dims, policy)
    sizes_of_axes = dict(zip(positions, after, strict=True))
    return [TensorType(source.dtype, tuple(sizes_of_axes.get(axis, dim) for axis, dim in enumerate(shape)))]


def _interpolations(before: tuple[int, ...], taps: Mapping[int, Any]) -> list[Interpolation]:
    """Return the kernels that interpolate from the last axis to the first, two neighbouring axes at a time."""
    shape, left, steps = list(before), sorted(taps), []
    weighted = {axis: [(index, weights.astype(np.float32)) for index, weights in taps[axis][0]] for axis in taps}
    while left:
        last = left.pop()
        first = left.pop() if left and left[-1] == last - 1 else None
        start = last if first is None else first
        rows = [(np.zeros(1, np.int64), np.ones(1, np.float32))] if first is None else weighted[first]
        given = (
            math.prod(shape[:start]),
            1 if first is None else shape[first],
            shape[last],
            math.prod(shape[last + 1 :]),
        )
        steps.append(Interpolation(given, rows, weighted[last]))
        for axis in (start, last):
            shape[axis] = len(weighted[axis][0][0])
    return steps


def _combined(x: Any, taps: list[tuple[Any, Any]], axis: int) -> Any:
    """Return the sum of elements along an axis times their weights; elements without a tap, even inf, are ignored."""
    total: Any = None
    for index, weights in taps:
        if weights is None:
            return _elements(x, index, axis)
        part = np.take(x, index, axis=axis)
        factors = weights.astype(x.dtype).reshape([-1 if i == axis else 1 for i in range(x.ndim)])
        part *= factors
        total = part if total is None else np.add(total, part, out=total)
    return total


def _elements(x: Any, index: Any, axis: int) -> Any:
    """Return the elements at indices along an axis. If all are repeated equally often, no index is read."""
    size = x.shape[axis]
    times = len(index) // max(size, 1)
    if times > 1 and np.array_equal(index, np.repeat(np.arange(size), times)):
        return np.repeat(x, times, axis=axis)
    return np.take(x, index, axis=axis)


def _corners(x: Any, taps: Mapping[int, list[tuple[Any, Any]]]) -> Any:
    """Interpolate integers along all axes in one step in float32, whose precision affects the truncated result."""
    total: Any = None
    for corner in product(*taps.values()):
        part, factors = x, np.ones([1] * x.ndim, np.float32)
        for axis, (index, weights) in zip(taps, corner, strict=True):
            part = np.take(part, index, axis=axis)
            if weights is not None:
                shape = [-1 if i == axis else 1 for i in range(x.ndim)]
                factors = factors * weights.astype(np.float32).reshape(shape)
        part = part if corner[0][1] is None else part * factors
        total = part if total is None else total + part
    return total


def cubic(distance: Any, a: float = -0.75) -> Any:
    """Return Keys' cubic convolution kernel (1981) at a distance."""
    near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0))


def _align_corners(x: Any, plan: _Axis) -> Any:
    # The length is the exact length of the scaled axis, before it is rounded to a whole number of elements.
    length = float(np.float32(plan.before) * np.float32(plan.scale))
    return x * (plan.before - 1) / (length - 1) if length != 1 else np.zeros_like(x)


def _half_pixel(x: Any, plan: _Axis) -> Any:
    return (x + 0.5) / plan.scale - 0.5


def _half_pixel_symmetric(x: Any, plan: _Axis) -> Any:
    adjustment = plan.after / (plan.scale * plan.before)
    centre = plan.before / 2
    return centre * (1 - adjustment) + (x + 0.5) / plan.scale - 0.5


def _crop(x: Any, plan: _Axis) -> Any:
    last = plan.before - 1
    if plan.after <= 1:
        return 0.5 * (plan.start + plan.end) * last + np.zeros_like(x)
    return plan.start * last + x * (plan.end - plan.start) * last / (plan.after - 1)


_COORDINATES: dict[str, Callable[[Any, _Axis], Any]] = {
    "align_corners": _align_corners,
    "asymmetric": lambda x, plan: x / plan.scale,
    "half_pixel": _half_pixel,
    "half_pixel_symmetric": _half_pixel_symmetric,
    "pytorch_half_pixel": lambda x, plan: _half_pixel(x, plan) if plan.after > 1 else np.zeros_like(x),
    "tf_crop_and_resize": _crop,
    "tf_half_pixel_for_nn": lambda x, plan: (x + 0.5) / plan.scale,
}
_ROUNDINGS: dict[str, Callable[[Any, float], Any]] = {
    "round_prefer_floor": lambda x, scale: np.ceil(x - 0.5),
    "round_prefer_ceil": lambda x, scale: np.floor(x + 0.5),
    "floor": lambda x, scale: np.floor(x),
    "ceil": lambda x, scale: np.ceil(x),
    # Before version 11, Resize had no nearest_mode; this is onnxruntime's rounding.
    "simple": lambda x, scale: np.ceil(x) if scale < 1 else np.floor(x),
}


# For nearest elements, the coordinates of positions k are computed as fractions: a float32 scale would decide ties.
_EXACT: dict[str, Callable[[Any, _Axis, Fraction], tuple[Any, int]]] = {
    "align_corners": lambda k, plan, ratio: (
        k * (plan.before - 1) * ratio.denominator,
        max(plan.before * ratio.numerator - ratio.denominator, 1),
    ),
    "asymmetric": lambda k, plan, ratio: (k * ratio.denominator, ratio.numerator),
    "half_pixel": lambda k, plan, ratio: _exact_half_pixel(k, ratio),
    "half_pixel_symmetric": lambda k, plan, ratio: (
        (2 * k + 1 - plan.after) * ratio.denominator + (plan.before - 1) * ratio.numerator,
        2 * ratio.numerator,
    ),
    "pytorch_half_pixel": lambda k, plan, ratio: _exact_half_pixel(k, ratio) if plan.after > 1 else (k, 1),
    "tf_half_pixel_for_nn": lambda k, plan, ratio: ((2 * k + 1) * ratio.denominator, 2 * ratio.numerator),
}
_WHOLE: dict[str, Callable[[Any, int], Any]] = {
    "round_prefer_floor": lambda n, d: -((d - 2 * n) // (2 * d)),
    "round_prefer_ceil": lambda n, d: (2 * n + d) // (2 * d),
    "floor": lambda n, d: n // d,
    "ceil": lambda n, d: -(-n // d),
}


def _exact_half_pixel(k: Any, ratio: Fraction) -> tuple[Any, int]:
    return (2 * k + 1) * ratio.denominator - ratio.numerator, 2 * ratio.numerator


@operator("CropAndResize", domain=MS)
def crop_and_resize(
    x: Any, regions: Any, images: Any, crop_size: Any, *, mode: str = "bilinear", extrapolation_value: float = 0.0,
    spec: NodeSpec,
) -> Any:  # fmt: skip
    """Resize regions [y1, x1, y2, x2] of images [batch, channels, height, width] to one size; the corners are aligned.

    Points outside the image, and points that are NaN, have the extrapolation value.
    """
    sizes = np.asarray(crop_size).reshape(-1).tolist()
    if x.ndim != 4 or regions.shape != (len(images), 4) or images.ndim != 1 or len(sizes) != 2 or min(sizes) < 1:
        raise KernelError(
            f"CropAndResize: images {list(x.shape)}, regions {list(regions.shape)}, {list(images.shape)} indices and "
            f"the size {sizes}; expected 4 axes, [N, 4], [N] and two sizes of at least 1"
        )
    if mode.lower() not in ("bilinear", "nearest"):
        raise KernelError(f"CropAndResize: mode is {mode!r}, expected one of bilinear, nearest")
    checked_indices("CropAndResize: indices of images", images, len(x))
    shape = checked_shape(spec, (len(regions), x.shape[1], *sizes), 4 * 8)
    if not all(x.shape[2:]):
        return np.full(shape, extrapolation_value, x.dtype)
    rows, columns = (_points(regions[:, axis], regions[:, axis + 2], x.shape[2 + axis], sizes[axis]) for axis in (0, 1))
    result = np.empty(shape, x.dtype)
    for number, image in enumerate(images.tolist()):
        y, inside_y, x_, inside_x = rows[0][number], rows[1][number], columns[0][number], columns[1][number]
        if mode.lower() == "nearest":
            crop = x[image][:, _half_up(y)[:, None], _half_up(x_)]
        else:
            crop = _between(_between(x[image], y, 1), x_, 2)
        result[number] = np.where(inside_y[:, None] & inside_x, crop, x.dtype.type(extrapolation_value))
    return result


def _points(begins: Any, ends: Any, extent: int, count: int) -> tuple[Any, Any]:
    """Return [regions, count] coordinates along one axis, and whether they lie in the image; others are moved to 0."""
    last = np.float32(extent - 1)
    if count == 1:
        points = (np.float32(0.5) * (begins + ends) * last)[:, None]
    else:
        steps = (ends - begins) * last / np.float32(count - 1)
        points = (begins * last)[:, None] + np.arange(count, dtype=np.float32) * steps[:, None]
    inside = (points >= 0) & (points <= last)
    return np.where(inside, points, 0), inside


def _half_up(points: Any) -> Any:
    return np.floor(points + np.float32(0.5)).astype(np.int64)


def _between(x: Any, points: Any, axis: int) -> Any:
    """Interpolate x along an axis at coordinates."""
    low = np.floor(points)
    shape = [-1 if i == axis else 1 for i in range(x.ndim)]
    first, second = (np.take(x, edge.astype(np.int64), axis=axis) for edge in (low, np.ceil(points)))
    return first + (second - first) * (points - low).reshape(shape)


@shape_rule("CropAndResize")
def crop_and_resize_types(types: NodeTypes) -> list[Type | None]:
    """[regions, channels, height, width]."""
    source, shape, regions, sizes = types.source, types.shape(0, rank=4), types.shape(1, rank=2), types.value(3)
    size: Sequence[Any] = sizes.dims if sizes is not None and len(sizes.dims) == 2 else (None, None)
    return [TensorType(source.dtype, (regions[0] if regions else None, shape[1] if shape else None, *size))]


@shape_rule("GridSample")
def grid_sample_types(types: NodeTypes) -> list[Type | None]:
    """[batch, channels] of the image, and the grid's sizes."""
    source, shape, grid = types.source, types.shape(0), types.shape(1)
    if not shape or not grid or len(shape) != len(grid):
        return [TensorType(source.dtype)]
    return [TensorType(source.dtype, (*shape[:2], *grid[1:-1]))]


@operator("GridSample", domain=MS)
@operator("GridSample", since_version=16)
def grid_sample(
    x: Any, grid: Any, *, mode: Literal["linear", "bilinear", "nearest", "cubic", "bicubic"] = "linear",
    padding_mode: Literal["zeros", "border", "reflection"] = "zeros", align_corners: bool = False, spec: NodeSpec,
) -> Any:  # fmt: skip
    """Sample (nearest, linear or cubic) at coordinates from -1 to 1 per axis; the last axis comes first in the grid."""
    axes = x.ndim - 2
    if axes < 1 or grid.ndim != x.ndim or grid.shape[-1] != axes or len(grid) != len(x):
        raise KernelError(
            f"GridSample: a grid of shape {list(grid.shape)} does not match an input of shape {list(x.shape)}"
        )
    shape = checked_shape(spec, (*x.shape[:2], *grid.shape[1:-1]), 8)
    if not all(x.shape[2:]):
        return np.zeros(shape, x.dtype)
    coordinates = widened(grid.reshape(len(grid), math.prod(grid.shape[1:-1]), axes))[..., ::-1]
    sampled = _sampled(x, coordinates, mode.removeprefix("bi"), padding_mode, align_corners)
    return sampled.reshape(shape).astype(x.dtype, copy=False)


def _sampled(x: Any, coordinates: Any, mode: str, padding: str, from_corners: bool) -> Any:
    """Sample an image [batch, channels, ...] at points [batch, points, axes] in -1 to 1: [batch, channels, points]."""
    taps = []
    for axis, extent in enumerate(x.shape[2:]):
        coordinate = coordinates[..., axis]
        coordinate = (coordinate + 1) / 2 * (extent - 1) if from_corners else ((coordinate + 1) * extent - 1) / 2
        borders = (0.0, extent - 1.0) if from_corners else (-0.5, extent - 0.5)
        taps.append(_taps(np.nan_to_num(coordinate, posinf=0, neginf=0), extent, borders, mode, padding))
    flat = x.reshape(*x.shape[:2], math.prod(x.shape[2:]))
    flat = widened(flat) if x.dtype.kind == "f" else flat
    result: Any = 0
    for choice in product(*taps):
        index, weight = np.zeros(coordinates.shape[:2], np.int64), np.ones(coordinates.shape[:2], coordinates.dtype)
        for (position, share), extent in zip(choice, x.shape[2:], strict=True):
            index, weight = index * extent + position, weight * share
        values = np.take_along_axis(flat, np.broadcast_to(index[:, None], (*flat.shape[:2], index.shape[1])), axis=2)
        if mode == "nearest":
            return np.where(weight[:, None] != 0, values, np.zeros((), values.dtype))
        result = result + values * weight[:, None]
    return result


def _taps(coordinate: Any, extent: int, borders: tuple[float, float], mode: str, padding: str) -> list[tuple[Any, Any]]:
    """Return (pixel, weight) per neighbour along one axis; the padding mode applies to pixels outside the image."""
    if mode == "nearest":
        coordinate = np.rint(coordinate)
    is_outside = (coordinate < borders[0]) | (coordinate > borders[1])
    if padding == "border" and mode != "cubic":
        coordinate = np.where(is_outside, np.clip(coordinate, 0, extent - 1), coordinate)
    elif padding == "reflection":
        coordinate = np.where(is_outside, _reflected(coordinate, *borders), coordinate)
    # Pixels far outside the image have no effect; clipping keeps the coordinates within the range of integers.
    coordinate = np.clip(coordinate, -4, extent + 3)
    low = np.floor(coordinate)
    after = coordinate - low
    offsets: tuple[int, ...]
    if mode == "nearest":
        offsets, weights = (0,), [np.ones_like(coordinate)]
    elif mode == "linear":
        offsets, weights = (0, 1), [1 - after, after]
    else:
        offsets, weights = (-1, 0, 1, 2), [cubic(np.abs(after - offset)) for offset in (-1, 0, 1, 2)]
    taps = []
    for offset, weight in zip(offsets, weights, strict=True):
        pixel = low + offset
        if padding == "zeros":
            weight = np.where((pixel < 0) | (pixel >= extent), 0, weight)
        elif padding == "reflection":
            pixel = np.where((pixel < 0) | (pixel >= extent), np.trunc(_reflected(pixel, *borders)), pixel)
        taps.append((np.clip(pixel, 0, extent - 1).astype(np.int64), weight.astype(coordinate.dtype, copy=False)))
    return taps


def _reflected(coordinate: Any, low: float, high: float) -> Any:
    """Reflect at both borders until the coordinate lies between them."""
    span = high - low
    if span <= 0:
        return np.full_like(coordinate, low)
    turns = np.mod(coordinate - low, 2 * span)
    return low + np.where(turns > span, 2 * span - turns, turns)
