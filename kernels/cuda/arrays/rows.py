"""Functions of whole rows of arrays: reductions, softmax, normalisation, and gathers by indices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..sources import CudaKernel
from .launches import Array, ArrayError, Recorder, dense_strides, joined, padded

_THREADS, _GATHER_THREADS, _WARP = 128, 256, 32
# Each row that is longer than this is computed by a whole block.
_SHORT = 1024
REDUCTIONS = {
    "sum": "Sum", "mean": "Average", "prod": "Product", "max": "Extreme<true>", "min": "Extreme<false>",
}  # fmt: skip
_BYTES = {1: "unsigned char", 2: "unsigned short", 4: "int", 8: "long long"}


def softmax_kernel(scalar: str, whole_block: bool, logarithm: bool) -> CudaKernel:
    """Return the kernel for softmax or log-softmax."""
    text = f"softmax<{scalar}, {_truth(whole_block)}, {_truth(logarithm)}>"
    return CudaKernel("arrays_rows.cu", text, "SoftmaxArguments", _THREADS)


def softmax(
    to: Recorder, x: Array, axis: int, *, logarithm: bool = False, scale: float = 1.0, addend: Array | None = None,
    nan_is_zero: bool = False,
) -> Array:  # fmt: skip
    """Record softmax(scale * x + addend) over an axis, which must be the last axis if there is an addend."""
    x = to.dense(x)
    out = to.new(x.shape, x.dtype)
    if not x.size:
        return out
    axis = x.axis(axis)
    width = x.shape[axis] if x.shape else 1
    step = math.prod(x.shape[axis + 1 :])
    wide = None if addend is None else addend.expanded(x.shape)
    sizes, (strides,) = joined(x.shape[:-1], (0,) * (len(x.shape) - 1) if wide is None else wide.strides[:-1])
    rows, block = x.size // width, width > _SHORT
    to.start(
        softmax_kernel(x.scalar, block, logarithm), _grid(rows, block), x=x, addend=wide, out=out, rows=rows,
        width=width, step=step, sizes=padded(sizes, 1), addend_strides=padded(strides, 0),
        addend_step=0 if wide is None else wide.strides[-1], axes=len(sizes), scale=scale,
        nan_is_zero=int(nan_is_zero),
    )  # fmt: skip
    return out


def norm_rows_kernel(scalar: str, whole_block: bool, centred: bool) -> CudaKernel:
    """Return the kernel for layer norm or RMS norm."""
    text = f"row_norm<{scalar}, {_truth(whole_block)}, {_truth(centred)}>"
    return CudaKernel("arrays_rows.cu", text, "RowNormArguments", _THREADS)


def normalised(
    to: Recorder, x: Array, width: int, weight: Array | None, bias: Array | None, epsilon: float, *,
    centred: bool = True, channels: int = 0, skip: Array | None = None, input_bias: Array | None = None,
    wants_total: bool = False,
) -> tuple[Array, Array | None]:  # fmt: skip
    """Record a kernel that normalises x + skip + input_bias in rows of `width` values, and applies weight and bias.

    If `centred`, the norm is a layer norm, which scales rows to mean 0 and variance 1; otherwise it is an RMS norm.

    Args:
        to: the recorder.
        x: the numbers.
        width: number of values in a row.
        weight: factors; None = 1.
        bias: added to the products; None = 0.
        epsilon: added to the variance.
        centred: True for layer norm.
        channels: if not 0, the number of channels. `weight` and `bias` then have one value per channel instead of one
            per position, and successive rows belong to successive channels.
        skip: an array that is added to x. It has the shape of x or of x's last axes. None = 0.
        input_bias: a bias that is added to x before the normalisation; None = 0.
        wants_total: True to return the sum that is normalised.

    Returns:
        The result and the sum that was normalised. The sum is None unless `wants_total` is True.
    """
    x = to.dense(x)
    skip = None if skip is None else to.dense(skip)
    count = channels or width
    for given in (weight, bias, input_bias):
        if given is not None and given.size != count:
            raise ArrayError(f"{given.size} factors do not match {count} numbers")
    if skip is not None and (not skip.size or x.size % skip.size or skip.size % max(width, 1)):
        raise ArrayError(f"shapes {list(x.shape)} and {list(skip.shape)} cannot be added")
    out = to.new(x.shape, x.dtype)
    total = to.new(x.shape, x.dtype) if wants_total else None
    if x.size:
        rows, block = x.size // width, width > _SHORT
        parts = {"weight": weight, "bias": bias, "input_bias": input_bias}
        to.start(
            norm_rows_kernel(x.scalar, block, centred), _grid(rows, block), x=x, skip=skip, out=out, total=total,
            rows=rows, width=width, channels=channels, skip_rows=skip.size // width if skip else 1, epsilon=epsilon,
            **{name: None if value is None else to.dense(value) for name, value in parts.items()},
        )  # fmt: skip
    return out, total


def reduce_kernel(scalar: str, kind: str, by_rows: bool) -> CudaKernel:
    """Return the kernel for a reduction."""
    name = "reduce_rows" if by_rows else "reduce_columns"
    return CudaKernel("arrays_rows.cu", f"{name}<{scalar}, {kind}>", "ReduceArguments", _THREADS)


def reduced(to: Recorder, x: Array, kind: str, axes: Sequence[int], keep: bool) -> Array:
    """Record the sum, mean, product, maximum or minimum over axes."""
    which = sorted({x.axis(axis) for axis in axes}) if x.shape else []
    kept = [axis for axis in range(len(x.shape)) if axis not in which]
    shape = tuple(x.shape[axis] for axis in kept)
    width = math.prod(x.shape[axis] for axis in which)
    out = to.new(shape, x.dtype)
    if out.size and not width:
        to.copy(to.constant(_of_nothing(kind, x.dtype)).expanded(out.shape), out)
    elif out.size:
        kept_sizes, (kept_strides,) = joined(shape, [x.strides[axis] for axis in kept])
        sizes, (strides,) = joined([x.shape[axis] for axis in which], [x.strides[axis] for axis in which])
        by_rows = width >= _WARP // 2 and (strides[0] == 1 or kept_strides[0] != 1)
        blocks = -(-out.size // (_THREADS // _WARP if by_rows else _THREADS))
        to.start(
            reduce_kernel(x.scalar, REDUCTIONS[kind], by_rows), (blocks, 1, 1), x=x, out=out, rows=out.size,
            width=width, kept_axes=len(kept_sizes), axes=len(sizes), kept_sizes=padded(kept_sizes, 1),
            kept_strides=padded(kept_strides, 0), sizes=padded(sizes, 1), strides=padded(strides, 0),
        )  # fmt: skip
    if not keep:
        return out
    whole = tuple(1 if axis in which else size for axis, size in enumerate(x.shape))
    return replace(out, shape=whole, strides=dense_strides(whole))


def _of_nothing(kind: str, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return the result of a reduction over no numbers."""
    if kind in ("sum", "mean", "prod"):
        return np.asarray(kind == "prod", dtype)
    least, most = (-np.inf, np.inf) if dtype.kind == "f" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return np.asarray(least if kind == "max" else most, dtype)


