"""The speed of decode attention by KV cache type: seconds, bytes, and shares of the memory bandwidth."""

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

# The value of every byte in the cache, which yields ordinary numbers both in floats and in integers with a scale.
_FILLING = 0x38


class _OneToken:
    """The attention of all layers as one program, over a cache that holds `context` tokens."""

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
        """Return a row in the format of `bench_kernels`; read: memory bandwidth in bytes/s, None if unknown."""
        seconds = statistics.median(self._times[1:])
        products = {"TOP/s": None, "of products": None}
        speed = self._bytes / seconds
        shares = {"ms": 1e3 * seconds, "GB/s": speed / 1e9, "of bandwidth": speed / read if read else None}
        return {"product": self._name, "rows": 1, "numerics": "decode", **shares, **products}

    def close(self) -> None:
        self._storage.close()


def bench_attention(model: Model, *, context: int, repeat: int = 5) -> Iterator[dict[str, Any]]:
    """Yield one row per KV cache type: the time of one layer's attention for one token, and its bandwidth share.

    The types are measured in turn. Each type has a separate KV cache with all layers, so that the processor's caches
    hold none of the keys and values of the previous run. There are no rows for models whose attention is not part of an
    op program.

    Args:
        context: number of tokens that the new token attends to, including itself; at most the model's context_length.
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
    return kv_dtype != "int4" or all(
        can_rotate(size) for one in layers for size in (one.head_size, one.v_head_size or one.head_size)
    )


def _attention_layers(decoder: PagedDecoder) -> list[LayerShape]:
    return [layer for layer in decoder.storage.layout.layers if isinstance(layer, LayerShape)]


def _attention_only(program: OpProgram) -> OpProgram:
    """Return a program of only the attention ops; their queries, keys and values are inputs of the program."""
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
