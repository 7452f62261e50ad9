"""Launches of attention, which store keys and values in pages, then compute rows over the pages of their sequences.

Rows with decode numerics, and all rows over float32 pages, are computed one by one in float32, in splits of their
sequences. Rows with prefill numerics over other pages are computed in tiles by tensor cores, in float16, or in bfloat16
if the pages hold bfloat16. Precision is lost only as in a page of the same type, where the loss has already occurred.
"""

from __future__ import annotations

import math
from typing import Any

from ..cache_layout import CacheLayer, PagedLayer
from ..device import UnsupportedOp
from ..ir import Attention
from .driver import Driver
from .grouped import NOBODY, made_with
from .launches import COUNTED, Counts, Functions, Launch, bind
from .lowering_context import CudaLowering
from .memory import DeviceRows
from .sources import CudaKernel
from .step import tiles_name

# Maximum number of splits that wait to be joined at the same time. If there are more, the rows are processed in several
# launches.
_SPLITS_AT_ONCE = 2048
# Maximum number of a KV head's query heads that one block computes: for single rows, whose sums are in registers, and
# for tiles.
_MOST_TOGETHER, _MOST_IN_A_TILE = 8, 16
_STORE_THREADS, _SPLIT_THREADS, _TILE_THREADS, _WARPS = 128, 128, 128, 4
_TILE_ROWS = 64
# Up to this number of blocks per multiprocessor, each block computes only one head.
_BLOCKS_APART = 2
# Number of a lane's registers that hold a tile's queries and sums.
_TILE_REGISTERS = 112
# Number of blocks of tiles on a multiprocessor, for heads of up to this number of columns.
_TILE_BLOCKS = ((64, 4), (128, 3), (256, 2))
_CHUNK = 32
# C++ types of keys and values.
FLOAT_KINDS = {"float32": "float", "float16": "half_bits", "bfloat16": "bfloat_bits", "float8": "float8_bits"}
KINDS = {**FLOAT_KINDS, "int8": "Int8", "int4": "Int4"}
_LARGEST_HEAD, _HEAD_STEP = 256, 8


def check_attention(op: Attention, layer: CacheLayer | None) -> None:
    """Raise UnsupportedOp, with the reason in the message, if there is no kernel for the op."""
    kind = layer.kind if isinstance(layer, PagedLayer) else "none"
    if kind not in KINDS:
        raise UnsupportedOp(f"CUDA has no kernels for keys and values of {kind}")
    if isinstance(layer, PagedLayer) and layer.values is None:
        raise UnsupportedOp("CUDA has no kernels that read the values of latent attention from its keys")
    if not op.causal:
        raise UnsupportedOp("CUDA has no kernels for attention to later tokens (encoders)")
    for size in (op.head_size, op.v_head_size):
        if size > _LARGEST_HEAD:
            raise UnsupportedOp(f"CUDA has no kernels for heads of {size}: at most {_LARGEST_HEAD}")
        if kind not in FLOAT_KINDS and size % _HEAD_STEP:
            raise UnsupportedOp(f"CUDA has no kernels for heads of {size} with keys and values of {kind}")


def store_kernel_of(kind: str) -> CudaKernel:
    """Return the kernel that stores keys and values of a type in pages."""
    return CudaKernel("attention_store.cu", f"store_heads<{KINDS[kind]}>", "StoreArguments", _STORE_THREADS, early=True)


def hadamard_kernel() -> CudaKernel:
    """Return the kernel that undoes the Hadamard transform of weighted sums of 4-bit values."""
    return CudaKernel("attention_store.cu", "hadamard_back", "HadamardArguments", _STORE_THREADS)


def divides(op: Attention) -> bool:
    """Return True if a lane can read several adjacent columns of a head together."""
    return op.head_size % _HEAD_STEP == op.v_head_size % _HEAD_STEP == 0


def any_kernels(kind: str) -> tuple[CudaKernel, CudaKernel]:
    """Return the kernels for single rows with heads of any size: one that computes splits, and one that joins them."""
    return (
        CudaKernel("attention_any.cu", f"attend_any<{KINDS[kind]}>", "AttentionArguments", _SPLIT_THREADS),
        CudaKernel("attention_any.cu", "join_any", "AttentionArguments", _SPLIT_THREADS),
    )


