"""Operators that rearrange, pad, crop or place elements."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import numpy as np

from genai.kernels.cpu.arrays.copying import concatenated, padded
from genai.kernels.cpu.arrays.gemm.windows import Windows
from genai.kernels.cpu.program.thread_pool import Threads

from ..onnx.node import MS
from ..onnx.types import Dim, TensorType, Type
from . import borrowed
from .pooling import added_windows
from .registry import KernelError, NodeSpec, Positive, operator, scalar
from .shape_rules import NodeTypes, shape_rule
from .support import axes_of, checked_axis, checked_indices, checked_shape

operator("Transpose")(lambda x, *, perm=None: np.transpose(x, perm))


@operator("Concat", since_version=4)
def concat(*values: Any, axis: int) -> Any:
    """Join values along an axis."""
    found = concatenated(values, axis)
    return np.concatenate(values, axis=axis) if found is None else found


_PadMode: TypeAlias = Literal["constant", "reflect", "edge", "wrap"]


@operator("Pad", since_version=2)
@operator("Pad", domain=MS)
def pad(
    x: Any, sizes: Any = None, constant: Any = None, chosen: Any = None, *, mode: _PadMode = "constant",
    pads: tuple[int, ...] | None = None, value: float = 0, axes: tuple[int, ...] | None = None, spec: NodeSpec,
) -> Any:  # fmt: skip
    """Pad axes with a value or with the input's own elements; negative pads remove elements."""
    if pads is None:
        # com.microsoft and onnxruntime also define pads of shape [1, 2 * axes].
        row = sizes[0] if sizes.ndim == 2 and len(sizes) == 1 else sizes
        if row.ndim != 1:
            raise KernelError(f"Pad: pads of shape {list(sizes.shape)}, expected [2 * axes] or [1, 2 * axes]")
        sizes_of_axes, fill = [int(size) for size in row], constant
    else:
        sizes_of_axes, fill = list(pads), value
    along = [checked_axis(axis, x.ndim) for axis in axes_of(chosen, axes) or range(x.ndim)]
    if len(sizes_of_axes) != 2 * len(along):
        raise KernelError(
            f"Pad: {len(sizes_of_axes)} pads are given for {len(along)} axes; two pads per axis are needed"
        )
    widths = [(0, 0)] * x.ndim
    for i, axis in enumerate(along):
        widths[axis] = (sizes_of_axes[i], sizes_of_axes[i + len(along)])
    inner = tuple(
        slice(max(-before, 0), size - max(-after, 0)) for (before, after), size in zip(widths, x.shape, strict=True)
    )
    if mode != "constant":
        x = x[inner]
    grown = [(max(before, 0), max(after, 0)) for before, after in widths]
    checked_shape(spec, [b + size + a for (b, a), size in zip(grown, x.shape, strict=True)], x.dtype.itemsize)
    if mode != "constant":
        extended = padded(x, grown, mode)
        return _extended(x, grown, mode) if extended is None else extended
    fill = ("" if x.dtype.kind == "O" else 0) if fill is None else np.asarray(fill).reshape(-1)[0]
    # A negative pad may remove padding on the other side, so the array is cropped last.
    outer = tuple(
        slice(max(-before, 0), max(size + max(before, 0) + after, max(-before, 0)) if after < 0 else None)
        for (before, after), size in zip(widths, x.shape, strict=True)
    )
    surrounded = padded(x, grown, mode, fill)
    return (_surrounded(x, grown, fill) if surrounded is None else surrounded)[outer]


@shape_rule("Pad", domain="")
def pad_types(types: NodeTypes) -> list[Type | None]:
    """The input's type with larger axes; an axis is unknown if its pads are."""
    source, pads = types.source, types.node.attribute("pads")
    given = types.value(1)
    widths: Sequence[Dim] | None = pads if isinstance(pads, list) else None if given is None else given.dims
    if not isinstance(source, TensorType) or source.shape is None:
        return [source]
    shape, axes = list(source.shape), list(range(len(source.shape)))
    if types.node.input(3):
        chosen = types.value(3)
        known = [] if chosen is None else [axis for axis in chosen.dims if isinstance(axis, int)]
        axes = [axis % len(shape) for axis in known if -len(shape) <= axis < len(shape)]
        if chosen is None or len(axes) != len(chosen.dims):
            return [TensorType(source.dtype, (None,) * len(shape))]
    if widths is None or len(widths) != 2 * len(axes):
        return [TensorType(source.dtype, (None,) * len(shape))]
    for before, after, axis in zip(widths, widths[len(axes) :], axes, strict=False):
        size = shape[axis]
        if isinstance(before, int) and isinstance(after, int) and isinstance(size, int):
            shape[axis] = size + before + after
        elif not before == 0 == after:
            shape[axis] = None
    return [TensorType(source.dtype, tuple(shape))]