def gather_kernel(nbytes: int, width: int, index: str) -> CudaKernel:
    """Return the kernel that copies rows by indices: elements of `nbytes` bytes, `width` at a time."""
    text = f"gather<{_BYTES[nbytes]}, {width}, {index}>"
    return CudaKernel("arrays_rows.cu", text, "GatherArguments", _GATHER_THREADS)


def gathered(to: Recorder, x: Array, indices: Array, axis: int, status: Array, number: int) -> Array:
    """Gather `x` at indices of an axis. An index out of range sets `status` to `number`."""
    x, indices, axis = to.dense(x), to.dense(indices), x.axis(axis)
    out = to.new((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]), x.dtype)
    if out.size:
        inner, nbytes = math.prod(x.shape[axis + 1 :]), x.dtype.itemsize
        width = math.gcd(inner, x.first, min(16 // nbytes, 8))
        count = out.size // width
        to.start(
            gather_kernel(nbytes, width, indices.scalar), (-(-count // _GATHER_THREADS), 1, 1), x=x, indices=indices,
            out=out, status=status, count=count, indices_count=indices.size, inner=inner // width,
            extent=x.shape[axis], number=number,
        )  # fmt: skip
    return out


def gather_tuples_kernel(nbytes: int, width: int, index: str) -> CudaKernel:
    """Return the kernel that copies rows by tuples of indices."""
    text = f"gather_tuples<{_BYTES[nbytes]}, {width}, {index}>"
    return CudaKernel("arrays_rows.cu", text, "GatherTuplesArguments", _GATHER_THREADS)


def gathered_by_tuples(
    to: Recorder, x: Array, indices: Array, batch_axes: int, status: Array, number: int
) -> Array:  # fmt: skip
    """Gather `x` at the tuples in the last axis of `indices`, after the batch axes that both arrays have."""
    x, indices = to.dense(x), to.dense(indices)
    depth = indices.shape[-1] if indices.shape else 0
    end = batch_axes + depth
    if depth < 1 or end > len(x.shape) or x.shape[:batch_axes] != indices.shape[:batch_axes]:
        raise ArrayError(f"indices of shape {list(indices.shape)} do not match an array of shape {list(x.shape)}")
    out = to.new((*indices.shape[:-1], *x.shape[end:]), x.dtype)
    if out.size:
        inner, nbytes = math.prod(x.shape[end:]), x.dtype.itemsize
        width = math.gcd(inner, x.first, min(16 // nbytes, 8))
        strides = [stride // width for stride in x.strides[batch_axes:end]]
        count = out.size // width
        to.start(
            gather_tuples_kernel(nbytes, width, indices.scalar), (-(-count // _GATHER_THREADS), 1, 1), x=x,
            indices=indices, out=out, status=status, count=count, inner=inner // width,
            rows=math.prod(indices.shape[batch_axes:-1]), depth=depth,
            extents=padded(x.shape[batch_axes:end], 1), strides=padded(strides, 0),
            batch=math.prod(x.shape[batch_axes:]) // width, number=number,
        )  # fmt: skip
    return out


def pad_kernel(nbytes: int) -> CudaKernel:
    """Return the kernel that pads an array with a number."""
    return CudaKernel("arrays_rows.cu", f"pad<{_BYTES[nbytes]}>", "PadArguments", _GATHER_THREADS)


def surrounded(to: Recorder, x: Array, before: Sequence[int], after: Sequence[int], filler: NDArray[Any]) -> Array:
    """Pad each axis with `before` and `after` positions that hold `filler`; negative numbers crop."""
    shape = tuple(size + first + last for size, first, last in zip(x.shape, before, after, strict=True))
    if any(size < 0 for size in shape):
        raise ArrayError(f"an array of shape {list(x.shape)} cannot be cropped by {list(before)} and {list(after)}")
    out = to.new(shape, x.dtype)
    if out.size:
        nbytes = x.dtype.itemsize
        bits = int(filler.astype(x.dtype).reshape(1).view(f"i{nbytes}")[0])
        to.start(
            pad_kernel(nbytes), (-(-out.size // _GATHER_THREADS), 1, 1), x=x, out=out, count=out.size,
            axes=len(shape), sizes=padded(shape[::-1], 1), before=padded([*before][::-1], 0),
            extents=padded(x.shape[::-1], 1), strides=padded(x.strides[::-1], 0), filler=bits,
        )  # fmt: skip
    return out


def _grid(rows: int, block: bool) -> tuple[int, int, int]:
    return (rows if block else -(-rows // (_THREADS // _WARP)), 1, 1)


def _truth(value: bool) -> str:
    return "true" if value else "false"
