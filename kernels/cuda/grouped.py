"""Values as int8 in groups of rows, which is the layout that matmuls of few rows read: see groups.cuh.

If possible, the kernel that computes a value also writes this layout; for other values, a separate kernel writes the
layout. Therefore the memory is allocated when the value is computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .. import ir
from ..ir import BlockWeight, HostNode, Op, Per, Projection
from .host_nodes import HostPart
from .launches import Launch, bind
from .lowering_context import CudaLowering
from .memory import DeviceRows
from .sources import CudaKernel

GROUP = 8
"""The number of rows of a group."""
STRIDE = 1024
"""Rows are padded to a multiple of this number of columns."""
_CHUNK, _SCALE_BYTES = 32, 8
NOBODY = {"bytes": 0, "scales": 0, "chunks": 0, "unused": 0}
"""The fields of `GroupedRows` for values that no matmul reads in this layout."""
# The names of the counts of rows with decode numerics.
COUNTED = {Per.TOKEN: "decode_rows", Per.LOGITS: "logits_rows"}


def arrange_kernel() -> CudaKernel:
    """Return the kernel that converts values to the grouped layout."""
    return CudaKernel("activations.cu", "arrange_groups", "GroupArguments", STRIDE // 4)


def wanted_of(parts: Iterable[Op | HostPart | HostNode]) -> set[str]:
    """Return the names of the values that int8 matmuls read."""
    return {
        part.x
        for part in parts
        if isinstance(part, ir.Linear | ir.GatedLinear) and not part.exact
        for projection in _projections(part)
        if isinstance(projection.weight, BlockWeight)
    }


def _projections(part: ir.Linear | ir.GatedLinear) -> tuple[Projection, ...]:
    return (part.projection,) if isinstance(part, ir.Linear) else (part.gate, part.up)


def made_with(at: CudaLowering, name: str, rows: DeviceRows, *, whole_strides: bool = False) -> dict[str, int]:
    """Return the fields of `GroupedRows` that make the kernel that computes a value also write the grouped layout.

    Args:
        at: the lowering.
        name: name of the value.
        rows: the value.
        whole_strides: True if the kernel does not pad rows.
    """
    if name not in at.grouped or (whole_strides and rows.width % STRIDE):
        return NOBODY
    return _fields(at, name, rows, lambda memory: None)


def grouped(at: CudaLowering, x: str) -> dict[str, int]:
    """Return the fields of a value in the grouped layout. If necessary, a launch that converts the value is added."""
    rows = at.values[x]

    def fill(memory: Any) -> None:
        kernel, strides = arrange_kernel(), -(-rows.width // STRIDE)
        arguments = bind(
            kernel, x=rows.address, grouped=_addresses(at, rows, memory), x_stride=rows.stride, rows=0, width=rows.width
        )
        counted = COUNTED[rows.per]
        at.starts.append(Launch(kernel, arguments, {"rows": counted}, lambda counts: (strides, counts[counted], 1)))

    return _fields(at, x, rows, fill)


def _fields(at: CudaLowering, name: str, rows: DeviceRows, fill: Any) -> dict[str, int]:
    chunks = _chunks(rows)
    nbytes = _capacity(at, rows) * chunks * (_CHUNK + _SCALE_BYTES)
    return _addresses(at, rows, at.values.derived(name, "grouped", nbytes, fill))


def _addresses(at: CudaLowering, rows: DeviceRows, memory: Any) -> dict[str, int]:
    address, chunks = at.driver.address(memory), _chunks(rows)
    scales = address + _capacity(at, rows) * chunks * _CHUNK
    return {"bytes": address, "scales": scales, "chunks": chunks, "unused": 0}


def _chunks(rows: DeviceRows) -> int:
    return -(-rows.width // STRIDE) * (STRIDE // _CHUNK)


def _capacity(at: CudaLowering, rows: DeviceRows) -> int:
    return -(-at.values.capacity[rows.per] // GROUP) * GROUP