def _surrounded(x: Any, pads: list[tuple[int, int]], fill: Any) -> Any:
    """Return np.pad(x, pads, constant_values=fill), which takes several times as long for small arrays."""
    out = np.empty([before + size + after for (before, after), size in zip(pads, x.shape, strict=True)], x.dtype)
    out[tuple(slice(before, before + size) for (before, _), size in zip(pads, x.shape, strict=True))] = x
    for axis, (before, after) in enumerate(pads):
        outside: list[Any] = [slice(None)] * x.ndim
        for part in (slice(0, before), slice(out.shape[axis] - after, None)):
            outside[axis] = part
            if before or after:
                out[tuple(outside)] = fill
    return out


# Results with fewer elements are gathered by indices, which costs less than slices.
_FEW = 4096


def _extended(x: Any, pads: list[tuple[int, int]], mode: _PadMode) -> Any:
    """Return np.pad(x, pads, mode)."""
    size = math.prod(before + size + after for (before, after), size in zip(pads, x.shape, strict=True))
    if not x.size or size >= _FEW:
        return np.pad(x, pads, mode=mode)
    for axis, (before, after) in enumerate(pads):
        if before or after:
            x = x.take(_indices(x.shape[axis], before, after, mode), axis)
    return x


@lru_cache(maxsize=64)
def _indices(size: int, before: int, after: int, mode: _PadMode) -> Any:
    return np.pad(np.arange(size), (before, after), mode=mode)


@operator("Trilu", since_version=14)
@operator("Trilu", domain=MS)
def trilu(x: Any, diagonal: Any = None, *, upper: bool = True) -> Any:
    """Return the upper or lower triangle of the last two axes; zeros elsewhere."""
    k = 0 if diagonal is None else max(min(int(scalar(diagonal)), x.shape[-1] + 1), -x.shape[-2] - 1)
    return np.triu(x, k) if upper else np.tril(x, k)


def _image_shape(op_type: str, x: Any) -> tuple[int, int, int, int]:
    if x.ndim != 4:
        raise KernelError(f"{op_type}: the input has shape {list(x.shape)}, expected [N, C, rows, columns]")
    n, c, h, w = x.shape
    return n, c, h, w


@operator("DepthToSpace")
def depth_to_space(x: Any, *, blocksize: Positive, mode: str = "DCR") -> Any:
    """Rearrange channels into blocks of pixels; DCR puts the block before the channel, CRD after."""
    n, c, h, w = _image_shape("DepthToSpace", x)
    size, channels = blocksize, c // blocksize**2
    if c % size**2:
        raise KernelError(f"DepthToSpace: {c} channels cannot be divided into blocks of {size} x {size}")
    if mode == "DCR":
        blocks = x.reshape(n, size, size, channels, h, w).transpose(0, 3, 4, 1, 5, 2)
    else:
        blocks = x.reshape(n, channels, size, size, h, w).transpose(0, 1, 4, 2, 5, 3)
    return blocks.reshape(n, channels, h * size, w * size)


