"""Operators on images in blocks of sixteen channels, [N, C / 16, ..., 16]; `block_convolutions` adds them to graphs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from genai.kernels.cpu.arrays.blocked.convolution import BlockedConvolution, Place, pack_blocked
from genai.kernels.cpu.arrays.blocked.layout import BLOCK, blocks_of, from_blocked, to_blocked
from genai.kernels.cpu.arrays.blocked.pooling import mean_blocks, pooled_blocks
from genai.kernels.cpu.arrays.blocked.scaling import scaled_blocks
from genai.kernels.cpu.arrays.blocked.transposed import BlockedTransposed, pack_transposed
from genai.kernels.cpu.arrays.copying import operand
from genai.kernels.cpu.arrays.gemm.windows import Windows
from genai.kernels.cpu.program.bound_program import BoundPrograms
from genai.kernels.cpu.program.thread_pool import Threads

from ..onnx.node import OURS
from .convolution import transposed_sizes
from .pooling import PoolingWindows, WindowMaker, WindowSpec, mean_counts, window_maker
from .registry import KernelError, NodeSpec, Positive, operator, register
from .support import checked_shape, optional

# Number of shapes of images for which a convolution keeps a program.
_KEPT = 8
# The compiled function for each activation, and its parameters. PRelu has a parameter for each channel.
ACTIVATIONS: Mapping[str, Callable[[Sequence[float]], tuple[str, tuple[float, ...]]]] = {
    "": lambda given: ("copy", ()),
    "Clip": lambda given: ("clip", (given[0], given[1])),
    "HardSigmoid": lambda given: ("hard_sigmoid", (given[0], given[1])),
    "HardSwish": lambda given: ("hard_swish", ()),
    "LeakyRelu": lambda given: ("leaky_relu", (given[0],)),
    "PRelu": lambda given: ("leaky_relu", (0.0,)),
    "QuickGelu": lambda given: ("silu", ()) if given[0] == 1 else ("quick_gelu", (given[0],)),
    "Relu": lambda given: ("relu", ()),
    "Sigmoid": lambda given: ("sigmoid", ()),
    "Tanh": lambda given: ("tanh", ()),
}


def _compiled_windows(windows: PoolingWindows) -> Windows:
    return Windows(windows.kernel, windows.strides, windows.dilations, windows.counts)


def _sides(values: Any, rank: int) -> tuple[tuple[int, int], ...]:
    """Return the widths before and after each axis from a list like the attribute pads."""
    numbers = [int(value) for value in values or [0] * (2 * rank)]
    return tuple(zip(numbers[:rank], numbers[rank:], strict=True))


@register("BlockedConv", domain=OURS)
class BlockedConv:
    """The kernel for a convolution with blocked results: scale * activation(conv(x, kernels) + bias + addend) + shift.

    The node has the attributes of Conv, and: `plain` = 1 if x is not blocked; `crop`, the widths of x's border of
    zeros, in the form of `pads`; `border`, the widths of the border of zeros that surrounds the results; `scale` and
    `shift`, which are 1 and 0 if they are missing; `broadcasts` = 1 if the addend may have another shape than the
    results, in which case there are no border and no activation.

    Attributes:
        packed: inputs that the kernel does not read, because it holds a packed copy.
        calls_blas: False.
    """

    calls_blas = False
    _name = "Conv"

    def __init__(self, spec: NodeSpec) -> None:
        attributes, weight = spec.attributes, spec.constant(1)
        bias = spec.constant(2) if spec.has(2) else None
        self._plain, self._shape = bool(attributes.get("plain", 0)), weight.shape
        self._spec = replace(spec, constants=())
        name = str(attributes.get("activation", ""))
        if name not in ACTIVATIONS:
            raise KernelError(f"{self._name}: the activation {name!r} is unknown")
        given, slopes = [float(v) for v in attributes.get("activation_params") or ()], None
        if name == "PRelu":
            slopes = np.array(given, np.float32)
        threads = spec.options.get("threads") or Threads(1)
        scaling = float(attributes.get("scale", 1.0)), float(attributes.get("shift", 0.0))
        self._convolution = self._made(spec, threads, bias, *ACTIVATIONS[name](given), slopes, *scaling)
        rank = weight.ndim - 2
        self._crop, self._border = (_sides(attributes.get(name), rank) for name in ("crop", "border"))
        self._broadcasts = bool(attributes.get("broadcasts", 0))
        self._placed: BoundPrograms[Callable[[Any, Any], Any]] = BoundPrograms(_KEPT)
        self.packed = (1, 2) if bias is not None else (1,)

    def _made(self, spec: NodeSpec, threads: Threads, *finish: Any) -> BlockedConvolution:
        """Return the convolution. `finish` is the bias, the function and its parameters, slopes, scale and shift."""
        groups, weight = int(spec.attributes.get("group", 1)), spec.constant(1)
        layout = f"blocks of {'1' if self._plain else '16'} channels in {groups} groups"
        kernels = spec.pack((1,), layout, lambda: pack_blocked(weight, groups, is_plain=self._plain))
        self._channels, self._outputs = kernels.channels, kernels.outputs
        self._windows = WindowSpec(spec)
        return BlockedConvolution(threads, kernels, *finish)

    def _windows_in(self, extents: list[int]) -> tuple[Windows, tuple[int, ...], list[int]]:
        """Return the windows, the pads before each axis, and the extents of the padded image."""
        windows = self._windows.windows(extents, self._shape[2:])
        padded = [size + sum(sides) for size, sides in zip(extents, windows.widths(extents), strict=True)]
        return _compiled_windows(windows), windows.begins, padded

    def __call__(self, context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Return the blocked results."""
        x, addend = inputs[0], optional(inputs, 3)
        given = None if addend is None else addend.shape
        return (self._placed.get(self._place, x.shape, x.dtype, given)(x, addend),)

    def _place(self, shape: tuple[int, ...], dtype: Any, addend: tuple[int, ...] | None) -> Callable[[Any, Any], Any]:
        rank = len(self._shape) - 2
        leading = self._channels if self._plain else blocks_of(self._channels)
        if len(shape) != rank + 3 - self._plain or shape[1] != leading or dtype != np.float32:
            layout = "" if self._plain else " in blocks of 16 channels"
            raise KernelError(
                f"{self._name}: the input is {dtype}{list(shape)}{layout}, which does not match float32 kernels of "
                f"shape {list(self._shape)}"
            )
        extents = [size - sum(sides) for size, sides in zip(shape[2 : 2 + rank], self._crop, strict=True)]
        windows, pads, padded = self._windows_in(extents)
        checked_shape(self._spec, (shape[0], leading, BLOCK, *padded), 4)
        checked_shape(self._spec, (shape[0], blocks_of(self._outputs), BLOCK, *windows.counts), 4)
        place = Place(windows, pads, self._crop, self._border)
        if self._broadcasts and addend != (shape[0], blocks_of(self._outputs), *windows.counts, BLOCK):
            placed = self._convolution.placed(shape, place, has_addend=False)
            return lambda x, addend: np.add(placed(x), addend)
        return self._convolution.placed(shape, place, addend is not None)


