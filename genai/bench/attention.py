"""Attention of one token alone, by the type of cached keys and values: seconds, bytes, and shares of the bandwidth."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from genai.kernels.cache_layout import can_rotate
from genai.kernels.device import PageTables, StepContext
from genai.kernels.ir import Attention, OpProgram, Per, RowsType
from genai.kvcache.storage import CacheLayout, LayerShape, PagedStorage

from ..engine.paged import PagedDecoder
from ..models.decoder_graph import BLOCK_SIZE
from ..models.kv_types import KV_TYPES, kv_types_on
from ..models.model import Model
from .ceilings import measure_of

# Of every byte in the cache: as floats or as integers with scales an ordinary number.
_FILLING = 0x38


class _OneToken:
    """The attention of all layers as one program, over a cache of so many tokens."""

    def __init__(self, decoder: PagedDecoder, kv_dtype: str, context: int) -> None:
        shapes = [replace(shape, dtype=KV_TYPES[kv_dtype]) for shape in _attention_layers(decoder)]
        layout, blocks = CacheLayout(tuple(shapes), BLOCK_SIZE), -(-context // BLOCK_SIZE)
        self._name = f"attention to {context} tokens, {kv_dtype} cache"
        self._bytes, self._times = layout.bytes_per_token * context / len(shapes), list[float]()
        self._storage = PagedStorage(layout, blocks, decoder.executor.allocate)
        filled = np.full(self._storage.blocks.shape[1], _FILLING, np.uint8)
        for block in range(blocks):
            decoder.executor.write_block(self._storage.blocks, block, filled)
        self._program = _attention_only(decoder.program)
        self._layers = len(self._program.parts)
        self._function = decoder.executor.compile(self._program, self._storage.layers)
        last = context - 1
        self._step = StepContext(
            tokens=np.zeros(1, np.int64),
            positions=np.array([last], np.int64),
            cu_seqlens_q=np.array([0, 1], np.int32),
            context_lens=np.array([context], np.int32),
            groups=(PageTables(np.arange(blocks, dtype=np.int32)[None], np.array([last], np.int64)),),
            num_decode_sequences=1,
            logits_indices=np.empty(0, np.int64),
            rope_table=np.zeros(1, np.int32),
        )

    def run(self) -> None:
        types = self._program.types
        inputs = {name: np.ones((1, types[name].width), np.float32) for name in self._program.given}
        self._times.append(self._function.seconds(self._step, inputs) / self._layers)

    def row(self, read: float | None) -> dict[str, Any]:
        """As `bench_kernels` gives them, for so many bytes per second of reading memory; None = unknown."""
        seconds = statistics.median(self._times[1:])
        products = {"TOP/s": None, "of products": None}
        speed = self._bytes / seconds
        shares = {"ms": 1e3 * seconds, "GB/s": speed / 1e9, "of bandwidth": speed / read if read else None}
        return {"product": self._name, "rows": 1, "numerics": "decode", **shares, **products}

    def close(self) -> None:
        self._storage.close()


def bench_attention(model: Model, *, context: int, repeat: int = 5) -> Iterator[dict[str, Any]]:
    """Per type of cached keys and values: the time of a layer's attention of one token, and its share of the bandwidth.

    The types are measured in turn, each over a cache of its own, of all layers: none waits in a processor's cache.
    Nothing is said of models whose attention is not part of a program of ops.

    Args:
        context: tokens seen, this one included; at most the model's context_length.
    """
    decoder = model.decoder
    if not isinstance(decoder, PagedDecoder) or not _attention_only(decoder.program).parts:
        return
    context = min(context, model.config.model.context_length)
    kinds = [name for name in kv_types_on(decoder.executor.name) if _fits(decoder, name)]
    runs = [_OneToken(decoder, kv_dtype, context) for kv_dtype in kinds]
    try:
        for _ in range(repeat + 1):
            for run in runs:
                run.run()
        measure = measure_of(decoder.executor, "bandwidth")
        read = None if measure is None else measure()
        for run in runs:
            yield run.row(read)
    finally:
        for run in runs:
            run.close()


def _fits(decoder: PagedDecoder, kv_dtype: str) -> bool:
    layers = _attention_layers(decoder)
    return kv_dtype != "int4" or all(can_rotate(size) for one in layers for size in (one.head_size, one.v_head_size))


def _attention_layers(decoder: PagedDecoder) -> list[LayerShape]:
    return [layer for layer in decoder.storage.layout.layers if isinstance(layer, LayerShape)]


def _attention_only(program: OpProgram) -> OpProgram:
    """The attention ops of a program, which read arrays that are given."""
    types: dict[str, RowsType] = {}
    ops: list[Any] = []
    for op in program.ops:
        if isinstance(op, Attention):
            names: dict[str, Any] = {}
            for role in ("query", "key", "value"):
                if name := getattr(op, role):
                    names[role] = f"given {role} {program.types[name].width}"
                    types[names[role]] = replace(program.types[name], per=Per.TOKEN)
            ops.append(replace(op, **names))
            types[op.out] = program.types[op.out]
    inputs = tuple(name for name in types if name.startswith("given "))
    return replace(program, parts=tuple(ops), types=types, outputs=(), ids={}, given=inputs)