@operator("SpaceToDepth")
def space_to_depth(x: Any, *, blocksize: Positive, mode: str = "DCR") -> Any:
    """Rearrange blocks of pixels into channels."""
    n, c, h, w = _image_shape("SpaceToDepth", x)
    size = blocksize
    if h % size or w % size:
        raise KernelError(f"SpaceToDepth: an image of {h} x {w} cannot be divided into blocks of {size} x {size}")
    blocks = x.reshape(n, c, h // size, size, w // size, size)
    order = (0, 3, 5, 1, 2, 4) if mode == "DCR" else (0, 1, 3, 5, 2, 4)
    return blocks.transpose(order).reshape(n, c * size**2, h // size, w // size)


@operator("Dropout", since_version=7, definition=borrowed.definition)
def dropout(x: Any, ratio: Any = None, training: Any = None, *, definition: Callable[..., Any], spec: NodeSpec) -> Any:
    """Return the input and a mask, which is True everywhere (before version 12, False, as in onnxruntime).

    With training_mode, onnx.reference runs the node and drops elements.
    """
    if training is not None and bool(scalar(training)) and (ratio is None or scalar(ratio) != 0):
        return definition(x, ratio, training)
    return x, np.full(x.shape, spec.version >= 12, bool if spec.version >= 10 else x.dtype)


def _per_axis(name: str, numbers: Any, count: int, least: int) -> list[int]:
    values = [int(value) for value in numbers or [least] * count]
    if len(values) != count or min(values, default=0) < least:
        raise KernelError(f"{name} are {values}, but {count} valid values are needed")
    return values


@operator("Col2Im", since_version=18)
def col2im(
    x: Any, image_shape: Any, block_shape: Any, *, strides: Any = None, dilations: Any = None, pads: Any = None,
    spec: NodeSpec, threads: Threads | None = None,
) -> Any:  # fmt: skip
    """Add blocks, one per column, at their positions in the image."""
    image, block = [int(size) for size in image_shape], [int(size) for size in block_shape]
    rank = len(image)
    steps, gaps = _per_axis("Col2Im: strides", strides, rank, 1), _per_axis("Col2Im: dilations", dilations, rank, 1)
    edges = _per_axis("Col2Im: pads", pads, 2 * rank, 0)
    if len(block) != rank or min(block, default=1) < 1 or min(image, default=1) < 1 or x.ndim != 3:
        raise KernelError(
            f"Col2Im: blocks of size {block} in an image of size {image} do not match data of shape {list(x.shape)}"
        )
    padded = [image[i] + edges[i] + edges[i + rank] for i in range(rank)]
    counts = tuple((padded[i] - gaps[i] * (block[i] - 1) - 1) // steps[i] + 1 for i in range(rank))
    taps = math.prod(block)
    if x.shape[1] % taps or min(counts, default=1) < 1 or x.shape[2] != math.prod(counts):
        raise KernelError(
            f"Col2Im: blocks of size {block} in an image of size {image} do not match data of shape {list(x.shape)}"
        )
    blocks = x.reshape(len(x), x.shape[1] // taps, taps, *counts)
    checked_shape(spec, (*blocks.shape[:2], *padded), x.dtype.itemsize)
    windows = Windows(tuple(block), tuple(steps), tuple(gaps), counts)
    return added_windows(blocks, windows, edges[:rank], image, threads=threads)


@operator("MaxUnpool", since_version=9)
def max_unpool(
    x: Any, indices: Any, output_shape: Any = None, *, kernel_shape: Any, strides: Any = None, pads: Any = None,
    spec: NodeSpec,
) -> Any:  # fmt: skip
    """Place elements at their flat indices, zeros elsewhere; a larger output_shape appends zeros to each axis."""
    rank = len(kernel_shape)
    steps, edges = _per_axis("MaxUnpool: strides", strides, rank, 1), _per_axis("MaxUnpool: pads", pads, 2 * rank, 0)
    if x.ndim != rank + 2 or indices.shape != x.shape:
        raise KernelError(
            f"MaxUnpool: indices of shape {list(indices.shape)} and a kernel with {rank} axes do not match data "
            f"of shape {list(x.shape)}"
        )
    extents = [(x.shape[i + 2] - 1) * steps[i] - edges[i] - edges[i + rank] + int(kernel_shape[i]) for i in range(rank)]
    result = np.zeros(checked_shape(spec, (*x.shape[:2], *extents), x.dtype.itemsize), x.dtype)
    result.reshape(-1)[checked_indices("MaxUnpool: indices", indices, result.size)] = x
    if output_shape is None:
        return result
    whole = np.zeros(checked_shape(spec, output_shape, x.dtype.itemsize), x.dtype)
    if whole.ndim != result.ndim:
        raise KernelError(f"MaxUnpool: output_shape is {list(whole.shape)}, but the result has {result.ndim} axes")
    common = tuple(slice(0, min(a, b)) for a, b in zip(result.shape, whole.shape, strict=True))
    whole[common] = result[common]
    return whole


@operator("CenterCropPad", since_version=18)
def center_crop_pad(x: Any, sizes: Any, *, axes: Any = None, spec: NodeSpec) -> Any:
    """Crop each axis to its centre, or pad it with zeros on both sides."""
    target_sizes = [int(size) for size in sizes]
    along = [checked_axis(int(axis), x.ndim) for axis in axes or range(x.ndim)]
    if len(target_sizes) != len(along):
        raise KernelError(
            f"CenterCropPad: {len(target_sizes)} sizes are given for {len(along)} axes; one size per axis is needed"
        )
    shape, source, target = list(x.shape), [slice(None)] * x.ndim, [slice(None)] * x.ndim
    for axis, size in zip(along, target_sizes, strict=True):
        extent, shape[axis] = x.shape[axis], size
        common = min(extent, size)
        source[axis], target[axis] = (
            slice((whole - common) // 2, (whole - common) // 2 + common) for whole in (extent, size)
        )
    result = np.full(checked_shape(spec, shape, x.dtype.itemsize), "" if x.dtype.kind == "O" else 0, x.dtype)
    result[tuple(target)] = x[tuple(source)]
    return result
