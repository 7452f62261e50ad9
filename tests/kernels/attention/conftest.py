"""A step of attention: sequences with new tokens, pages with their earlier tokens, and programs of one layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from genai.kernels.cache_layout import PAGE_TOKENS, PackedPages, PagedLayer
from genai.kernels.cpu.attention.decode import partial_floats
from genai.kernels.cpu.attention.phases import attention_phases, fill_table
from genai.kernels.cpu.program.calls import Rows, program_of
from genai.kernels.cpu.program.step_table import ContextTable, StepField
from genai.kernels.cpu.program.thread_pool import Threads
from genai.kernels.device import PageTables, StepContext
from genai.kernels.ir import Attention, Rope
from genai.kernels.reference.attention import attend_pages, rotated, rotations

# Sequences with at least this many new tokens have prefill numerics in these tests.
MIN_PREFILL_TOKENS = 32


@dataclass
class AttentionStep:
    """Sequences (new tokens, context length with them), those with few new tokens first.

    query, key, value: float32 [T, heads, size]. The pages hold a random past, and garbage behind every sequence's end.
    """

    layer: PagedLayer
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    positions: np.ndarray
    cu_seqlens_q: np.ndarray
    context_lengths: np.ndarray
    block_tables: np.ndarray
    rope_table: np.ndarray
    min_prefill: int = MIN_PREFILL_TOKENS
    slot_mapping: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        blocks = self.block_tables[self.sequence_of_row, self.positions // PAGE_TOKENS].astype(np.int64)
        self.slot_mapping = blocks * PAGE_TOKENS + self.positions % PAGE_TOKENS

    @property
    def counts(self) -> np.ndarray:
        return np.diff(self.cu_seqlens_q)

    @property
    def sequence_of_row(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.counts), dtype=np.int32), self.counts)

    @property
    def decode_rows(self) -> int:
        return int(self.counts[self.counts < self.min_prefill].sum())

    def context(self) -> ContextTable:
        table = ContextTable()
        floats = partial_floats(self.query.shape[1], self.layer.v_head_size)
        fill_table(table, self.step, floats)
        table.room(StepField.PARTIALS, 0, np.float32).fill(np.nan)
        return table

    def op(self, options: dict[str, Any]) -> tuple[Attention, Callable[[str], Any]]:
        """The op that these options make, and its constants; "rope": tables by their names, and `interleaved`."""
        tables = dict(options.get("rope") or {})
        interleaved = tables.pop("interleaved", False)
        constants = tables | {name: options[name] for name in ("sinks", "q_norm", "k_norm", "bias") if name in options}
        names = {name: name for name in constants}
        four = [names.pop(name, "") for name in ("cos", "sin", "long_cos", "long_sin")]
        rope = Rope(*four, interleaved=interleaved) if tables else None
        plain = {name: value for name, value in options.items() if name not in (*names, "rope", "heads")}
        sizes = options.get("heads", self.query.shape[1]), self.layer.kv_heads, self.layer.head_size
        op = Attention("", "", "", "", 0, *sizes, self.layer.v_head_size, rope=rope, **names, **plain)
        return op, constants.get

    def run(self, threads: int = 1, context: ContextTable | None = None, **options: Any) -> np.ndarray:
        """Attention [T, heads, v_head_size] by the operators; the new keys and values are in the pages afterwards."""
        tokens, heads = self.query.shape[:2]
        out = np.full((tokens, heads * self.layer.v_head_size), np.nan, np.float32)
        # Queries, keys and values lie in one packed row.
        heads_of_rows = (self.query, self.key, self.value)
        widths = [x.shape[1] * x.shape[2] for x in heads_of_rows]
        packed = np.concatenate(
            [x.reshape(tokens, width) for x, width in zip(heads_of_rows, widths, strict=True)], axis=1
        )
        before = packed.copy()
        rows = Rows(packed.ctypes.data, 4 * sum(widths), sum(widths), held=packed)
        starts = np.cumsum([0, *widths]).tolist()
        parts = [rows.columns(start, width) for start, width in zip(starts, widths, strict=False)]
        op, constant = self.op(options)
        target = Rows(out.ctypes.data, 4 * out.shape[1], out.shape[1], held=out)
        program = program_of(attention_phases(op, parts, target, self.layer, constant))
        Threads(threads).run(program, context or self.context(), nanoseconds=1e6)  # work that all threads share
        np.testing.assert_array_equal(packed, before)
        return out.reshape(tokens, heads, self.layer.v_head_size)

    @property
    def step(self) -> StepContext:
        return StepContext(
            tokens=np.zeros(len(self.positions), np.int64),
            positions=self.positions,
            cu_seqlens_q=self.cu_seqlens_q,
            context_lens=self.context_lengths,
            groups=(PageTables(self.block_tables, self.slot_mapping),),
            num_decode_sequences=int((self.counts < self.min_prefill).sum()),
            logits_indices=np.empty(0, np.int64),
            rope_table=self.rope_table,
        )

    def rotated(self, x: np.ndarray, norm: np.ndarray | None, options: dict[str, Any]) -> np.ndarray:
        """Heads normed and rotated by the reference, in float64."""
        op, constant = self.op(options)
        return rotated(x, norm, op.epsilon, rotations(op.rope, self.step, constant))

    def expected(self, **options: Any) -> np.ndarray:
        """Attention by the reference, in float64, over the current pages."""
        query = self.rotated(self.query, options.get("q_norm"), options)
        sinks, bias = options.get("sinks"), options.get("bias")
        return attend_pages(self.op(options)[0], query, self.layer, self.step, sinks, bias)

    def part(self, sequence: int, first: int, last: int) -> AttentionStep:
        """A separate step of a sequence's new tokens [first, last), over the same pages."""
        start = int(self.cu_seqlens_q[sequence])
        rows = slice(start + first, start + last)
        return AttentionStep(
            self.layer,
            self.query[rows],
            self.key[rows],
            self.value[rows],
            self.positions[rows],
            np.array([0, last - first], np.int32),
            (self.positions[rows][-1:] + 1).astype(np.int32),
            self.block_tables[sequence : sequence + 1],
            self.rope_table[sequence : sequence + 1],
            self.min_prefill,
        )

    def alone(self, sequence: int) -> AttentionStep:
        return self.part(sequence, 0, int(self.counts[sequence]))


