"""Attention in programs: the calls of one layer, and the division of a step's rows into work items for all layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...cache_layout import PagedLayer
from ...checks import Float32, check
from ...device import PageTables, StepContext
from ...ir import Attention, Rope
from ..jit.native import NativeOp
from ..program.calls import Call, Items, Phases, Rows
from ..program.step_table import ContextTable, StepField
from . import amx_products, vector_products
from .arguments import AttentionArguments
from .decode import (
    SPLIT_FIELDS,
    SPLIT_TOKENS,
    WEIGHT_BYTES,
    attend_splits,
    decode_scratch,
    heads_per_pass,
    merge_splits,
    weigh_split,
)
from .heads import make_heads_ready
from .int8_products import add_packed_values_op, multiply_packed_keys_op
from .latent import keys_to_values_op, value_page_bytes
from .packing import pack_queries_op, pack_weights_op
from .pages import PACKED_BITS
from .panels import BLOCK_TOKENS, SCORE_BYTES, Panels
from .prefill import BLOCK_FIELDS, load_chunk_op, prefill_op, prefill_rows, uses_tiles, weigh_rows_op
from .products import add_values_op, multiply_keys_op
from .store import store_op, store_scratch

Int32: TypeAlias = NDArray[np.int32]
Int64: TypeAlias = NDArray[np.int64]


def kv_splits(positions: Int64) -> Int32:
    """Return the splits of these rows' contexts, which are the same for every window.

    Args:
        positions: int64 [DECODE_ROWS].

    Returns:
        int32 [KV_SPLITS, 2]: row, and index of the split in the row's context. A row's splits are consecutive.
    """
    # A row with an invalid position also gets a split, so that the operator of the split reports the error.
    counts = [max(position // SPLIT_TOKENS, 0) + 1 for position in positions.tolist()]
    splits = [(row, split) for row, count in enumerate(counts) for split in range(count)]
    return np.array(splits, np.int32).reshape(-1, SPLIT_FIELDS)


def row_blocks(positions: Int64, cu_seqlens_q: Int32, decode_sequences: int) -> Int32:
    """Return the blocks of consecutive tokens into which the prefill rows are divided, longest context first.

    Args:
        positions: int64 [T].
        cu_seqlens_q: first row of each sequence and the end, int32 [S + 1].
        decode_sequences: number of sequences that have decode rows.

    Returns:
        int32 [PREFILL_BLOCKS, 3]: sequence, first row, number of rows.
    """
    if decode_sequences == len(cu_seqlens_q) - 1:
        return np.empty((0, BLOCK_FIELDS), np.int32)
    starts = cu_seqlens_q[decode_sequences:].astype(np.int64)
    blocks = -(-np.diff(starts) // BLOCK_TOKENS)
    sequences = np.repeat(np.arange(len(blocks)), blocks)
    numbers = np.arange(len(sequences)) - np.repeat(np.cumsum(blocks) - blocks, blocks)
    first = starts[sequences] + numbers * BLOCK_TOKENS
    result = np.empty((len(sequences), BLOCK_FIELDS), np.int32)
    result[:, 0] = sequences + decode_sequences
    result[:, 1] = first
    result[:, 2] = np.minimum(starts[sequences + 1] - first, BLOCK_TOKENS)
    return result[np.argsort(-positions[first], kind="stable")]


# Looked up once, because in Python 3.11 the look-up costs more than writing the field.
_COUNTS = (
    StepField.TOKENS, StepField.DECODE_ROWS, StepField.PREFILL_ROWS, StepField.LOGITS_ROWS, StepField.SEQUENCES,
    StepField.KV_SPLITS, StepField.PREFILL_BLOCKS,
)  # fmt: skip
_TABLE_WIDTH, _BLOCK_TABLES, _SLOT_MAPPING = StepField.TABLE_WIDTH, StepField.BLOCK_TABLES, StepField.SLOT_MAPPING
_ARRAYS = (
    StepField.TOKEN_IDS, StepField.POSITIONS, StepField.CONTEXT_LENGTHS,
    StepField.LOGITS_INDICES, StepField.ROPE_TABLE,
    StepField.SEQUENCE_OF_ROW, StepField.ROW_SPLITS, StepField.ROW_BLOCKS,
)  # fmt: skip


def fill_table(table: ContextTable, step: StepContext, floats_per_split: int) -> None:
    """Write a step into the context table that its programs read.

    Args:
        floats_per_split: largest `partial_floats` of all layers.
    """
    starts, decode_sequences = step.cu_seqlens_q, step.num_decode_sequences
    tokens, decode = len(step.tokens), int(starts[decode_sequences])
    splits = kv_splits(step.positions[:decode])
    blocks = row_blocks(step.positions, starts, decode_sequences)
    lengths = starts[1:] - starts[:-1]
    counts = (
        tokens, decode, tokens - decode, len(step.logits_indices), len(lengths), len(splits), len(blocks),
    )  # fmt: skip
    for field, count in zip(_COUNTS, counts, strict=True):
        table.count(field, count)
    sequences = np.arange(len(lengths), dtype=np.int32)
    arrays: tuple[NDArray[Any], ...] = (
        step.tokens, step.positions, step.context_lens, step.logits_indices, step.rope_table,
        sequences.repeat(lengths), splits, blocks,
    )  # fmt: skip
    for field, array in zip(_ARRAYS, arrays, strict=True):
        table.array(field, array)
    fill_groups(table, step)
    table.room(StepField.PARTIALS, len(splits) * floats_per_split, np.float32)


def fill_groups(table: ContextTable, step: StepContext) -> None:
    """Write the block tables, slots and states of each cache group. Block tables are consecutive and of equal width."""
    groups = step.groups
    if len(groups) == 1 and isinstance(groups[0], PageTables):  # a fast path that most programs take in every step
        table.count(_TABLE_WIDTH, groups[0].block_tables.shape[1])
        table.array(_BLOCK_TABLES, groups[0].block_tables)
        table.array(_SLOT_MAPPING, groups[0].slot_mapping)
        return
    states, pages = step.state_slots, step.page_tables
    if states is not None:
        table.array(StepField.SEQUENCE_STARTS, step.cu_seqlens_q)
        table.array(StepField.STATE_READS, states.reads)
        table.array(StepField.STATE_WRITES, states.writes)
    tables = [group.block_tables for group in pages]
    width, sequences = max((one.shape[1] for one in tables), default=0), len(step.context_lens)
    table.count(StepField.TABLE_WIDTH, width)
    room = table.room(StepField.BLOCK_TABLES, len(tables) * sequences * width, np.int32)
    slots = table.room(StepField.SLOT_MAPPING, len(tables) * len(step.tokens), np.int64)
    for number, group in enumerate(pages):
        block = room[number * sequences * width :][: sequences * width].reshape(sequences, width)
        block[:, : group.block_tables.shape[1]] = group.block_tables
        block[:, group.block_tables.shape[1] :] = -1  # operators reject block -1
        slots[number * len(step.tokens) :][: len(step.tokens)] = group.slot_mapping


_LOG2_E = 1 / math.log(2)
_LINE = 64


def attention_phases(
    op: Attention, rows: Sequence[Rows], out: Rows, layer: PagedLayer, constant: Callable[[str], Float32 | None]
) -> Phases:
    """Return the calls of an `ir.Attention`.

    Decode rows are computed in float32, or in integers if pages are packed. Prefill rows are computed in float32 if the
    pages are float32 or there is no AMX; otherwise bfloat16 products are summed in float32. Operators return an error
    (`program.step_table.ErrorCode`) for slots, positions and pages outside the cache or the tables.

    Args:
        op: the op.
        rows: queries [T, heads * head_size], and unless `op.stored` is set, keys [T, kv_heads * head_size] and values
            [T, kv_heads * v_head_size]. The operators do not change them; they may be columns of one packed projection.
        out: [T, heads * v_head_size].
        layer: the pages; query heads h * group to (h + 1) * group - 1 use KV head h.
        constant: function that returns the contiguous array with a name, or None for "".
    """
    found = [constant(name) for name in (op.sinks, op.q_norm, op.k_norm)]
    sinks, q_norm, k_norm = (None if one is None else one.reshape(-1) for one in found)
    if op.stored:  # the arguments have places for keys and values, which no operator reads
        rows = [rows[0]] * 3
    _check(op, (*rows, out), layer, {"sinks": sinks, "q_norm": q_norm, "k_norm": k_norm})
    if sinks is None and op.smooth_softmax:
        sinks = np.zeros(op.heads, np.float32)
    scale, group = op.scale or 1 / math.sqrt(layer.head_size), op.heads // layer.kv_heads
    shared: dict[str, Any] = {
        **dict(zip(("query", "key", "value"), rows, strict=True)),
        "out": out,
        "key_pages": layer.keys,
        "key_block": layer.keys.strides[0],
        **_value_arguments(layer),
        "num_blocks": layer.num_blocks,
        "cache_group": layer.group,
        "kv_heads": layer.kv_heads,
        "group": group,
        "head_size": layer.head_size,
        "v_head_size": layer.v_head_size,
        "key_page": layer.keys.strides[1],
        "hadamard": layer.kind == "int4",
        "weight_groups": layer.packed.value_groups if layer.packed else 0,
        "query_factor": scale / op.softcap if op.softcap else scale * _LOG2_E,
        "score_cap": op.softcap * _LOG2_E,
        "causal": op.causal,
        "window": op.window,
        "chunk": op.chunk,
        **_bias_arguments(op, constant(op.bias)),
        "sinks": None if sinks is None else np.ascontiguousarray(sinks * np.float32(_LOG2_E)),
        "q_norm": q_norm,
        "k_norm": k_norm,
        "epsilon": op.epsilon,
        "make_ready": make_heads_ready,
        **({} if op.rope is None else _rope_arguments(op.rope, layer.head_size, constant)),
    }
    return _phases(shared, layer, group)[1 if op.stored else 0 :]


def _value_arguments(layer: PagedLayer) -> dict[str, Any]:
    """Return the fields of AttentionArguments that describe the pages of values."""
    if layer.values is None:  # the pages of keys are only prefetched
        return {
            "value_pages": layer.keys,
            "value_block": layer.keys.strides[0],
            "value_page": value_page_bytes(layer),
            "keys_to_values": keys_to_values_op(layer.kind),
        }
    strides = layer.values.strides
    return {"value_pages": layer.values, "value_block": strides[0], "value_page": strides[1]}


def _bias_arguments(op: Attention, bias: Float32 | None) -> dict[str, Any]:
    """Return the fields of AttentionArguments that describe a bias per distance."""
    if bias is None:
        return {}
    check("bias", bias, (op.heads, None))
    if op.causal or bias.shape[1] % 2 == 0:
        raise ValueError(f"bias has {bias.shape[1]} columns, expected an odd number, and attention to later tokens")
    return {"bias": np.ascontiguousarray(bias * np.float32(_LOG2_E)), "bias_tokens": bias.shape[1] // 2 + 1}


def _rope_arguments(rope: Rope, head_size: int, constant: Callable[[str], Float32 | None]) -> dict[str, Any]:
    """Return the fields of AttentionArguments that describe a rotation."""
    cos, sin = constant(rope.cos), constant(rope.sin)
    long_cos, long_sin = constant(rope.long_cos), constant(rope.long_sin)
    assert cos is not None and sin is not None
    half = cos.shape[-1]
    check("cos", cos, (None, None))
    check("sin", sin, cos.shape)
    if (long_cos is None) != (long_sin is None):
        raise ValueError("long_cos and long_sin must be given together")
    if long_cos is not None and long_sin is not None:
        check("long_cos", long_cos, (None, half))
        check("long_sin", long_sin, long_cos.shape)
    if not 0 < 2 * half <= head_size:
        raise ValueError(f"cos has {half} columns, expected at most half of the head size {head_size}")
    return {
        "cos": cos,
        "sin": sin,
        "positions": len(cos),
        "long_cos": long_cos,
        "long_sin": long_sin,
        "long_positions": 0 if long_cos is None else len(long_cos),
        "half": half,
        "interleaved": rope.interleaved,
    }


def _check(op: Attention, rows: Sequence[Rows], layer: PagedLayer, vectors: Mapping[str, Float32 | None]) -> None:
    heads, kv_heads, head_size, v_head_size = op.heads, layer.kv_heads, layer.head_size, layer.v_head_size
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ValueError(
            f"the number of query heads is {heads}, expected a multiple of the number of KV heads, {kv_heads}"
        )
    if op.window == 0 or op.window < -1:
        raise ValueError(f"window is {op.window}, expected -1 or a positive number of tokens")
    if op.chunk < 0 or (op.chunk and op.window > 0):
        raise ValueError(
            f"chunk is {op.chunk} and window is {op.window}, but only one can be a positive number of tokens"
        )
    if op.softcap < 0:
        raise ValueError(f"softcap is {op.softcap}, expected 0 or a positive number")
    widths = (heads * head_size, kv_heads * head_size, kv_heads * v_head_size, heads * v_head_size)
    for name, given, width in zip(("query", "key", "value", "out"), rows, widths, strict=True):
        if op.stored and name in ("key", "value"):
            continue
        if given.width != width:
            raise ValueError(f"{name} has rows of {given.width} numbers, expected {width}")
    for name, vector in vectors.items():
        if vector is not None:
            check(name, vector, (heads if name == "sinks" else head_size,))


def _phases(shared: Mapping[str, Any], layer: PagedLayer, group: int) -> Phases:
    """Return the calls of a layer from the arguments that they share."""
    kind = layer.kind
    panels = Panels(group, layer.head_size, layer.v_head_size, value_page_bytes(layer))

    def call(op: NativeOp, own: Mapping[str, Any], counted: StepField, scratch: int) -> Call:
        scratch = -(-scratch // _LINE) * _LINE
        return Call(op, AttentionArguments(**shared, **own), Items(counted, layer.kv_heads), scratch)

    store = call(store_op(kind), {}, StepField.TOKENS, store_scratch(layer.head_size, layer.v_head_size))
    prefill = prefill_operators(panels, layer.head_size, kind)
    attend_prefill = call(prefill_op(kind), prefill, StepField.PREFILL_BLOCKS, panels.bytes)
    if not shared["causal"]:  # its steps have no decode rows
        return [[store], [attend_prefill]]
    decode = decode_operators(group, layer.head_size, layer.v_head_size, kind)
    attend_decode = call(attend_splits, decode, StepField.KV_SPLITS, decode_scratch(group, layer))
    return [[store], [attend_decode, attend_prefill], [call(merge_splits, {}, StepField.KV_SPLITS, 0)]]


def decode_operators(group: int, head_size: int, v_head_size: int, kind: str) -> dict[str, Any]:
    """Return the arguments that only the decode operator uses, mostly the operators that it calls."""
    rows, bits = heads_per_pass(group, kind), PACKED_BITS.get(kind)
    own = {"rows_at_once": rows, "weigh": weigh_split}
    if bits is None:
        half = kind == "float16"
        return own | {
            "multiply_keys": multiply_keys_op(rows, head_size, half, True),
            "add_values": add_values_op(rows, v_head_size, half, True, WEIGHT_BYTES),
        }
    return own | {
        "multiply_keys": multiply_packed_keys_op(rows, head_size, bits),
        "add_values": add_packed_values_op(rows, v_head_size, bits),
        "pack_queries": pack_queries_op(bits),
        "pack_weights": pack_weights_op(bits),
    }


def prefill_operators(panels: Panels, head_size: int, kind: str) -> dict[str, Any]:
    """Return the arguments that only the prefill operator uses, mostly the operators that it calls."""
    rows = prefill_rows(kind)
    own = {
        "rows_at_once": rows,
        "weigh": weigh_rows_op(kind),
        "panels": panels.table,
        "load_chunk": load_chunk_op(kind),
    }
    if uses_tiles(kind):
        return own | {"multiply_group": amx_products.multiply_tile_group, "add_group": amx_products.add_tile_group}
    return own | {
        "multiply_keys": multiply_keys_op(rows, head_size, False, False),
        "add_values": add_values_op(rows, panels.v_head_size, False, False, SCORE_BYTES),
        "multiply_group": vector_products.multiply_vector_group,
        "add_group": vector_products.add_vector_group,
    }
