"""Matmuls and convolutions of arrays: the choice of the kernel, and the layout of operands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..driver import MOST_IN_GRID
from ..sources import CudaKernel
from .launches import Array, ArrayError, Recorder, dense_strides, joined, padded

_BATCH_AXES = 3
# Functions that may be applied at the end of a matmul.
FUNCTIONS = ("copy", "relu", "clip", "gelu", "gelu_tanh", "sigmoid", "tanh", "leaky_relu", "hard_sigmoid", "silu")
FORMS = ("ALONG_K", "ALONG_LINES", "WINDOWS")
# With fewer tiles of 128, some multiprocessors would have no tile.
_FULL_GRID = 132


@dataclass(frozen=True)
class Tail:
    """Operations after a matmul: function(alpha * product + beta * bias + addend). Bias and addend are broadcast."""

    bias: Array | None = None
    addend: Array | None = None
    alpha: float = 1.0
    beta: float = 1.0
    function: str = "copy"
    parameters: tuple[float, ...] = ()


def product_kernel(scalar: str, function: str, tile: int, a_layout: str, b_layout: str) -> CudaKernel:
    """Return the kernel for float32 or float16."""
    name = "float_product" if scalar == "float" else "half_product"
    threads = 256 if scalar == "float" else 2 * tile
    text = f"{name}<unary::{function}, {tile}, {a_layout}, {b_layout}>"
    return CudaKernel("arrays_product.cu", text, "ArrayProductArguments", threads)


def product(to: Recorder, a: Array, b: Array, tail: Tail | None = None) -> Array:
    """Record a @ b by NumPy's rules, followed by `tail`.

    Raises:
        ArrayError: if the shapes do not fit.
    """
    tail = tail or Tail()
    if not a.shape or not b.shape:
        raise ArrayError("an operand of a matmul is a scalar")
    rows, columns = len(a.shape) > 1, len(b.shape) > 1
    a = a if rows else replace(a, shape=(1, *a.shape), strides=(0, *a.strides))
    b = b if columns else replace(b, shape=(*b.shape, 1), strides=(*b.strides, 0))
    try:
        batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except ValueError:
        raise ArrayError(f"shapes {list(a.shape)} and {list(b.shape)} do not match for a matmul") from None
    if a.shape[-1] != b.shape[-2]:
        raise ArrayError(f"shapes {list(a.shape)} and {list(b.shape)} do not match for a matmul")
    full = (*batch, a.shape[-2], b.shape[-1])
    shape = tuple(size for size, kept in zip(full, [True] * len(batch) + [rows, columns], strict=True) if kept)
    out = to.new(full, a.dtype)
    if out.size:
        _launch(to, a, b, out, tail)
    return replace(out, shape=shape, strides=dense_strides(shape))


def _launch(to: Recorder, a: Array, b: Array, out: Array, tail: Tail) -> None:
    bias = None if tail.bias is None else tail.bias.expanded(out.shape)
    addend = None if tail.addend is None else to.dense(tail.addend.expanded(out.shape))
    if len(b.shape) == 2 and len(a.shape) > 2 and a.is_dense:  # one matrix for the whole batch: all axes become rows
        count = math.prod(a.shape[:-1])
        if bias is None or not any(bias.strides[:-1]):
            bias = None if bias is None else replace(bias, shape=(count, out.shape[-1]), strides=(0, bias.strides[-1]))
            a = replace(a, shape=(count, a.shape[-1]), strides=dense_strides((count, a.shape[-1])))
            out = replace(out, shape=(count, out.shape[-1]), strides=dense_strides((count, out.shape[-1])))
    batch = out.shape[:-2]
    a, b = _with_neighbours(to, a), _with_neighbours(to, b)
    wide_a, wide_b = a.expanded((*batch, *a.shape[-2:])), b.expanded((*batch, *b.shape[-2:]))
    of_bias = (0,) * len(batch) if bias is None else bias.strides[:-2]
    sizes, strides = joined(batch, wide_a.strides[:-2], wide_b.strides[:-2], of_bias, out.strides[:-2])
    if len(sizes) > _BATCH_AXES:
        a, b = to.dense(wide_a), to.dense(wide_b)
        bias = None if bias is None else to.dense(bias)
        _launch(to, a, b, out, replace(tail, bias=bias, addend=addend))
        return
    a_layout = _layout(a.strides[-1], a.strides[-2])
    b_layout = _layout(b.strides[-2], b.strides[-1])
    start_product(
        to, out, tail, a_layout, b_layout, math.prod(sizes), a=a, b=b, bias=bias, addend=addend, a_row=a.strides[-2],
        a_k=a.strides[-1], b_k=b.strides[-2], b_column=b.strides[-1], bias_row=bias.strides[-2] if bias else 0,
        bias_column=bias.strides[-1] if bias else 0, out_row=out.strides[-2], rows=out.shape[-2],
        columns=out.shape[-1], k=a.shape[-1], batches=padded(sizes, 1, _BATCH_AXES),
        a_batch=padded(strides[0], 0, _BATCH_AXES), b_batch=padded(strides[1], 0, _BATCH_AXES),
        bias_batch=padded(strides[2], 0, _BATCH_AXES), out_batch=padded(strides[3], 0, _BATCH_AXES),
        a_packs=_packs(a, a.strides[-2] if a_layout == "ALONG_K" else a.strides[-1], strides[0]),
        b_packs=_packs(b, b.strides[-1] if b_layout == "ALONG_K" else b.strides[-2], strides[1]),
        out_packs=_packs(out, out.strides[-2], strides[3]), **NO_WINDOWS,
    )  # fmt: skip


NO_WINDOWS: dict[str, Any] = {
    "taps": None, "image": 0, "out_image": 0, "positions": 1, "out_width": 1, "height": 0, "width": 0, "step_y": 0,
    "step_x": 0, "pad_y": 0, "pad_x": 0,
}  # fmt: skip


def start_product(
    to: Recorder, out: Array, tail: Tail, a_layout: str, b_layout: str, matrices: int, *, rows: int, columns: int,
    **given: Any,
) -> None:  # fmt: skip
    """Launch the kernel that fits the matmul: with large tiles if there are enough large tiles."""
    if tail.function not in FUNCTIONS:
        raise ArrayError(f"a matmul cannot be followed by the function {tail.function!r}")
    tile = 128 if -(-rows // 128) * -(-columns // 128) * matrices >= _FULL_GRID else 64
    grid = (-(-columns // tile), -(-rows // tile), matrices)
    if max(grid[1:]) > MOST_IN_GRID:
        raise ArrayError(f"a matmul of {matrices} matrices of {rows} rows is too large for one launch")
    kernel = product_kernel(out.scalar, tail.function, tile, a_layout, b_layout)
    p = [*tail.parameters, 0.0, 0.0, 0.0][:3]
    to.start(
        kernel, grid, out=out, rows=rows, columns=columns, alpha=tail.alpha, beta=tail.beta, p=p, **given
    )  # fmt: skip


def _with_neighbours(to: Recorder, x: Array) -> Array:
    """Return the matrices, copied if necessary, with adjacent elements along one of their two axes."""
    (rows, columns), (row, column) = x.shape[-2:], x.strides[-2:]
    if column == 1 or columns == 1:
        return replace(x, strides=(*x.strides[:-1], 1))
    if row == 1 or rows == 1:
        return replace(x, strides=(*x.strides[:-2], 1, column))
    return to.dense(x)


def _layout(k_stride: int, line_stride: int) -> str:
    return "ALONG_K" if k_stride == 1 and line_stride != 1 else "ALONG_LINES" if line_stride == 1 else "ALONG_K"


def _packs(x: Array, stride: int, batch: Sequence[int]) -> int:
    """Return 1 if all lines start at multiples of 16 bytes, else 0."""
    width = 16 // x.dtype.itemsize
    return int(all(step % width == 0 for step in (x.first, stride, *batch)))


@dataclass(frozen=True)
class WindowShape:
    """A window over the last two axes of an image, with its size, stride, dilation, and leading padding."""

    size: tuple[int, int]
    step: tuple[int, int] = (1, 1)
    distance: tuple[int, int] = (1, 1)
    pad: tuple[int, int] = (0, 0)


@cache
def _taps(channels: int, height: int, width: int, window: WindowShape) -> NDArray[np.int32]:
    """Return int32 [k, 3]: for each weight of an output, its offset from the window's corner, its row and column."""
    c, y, x = np.meshgrid(np.arange(channels), *map(np.arange, window.size), indexing="ij")
    y, x = y * window.distance[0], x * window.distance[1]
    return np.stack([c * height * width + y * width + x, y, x], -1).reshape(-1, 3).astype(np.int32)


