"""Values as bytes in groups of rows, as products of few rows read them: see groups.cuh.

Whoever makes a value that such a product reads writes it in this layout as well, where it can; for others there is a
kernel. So the memory is taken when the value is made.
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
"""Rows of a group."""
STRIDE = 1024
"""Columns that rows are filled up to a multiple of."""
_CHUNK, _SCALE_BYTES = 32, 8
NOBODY = {"bytes": 0, "scales": 0, "chunks": 0, "unused": 0}
"""The fields of `GroupedRows` where nobody wants them."""
# What counts the rows that have decode numerics.
COUNTED = {Per.TOKEN: "decode_rows", Per.LOGITS: "logits_rows"}


def arrange_kernel() -> CudaKernel:
    """The kernel that brings values into this layout."""
    return CudaKernel("activations.cu", "arrange_groups", "GroupArguments", STRIDE // 4)


def wanted_of(parts: Iterable[Op | HostPart | HostNode]) -> set[str]:
    """The values that products of bytes read."""
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
    """Where the kernel that makes a value is to write it in this layout, too: the fields of `GroupedRows`.

    Args:
        whole_strides: the kernel does not fill rows up.
    """
    if name not in at.grouped or (whole_strides and rows.width % STRIDE):
        return NOBODY
    return _fields(at, name, rows, lambda memory: None)


def grouped(at: CudaLowering, x: str) -> dict[str, int]:
    """A value in this layout."""
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