MakeStep = Callable[..., AttentionStep]
PACKED = {"int8": 8, "int4": 4}


def scales_of(layer: PagedLayer) -> list[np.ndarray]:
    """Writable scales of a packed layer's keys and values, float16 [blocks, heads, groups, PAGE_TOKENS]."""
    packed = layer.packed
    assert packed is not None
    parts = (layer.keys, packed.key_columns), (layer.values, packed.value_columns)
    found = [pages[..., PAGE_TOKENS * columns :].view(np.float16) for pages, columns in parts]
    return [scales.reshape(*scales.shape[:2], -1, PAGE_TOKENS) for scales in found]


def packed_layer(rng: np.random.Generator, packed: PackedPages, blocks: int, kv_heads: int) -> PagedLayer:
    """Pages of random integers, -127 to 127 or all nibbles, and random scales."""
    sizes = packed.key_bytes, packed.value_bytes
    keys, values = (rng.integers(0, 256, (blocks, kv_heads, size)).astype(np.uint8) for size in sizes)
    for pages in (keys, values):
        pages[pages == 128] = 0  # -128 is never written
    layer = PagedLayer(keys, values, packed)
    for scales in scales_of(layer):
        scales[:] = rng.uniform(0.005, 0.02, scales.shape) * 8 / (packed.bits**2 / 8)
    return layer


def spoil(layer: PagedLayer, block: int, first: int) -> None:
    """Make all tokens of a block from `first` on NaN."""
    if layer.packed is None:
        layer.keys[block, :, :, first:] = layer.values[block, :, first:] = np.nan
    else:
        for scales in scales_of(layer):
            scales[block, :, :, first:] = np.nan


@pytest.fixture
def make_step(rng: np.random.Generator) -> MakeStep:
    def make(
        sequences: list[tuple[int, int]],
        *,
        dtype: Any = np.float16,
        heads: int = 4,
        kv_heads: int = 2,
        head_size: int = 32,
        v_head_size: int | None = None,
        min_prefill: int = MIN_PREFILL_TOKENS,
    ) -> AttentionStep:
        v_size = v_head_size or head_size
        blocks = [-(-length // PAGE_TOKENS) for _, length in sequences]
        ids = rng.permutation(sum(blocks) + 3).astype(np.int32)
        tables = np.full((len(sequences), max(blocks) + 1), -1, np.int32)
        for row, count, start in zip(tables, blocks, np.cumsum([0, *blocks]), strict=False):
            row[:count] = ids[start : start + count]
        if dtype in PACKED:
            layer = packed_layer(rng, PackedPages(PACKED[dtype], head_size, v_size), len(ids), kv_heads)
        else:
            layer = PagedLayer(
                rng.standard_normal((len(ids), kv_heads, head_size, PAGE_TOKENS)).astype(dtype),
                rng.standard_normal((len(ids), kv_heads, PAGE_TOKENS, v_size)).astype(dtype),
            )
        for row, (_, length) in zip(tables, sequences, strict=True):
            if length % PAGE_TOKENS:
                spoil(layer, int(row[length // PAGE_TOKENS]), length % PAGE_TOKENS)
        new = [count for count, _ in sequences]

        def normal(heads: int, size: int) -> np.ndarray:
            return rng.standard_normal((sum(new), heads, size)).astype(np.float32)

        return AttentionStep(
            layer,
            normal(heads, head_size),
            normal(kv_heads, head_size),
            normal(kv_heads, v_size),
            np.concatenate([np.arange(length - count, length) for count, length in sequences]).astype(np.int64),
            np.cumsum([0, *new]).astype(np.int32),
            np.array([length for _, length in sequences], np.int32),
            tables,
            np.arange(len(sequences), dtype=np.int32) % 2,
            min_prefill,
        )

    return make


@pytest.fixture
def make_rope(rng: np.random.Generator) -> Callable[..., dict[str, Any]]:
    """Tables of random rotations for 2000 positions."""

    def make(rotary_dim: int, *, interleaved: bool = False, long: bool = False) -> dict[str, Any]:
        angles = rng.uniform(0, 2 * np.pi, (2, 2000, rotary_dim // 2))
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        longer = {"long_cos": cos[1], "long_sin": sin[1]} if long else {}
        return {"cos": cos[0], "sin": sin[0], **longer, "interleaved": interleaved}

    return make