def convolution(
    to: Recorder, x: Array, weight: Array, window: WindowShape, positions: tuple[int, int], groups: int, tail: Tail
) -> Array:
    """Record a convolution of images [n, channels, height, width] with weights [outputs, channels / groups, *window].

    The shape of the bias is [outputs].

    Raises:
        ArrayError: if the shapes do not fit.
    """
    x, weight = to.dense(x), to.dense(weight)
    (n, channels, height, width), (outputs, inputs) = x.shape, weight.shape[:2]
    if inputs * groups != channels or outputs % groups or weight.shape[2:] != window.size:
        raise ArrayError(f"weights of shape {list(weight.shape)} do not match images of shape {list(x.shape)}")
    out = to.new((n, outputs, *positions), x.dtype)
    addend = None if tail.addend is None else to.dense(tail.addend)
    if addend is not None and addend.shape != out.shape:
        raise ArrayError(f"an addend of shape {list(addend.shape)} does not match results of shape {list(out.shape)}")
    area, k, rows = math.prod(positions), inputs * math.prod(window.size), outputs // groups
    if not out.size:
        return out
    if groups > 1 and inputs == 1 and rows == 1:
        _each_channel(to, x, weight, out, window, replace(tail, addend=addend))
        return out
    bias = tail.bias
    start_product(
        to, out, tail, "ALONG_K", "WINDOWS", groups, a=weight, b=x, bias=bias, addend=addend, a_row=k, a_k=1, b_k=0,
        b_column=0, bias_row=1, bias_column=0, out_row=area, rows=rows, columns=n * area, k=k,
        batches=[groups, 1, 1], a_batch=[rows * k, 0, 0], b_batch=[inputs * height * width, 0, 0],
        bias_batch=[rows, 0, 0], out_batch=[rows * area, 0, 0],
        a_packs=_packs(weight, k, [rows * k]), b_packs=0, out_packs=0,
        taps=to.constant(_taps(inputs, height, width, window)), image=channels * height * width,
        out_image=outputs * area, positions=area, out_width=positions[1], height=height, width=width,
        step_y=window.step[0], step_x=window.step[1], pad_y=window.pad[0], pad_x=window.pad[1],
    )  # fmt: skip
    return out


