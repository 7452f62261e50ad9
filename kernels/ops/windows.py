"""Windows that slide over the spatial axes of [batch, channels, ...]: their sizes, pads and taps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from ..registry import KernelError, NodeSpec

# Windows are walked tap by tap; no real kernel is as large as this.
MAX_TAPS = 1 << 18


@dataclass(frozen=True)
class Windows:
    """Per spatial axis: extent of the kernel, stride, dilation, pads before and after, and number of windows."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begins: tuple[int, ...]
    ends: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def is_pointwise(self) -> bool:
        """Whether each window is the element itself."""
        return all(size == 1 for size in self.kernel) and all(s == 1 for s in self.strides) and not self.pads_anything

    @property
    def pads_anything(self) -> bool:
        """Whether there are pads."""
        return any(self.begins) or any(self.ends)

    def taps(self) -> Iterator[tuple[slice, ...]]:
        """Per position inside the kernel, where its elements lie in the padded array (leading axes included)."""
        for offsets in product(*(range(size) for size in self.kernel)):
            yield (
                slice(None),
                slice(None),
                *(
                    slice(offset * dilation, offset * dilation + (count - 1) * stride + 1, stride)
                    for offset, dilation, stride, count in zip(
                        offsets, self.dilations, self.strides, self.counts, strict=True
                    )
                ),
            )

    def widths(self, extents: Sequence[int]) -> list[tuple[int, int]]:
        """Elements before and after per axis of an input of these extents: pads, and what windows need beyond them."""
        beyond = [
            (count - 1) * stride + dilation * (size - 1) + 1
            for size, stride, dilation, count in zip(
                self.kernel, self.strides, self.dilations, self.counts, strict=True
            )
        ]
        return [
            (begin, max(needed - extent - begin, 0))
            for begin, needed, extent in zip(self.begins, beyond, extents, strict=True)
        ]

    def padded(self, x: Any, value: Any) -> Any:
        """x with its pads, and with what windows need beyond them."""
        widths = self.widths(x.shape[2:])
        if not any(before or after for before, after in widths):
            return x
        shape = (
            *x.shape[:2],
            *(before + size + after for (before, after), size in zip(widths, x.shape[2:], strict=True)),
        )
        result = np.full(shape, value, x.dtype)
        inner = tuple(slice(before, before + size) for (before, _), size in zip(widths, x.shape[2:], strict=True))
        result[(slice(None), slice(None), *inner)] = x
        return result


class WindowSpec:
    """The attributes of a convolution or pool that say where its windows lie."""

    def __init__(self, spec: NodeSpec) -> None:
        attributes = spec.attributes
        self._name = spec.op_type
        self._strides, self._dilations = attributes.get("strides"), attributes.get("dilations")
        self._pads, self._auto_pad = attributes.get("pads"), str(attributes.get("auto_pad", "NOTSET"))
        self._ceil = bool(attributes.get("ceil_mode", 0))
        if self._auto_pad not in ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"):
            raise KernelError(f"{self._name}: auto_pad {self._auto_pad!r} is unknown")
        for name in ("strides", "dilations", "kernel_shape"):
            if any(int(value) < 1 for value in attributes.get(name) or ()):
                raise KernelError(f"{self._name}: {name} {attributes[name]} must be at least 1")
        if any(int(value) < 0 for value in self._pads or ()):
            raise KernelError(f"{self._name}: pads {self._pads} must not be negative")

    def windows(self, extents: Sequence[int], kernel: Sequence[int]) -> Windows:
        """For an input of these spatial extents.

        Raises:
            KernelError: attributes of another rank, or a window larger than the padded input.
        """
        rank = len(extents)
        sizes, strides, dilations = (
            self._per_axis(values, rank) for values in (kernel, self._strides, self._dilations)
        )
        if math.prod(sizes) > MAX_TAPS:
            raise KernelError(f"{self._name}: a kernel of {list(sizes)} has more than {MAX_TAPS} elements")
        reach = [dilation * (size - 1) + 1 for size, dilation in zip(sizes, dilations, strict=True)]
        begins, ends = self._padding(extents, reach, strides)
        counts = []
        for extent, begin, end, size, stride in zip(extents, begins, ends, reach, strides, strict=True):
            room = extent + begin + end - size
            if room < 0:
                raise KernelError(f"{self._name}: a window of {size} is larger than the padded extent {room + size}")
            count = (-(-room // stride) if self._ceil and self._auto_pad == "NOTSET" else room // stride) + 1
            # A last window that would begin in the padding at the end is left out.
            counts.append(count - (self._ceil and (count - 1) * stride >= extent + begin))
        return Windows(sizes, strides, dilations, tuple(begins), tuple(ends), tuple(counts))

    def _per_axis(self, values: Any, rank: int) -> tuple[int, ...]:
        found = (1,) * rank if values is None else tuple(int(value) for value in values)
        if len(found) != rank:
            raise KernelError(f"{self._name}: {list(found)} does not fit {rank} spatial axes")
        return found

    def _padding(
        self, extents: Sequence[int], reach: Sequence[int], strides: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        rank = len(extents)
        if self._auto_pad == "VALID" or (self._auto_pad == "NOTSET" and self._pads is None):
            return [0] * rank, [0] * rank
        if self._auto_pad == "NOTSET":
            pads = [int(pad) for pad in self._pads or ()]
            if len(pads) != 2 * rank:
                raise KernelError(f"{self._name}: pads {pads} do not fit {rank} spatial axes")
            return pads[:rank], pads[rank:]
        totals = [
            max((-(-extent // stride) - 1) * stride + size - extent, 0)
            for extent, size, stride in zip(extents, reach, strides, strict=True)
        ]
        smaller, larger = [total // 2 for total in totals], [total - total // 2 for total in totals]
        return (smaller, larger) if self._auto_pad == "SAME_UPPER" else (larger, smaller)