@register("BlockedConvTranspose", domain=OURS)
class BlockedConvTranspose(BlockedConv):
    """The kernel for a transposed convolution of blocked images: activation(conv_transpose(x, kernels) + bias).

    The node has the attributes of ConvTranspose, and `crop` and `border` (see `BlockedConv`).
    """

    _name = "ConvTranspose"

    def _made(self, spec: NodeSpec, threads: Threads, *finish: Any) -> BlockedConvolution:
        weight = spec.constant(1)
        self._channels, self._outputs = weight.shape[:2]
        self._strides = tuple(spec.attributes.get("strides") or (1,) * (weight.ndim - 2))
        layout = f"blocks of 16 channels for the strides {self._strides}"
        kernels = spec.pack((1,), layout, lambda: pack_transposed(weight, self._strides))
        return BlockedTransposed(threads, kernels, *finish)

    def _windows_in(self, extents: list[int]) -> tuple[Windows, tuple[int, ...], list[int]]:
        kernel, strides = self._shape[2:], self._strides
        begins, sizes = transposed_sizes(self._spec, extents, strides, kernel)
        padded = [size + 2 * taps for size, taps in zip(extents, kernel, strict=True)]
        return Windows(kernel, strides, (1,) * len(kernel), tuple(sizes)), tuple(begins), padded


@register("BlockedScale", domain=OURS)
class BlockedScale:
    """The kernel for activation(x * scale + shift), with one scale and one shift for each channel of blocked images.

    Attributes:
        calls_blas: False.
    """

    calls_blas = False

    def __init__(self, spec: NodeSpec) -> None:
        given = [float(value) for value in spec.attributes.get("activation_params") or ()]
        self._function, self._parameters = ACTIVATIONS[str(spec.attributes.get("activation", ""))](given)
        self._threads = spec.options.get("threads")

    def __call__(self, context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Return the blocked results."""
        x, scale, shift = operand(inputs[0]), operand(inputs[1]), optional(inputs, 2)
        shift = None if shift is None else operand(shift)
        return (scaled_blocks(x, scale, shift, self._function, self._parameters, self._threads),)


@operator("ToBlocked", domain=OURS)
def convert_to_blocked(x: Any, *, threads: Threads | None = None) -> Any:
    """Convert [N, C, ...] to [N, C / 16, ..., 16]."""
    return to_blocked(x, threads)


@operator("FromBlocked", domain=OURS)
def convert_from_blocked(x: Any, *, channels: Positive, threads: Threads | None = None) -> Any:
    """Convert [N, C / 16, ..., 16] to [N, C, ...]."""
    return from_blocked(x, channels, threads)


def _without_blocks(x: Any) -> Any:
    """Return a view of no memory with the shape of the images, one channel per block."""
    return np.broadcast_to(np.float32(0), x.shape[:-1])


@operator("BlockedMaxPool", domain=OURS, make_windows=window_maker)
def blocked_max_pool(x: Any, *, make_windows: WindowMaker, threads: Threads | None = None) -> Any:
    """MaxPool of blocked images."""
    _, windows = make_windows(_without_blocks(x))
    first, second = windows.begins
    return pooled_blocks(operand(x), _compiled_windows(windows), (first, second), threads=threads)


@operator("BlockedAveragePool", domain=OURS, make_windows=window_maker)
def blocked_average_pool(
    x: Any, *, count_include_pad: bool = False, counts_taps: bool = False, make_windows: WindowMaker,
    threads: Threads | None = None,
) -> Any:  # fmt: skip
    """AveragePool of blocked images. `counts_taps`: see `mean_counts`."""
    windows, walked = make_windows(_without_blocks(x))
    counts = mean_counts(x.shape[2:-1], windows, count_include_pad, np.float32, counts_taps=counts_taps)
    first, second = walked.begins
    return pooled_blocks(operand(x), _compiled_windows(walked), (first, second), counts=counts, threads=threads)


@operator("BlockedMean", domain=OURS)
def blocked_mean(x: Any, *, threads: Threads | None = None) -> Any:
    """The mean of each plane of blocked images."""
    if not math.prod(x.shape[2:-1]):
        return np.full((*x.shape[:2], *[1] * (x.ndim - 3), BLOCK), np.nan, np.float32)
    return mean_blocks(operand(x), threads)