def channel_kernel(scalar: str, function: str) -> CudaKernel:
    """Return the kernel for depthwise convolutions."""
    text = f"convolve_channels<{scalar}, unary::{function}>"
    return CudaKernel("arrays_window.cu", text, "WindowArguments", 256)


def _each_channel(to: Recorder, x: Array, weight: Array, out: Array, window: WindowShape, tail: Tail) -> None:
    start_windows(
        to, channel_kernel(x.scalar, tail.function), x, out, window, weight=weight, bias=tail.bias,
        addend=tail.addend, p=[*tail.parameters, 0.0, 0.0, 0.0][:3], counts_padding=0, end_y=0, end_x=0,
    )  # fmt: skip


def start_windows(to: Recorder, kernel: CudaKernel, x: Array, out: Array, window: WindowShape, **given: Any) -> None:
    """Launch a kernel with one thread for each position of each channel."""
    _, channels, height, width = x.shape
    if out.size > 2**31 - 1:
        raise ArrayError(f"a result of shape {list(out.shape)} is too large for one launch")
    sizes = {
        "size": window.size, "step": window.step, "distance": window.distance, "pad": window.pad,
        "out": out.shape[2:],
    }  # fmt: skip
    named = {f"{name}_{axis}": pair[i] for name, pair in sizes.items() for i, axis in enumerate("yx")}
    blocks = -(-out.size // kernel.threads)
    to.start(
        kernel, (blocks, 1, 1), x=x, out=out, count=out.size, channels=channels, height=height, width=width,
        **named, **given,
    )  # fmt: skip


def pool_kernel(scalar: str, kind: str) -> CudaKernel:
    """Return the kernel for max or mean pooling."""
    return CudaKernel("arrays_window.cu", f"pool<{scalar}, {kind}>", "WindowArguments", 256)


def pooled(
    to: Recorder, x: Array, kind: str, window: WindowShape, positions: tuple[int, int], ends: tuple[int, int],
    counts_padding: bool,
) -> Array:  # fmt: skip
    """Record max ("Largest") or mean ("Mean") pooling of images [n, channels, height, width].

    Args:
        to: the recorder.
        x: the images.
        kind: "Largest" or "Mean".
        window: the window.
        positions: number of rows and columns of the result.
        ends: number of rows and columns of padding at the end.
        counts_padding: True if a mean includes the zeros of padding.
    """
    x = to.dense(x)
    out = to.new((*x.shape[:2], *positions), x.dtype)
    start_windows(
        to, pool_kernel(x.scalar, kind), x, out, window, weight=None, bias=None, addend=None, p=[0.0] * 3,
        counts_padding=int(counts_padding), end_y=x.shape[2] + ends[0], end_x=x.shape[3] + ends[1],
    )  # fmt: skip
    return out
