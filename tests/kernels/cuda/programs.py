"""Programs of ops with made-up constants, run by the CUDA executor on a host and by the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import genai
from genai.kernels.cache_layout import PAGE_TOKENS, PackedPages, PagedLayer
from genai.kernels.cuda import linear
from genai.kernels.cuda.executor import CudaExecutor
from genai.kernels.device import AdapterRows, PageTables, StepContext
from genai.kernels.float_bits import stored_floats
from genai.kernels.ir import BlockWeight, Op, OpProgram, RowsType, Weight
from genai.kernels.reference.executor import ReferenceExecutor
from genai.kernels.reference.pages import write_pages
from genai.kernels.weights import pack_bits, uniform_format

from .devices import GPU

Arrays = dict[str, NDArray[Any]]
# Which kernel multiplies many rows: tiles of a warp in large or small blocks, or a shape of warpgroups.
GEMMS = ("large", "small", "256", "128", "64")
# The fixture `load`.
Load = Callable[..., genai.Model]


def opener(driver: Any) -> Callable[[str, int | None], Any]:
    """In target of `open_executor`: every device is this one, but for the reference."""
    return lambda device, threads: ReferenceExecutor() if device == "reference" else CudaExecutor(driver, threads)


class MadeUpConstants:
    """See `genai.kernels.ir.Constants`."""

    def __init__(self, arrays: Arrays | None = None) -> None:
        self.arrays: Arrays = arrays or {}

    def array(self, name: str) -> NDArray[Any]:
        return self.arrays[name]

    def packed(self, weight: Weight) -> None:
        pass

    def block_weight(
        self, rng: np.random.Generator, rows: int, columns: int, *, bits: int = 4, block_size: int = 32,
        scales: str = "float16", points: bool = False, per_row: bool = False,
    ) -> BlockWeight:  # fmt: skip
        """A weight of random codes; its constants are added."""
        name, blocks = f"weight{len(self.arrays)}", -(-columns // block_size)
        codes = rng.integers(0, 1 << bits, (rows, blocks * block_size))
        self.arrays[name] = pack_bits(codes, bits).reshape(rows, blocks, -1)
        factors = rng.uniform(0.5, 1.5, (rows, 1 if per_row else blocks)) / (columns**0.5 * (1 << (bits - 2)))
        self.arrays[f"{name}.scales"] = factors.astype(scales)
        if points:
            self.arrays[f"{name}.points"] = pack_bits(rng.integers(0, 1 << bits, (rows, blocks)), bits)
        return BlockWeight(
            name, f"{name}.scales", f"{name}.points" if points else "", rows, columns,
            uniform_format(bits, block_size, zero_points=points),
        )  # fmt: skip


def rows_of(width: int) -> RowsType:
    """Return a value of `width` numbers per token."""
    return RowsType((1, -1, width), width)


def program(
    ops: Sequence[Op], widths: Mapping[str, int], constants: MadeUpConstants, outputs: Sequence[str]
) -> OpProgram:
    """Values that no op computes are given."""
    made = {name for op in ops for name in op.outputs}
    read = dict.fromkeys(name for op in ops for name in op.inputs if name not in made)
    types = {name: rows_of(width) for name, width in widths.items()}
    return OpProgram(tuple(ops), types, constants, tuple(outputs), given=tuple(read))


def step_of(
    lengths: Sequence[int], new: Sequence[int], *, num_blocks: int = 0, rng: np.random.Generator | None = None,
    prefill: int = 0,
) -> StepContext:  # fmt: skip
    """Sequences of so many tokens of which the last `new` are computed, in blocks that lie anywhere.

    Args:
        prefill: so many of them, the last ones, have prefill numerics.
    """
    rng = np.random.default_rng(0) if rng is None else rng
    pages = [-(-length // PAGE_TOKENS) for length in lengths]
    blocks = rng.permutation(max(num_blocks, sum(pages)))[: sum(pages)]
    tables = np.zeros((len(lengths), max(pages)), np.int32)
    positions, slots, first = [], [], 0
    for row, length, count, own in zip(tables, lengths, new, pages, strict=True):
        row[:own] = blocks[first : first + own]
        first += own
        where = np.arange(length - count, length)
        positions.append(where)
        slots.append(row[where // PAGE_TOKENS].astype(np.int64) * PAGE_TOKENS + where % PAGE_TOKENS)
    total = sum(new)
    return StepContext(
        tokens=rng.integers(0, 16, total), positions=np.concatenate(positions),
        cu_seqlens_q=np.cumsum([0, *new]).astype(np.int32), context_lens=np.array(lengths, np.int32),
        groups=(PageTables(tables, np.concatenate(slots)),), num_decode_sequences=len(lengths) - prefill,
        logits_indices=np.cumsum(new) - 1, rope_table=np.zeros(len(lengths), np.int32),
    )  # fmt: skip


def with_adapters(
    step: StepContext, adapters: Sequence[Any], mixes: Sequence[Sequence[tuple[int, float]]]
) -> StepContext:
    """The step with adapters: of each sequence which ones, and their weights."""
    flat = [one for mix in mixes for one in mix]
    return replace(
        step,
        adapter_rows=AdapterRows(
            adapters,
            np.cumsum([0, *map(len, mixes)]).astype(np.int32),
            np.array([index for index, _ in flat], np.int32),
            np.array([weight for _, weight in flat], np.float32),
        ),
    )


def layer_of(
    rng: np.random.Generator, num_blocks: int, kv_heads: int, head_size: int, v_head_size: int, kind: str
) -> PagedLayer:
    """Pages of random keys and values, two layers' blocks apart."""
    sizes = head_size * PAGE_TOKENS, v_head_size * PAGE_TOKENS
    memory = stored_floats(rng.standard_normal((num_blocks, 2 * kv_heads * sum(sizes))), kind)
    keys = memory[:, : kv_heads * sizes[0]].reshape(num_blocks, kv_heads, head_size, PAGE_TOKENS)
    values = memory[:, kv_heads * sizes[0] : kv_heads * sum(sizes)]
    return PagedLayer(keys, values.reshape(num_blocks, kv_heads, PAGE_TOKENS, v_head_size))


