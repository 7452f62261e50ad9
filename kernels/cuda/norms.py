"""Launches of norms, and the selection of norms that matmuls of one or two rows compute themselves, to save kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .. import ir
from ..ir import Constants, weights_of
from .decode_lanes import ROWS
from .driver import Grid
from .grouped import COUNTED as DECODED, NOBODY, made_with
from .launches import COUNTED, Counts, Launch, bind
from .lowering_context import CudaLowering
from .memory import DeviceRows
from .sources import CudaKernel

_THREADS, _FOUR_BYTES = 512, 16


def norm_kernel(centred: bool) -> CudaKernel:
    """Return the kernel for RMS norm, or for layer norm (`centred`)."""
    return CudaKernel("norm.cu", f"norm<{str(centred).lower()}>", "NormArguments", _THREADS, early=True)


def left_to_products(
    parts: Sequence[Any], outputs: Sequence[str], constants: Constants, takes: Callable[[Any], bool]
) -> dict[str, ir.Norm]:
    """Return the norms whose results are read only by matmuls that can normalise rows, by the results' names.

    Args:
        parts: parts of the program.
        outputs: outputs of the program.
        constants: the program's constants.
        takes: function that returns True if a matmul can normalise rows.
    """
    norms = {
        part.out: part
        for part in parts
        if isinstance(part, ir.Norm) and not (part.centred or part.skip or part.input_bias or part.bias or part.total)
    }
    others = set(outputs)
    for part in parts:
        is_linear = isinstance(part, ir.Linear | ir.GatedLinear) and not part.exact
        if is_linear and takes(part):
            width = constants.array(norms[part.x].weight).size if part.x in norms else 0
            others |= {name for name in part.inputs if name != part.x}
            others |= {part.x} if any(weight.columns != width for weight in weights_of(part)) else set()
        else:
            others |= set(part.inputs)
    return {name: norm for name, norm in norms.items() if name not in others}


def _can_read_fours(x: DeviceRows) -> bool:
    """Return True if the numbers can be read four at a time."""
    return x.address % _FOUR_BYTES == 0 and x.stride % 4 == x.width % 4 == 0


def add_norm(op: ir.Norm, at: CudaLowering) -> None:
    """Add the launch of a norm, and record the fields that matmuls need to compute the norm themselves."""
    x, size = at.values[op.x], at.constants.array(op.weight).size
    skip = at.values[op.skip] if op.skip else None
    out = at.values.make(op.out) if op.out else None
    total = at.values.make(op.total) if op.total else None
    groups = x.width // size
    kernel = norm_kernel(op.centred)
    weight = at.vector(op.weight)
    is_left = op.out in at.left_norms and _can_read_fours(x)
    if is_left:
        at.normed[op.out] = {
            "x": x.address, "weight": weight, "x_stride": x.stride, "width": size, "epsilon": op.epsilon,
        }  # fmt: skip
    arguments = bind(
        kernel,
        grouped=made_with(at, op.out, out) if out and groups == 1 else NOBODY,
        x=x.address,
        skip=skip.address if skip else 0,
        input_bias=at.vector(op.input_bias),
        weight=weight,
        bias=at.vector(op.bias),
        out=out.address if out else 0,
        total=total.address if total else 0,
        x_stride=x.stride,
        skip_stride=skip.stride if skip else 0,
        out_stride=out.stride if out else 0,
        total_stride=total.stride if total else 0,
        rows=0,
        groups=groups,
        width=size,
        grouped_rows=0,
        epsilon=op.epsilon,
    )
    counted, decoded = COUNTED[x.per], DECODED[x.per]

    def grid(counts: Counts) -> Grid:
        rows = counts[counted]
        is_done = is_left and rows == counts[decoded] <= ROWS[-1]
        return (0, 0, 0) if is_done else (rows * groups, 1, 1)

    at.starts.append(Launch(kernel, arguments, {"rows": counted, "grouped_rows": decoded}, grid))


def read_by(part: Any, left: Mapping[str, ir.Norm]) -> list[str]:
    """Return the values that a part reads, including the inputs of norms that its matmuls compute."""
    normed = getattr(part, "x", "")
    return [*part.inputs, *([left[normed].x] if normed in left else [])]
