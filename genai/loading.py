"""From a model folder to a decoder: compile what `decoder_graph` read, and lay out the cache."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from genai.kernels.cpu.jit import LIBRARY, report_progress
from genai.kernels.cpu.large import Arena
from genai.kernels.cpu.sampling import sample_slots
from genai.kernels.cpu.tape.context import Word
from genai.kernels.cpu.tape.walkers import Walkers
from genai.kernels.cpu.team import Team
from genai.kvcache import budget
from genai.kvcache.groups import CacheLayout
from genai.kvcache.pool import BlockPool
from genai.kvcache.storage import PagedStorage

from .config import Config
from .decoder_graph import BLOCK_SIZE, DecoderGraph, read_decoder
from .engine.decoder import Decoder
from .engine.dense import DenseDecoder, DenseInput
from .engine.paged import PagedDecoder
from .errors import UnsupportedModelError
from .graph.flatten import FlatDecoder
from .graph.ir import Graph, Value
from .graph.names import GraphNames
from .memory_plan import CacheBudget, budget_cache, plan_memory
from .runtime.packing_progress import PackingProgress
from .runtime.plan import PlanOptions, build_plan

# A pool larger than this many full contexts would only cost memory for its free list.
MAX_CONTEXTS_IN_POOL = 256


@dataclass(frozen=True)
class DecoderInfo:
    """What was found in a decoder's graph.

    Attributes:
        parameters: number of weights (a packed 4-bit byte counts as two).
        weight_bytes: bytes that the weights take as stored.
        num_layers: attention layers that keep a cache in the block pool.
        kv_bytes_per_token: cache bytes per token over all layers.
        kv_dtype: "fp16" or "fp32".
        context_size: most tokens that one sequence may have.
        cache_tokens: tokens that the block pool can hold; 0 where there is none.
        flattened: whether it runs batched over the paged cache; `reason` says why not.
    """

    parameters: int
    weight_bytes: int
    num_layers: int
    kv_bytes_per_token: int
    kv_dtype: str
    context_size: int
    cache_tokens: int
    flattened: bool
    reason: str = ""


def load_decoder(
    config: Config,
    *,
    threads: int | None,
    kv_dtype: str,
    accuracy: str,
    cache_bytes: int | None,
    context_size: int | None,
    quiet: bool,
) -> tuple[Decoder, DecoderInfo]:
    """Load the decoder of a model folder; see genai.Model for the arguments and errors."""
    with report_progress(_say_nothing if quiet else None):
        source = read_decoder(config, kv_dtype=kv_dtype, accuracy=accuracy)
        LIBRARY.expect([sample_slots])
        cache = budget_cache(
            plan_memory(source, config),
            free_bytes=budget.available_memory(),
            context_size=context_size,
            cache_bytes=cache_bytes,
        )
        kernel = {"accuracy": accuracy, "team": Team(threads), "walkers": Walkers(threads), "arena": Arena()}
        if source.flat is None or source.layout is None:
            if not quiet:
                print(f"genai: running sequence by sequence, without batching: {source.reason}", file=sys.stderr)
            return _dense(source, config, PlanOptions(kernel=kernel)), _info(source, cache, cache_tokens=0)
        num_blocks = _num_blocks(source.layout, cache)
        decoder = _paged(source, source.flat, source.layout, num_blocks, config, kernel, quiet)
    return decoder, _info(source, cache, cache_tokens=num_blocks * BLOCK_SIZE)


def _paged(
    source: DecoderGraph,
    flat: FlatDecoder,
    layout: CacheLayout,
    num_blocks: int,
    config: Config,
    kernel: Mapping[str, Any],
    quiet: bool,
) -> PagedDecoder:
    graph, names = source.model.graph, config.model.decoder.names
    progress = PackingProgress(0 if quiet else source.weight_bytes)
    options = PlanOptions(
        kernel=kernel, walkers=kernel["walkers"], ids=_ids(names), on_packed=None if quiet else progress.add
    )
    try:
        plan = build_plan(source.model, options)
    finally:
        progress.close()
    decoder = PagedDecoder(
        plan=plan,
        input_ids=names.input_ids,
        position_ids=names.position_ids if any(v.name == names.position_ids for v in graph.inputs) else None,
        input_dtype=_input_dtype(graph, names.input_ids),
        vocab_size=config.model.vocab_size,
        pool=BlockPool(num_blocks),
        storage=PagedStorage(layout, num_blocks),
        team=kernel["team"],
        rope_threshold=flat.rope_threshold,
    )
    decoder.prepare()
    return decoder


def _ids(names: GraphNames) -> dict[str, Word]:
    """The graph inputs that are integers per token."""
    return {names.input_ids: Word.TOKEN_IDS, names.position_ids: Word.POSITIONS}


def _say_nothing(current: int, total: int) -> None:
    """Progress that nobody wants to see."""


def _info(source: DecoderGraph, cache: CacheBudget, *, cache_tokens: int) -> DecoderInfo:
    return DecoderInfo(
        parameters=source.parameters,
        weight_bytes=source.weight_bytes,
        num_layers=len(source.flat.layers) if source.flat else 0,
        kv_bytes_per_token=source.bytes_per_token,
        kv_dtype=source.kv_dtype,
        context_size=cache.context_size,
        cache_tokens=cache_tokens,
        flattened=source.flat is not None,
        reason=source.reason,
    )


def _num_blocks(layout: CacheLayout, cache: CacheBudget) -> int:
    blocks_per_context = -(-cache.context_size // BLOCK_SIZE)
    return min(budget.blocks_that_fit(layout, cache.cache_bytes), blocks_per_context * MAX_CONTEXTS_IN_POOL)


def _dense(source: DecoderGraph, config: Config, options: PlanOptions) -> DenseDecoder:
    graph, decoder = source.model.graph, config.model.decoder
    inputs = {
        value.name: DenseInput(_numpy_dtype(value), _static_shape(value))
        for value in graph.inputs
        if value.name not in graph.initializers
    }
    past_shape = decoder.num_key_value_heads, decoder.head_size
    plan, team = build_plan(source.model, options), options.kernel["team"]
    return DenseDecoder(plan, team, inputs, decoder.names, config.model.vocab_size, past_shape)


def _input_dtype(graph: Graph, name: str) -> np.dtype[Any]:
    return next(_numpy_dtype(value) for value in graph.inputs if value.name == name)


def _numpy_dtype(value: Value) -> np.dtype[Any]:
    dtype = getattr(value.type, "dtype", None)
    if dtype is None:
        raise UnsupportedModelError(
            f"graph input {value.name!r} is not a tensor", "decoders take tensors", "export it again"
        )
    result: np.dtype[Any] = np.dtype(dtype.numpy_dtype)
    return result


def _static_shape(value: Value) -> tuple[int | None, ...]:
    shape = getattr(value.type, "shape", None) or ()
    return tuple(size if isinstance(size, int) else None for size in shape)