def packed_layer_of(
    rng: np.random.Generator, num_blocks: int, kv_heads: int, head_size: int, v_head_size: int, bits: int
) -> PagedLayer:
    """Pages that hold random keys and values as small integers, two layers' blocks apart."""
    form = PackedPages(bits, head_size, v_head_size)
    sizes = kv_heads * form.key_bytes, kv_heads * form.value_bytes
    memory = np.zeros((num_blocks, 2 * sum(sizes)), np.uint8)
    keys = memory[:, : sizes[0]].reshape(num_blocks, kv_heads, form.key_bytes)
    values = memory[:, sizes[0] : sum(sizes)].reshape(num_blocks, kv_heads, form.value_bytes)
    layer, slots = PagedLayer(keys, values, form), np.arange(num_blocks * PAGE_TOKENS)
    write_pages(layer, slots, *(rng.standard_normal((len(slots), kv_heads, n)) for n in (head_size, v_head_size)))
    return layer


def choose_gemm(driver: Any, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows are multiplied by one of `GEMMS`; skipped where the device cannot run it."""
    is_hopper = which.isdigit()
    if GPU and is_hopper and driver.capability != linear.HOPPER:
        pytest.skip("a GPU without Hopper's instructions")
    monkeypatch.setattr(driver, "capability", linear.HOPPER if is_hopper else 80)
    monkeypatch.setattr(linear, "_ENOUGH_BLOCKS", 1 if which == "large" else 1000)
    shapes = [(*shape[:3], 1.0 if str(shape[0]) == which else 1e6, 0.0) for shape in linear.WARPGROUP_SHAPES]
    monkeypatch.setattr(linear, "WARPGROUP_SHAPES", tuple(shapes))


def relative_error(found: NDArray[Any], wanted: NDArray[Any]) -> float:
    """Of the whole, by the Euclidean norm."""
    assert found.shape == wanted.shape
    difference = np.linalg.norm(found.astype(np.float64) - wanted.astype(np.float64))
    return float(difference / max(np.linalg.norm(wanted.astype(np.float64)), 1e-30))
