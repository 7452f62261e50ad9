"""The final operators of detectors: non-maximum suppression, and pooling of regions to a fixed size."""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias

import numpy as np

from genai.kernels.cpu.arrays.selection import without_overlap
from genai.kernels.cpu.program.thread_pool import Threads

from .registry import KernelError, Natural, NodeSpec, operator, scalar
from .support import checked_indices, checked_shape, widened


@operator("NonMaxSuppression", since_version=10)
def non_max_suppression(
    boxes: Any, scores: Any, most: Any = None, overlap: Any = None, least: Any = None, *,
    center_point_box: bool = False, threads: Threads | None,
) -> Any:  # fmt: skip
    """Select, per image and class, the highest-scoring boxes that overlap no selected box by more than a threshold."""
    if boxes.ndim != 3 or boxes.shape[2] != 4 or scores.ndim != 3 or scores.shape[::2] != boxes.shape[:2]:
        raise KernelError(
            f"NonMaxSuppression: the boxes have shape {list(boxes.shape)} and the scores have shape "
            f"{list(scores.shape)}, but the shapes must be [batch, boxes, 4] and [batch, classes, boxes]"
        )
    limit = 0 if most is None else max(int(scalar(most)), 0)
    threshold = np.float32(0 if overlap is None else scalar(overlap))
    if not 0 <= threshold <= 1:
        raise KernelError(f"NonMaxSuppression: iou_threshold is {threshold}, but it must be from 0 to 1")
    lower = -math.inf if least is None else float(scalar(least))
    corners, scores = np.ascontiguousarray(boxes, np.float32), np.ascontiguousarray(scores, np.float32)
    found, counts = without_overlap(
        corners, scores, limit, float(threshold), lower, threads, is_centred=bool(center_point_box)
    )
    result = np.empty((int(counts.sum()), 3), np.int64)
    if counts.size == 1:
        result[:, :2], result[:, 2] = 0, found[0, 0, : len(result)]
        return result
    is_chosen = np.arange(found.shape[2]) < counts[..., None]
    result[:, 0], result[:, 1], _ = is_chosen.nonzero()
    result[:, 2] = found[is_chosen]
    return result


_CoordinateMode: TypeAlias = Literal["half_pixel", "output_half_pixel"]


@operator("RoiAlign", since_version=10)
def roi_align(
    image: Any, boxes: Any, images: Any, *, output_height: int = 1, output_width: int = 1, sampling_ratio: Natural = 0,
    spatial_scale: float = 1.0, mode: Literal["avg", "max"] = "avg",
    coordinate_transformation_mode: _CoordinateMode | None = None, spec: NodeSpec,
) -> Any:  # fmt: skip
    """Pool each bin of each region (He et al. 2017): the mean or max of samples interpolated between pixels."""
    x, regions = widened(image), widened(boxes)
    # Operator set 16 added this attribute and changed the default.
    old = (
        spec.version < 16 if coordinate_transformation_mode is None else coordinate_transformation_mode != "half_pixel"
    )
    checked_indices("RoiAlign: batch_indices", images, len(x))
    result = np.zeros(checked_shape(spec, (len(regions), x.shape[1], output_height, output_width), 8), x.dtype)
    for number, (region, index) in enumerate(zip(regions, images, strict=True) if result.size else ()):
        shift = 0.0 if old else 0.5
        first = region[:2][::-1] * spatial_scale - shift
        size = region[2:][::-1] * spatial_scale - shift - first
        size = np.maximum(size, 1) if old else size
        if not np.isfinite(size).all() or not np.isfinite(first).all():
            raise KernelError(f"RoiAlign: region {number} is {region.tolist()}, which is not finite")
        result[number] = _pooled(spec, x[index], first, size, result.shape[2:], sampling_ratio, mode)
    return result.astype(image.dtype, copy=False)


def _pooled(spec: NodeSpec, x: Any, first: Any, size: Any, bins: tuple[int, int], ratio: int, mode: str) -> Any:
    """Pool one region of [channels, height, width] to [channels, *bins]."""
    counts = [ratio or max(int(np.ceil(size[axis] / bins[axis])), 0) for axis in (0, 1)]
    samples = tuple(bins[axis] * counts[axis] for axis in (0, 1))
    checked_shape(spec, (len(x), *samples), 8 * 4)
    if not all(counts):
        return np.zeros((len(x), *bins), x.dtype)
    ends, weights = [], []
    for axis in (0, 1):
        step = size[axis] / samples[axis]
        low, high, share = _neighbours(first[axis] + (np.arange(samples[axis]) + 0.5) * step, x.shape[axis + 1])
        ends.append((low, high))
        weights.append(share)
    split = (len(x), bins[0], counts[0], bins[1], counts[1])
    parts = [
        x[:, ends[0][i][:, None], ends[1][j]] * (weights[0][i][:, None] * weights[1][j]).astype(x.dtype)
        for i in (0, 1)
        for j in (0, 1)
    ]
    if mode == "avg":
        return sum(parts).reshape(split).mean(axis=(2, 4))
    # ONNX's own test cases expect the largest weighted pixel, not the largest sample.
    return np.maximum.reduce(parts).reshape(split).max(axis=(2, 4))


def _neighbours(positions: Any, extent: int) -> tuple[Any, Any, tuple[Any, Any]]:
    """Return the pixels around each position and their weights; weights are 0 if it is over one pixel outside."""
    is_inside = (positions >= -1) & (positions <= extent)
    positions = np.clip(positions, 0, max(extent - 1, 0))
    low = np.floor(positions).astype(np.int64)
    high = np.minimum(low + 1, extent - 1)
    after = positions - low
    return low, high, (np.where(is_inside, 1 - after, 0), np.where(is_inside, after, 0))
