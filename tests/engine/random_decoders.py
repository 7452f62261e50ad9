"""Decoders with random weights whose layers are full attention, windows and recurrent layers in random order."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from genai.engine.paged import PagedDecoder
from genai.kernels.device import Executor
from genai.kernels.ir import (
    Attention,
    Binary,
    CausalConv,
    DenseWeight,
    Embedding,
    Ids,
    Linear,
    LinearAttention,
    LinearRecurrence,
    LogitsRows,
    Norm,
    Op,
    OpProgram,
    Per,
    Projection,
    RowsType,
    Unary,
)
from genai.kvcache.groups import GroupKind
from genai.kvcache.pool import BlockPool
from genai.kvcache.storage import CacheLayout, LayerShape, PagedStorage, StateShape, grouped_layout

VOCAB, WIDTH, HEADS, KV_HEADS, HEAD_SIZE = 23, 32, 4, 2, 8
BLOCK = 32
TAPS = 3
# Of a running sum, a convolution of a dilation of 2, and linear attention with two heads.
STATE_SIZES = WIDTH, WIDTH * 2 * (TAPS - 1), 2 * 8 * 8
Kinds = list[tuple[GroupKind, int]]
KINDS: Kinds = [
    (GroupKind.FULL, 0),
    (GroupKind.WINDOW, 16),
    (GroupKind.WINDOW, 40),
    (GroupKind.CHUNKED, 48),
    (GroupKind.STATE, 0),
]


class Weights:
    """See `genai.kernels.ir.Constants`."""

    def __init__(self, seed: int) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        self._rng = np.random.default_rng(seed)

    def array(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def packed(self, weight: Any) -> None:
        pass

    def matrix(self, rows: int, columns: int) -> DenseWeight:
        name = f"weight{len(self.arrays)}"
        self.arrays[name] = (self._rng.standard_normal((rows, columns)) / columns**0.5).astype(np.float32)
        return DenseWeight(name, rows, columns, transposed=True)

    def taps(self, channels: int, count: int) -> str:
        name = f"taps{len(self.arrays)}"
        self.arrays[name] = self._rng.standard_normal((channels, 1, count)).astype(np.float32)
        return name

    def ones(self, size: int) -> str:
        name = f"ones{size}"
        self.arrays.setdefault(name, np.ones(size, np.float32))
        return name


def random_kinds(rng: random.Random, *, chunked: bool = True) -> Kinds:
    """One to five layers."""
    kinds = [kind for kind in KINDS if chunked or kind[0] is not GroupKind.CHUNKED]
    return [rng.choice(kinds) for _ in range(rng.randint(1, 5))]


def program_of(kinds: Kinds, seed: int) -> OpProgram:
    """Residual layers: attention, or a recurrence, whose kind follows from the number of the layer."""
    weights, ops = Weights(seed), list[Op]()
    widths: dict[str, tuple[int, Per]] = {}

    def value(name: str, width: int, per: Per = Per.TOKEN) -> str:
        widths[name] = width, per
        return name

    def linear(x: str, width: int, out: str, *, columns: int = WIDTH, per: Per = Per.TOKEN) -> str:
        ops.append(Linear(x, Projection(weights.matrix(width, columns)), value(out, width, per), exact=True))
        return out

    table = weights.matrix(VOCAB, WIDTH)
    ops.append(Embedding(table, Ids.TOKENS, value("x", WIDTH)))
    x = "x"
    for layer, (kind, window) in enumerate(kinds):
        normed = value(f"n{layer}", WIDTH)
        ops.append(Norm(x, weights.ones(WIDTH), 1e-6, normed))
        if kind is GroupKind.STATE and layer % 3 == 1:
            given, columns = linear(normed, WIDTH, f"g{layer}"), WIDTH
            ops.append(CausalConv(given, weights.taps(WIDTH, TAPS), value(f"r{layer}", WIDTH), layer, dilation=2))
            mixed = f"r{layer}"
        elif kind is GroupKind.STATE and layer % 3 == 2:
            q, k, v, gate = (
                linear(normed, width, f"{name}{layer}") for name, width in zip("qkvd", (16, 8, 16, 2), strict=True)
            )
            ops.append(Unary("sigmoid", gate, value(f"b{layer}", 2)))
            ops.append(Binary("subtract", f"b{layer}", "", value(f"e{layer}", 2), "", weights.ones(1)))
            mixed, columns = value(f"r{layer}", 16), 16
            ops.append(LinearAttention(q, k, v, mixed, layer, 2, 1, 2, 8, 8, 0.3, f"e{layer}", f"b{layer}"))
        elif kind is GroupKind.STATE:
            given, gate = linear(normed, WIDTH, f"g{layer}"), linear(normed, WIDTH, f"d{layer}")
            ops.append(Unary("sigmoid", gate, value(f"s{layer}", WIDTH)))
            ops.append(LinearRecurrence(given, f"s{layer}", value(f"r{layer}", WIDTH), layer))
            mixed, columns = f"r{layer}", WIDTH
        else:
            q, k, v = (
                linear(normed, heads * HEAD_SIZE, f"{name}{layer}")
                for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
            )
            sizes = {"heads": HEADS, "kv_heads": KV_HEADS, "head_size": HEAD_SIZE, "v_head_size": HEAD_SIZE}
            out = value(f"a{layer}", HEADS * HEAD_SIZE)
            sizes |= {"chunk": window} if kind is GroupKind.CHUNKED else {"window": window or -1}
            ops.append(Attention(q, k, v, out, layer, **sizes))
            mixed, columns = out, HEADS * HEAD_SIZE
        added = linear(mixed, WIDTH, f"o{layer}", columns=columns)
        ops.append(Binary("add", x, added, value(f"x{layer}", WIDTH)))
        x = f"x{layer}"
    ops.append(LogitsRows(x, value("last", WIDTH, Per.LOGITS)))
    linear("last", VOCAB, "logits", per=Per.LOGITS)
    types = {name: RowsType((1, -1, width), width, per) for name, (width, per) in widths.items()}
    return OpProgram(tuple(ops), types, weights, ("logits",))


def layout_of(kinds: Kinds, dtype: str = "float32") -> CacheLayout:
    shapes = [
        StateShape(STATE_SIZES[layer % 3])
        if kind is GroupKind.STATE
        else LayerShape(KV_HEADS, HEAD_SIZE, HEAD_SIZE, dtype)
        for layer, (kind, _) in enumerate(kinds)
    ]
    return grouped_layout(shapes, kinds, BLOCK)


def random_decoder(executor: Executor, kinds: Kinds, *, seed: int, blocks: int = 256, slots: int = 64) -> PagedDecoder:
    """Args: blocks, slots: sizes of the pools; blocks per cache group."""
    layout = layout_of(kinds)
    blocks *= max(len(layout.page_groups), 1)
    num_slots = slots if layout.bytes_per_state else 0
    return PagedDecoder(
        executor,
        program_of(kinds, seed),
        vocab_size=VOCAB,
        pool=BlockPool(blocks),
        storage=PagedStorage(layout, blocks, executor.allocate, num_slots),
        state_pool=BlockPool(num_slots) if num_slots else None,
        output_names=("logits",),
    )
