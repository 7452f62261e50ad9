"""Launches of attention: keys and values into pages, then every row over the pages of its sequence, in splits."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ..executor import UnsupportedRecord
from ..formats import PagedLayer
from ..records import Attention
from .driver import Driver
from .launches import Counts, Functions, bind
from .memory import DeviceRows
from .sources import CudaKernel

if TYPE_CHECKING:
    from .lowering import CudaLowering

# Rows whose splits wait to be joined at the same time; more are taken one part after another.
ROWS_AT_ONCE = 64
# Query heads of a KV head that one block computes: their sums are in registers.
_MOST_TOGETHER = 8
_STORE_THREADS, _SPLIT_THREADS, _JOIN_THREADS = 128, 128, 64
# C++ types of keys and values.
SCALAR = {"float32": "float", "float16": "half_bits"}
_LARGEST_HEAD = 256


def check_attention(record: Attention, layer: PagedLayer | None) -> None:
    """Raise UnsupportedRecord, which names what there is no kernel for."""
    kind = "none" if layer is None else layer.kind
    if kind not in SCALAR:
        raise UnsupportedRecord(f"CUDA has no kernels for keys and values of {kind}")
    if max(record.head_size, record.v_head_size) > _LARGEST_HEAD:
        raise UnsupportedRecord(f"CUDA has no kernels for heads of {record.head_size}: at most {_LARGEST_HEAD}")


def store_kernel_of(kind: str) -> CudaKernel:
    """The kernel that puts keys and values of a type into pages."""
    return CudaKernel("attention_store.cu", f"store_heads<{SCALAR[kind]}>", "StoreArguments", _STORE_THREADS)


def split_kernels(kind: str, head_size: int, v_head_size: int, together: int) -> tuple[CudaKernel, CudaKernel]:
    """The kernels of single rows: of splits, and the one that joins them."""
    shape = f"{SCALAR[kind]}, {head_size}, {v_head_size}, {together}"
    return (
        CudaKernel("attention_rows.cu", f"attend_split<{shape}>", "AttentionArguments", _SPLIT_THREADS),
        CudaKernel("attention_rows.cu", f"join_splits<{v_head_size}>", "AttentionArguments", _JOIN_THREADS),
    )


def store_kernel(record: Attention, layer: PagedLayer, driver: Driver) -> tuple[CudaKernel, dict[str, Any]]:
    """What puts keys and values into pages, and those of its arguments that the record and the layer say."""
    sizes = {name: getattr(record, name) for name in ("heads", "kv_heads", "head_size", "v_head_size", "epsilon")}
    interleaved = int(record.rope is not None and record.rope.interleaved)
    return store_kernel_of(layer.kind), {"pages": pages(layer, driver), "interleaved": interleaved, **sizes}


def pages(layer: PagedLayer, driver: Driver) -> dict[str, int]:
    """The fields of `Pages` in pages.cuh."""
    size = layer.keys.dtype.itemsize
    return {
        "keys": driver.address(layer.keys), "values": driver.address(layer.values),
        "key_block": layer.keys.strides[0] // size, "value_block": layer.values.strides[0] // size,
    }  # fmt: skip


def heads_together(heads: int, kv_heads: int) -> int:
    """Query heads that one block computes: the largest part of those of a KV head that fits."""
    group = heads // kv_heads
    return max(count for count in range(1, _MOST_TOGETHER + 1) if group % count == 0)


class AttentionLaunch:
    """Rows over their pages: splits, then what joins them, for `ROWS_AT_ONCE` rows after another."""

    def __init__(
        self, record: Attention, layer: PagedLayer, at: CudaLowering, rotated: DeviceRows, out: DeviceRows
    ) -> None:
        self._together, size = heads_together(record.heads, record.kv_heads), record.v_head_size
        self._record = record
        self._split, self._join = split_kernels(layer.kind, record.head_size, size, self._together)
        rows = min(ROWS_AT_ONCE, at.capacity.tokens)
        parts = at.workspace(4 * rows * record.heads * at.capacity.splits * (size + 2))
        self._arguments = bind(
            self._split, rotated=rotated.address, sinks=at.vector(record.sinks), parts=at.driver.address(parts),
            out=out.address, step=at.table.rows, pages=pages(layer, at.driver), out_stride=out.stride, first_row=0,
            rows=0, heads=record.heads, kv_heads=record.kv_heads, splits=0, window=record.window,
            scale=record.scale or 1 / math.sqrt(record.head_size), softcap=record.softcap,
            smooth=int(record.smooth_softmax),
        )  # fmt: skip

    @property
    def kernels(self) -> tuple[CudaKernel, ...]:
        """Those that it starts."""
        return self._split, self._join

    def start(self, driver: Driver, functions: Functions, counts: Counts) -> None:
        """Start them over all rows of a step."""
        heads, total, splits = self._record.heads, counts["tokens"], counts["splits"]
        self._arguments["rows"], self._arguments["splits"] = total, splits
        for first in range(0, total, ROWS_AT_ONCE):
            rows = min(ROWS_AT_ONCE, total - first)
            self._arguments["first_row"] = first
            grid = (splits, heads // self._together, rows)
            driver.launch(functions[self._split], self._split, grid, self._arguments)
            driver.launch(functions[self._join], self._join, (heads, rows, 1), self._arguments)
