"""Transposed convolution of blocked images (see `layout`): each input adds its kernel to the results.

Results whose positions have the same remainder modulo the strides are a convolution with some of the taps. Each
remainder writes its results in place: every `stride`-th pixel of the image of results.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import numpy as np
from numpy.typing import NDArray

from ....checks import Float32
from ...program.thread_pool import Threads
from .convolution import BlockedConvolution, BlockedKernels, Part, Place, pack_blocked

# The packed kernels for each remainder of positions modulo the strides.
Remainders = Mapping[tuple[int, ...], BlockedKernels]


def pack_transposed(weight: NDArray[np.float32], strides: tuple[int, ...]) -> Remainders:
    """Pack kernels [C, M, kernel ...].

    Raises:
        ValueError: a stride is larger than the kernel, so that some results have no taps.
    """
    kernel = weight.shape[2:]
    if any(step > size for step, size in zip(strides, kernel, strict=True)):
        raise ValueError(f"the strides {list(strides)} are larger than the kernel {list(kernel)}")
    swapped = weight.swapaxes(0, 1)
    found = {}
    for remainder in product(*map(range, strides)):
        taps = (slice(first, None, step) for first, step in zip(remainder, strides, strict=True))
        chosen = np.flip(swapped[(slice(None), slice(None), *taps)], tuple(range(2, weight.ndim)))
        found[remainder] = pack_blocked(np.ascontiguousarray(chosen))
    return found


class BlockedTransposed(BlockedConvolution):
    """The transposed convolution function(conv_transpose(x, kernels) + bias) with blocked results.

    The windows of a `Place` have the kernel's size, the strides, no dilations, and the extents of the results as
    counts. Its pads are the number of results that are omitted before each axis. There is no addend.

    Args:
        bias, function, parameters, slopes, scale, shift: see `BlockedConvolution`.
    """

    def __init__(
        self, threads: Threads, kernels: Remainders, bias: Float32 | None = None, function: str = "copy",
        parameters: tuple[float, ...] = (), slopes: Float32 | None = None, scale: float = 1.0, shift: float = 0.0,
    ) -> None:  # fmt: skip
        one, *others = kernels.values()
        super().__init__(threads, one, bias, function, parameters, slopes, scale, shift)
        self._remainders = kernels
        self._is_finite = self._is_finite and all(np.isfinite(other.data).all() for other in others)

    def _parts(self, place: Place) -> list[Part]:
        found, windows = [], place.windows
        nones: tuple[int, ...] = (0,) * (3 - len(windows.kernel))
        ones: tuple[int, ...] = (1,) * len(nones)
        for remainder, kernels in self._remainders.items():
            sizes = zip(remainder, windows.kernel, windows.strides, windows.counts, place.pads, strict=True)
            taps, counts, pads, first = zip(*(_axis(*axis) for axis in sizes), strict=True)
            if 0 not in counts:
                part = Part(
                    kernels=kernels, kernel=ones + taps, strides=(1, 1, 1), dilations=(1, 1, 1), counts=ones + counts,
                    pads=nones + pads, first=nones + first, gaps=ones + windows.strides,
                )  # fmt: skip
                found.append(part)
        return found


def _axis(remainder: int, size: int, stride: int, extent: int, omitted: int) -> tuple[int, int, int, int]:
    """Return the taps, the number of results, the pads and the first result of a remainder on an axis.

    Result number i is at position p = i + omitted, and reads inputs p // stride, p // stride - 1, and so on.
    """
    taps, first = -(-(size - remainder) // stride), (remainder - omitted) % stride
    return taps, max(-(-(extent - first) // stride), 0), taps - 1 - (first + omitted) // stride, first
