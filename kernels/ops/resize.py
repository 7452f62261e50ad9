"""Resize: every axis that changes is one small matrix, whatever the mode, so all modes are one path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..registry import Kernel, KernelError, NodeSpec, register
from .support import checked_axis, checked_shape, optional, widened


@dataclass(frozen=True)
class _Axis:
    """One axis: sizes before and after, the scale, and the region of interest of tf_crop_and_resize."""

    before: int
    after: int
    scale: float
    start: float = 0.0
    end: float = 1.0


@register("Upsample", since_version=7)
@register("Resize", since_version=10)
def resize(spec: NodeSpec) -> Kernel:
    """Nearest, linear or cubic interpolation along any axes."""
    return _Resize(spec)


class _Resize:
    def __init__(self, spec: NodeSpec) -> None:
        a = spec.attributes
        self.spec = spec
        self.mode = str(a.get("mode", "nearest"))
        old = spec.op_type == "Upsample" or spec.version < 11
        self.where = str(a.get("coordinate_transformation_mode", "asymmetric" if old else "half_pixel"))
        self.nearest = str(a.get("nearest_mode", "floor" if old else "round_prefer_floor"))
        self.cubic = float(a.get("cubic_coeff_a", -0.75))
        self.exclude_outside = bool(a.get("exclude_outside", 0))
        self.extrapolation = float(a.get("extrapolation_value", 0.0))
        self.antialias = bool(a.get("antialias", 0)) and self.mode != "nearest"
        self.policy = str(a.get("keep_aspect_ratio_policy", "stretch"))
        self.axes = a.get("axes")
        self.scales_at = 1 if old else 2
        if self.mode not in ("nearest", "linear", "bilinear", "cubic"):
            raise KernelError(f"{spec.op_type}: mode {self.mode!r} is unknown")
        if self.nearest not in _ROUNDINGS:
            raise KernelError(f"{spec.op_type}: nearest_mode {self.nearest!r} is unknown")
        if self.where not in _COORDINATES:
            raise KernelError(f"{spec.op_type}: coordinate_transformation_mode {self.where!r} is unknown")

    def __call__(self, context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x = inputs[0]
        plans = self._plans(x, inputs)
        shape = [x.shape[axis] for axis in range(x.ndim)]
        for axis, plan in plans.items():
            shape[axis] = plan.after
        checked_shape(self.spec, shape, 4)
        result = widened(x) if x.dtype.kind not in "iu" else x.astype(np.float32)
        outside = []
        for axis, plan in plans.items():
            if plan.before == plan.after and plan.scale == 1.0 and self.where != "tf_crop_and_resize":
                continue
            checked_shape(self.spec, (plan.before, plan.after), 4)
            matrix, beyond = self._matrix(plan)
            result = np.moveaxis(np.tensordot(matrix.astype(result.dtype), result, ([1], [axis])), 0, axis)
            if beyond.any():
                outside.append(beyond.reshape([-1 if i == axis else 1 for i in range(x.ndim)]))
        for beyond in outside:
            result = np.where(beyond, result.dtype.type(self.extrapolation), result)
        if x.dtype.kind in "iu":
            result = np.clip(np.rint(result) if self.mode == "nearest" else result, *_limits(x.dtype))
        return (np.ascontiguousarray(result).astype(x.dtype, copy=False),)

    def _plans(self, x: Any, inputs: Sequence[Any]) -> dict[int, _Axis]:
        attribute = self.spec.attributes.get("scales")
        scales = attribute if attribute is not None else optional(inputs, self.scales_at)
        sizes, roi = optional(inputs, 3), optional(inputs, 1) if self.scales_at == 2 else None
        axes = [checked_axis(int(a), x.ndim) for a in (range(x.ndim) if self.axes is None else self.axes)]
        scales = [] if scales is None else np.asarray(scales, np.float64).reshape(-1).tolist()
        if scales:
            afters = [int(np.floor(x.shape[a] * s)) for a, s in zip(axes, scales, strict=False)]
        elif sizes is not None:
            afters, scales = self._by_sizes(x, axes, [int(size) for size in sizes])
        else:
            raise KernelError(f"{self.spec.op_type}: neither scales nor sizes are given")
        if len(afters) != len(axes) or any(after < 0 for after in afters) or any(s <= 0 for s in scales):
            raise KernelError(f"{self.spec.op_type}: scales {scales} or sizes {afters} do not fit the axes {axes}")
        regions = [(0.0, 1.0)] * len(axes)
        if self.where == "tf_crop_and_resize" and roi is not None and roi.size == 2 * len(axes):
            regions = [(float(roi[i]), float(roi[i + len(axes)])) for i in range(len(axes))]
        return {
            axis: _Axis(x.shape[axis], after, scale, *region)
            for axis, after, scale, region in zip(axes, afters, scales, regions, strict=True)
        }

    def _by_sizes(self, x: Any, axes: Sequence[int], sizes: Sequence[int]) -> tuple[list[int], list[float]]:
        if any(x.shape[axis] == 0 for axis in axes):
            raise KernelError(f"{self.spec.op_type}: an axis of extent 0 cannot be resized")
        scales = [size / x.shape[axis] for axis, size in zip(axes, sizes, strict=True)]
        if self.policy == "stretch":
            return list(sizes), scales
        one = min(scales) if self.policy == "not_larger" else max(scales)
        return [int(np.floor(x.shape[axis] * one + 0.5)) for axis in axes], [one] * len(scales)

    def _matrix(self, plan: _Axis) -> tuple[Any, Any]:
        """[after, before] of weights, and which positions lie outside the input (tf_crop_and_resize only)."""
        places = _COORDINATES[self.where](np.arange(plan.after, dtype=np.float64), plan)
        beyond = np.zeros(plan.after, bool)
        if self.where == "tf_crop_and_resize":
            beyond = (places < 0) | (places > plan.before - 1)
        matrix = np.zeros((plan.after, plan.before))
        if self.mode == "nearest":
            index = _ROUNDINGS[self.nearest](places)
            matrix[np.arange(plan.after), np.clip(index, 0, plan.before - 1).astype(np.int64)] = 1
            return matrix, beyond
        stretch = max(1.0, 1.0 / plan.scale) if self.antialias else 1.0
        reach = (2 if self.mode == "cubic" else 1) * stretch
        first = np.floor(places - reach).astype(np.int64) + (0 if self.antialias else 1)
        offsets = np.arange(int(np.ceil(2 * reach)) + (2 if self.antialias else 0))
        index = first[:, None] + offsets
        distance = np.abs(places[:, None] - index) / stretch
        weights = _cubic(distance, self.cubic) if self.mode == "cubic" else np.maximum(1 - distance, 0)
        if self.exclude_outside:
            weights = np.where((index < 0) | (index >= plan.before), 0, weights)
        total = weights.sum(axis=1, keepdims=True)
        if self.exclude_outside or self.antialias:
            weights = weights / np.where(total == 0, 1, total)
        rows = np.broadcast_to(np.arange(plan.after)[:, None], index.shape)
        np.add.at(matrix, (rows, np.clip(index, 0, plan.before - 1)), weights)
        return matrix, beyond


def _cubic(distance: Any, a: float) -> Any:
    """Keys' cubic convolution kernel (1981)."""
    near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0))


def _limits(dtype: Any) -> tuple[int, int]:
    return np.iinfo(dtype).min, np.iinfo(dtype).max


def _align_corners(x: Any, plan: _Axis) -> Any:
    # The length is that of the scaled axis, not of the whole number of elements it gives.
    length = plan.before * plan.scale
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
_ROUNDINGS: dict[str, Callable[[Any], Any]] = {
    "round_prefer_floor": lambda x: np.ceil(x - 0.5),
    "round_prefer_ceil": lambda x: np.floor(x + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
    "simple": lambda x: x,
}
