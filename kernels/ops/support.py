"""What operator factories share: optional inputs, axes, factories from plain functions, and a limit on allocations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..registry import Kernel, KernelError, NodeSpec

# A single value may not take more than this unless the caller allows more (NodeSpec.options["max_value_bytes"]).
MAX_VALUE_BYTES = 1 << 34


def optional(inputs: Sequence[Any], index: int) -> Any:
    """Input `index`, or None where it is absent."""
    return inputs[index] if len(inputs) > index else None


def from_function(function: Callable[..., Any]) -> Callable[[NodeSpec], Kernel]:
    """A factory for an operator that is a function of its inputs alone."""

    def factory(spec: NodeSpec) -> Kernel:
        def kernel(context: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
            return (function(*inputs),)

        return kernel

    return factory


def axes_of(spec: NodeSpec, inputs: Sequence[Any], index: int = 1) -> tuple[int, ...] | None:
    """Axes from an input (newer versions) or the attribute (older ones); None where neither is given."""
    given = optional(inputs, index)
    if given is not None:
        return tuple(int(axis) for axis in np.asarray(given).reshape(-1))
    axes = spec.attributes.get("axes")
    return None if axes is None else tuple(int(axis) for axis in axes)


def checked_axis(axis: int, rank: int) -> int:
    """An axis counted from the front.

    Raises:
        KernelError: there is no such axis.
    """
    if not -rank <= axis < max(rank, 1):
        raise KernelError(f"axis {axis} is outside a value of rank {rank}")
    return axis % rank if rank else 0


def checked_shape(spec: NodeSpec, sizes: Sequence[Any], itemsize: int) -> tuple[int, ...]:
    """Sizes as a shape that may be allocated.

    Raises:
        KernelError: a size is negative, or the value would take more than is allowed.
    """
    shape = tuple(int(size) for size in sizes)
    if any(size < 0 for size in shape):
        raise KernelError(f"{spec.op_type}: a size is negative in {list(shape)}")
    allowed = int(spec.options.get("max_value_bytes", MAX_VALUE_BYTES))
    if math.prod(shape) * itemsize > allowed:
        raise KernelError(
            f"{spec.op_type}: a value of shape {list(shape)} takes {math.prod(shape) * itemsize} bytes, "
            f"allowed are {allowed}"
        )
    return shape


def widened(x: Any) -> Any:
    """Floats narrower than 32 bits as float32, others as they are."""
    return x.astype(np.float32) if x.dtype.itemsize < 4 and x.dtype.kind not in "biu" else x
