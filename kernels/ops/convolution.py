"""Convolutions as matrix products: windows are laid out side by side (im2col) and multiplied by BLAS."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from ..cpu.blas import matmul
from ..cpu.team import run
from ..registry import Kernel, KernelError, NodeSpec, register
from .support import checked_shape, optional, widened
from .windows import Windows, WindowSpec

Limits: TypeAlias = tuple[float, float]
NO_LIMITS: Limits = (-math.inf, math.inf)
_NANOSECONDS_PER_COPY = 0.5


def convolve(x: Any, weight: Any, windows: Windows, groups: int, team: Any = None) -> Any:
    """Convolution of [N, C, ...] with [M, C / groups, kernel ...] to [N, M, counts ...]."""
    batch, channels = x.shape[:2]
    outputs = weight.shape[0]
    check_groups(x, weight, groups)
    positions = math.prod(windows.counts)
    if windows.is_pointwise and groups == 1:
        product = matmul(weight.reshape(outputs, channels), x.reshape(batch, channels, positions), team)
    elif weight.shape[1] == 1 and outputs == channels:
        return _depthwise(windows.padded(x, 0), weight, windows)
    else:
        columns = columns_of(windows.padded(x, 0), windows, team)
        columns = columns.reshape(batch, groups, -1, positions)
        product = matmul(weight.reshape(groups, outputs // groups, -1), columns, team)
    return product.reshape(batch, outputs, *windows.counts)


def check_groups(x: Any, weight: Any, groups: int) -> None:
    if x.shape[1] != weight.shape[1] * groups or weight.shape[0] % groups:
        raise KernelError(
            f"Conv: {x.shape[1]} channels in {groups} groups do not fit a weight of shape {list(weight.shape)}"
        )


def columns_of(x: Any, windows: Windows, team: Any) -> Any:
    """[N, C, taps, positions ...]: the elements that each window sees."""
    taps = math.prod(windows.kernel)
    columns = np.empty((*x.shape[:2], taps, *windows.counts), x.dtype)
    run(team, _fill_columns, (x, columns, list(windows.taps())), x.shape[1], work=columns.size * _NANOSECONDS_PER_COPY)
    return columns


def _fill_columns(x: Any, columns: Any, taps: Sequence[tuple[slice, ...]], begin: int, end: int) -> None:
    """Channels begin to end."""
    for index, tap in enumerate(taps):
        columns[:, begin:end, index] = x[:, begin:end][tap]


def _depthwise(x: Any, weight: Any, windows: Windows) -> Any:
    """One window per channel, tap by tap, which needs no columns."""
    scales = weight.reshape(1, weight.shape[0], -1, *[1] * len(windows.counts))
    result = np.zeros((*x.shape[:2], *windows.counts), np.result_type(x, weight))
    part = np.empty_like(result)
    for index, tap in enumerate(windows.taps()):
        result += np.multiply(x[tap], scales[:, :, index], out=part)
    return result


def depthwise_images(x: Any, weight: Any, bias: Any, windows: Windows, limits: Limits, crew: Any) -> Any:
    """The same of images in float32, in compiled code, with all that follows; None where it does not fit."""
    fits = x.ndim == 4 and weight.shape[1] == 1 and weight.shape[0] == x.shape[1] and windows.dilations == (1, 1)
    if not fits or not x.size or not (x.dtype == weight.dtype == np.float32):
        return None
    from ..cpu.depthwise import depthwise

    first, second = windows.strides
    out = depthwise(
        np.ascontiguousarray(x).reshape(-1, *x.shape[2:]),
        np.ascontiguousarray(weight[:, 0]),
        np.zeros(len(weight), np.float32) if bias is None else np.ascontiguousarray(bias, np.float32),
        (windows.counts[0], windows.counts[1]),
        strides=(first, second),
        pads=(windows.begins[0], windows.begins[1]),
        limits=limits,
        crew=crew,
    )
    return out.reshape(*x.shape[:2], *windows.counts)


def _finish(result: Any, bias: Any, limits: Limits, team: Any) -> None:
    """Add the bias and keep to the limits, in place."""
    if bias is None and limits == NO_LIMITS:
        return
    if result.dtype == np.float32 and result.flags.c_contiguous and result.size and result.ndim > 2:
        from ..cpu.channels import finish_channels

        addend = None if bias is None else np.ascontiguousarray(bias, np.float32)
        finish_channels(result.reshape(math.prod(result.shape[:2]), -1), addend, limits, team=team)
        return
    if bias is not None:
        result += per_channel(bias, result.ndim)
    if limits != NO_LIMITS:
        np.clip(result, *limits, out=result)


def per_channel(values: Any, rank: int) -> Any:
    """[C] in a form that broadcasts along axis 1 of a value of this rank."""
    return np.asarray(values).reshape(-1, *[1] * (rank - 2))


@register("Conv")
def conv(spec: NodeSpec) -> Kernel:
    """Cross-correlation of any spatial rank, with groups, dilations and bias."""
    return limited_conv(spec, NO_LIMITS)


def limited_conv(spec: NodeSpec, limits: Limits) -> Kernel:
    """The same with results kept within limits, as Relu and Clip do."""
    window_spec, groups = WindowSpec(spec), int(spec.attributes.get("group", 1))
    team = spec.options.get("team")
    if groups < 1:
        raise KernelError(f"Conv: group is {groups}")

    packed = packed_convolution(spec, limits)
    if packed is not None:
        return packed

    def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x, weight, bias = inputs[0], inputs[1], optional(inputs, 2)
        check_ranks(spec, x, weight)
        windows = window_spec.windows(x.shape[2:], weight.shape[2:])
        check_columns(spec, x, weight, windows)
        result = depthwise_images(x, weight, bias, windows, limits, spec.options.get("crew"))
        if result is None:
            result = convolve(widened(x), widened(weight), windows, groups, team)
            _finish(result, bias, limits, team)
        return (result.astype(x.dtype, copy=False),)

    return kernel


class PackedConvolution:
    """The kernel of a node with constant float32 kernels in one group.

    Attributes:
        packed: inputs that it no longer reads, since it keeps them in its own form.
    """

    def __init__(self, spec: NodeSpec, convolution: Any, kernel: tuple[int, ...], packed: tuple[int, ...]) -> None:
        self._spec, self._windows = replace(spec, constants=()), WindowSpec(spec)
        self._convolution, self._kernel, self.packed = convolution, kernel, packed

    def __call__(self, context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        from ..cpu.gemm.convolution import Windows as Places

        x, addend = inputs[0], optional(inputs, 3)
        if x.ndim != len(self._kernel) or x.shape[1] != self._kernel[1] or x.dtype != np.float32:
            raise KernelError(f"Conv: {x.dtype}{list(x.shape)} does not fit kernels of shape {list(self._kernel)}")
        windows = self._windows.windows(x.shape[2:], self._kernel[2:])
        checked_shape(self._spec, (*x.shape[:2], math.prod(windows.kernel), *windows.counts), 4)
        checked_shape(self._spec, (x.shape[0], self._kernel[0], *windows.counts), 4)
        places = Places(windows.kernel, windows.strides, windows.dilations, windows.counts)
        if addend is not None:
            addend = np.broadcast_to(addend, (len(x), self._kernel[0], *windows.counts))
        return (self._convolution(windows.padded(x, 0), places, addend),)


def packed_convolution(spec: NodeSpec, limits: Limits) -> PackedConvolution | None:
    """A convolution whose kernels are packed once; None where they are no constants, or in groups, or few."""
    crew, weight = spec.options.get("crew"), spec.constants[1]
    if crew is None or weight is None or weight.dtype != np.float32 or weight.ndim < 3 or not weight.size:
        return None
    bias = spec.constants[2] if spec.has(2) else None
    if int(spec.attributes.get("group", 1)) != 1 or (spec.has(2) and (bias is None or bias.dtype != np.float32)):
        return None
    if bias is not None and bias.shape != (len(weight),):
        raise KernelError(f"Conv: a bias of shape {list(bias.shape)} does not fit {len(weight)} kernels")
    from ..cpu.gemm.convolution import Convolution, pack_kernels

    kernels = spec.pack((1,), "float32 kernels", lambda: pack_kernels(weight))
    function, parameters = ("copy", ()) if limits == NO_LIMITS else ("clip", limits)
    convolution = Convolution(crew, kernels, bias, function, parameters)
    return PackedConvolution(spec, convolution, weight.shape, (1, 2) if bias is not None else (1,))


def check_ranks(spec: NodeSpec, x: Any, weight: Any) -> None:
    if x.ndim < 2 or x.ndim != weight.ndim:
        raise KernelError(f"{spec.op_type}: data {list(x.shape)} and weight {list(weight.shape)} differ in rank")


def check_columns(spec: NodeSpec, x: Any, weight: Any, windows: Windows) -> None:
    """The columns are the largest value that a convolution makes."""
    checked_shape(spec, (*x.shape[:2], math.prod(windows.kernel), *windows.counts), 4)
    checked_shape(spec, (x.shape[0], weight.shape[0], *windows.counts), 4)


@register("ConvTranspose")
def conv_transpose(spec: NodeSpec) -> Kernel:
    """The gradient of Conv: each input element adds its kernel to the output."""
    return _ConvTranspose(spec)


class _ConvTranspose:
    def __init__(self, spec: NodeSpec) -> None:
        self.spec = spec
        attributes = spec.attributes
        self.groups = int(attributes.get("group", 1))
        self.auto_pad = str(attributes.get("auto_pad", "NOTSET"))
        if self.groups < 1:
            raise KernelError(f"ConvTranspose: group is {self.groups}")

    def __call__(self, context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
        x, weight, bias = inputs[0], inputs[1], optional(inputs, 2)
        check_ranks(self.spec, x, weight)
        if x.shape[1] != weight.shape[0] or x.shape[1] % self.groups:
            raise KernelError(
                f"ConvTranspose: {x.shape[1]} channels in {self.groups} groups, weight {list(weight.shape)}"
            )
        strides, dilations = self._axes("strides", x.ndim - 2, 1), self._axes("dilations", x.ndim - 2, 1)
        reach = [d * (size - 1) + 1 for d, size in zip(dilations, weight.shape[2:], strict=True)]
        full = [(extent - 1) * s + r for extent, s, r in zip(x.shape[2:], strides, reach, strict=True)]
        begins, sizes = self._crop(x.shape[2:], strides, full)
        outputs = weight.shape[1] * self.groups
        room = [max(f, begin + size) for f, begin, size in zip(full, begins, sizes, strict=True)]
        checked_shape(self.spec, (x.shape[0], outputs, *room), 4)
        checked_shape(self.spec, (x.shape[0], outputs, math.prod(weight.shape[2:]), *x.shape[2:]), 4)
        windows = Windows(tuple(weight.shape[2:]), strides, dilations, (), (), tuple(x.shape[2:]))
        result = self._spread(widened(x), widened(weight), windows, room)
        inner = tuple(slice(begin, begin + size) for begin, size in zip(begins, sizes, strict=True))
        result = result[(slice(None), slice(None), *inner)]
        if bias is not None:
            result = result + per_channel(bias, x.ndim)
        return (np.ascontiguousarray(result).astype(x.dtype, copy=False),)

    def _spread(self, x: Any, weight: Any, windows: Windows, room: Sequence[int]) -> Any:
        batch, channels = x.shape[:2]
        per_group = channels // self.groups
        taps = math.prod(windows.kernel)
        matrix = weight.reshape(self.groups, per_group, -1).transpose(0, 2, 1)
        parts = matrix @ x.reshape(batch, self.groups, per_group, -1)
        parts = parts.reshape(batch, self.groups * weight.shape[1], taps, *windows.counts)
        result = np.zeros((batch, parts.shape[1], *room), parts.dtype)
        for index, tap in enumerate(windows.taps()):
            result[tap] += parts[:, :, index]
        return result

    def _crop(self, extents: Sequence[int], strides: Sequence[int], full: Sequence[int]) -> tuple[list[int], list[int]]:
        """Where the output begins inside the full result, and its sizes."""
        rank = len(extents)
        extra = self._axes("output_padding", rank, 0)
        wanted = self.spec.attributes.get("output_shape")
        if wanted is None and self.auto_pad in ("SAME_UPPER", "SAME_LOWER"):
            wanted = [extent * stride for extent, stride in zip(extents, strides, strict=True)]
        if wanted is not None:
            sizes = [int(size) for size in wanted][-rank:]
            totals = [max(f + e - size, 0) for f, e, size in zip(full, extra, sizes, strict=True)]
            if self.auto_pad == "SAME_UPPER":
                return [total // 2 for total in totals], sizes
            return [total - total // 2 for total in totals], sizes
        pads = self.spec.attributes.get("pads") if self.auto_pad == "NOTSET" else None
        begins = [int(pad) for pad in pads[:rank]] if pads else [0] * rank
        ends = [int(pad) for pad in pads[rank:]] if pads else [0] * rank
        sizes = [f + e - b - end for f, e, b, end in zip(full, extra, begins, ends, strict=True)]
        return begins, list(checked_shape(self.spec, sizes, 1))

    def _axes(self, name: str, rank: int, default: int) -> tuple[int, ...]:
        values = self.spec.attributes.get(name)
        found = (default,) * rank if not values else tuple(int(value) for value in values)
        if len(found) != rank or any(value < default for value in found):
            raise KernelError(f"ConvTranspose: {name} {list(found)} does not fit {rank} spatial axes")
        return found