def split_kernel(kind: str, head_size: int, v_head_size: int, together: int, *, fresh: bool = False) -> CudaKernel:
    """Return the kernel for single rows. If `fresh`, the kernel also stores the rows' keys and values in pages."""
    shape = f"{KINDS[kind]}, {head_size}, {v_head_size}, {together}, {str(fresh).lower()}"
    return CudaKernel("attention_rows.cu", f"attend_split<{shape}>", "AttentionArguments", _SPLIT_THREADS, early=True)


def tile_kernel(kind: str, head_size: int, v_head_size: int) -> CudaKernel:
    """Return the kernel for tiles of rows."""
    shape = f"{KINDS[kind]}, {head_size}, {v_head_size}, {tile_columns(head_size, v_head_size)}"
    # With three blocks, a lane has 168 registers; with two blocks, it has 255.
    blocks = next(blocks for most, blocks in _TILE_BLOCKS if max(head_size, v_head_size) <= most)
    return CudaKernel("attention_tiles.cu", f"attend_tile<{shape}>", "TileArguments", _TILE_THREADS, blocks)


def tile_columns(head_size: int, v_head_size: int) -> int:
    """Return the number of value columns that one block computes: all, or half if there are not enough registers."""
    if head_size // 4 + v_head_size // 2 <= _TILE_REGISTERS:
        return v_head_size
    return -(-v_head_size // (2 * _HEAD_STEP)) * _HEAD_STEP


def tile_rows(op: Attention, layer: CacheLayer | None) -> int:
    """Return the number of a sequence's rows that a tile holds; 0 = rows are computed one by one."""
    if not isinstance(layer, PagedLayer) or layer.kind == "float32" or not divides(op):
        return 0
    return _TILE_ROWS // heads_together(op.heads, op.kv_heads, _MOST_IN_A_TILE)


def pages(layer: PagedLayer, driver: Driver) -> dict[str, int]:
    """Return the fields of `Pages` in pages.cuh."""
    assert layer.values is not None  # see `check_attention`
    return {
        "keys": driver.address(layer.keys), "values": driver.address(layer.values),
        "key_block": layer.keys.strides[0], "value_block": layer.values.strides[0],
    }  # fmt: skip


def heads_together(heads: int, kv_heads: int, most: int = _MOST_TOGETHER) -> int:
    """Return the number of query heads per block: the largest divisor of the heads per KV head, at most `most`."""
    group = heads // kv_heads
    return max(count for count in range(1, most + 1) if group % count == 0)


def add_attention(
    op: Attention, layer: PagedLayer, at: CudaLowering, rotated: DeviceRows, out: DeviceRows, fresh: dict[str, Any]
) -> None:
    """Add the launches that store keys and values in pages, and the launches that compute rows over the pages.

    Args:
        op: the op.
        layer: the pages.
        at: the lowering.
        rotated: memory for rotated queries.
        out: the result.
        fresh: the fields of `FreshRows`.
    """
    rows = tile_rows(op, layer)
    kernel, blocks = store_kernel_of(layer.kind), -(-(op.heads + 2 * op.kv_heads) // _WARPS)
    sizes = {name: getattr(op, name) for name in ("heads", "kv_heads", "head_size", "v_head_size")}
    if op.stored:  # only queries are rotated
        sizes["kv_heads"] = 0
    arguments = bind(
        kernel,
        fresh=fresh,
        rotated=rotated.address,
        step=at.table.rows(layer.group),
        pages=pages(layer, at.driver),
        rows=0,
        **sizes,
    )
    counted = COUNTED[rotated.per]
    store = Launch(kernel, arguments, {"rows": counted}, lambda counts: (blocks, counts[counted], 1))
    given: dict[str, Any] = {
        "rotated": rotated.address, "sinks": at.vector(op.sinks), "out": out.address,
        "step": at.table.rows(layer.group), "pages": pages(layer, at.driver), "out_stride": out.stride,
        "heads": op.heads, "kv_heads": op.kv_heads, "window": op.window, "chunk": op.chunk,
        "scale": op.scale or 1 / math.sqrt(op.head_size), "softcap": op.softcap,
        "smooth": int(op.smooth_softmax),
    }  # fmt: skip
    at.starts.append(SplitLaunch(op, layer, at, given | {"fresh": fresh}, store, decode_only=bool(rows)))
    if rows:
        at.starts.append(_tile_launch(op, layer, at, given, rows))
    if layer.kind == "int4":
        rounds = -(-op.heads // _WARPS)
        at.launch(
            hadamard_kernel(), out.per, lambda count: (rounds, count, 1), out=out.address, out_stride=out.stride,
            heads=op.heads, v_head_size=op.v_head_size,
        )  # fmt: skip


def _tile_launch(op: Attention, layer: PagedLayer, at: CudaLowering, given: dict[str, Any], rows: int) -> Launch:
    kernel, counted = tile_kernel(layer.kind, op.head_size, op.v_head_size), tiles_name(rows)
    together = heads_together(op.heads, op.kv_heads, _MOST_IN_A_TILE)
    blocks = op.heads // together
    parts = -(-op.v_head_size // tile_columns(op.head_size, op.v_head_size))
    arguments = bind(kernel, tiles=at.table.address(counted), together=together, **given)
    return Launch(kernel, arguments, {}, lambda counts: (counts[counted], blocks, parts))


class SplitLaunch:
    """Launches that store keys and values in pages, then compute rows over the pages one by one, in splits.

    The last block of a row joins the row's splits; for heads of unusual sizes, a separate kernel joins them. Rows that
    exceed the workspace are computed in several launches. With few rows, the blocks themselves store keys and values,
    unless rows attend to each other. If blocks of one head each do not fill the GPU, each block computes only one head.
    The results are bit-identical in all cases.
    """

    def __init__(
        self, op: Attention, layer: PagedLayer, at: CudaLowering, given: dict[str, Any], store: Launch, *,
        decode_only: bool,
    ) -> None:  # fmt: skip
        size = op.v_head_size
        self._join: CudaKernel | None = None
        self._fresh: dict[int, CudaKernel] = {}
        self._store, self._together = store, 1
        if divides(op):
            self._together = heads_together(op.heads, op.kv_heads)
            self._split = split_kernel(layer.kind, op.head_size, size, self._together)
            self._fresh = {
                together: split_kernel(layer.kind, op.head_size, size, together, fresh=True)
                for together in dict.fromkeys((1, self._together))
                if not op.stored
            }
        else:
            self._split, self._join = any_kernels(layer.kind)
        self._heads, self._most_apart = op.heads, _BLOCKS_APART * at.driver.multiprocessors
        self._rows_counted, self._splits_counted = (
            ("decode_rows", "decode_splits") if decode_only else ("tokens", "splits")
        )
        out = at.values[op.out]
        # Eight lanes of the join compute a chunk of columns.
        can_group = divides(op) and size % _CHUNK == 0 and layer.kind != "int4"
        grouped = made_with(at, op.out, out, whole_strides=True) if can_group else NOBODY
        splits = at.capacity.splits
        self._rows = min(at.capacity.tokens, max(_SPLITS_AT_ONCE // splits, 1))
        parts = at.workspace(4 * self._rows * op.heads * splits * (size + 4))
        # Rows whose blocks store keys themselves are started in one launch, whatever the length of the longest
        # sequence.
        most_rows = max(self._rows, min(at.capacity.tokens, self._most_apart))
        self._arrived = at.driver.zeros(4 * most_rows * op.heads)
        self._arguments = bind(
            self._split, parts=at.driver.address(parts), arrived=at.driver.address(self._arrived), first_row=0,
            rows=0, splits=0, head_size=op.head_size, v_head_size=size, grouped=grouped, grouped_rows=0, **given,
        )  # fmt: skip

    @property
    def kernels(self) -> tuple[CudaKernel, ...]:
        """The kernels that `start` launches."""
        return tuple(one for one in (self._store.kernel, self._split, *self._fresh.values(), self._join) if one)

    def start(self, driver: Driver, functions: Functions, counts: Counts) -> None:
        """Launch the kernels over the rows of a step."""
        total, splits = counts[self._rows_counted], counts[self._splits_counted]
        self._arguments["rows"], self._arguments["splits"] = total, splits
        self._arguments["grouped_rows"] = counts["decode_rows"]
        self._arguments["first_row"] = 0
        if counts["apart"] and total == counts["tokens"]:
            for together, kernel in self._fresh.items():
                grid = splits, self._heads // together, total
                if math.prod(grid) <= self._most_apart:
                    driver.launch(functions[kernel], kernel, grid, self._arguments)
                    return
        self._store.start(driver, functions, counts)
        for first in range(0, total, self._rows):
            rows = min(self._rows, total - first)
            self._arguments["first_row"] = first
            grid = splits, self._heads // self._together, rows
            driver.launch(functions[self._split], self._split, grid, self._arguments)
            if self._join:
                driver.launch(functions[self._join], self._join, (self._heads, rows, 1), self._arguments)
