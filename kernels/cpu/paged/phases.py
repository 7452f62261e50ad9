"""The calls of one attention layer, for a tape."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...formats import PagedLayer
from ..checks import Float32, check
from ..jit import NativeOp
from ..tape.context import Word
from ..tape.program import Call, Items, Phases, Rows
from . import tile_products, vector_products
from .few import WEIGHT_BYTES, attend_pieces, few_rows, few_scratch, merge_pieces, weigh_piece
from .heads import make_heads_ready
from .many import load_chunk_op, many_op, many_rows, uses_tiles, weigh_rows_op
from .panels import SCORE_BYTES, Panels
from .products import add_values_op, multiply_keys_op
from .store import store_op, store_scratch

_LOG2_E = 1 / math.log(2)
_LINE = 64


@dataclass(frozen=True)
class Rope:
    """Rotary tables; rotary_dim, at most the head size, is twice their width.

    Attributes:
        cos, sin: float32 [positions, rotary_dim / 2].
        long_cos, long_sin: the same for the sequences whose ROPE_TABLE is not 0; None = they use the others too.
        interleaved: pairs are (0, 1), (2, 3), ... instead of (0, rotary_dim / 2), (1, rotary_dim / 2 + 1), ...
    """

    cos: Float32
    sin: Float32
    long_cos: Float32 | None = None
    long_sin: Float32 | None = None
    interleaved: bool = False

    def check(self, head_size: int) -> None:
        """The tables fit each other and the head.

        Raises:
            ValueError: they do not.
        """
        half = self.cos.shape[-1]
        check("cos", self.cos, (None, None))
        check("sin", self.sin, self.cos.shape)
        if self.long_cos is not None or self.long_sin is not None:
            if self.long_cos is None or self.long_sin is None:
                raise ValueError("long_cos and long_sin are given together or not at all")
            check("long_cos", self.long_cos, (None, half))
            check("long_sin", self.long_sin, self.long_cos.shape)
        if not 0 < 2 * half <= head_size:
            raise ValueError(f"cos has {half} columns, expected at most half of the head size {head_size}")


def attention_phases(
    query: Rows,
    key: Rows,
    value: Rows,
    out: Rows,
    layer: PagedLayer,
    *,
    heads: int,
    scale: float = 0.0,
    softcap: float = 0.0,
    window: int = -1,
    sinks: Float32 | None = None,
    smooth_softmax: bool = False,
    rope: Rope | None = None,
    q_norm: Float32 | None = None,
    k_norm: Float32 | None = None,
    epsilon: float = 1e-6,
) -> Phases:
    """Keys and values into the layer's pages at SLOTS, then softmax(q k * scale) v of every row over its sequence.

    Queries and keys are normed and rotated on the way and never change in place. The step's context must hold what
    `steps.prepare_context` writes. FEW rows are computed in float32. So are MANY rows if the pages are float32, or
    without AMX; with it, and pages of float16, their products take bfloat16 and sum in float32.

    Args:
        query: [T, heads * head_size]; key: [T, kv_heads * head_size]; value: [T, kv_heads * v_head_size]; they may be
            columns of one packed projection. out: [T, heads * v_head_size].
        layer: the pages; its shape says the KV heads and head sizes. Query heads h * group to (h + 1) * group - 1 use
            KV head h.
        scale: factor on scores; 0 = 1 / sqrt(head_size).
        softcap: scores become softcap * tanh(score / softcap); 0 = off.
        window: a row sees its own token and window - 1 before it; -1 = all before it.
        sinks: float32 [heads], a score per head that takes part in the softmax with a value of zero.
        smooth_softmax: a sink of 0 for every head.
        q_norm, k_norm: float32 [head_size], weights of an RMS norm per head before the rotation; epsilon: its.

    Operators refuse (`tape.context.ErrorCode`) slots, positions and pages that lead outside the cache or the tables.

    Raises:
        ValueError: a shape, type or number does not fit.
    """
    kv_heads, head_size, v_head_size = layer.kv_heads, layer.head_size, layer.v_head_size
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"there are {heads} query heads, expected a multiple of the cache's {kv_heads} KV heads")
    if window == 0 or window < -1:
        raise ValueError(f"window is {window}, expected -1 or a positive number of tokens")
    if softcap < 0:
        raise ValueError(f"softcap is {softcap}, expected 0 or a positive number")
    for name, given, width in (
        ("query", query, heads * head_size),
        ("key", key, kv_heads * head_size),
        ("value", value, kv_heads * v_head_size),
        ("out", out, heads * v_head_size),
    ):
        if given.width != width:
            raise ValueError(f"{name} has rows of {given.width} numbers, expected {width}")
    for name, vector, length in (("sinks", sinks, heads), ("q_norm", q_norm, head_size), ("k_norm", k_norm, head_size)):
        if vector is not None:
            check(name, vector, (length,))
    if rope is not None:
        rope.check(head_size)
    if sinks is None and smooth_softmax:
        sinks = np.zeros(heads, np.float32)
    if sinks is not None:
        sinks = np.ascontiguousarray(sinks * np.float32(_LOG2_E))
    scale = scale or 1 / math.sqrt(head_size)
    group, half = heads // kv_heads, layer.keys.dtype == np.float16
    arguments: tuple[Any, ...] = (
        query.address, query.stride, key.address, key.stride, value.address, value.stride, out.address, out.stride,
        _address(layer.keys), layer.keys.strides[0], _address(layer.values), layer.values.strides[0], layer.num_blocks,
        kv_heads, group, head_size, v_head_size, layer.keys.itemsize,
        float(scale / softcap if softcap else scale * _LOG2_E), float(softcap * _LOG2_E), window, _address(sinks),
        *_rope_arguments(rope), _address(q_norm), _address(k_norm), float(epsilon), make_heads_ready,
    )  # fmt: skip
    panels, rows = Panels(group, head_size, v_head_size), few_rows(group)
    few = (
        multiply_keys_op(rows, head_size, half, True),
        add_values_op(rows, v_head_size, half, True, WEIGHT_BYTES),
        rows,
        weigh_piece,
    )
    held = (query, key, value, out, layer, sinks, rope, q_norm, k_norm, panels)

    def call(op: NativeOp, own: tuple[Any, ...], counted: Word, scratch: int, label: str) -> Call:
        scratch = -(-scratch // _LINE) * _LINE
        return Call(op, (*arguments, *own), Items(counted, kv_heads), scratch, held, label)

    few_bytes = few_scratch(group, head_size, v_head_size)
    return [
        [call(store_op(half), (), Word.TOKENS, store_scratch(head_size), "store keys and values")],
        [
            call(attend_pieces, few, Word.FEW_SPLITS, few_bytes, "attention of few rows"),
            call(
                many_op(half), _many(panels, head_size, half), Word.MANY_BLOCKS, panels.bytes, "attention of many rows"
            ),
        ],
        [call(merge_pieces, (), Word.FEW_SPLITS, 0, "merge attention")],
    ]


def _many(panels: Panels, head_size: int, half: bool) -> tuple[Any, ...]:
    """MULTIPLY_KEYS to ADD_GROUP for `many`."""
    rows, own = many_rows(half), (weigh_rows_op(half), _address(panels.table), load_chunk_op(half))
    if uses_tiles(half):
        return 0, 0, rows, *own, tile_products.multiply_tile_group, tile_products.add_tile_group
    return (
        multiply_keys_op(rows, head_size, False, False),
        add_values_op(rows, panels.v_head_size, False, False, SCORE_BYTES),
        rows,
        *own,
        vector_products.multiply_vector_group,
        vector_products.add_vector_group,
    )


def _address(array: NDArray[Any] | None) -> int:
    return 0 if array is None else int(array.ctypes.data)


def _rope_arguments(rope: Rope | None) -> tuple[int, ...]:
    """COS to INTERLEAVED."""
    if rope is None:
        return (0,) * 8
    long = (_address(rope.long_cos), _address(rope.long_sin), 0 if rope.long_cos is None else len(rope.long_cos))
    return (
        _address(rope.cos), _address(rope.sin), len(rope.cos), *long, rope.cos.shape[1], int(rope.interleaved)
    )  # fmt: skip
