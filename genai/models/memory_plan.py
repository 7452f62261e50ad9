"""The memory that a decoder needs, and the longest context that fits: computations without allocations."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from genai.common.memory_limits import format_bytes
from genai.kernels.host_memory import HostMemory
from genai.kernels.weight_layout import BLOCK_SIZES, FactorType, RecordLayout, layout_with, num_records, num_tiles
from genai.kvcache.groups import CacheGroup
from genai.kvcache.storage import CacheLayout

from ..errors import CacheCapacityError, OptionError
from ..lowering.rules import Packed, find_stored_weights
from ..onnx.ir import Graph, Node, OnnxTensor
from .config import Config
from .decoder_graph import BLOCK_SIZE, DecoderGraph, whole_number

# Kernels allocate some arrays in addition to the graph's values (quantised activations, rotated heads). In measured
# prefills, the values on their own were 90 to 98% of the peak.
_SCRATCH_SHARE = 1 / 4
_SCALES_JUDGED = 4096
# The share of free memory that is left unused.
_MARGIN = 1 / 20


@dataclass(frozen=True)
class MemoryPlan:
    """The memory that a loaded decoder needs.

    Attributes:
        weights: bytes of the weights that stay in memory, in the form in which kernels read them.
        workspace: maximum bytes of activations in one step.
        cache_bytes_per_token: bytes of keys and values per token of context, over all layers.
        context_limit: the model's maximum context, in tokens.
        block_size: number of tokens by which the cache grows.
        mapped: bytes of tables that are read from the mapped file. Few of their rows are used, and the system can
            reclaim their pages.
        packing: bytes that loading needs temporarily: weights inside the model's own file, and the largest matrix in
            its stored form (and also as fp32, if it is packed from half precision). Activations use that memory later.
        where: suffix of error messages that names the device that has this memory.
        layout: layout of the paged cache; None if the cache is not paged, in which case it grows with every token.
        step_tokens: maximum number of tokens per step; windows do not slide within a step.
    """

    weights: int
    workspace: int
    cache_bytes_per_token: int
    context_limit: int
    block_size: int = BLOCK_SIZE
    mapped: int = 0
    packing: int = 0
    where: str = ""
    layout: CacheLayout | None = None
    step_tokens: int = 0

    @property
    def temporary(self) -> int:
        """Bytes of activations, or of packing if packing needs more."""
        return max(self.workspace, self.packing)

    @property
    def fixed(self) -> int:
        """Bytes that do not depend on the context."""
        return self.weights + self.temporary

    def cache(self, context: int) -> int:
        """Return the cache bytes of one sequence of `context` tokens."""
        if self.layout is None:
            return -(-context // self.block_size) * self.block_size * self.cache_bytes_per_token
        return self.layout.sequence_bytes(context, self.step_tokens)

    def cache_by_kind(self, context: int) -> list[tuple[CacheGroup, int]]:
        """Return the layers of each kind, with their cache bytes for one sequence; empty without a paged cache."""
        layout = self.layout
        if layout is None:
            return []
        return [(kind, layout.kind_bytes(kind, context, self.step_tokens)) for kind in layout.kinds]

    def describe_cache(self, context: int) -> str:
        """Return a description of the cache per kind of layer; "" if there is only one kind."""
        parts = [f"{kind}: {format_bytes(size)}" for kind, size in self.cache_by_kind(context)]
        return f" ({', '.join(parts)})" if len(parts) > 1 else ""

    def needed(self, context: int) -> int:
        """Return the total bytes, with one sequence of `context` tokens."""
        return self.fixed + self.cache(context)

    def context_within(self, cache_bytes: int) -> int:
        """Return the longest context that fits into `cache_bytes`, up to the model's limit; 0 = no block fits."""
        if self.cache_bytes_per_token == 0:
            return self.context_limit
        if self.layout is not None:
            states = self.layout.sequence_bytes(0, 0)
            blocks = max(cache_bytes - states, 0) // self.layout.bytes_per_block
            return self.layout.tokens_within(blocks, self.step_tokens, self.context_limit)
        blocks = max(cache_bytes, 0) // (self.cache_bytes_per_token * self.block_size)
        return min(blocks * self.block_size, self.context_limit)


@dataclass(frozen=True)
class CacheBudget:
    """The maximum number of tokens per sequence, and the maximum bytes of the cache of all sequences."""

    context_size: int
    cache_bytes: int


def plan_memory(
    decoder: DecoderGraph, config: Config, *, device: str = "", tokens: int = HostMemory.step_sizes.fast
) -> MemoryPlan:
    """Return the memory that a decoder will need when it is loaded.

    Args:
        decoder: the decoder's graph.
        config: the folder's configuration.
        device: device with separate memory, in which weights and tables keep their stored form; "" = the host.
        tokens: number of tokens per prefill step.
    """
    limit = config.model.context_length
    graph = decoder.model.graph
    # A graph that is not flattened creates new present tensors in each step, so the past is held twice.
    copies = 1 if decoder.flat else 2
    tables = mapped_tables(graph) if decoder.flat and not device else frozenset()
    loaded = [tensor for name, tensor in graph.initializers.items() if name not in tables]
    widened = 2 if decoder.flat else 0
    meanwhile = (tensor.nbytes * (1 + widened * _is_half(tensor)) for tensor in loaded)
    packing = sum(tensor.nbytes for tensor in loaded if not tensor.is_external) + max(meanwhile, default=0)
    return MemoryPlan(
        weights=sum(tensor.nbytes for tensor in loaded) if device else loaded_weight_bytes(graph, tables),
        mapped=sum(graph.initializers[name].nbytes for name in tables),
        packing=0 if device else packing,  # only the host packs weights
        workspace=workspace_bytes(graph, min(tokens, limit), config.model.decoder.hidden_size),
        cache_bytes_per_token=copies * decoder.info.kv_bytes_per_token,
        context_limit=limit,
        where=f" on the device {device}" if device else "",
        layout=decoder.layout,
        step_tokens=tokens,
    )


def usable(free_bytes: int) -> int:
    """Return the free memory that a model may use. A part is left for other processes, whose usage varies."""
    return free_bytes - int(max(free_bytes, 0) * _MARGIN)


def default_context(plan: MemoryPlan, free_bytes: int) -> int:
    """Return the longest context (up to the limit) that fits in half of the memory after weights and workspace.

    Raises:
        CacheCapacityError: not even one block fits.
    """
    room = usable(free_bytes) - plan.fixed
    context = plan.context_within(room // 2)
    if context < 1:
        raise CacheCapacityError(
            f"the model needs {format_bytes(plan.needed(1))}, but only {format_bytes(free_bytes)} is free{plan.where}",
            f"weights need {format_bytes(plan.weights)}, workspace {format_bytes(plan.temporary)}, the smallest cache "
            f"{format_bytes(plan.cache(1))}{plan.describe_cache(1)}; the cache may use half of the remaining memory",
            "free memory, or use a smaller or more strongly quantised model "
            "(with cache_bytes set, a model is loaded without this check)",
        )
    return context


def check_limit(plan: MemoryPlan, context_size: int) -> None:
    """Raise OptionError if a context exceeds the model's limit."""
    if not 1 <= context_size <= plan.context_limit:
        raise OptionError(
            f"context_size = {context_size}",
            f"the context length of the model is {plan.context_limit} tokens",
            f"use a context_size from 1 to {plan.context_limit}, or leave context_size out",
        )


def check_context(plan: MemoryPlan, context_size: int, free_bytes: int) -> None:
    """Raise an error if a requested context exceeds the model's limit or the free memory."""
    check_limit(plan, context_size)
    if plan.needed(context_size) > usable(free_bytes):
        most = plan.context_within(usable(free_bytes) - plan.fixed)
        raise CacheCapacityError(
            f"a context of {context_size} tokens needs {format_bytes(plan.needed(context_size))}, but "
            f"{format_bytes(free_bytes)} is free{plan.where}, of which 5 % is reserved",
            f"weights need {format_bytes(plan.weights)}, the cache {format_bytes(plan.cache(context_size))}"
            f"{plan.describe_cache(context_size)}, and "
            f"the workspace {format_bytes(plan.temporary)}",
            f"use a context size of at most {most}, or free memory"
            if most
            else "use a smaller or more strongly quantised model, or free memory",
        )


def budget_cache(
    plan: MemoryPlan, *, free_bytes: int, context_size: int | None = None, cache_bytes: int | None = None
) -> CacheBudget:
    """Determine the sizes of context and cache.

    Args:
        plan: the memory that the decoder needs.
        free_bytes: free memory before the weights are packed.
        context_size: requested number of tokens; None = `default_context`.
        cache_bytes: requested bytes, used without a check of free memory; None = half of the memory that remains after
            weights and workspace, or the memory that the requested context needs, if that is more.

    Raises:
        OptionError, CacheCapacityError: as for `check_context`; also if the context does not fit into cache_bytes.
    """
    if cache_bytes is None:
        half = (usable(free_bytes) - plan.fixed) // 2
        if context_size is None:
            return CacheBudget(default_context(plan, free_bytes), half)
        check_context(plan, context_size, free_bytes)
        return CacheBudget(context_size, max(half, plan.cache(context_size)))
    fits = plan.context_within(cache_bytes)
    if context_size is not None:
        check_limit(plan, context_size)
    if fits < (context_size or 1):
        raise CacheCapacityError(
            f"the KV cache is limited to {cache_bytes} bytes, but a context of {context_size or 1} tokens needs "
            f"{plan.cache(context_size or 1)} bytes{plan.describe_cache(context_size or 1)}",
            f"{fits} tokens fit" if fits else f"the limit is too small for one block of {plan.block_size} tokens",
            "raise cache_bytes, or choose a smaller context_size",
        )
    return CacheBudget(context_size or fits, cache_bytes)


# --- weights -------------------------------------------------------------------------------------------------------


def mapped_tables(graph: Graph) -> frozenset[str]:
    """Return the tables of floats that only Gather reads, row by row. These tables stay in the file."""
    return frozenset(
        name
        for name, tensor in graph.initializers.items()
        if tensor.is_external
        and len(tensor.shape) == 2
        and (users := graph.consumers(name))
        and all(node.op_type == "Gather" and node.input(0) == name != node.input(1) for node in users)
    )


def _is_half(tensor: OnnxTensor) -> bool:
    return tensor.dtype.name in ("FLOAT16", "BFLOAT16")


def loaded_weight_bytes(graph: Graph, mapped: Collection[str] = ()) -> int:
    """Return the bytes of a graph's loaded weights: block-quantised weights in packed tiles, others as stored.

    A weight with several readers counts only once. Weights in `mapped` do not count, and half-precision weights count
    as fp32, because they are converted.
    """
    packed: dict[tuple[object, ...], int] = {}
    inside: set[str] = set()
    for node in graph.nodes:
        for index, stored in find_stored_weights(node.op_type).packed.items():
            source = _initializer(graph, node.input(index))
            if source is None:
                continue
            bits = whole_number(node, stored.bits, 4)
            rows, columns = _matrix_shape(graph, node, node.input(index), source, stored)
            block_size = whole_number(node, "block_size", stored.block_size, least=min(stored.block_size, 1))
            scales, points = node.input(stored.scales), node.input(stored.points)
            if not block_size or stored.as_stored:
                continue  # counted below in its stored form, like weights with one scale per row
            inside |= {source, scales, points}
            if bits not in (2, 4, 8) or block_size not in BLOCK_SIZES:
                continue  # an error when the model is loaded
            factors: FactorType = "float" if _is_wide(graph, scales, points) else "half"
            whole = points in graph.initializers and graph.initializers[points].dtype.name == "UINT8"
            layout = layout_with(bits, block_size, factors, bool(points), whole_points=whole)
            packed[source, rows, columns, bits, block_size] = packed_bytes(rows, columns, layout)
    return sum(packed.values()) + sum(
        tensor.nbytes * (2 if _is_half(tensor) else 1)
        for name, tensor in graph.initializers.items()
        if name not in inside and name not in mapped
    )


def packed_bytes(rows: int, columns: int, layout: RecordLayout) -> int:
    """Return the bytes of a BlockMatrix (genai.kernels.weight_layout)."""
    return num_tiles(rows) * num_records(columns, layout) * layout.nbytes


def _is_wide(graph: Graph, *names: str) -> bool:
    """Return True if scales and zero points need 32 bits. Samples decide, because it would take long to read all."""
    tensors = [graph.initializers[name] for name in names if name in graph.initializers]
    floats = [tensor for tensor in tensors if tensor.dtype.name == "FLOAT"]
    sample = [tensor.array().reshape(-1)[:_SCALES_JUDGED] for tensor in floats]
    with np.errstate(over="ignore"):
        return any(bool(np.any(part.astype(np.float16).astype(np.float32) != part)) for part in sample)


def _initializer(graph: Graph, name: str) -> str | None:
    """Return the initializer behind a name. Follow reshapes: a tied embedding reads the head's weight through one."""
    while name not in graph.initializers:
        node = graph.producer(name)
        if node is None or node.op_type not in ("Reshape", "Identity", "Unsqueeze", "Squeeze"):
            return None
        name = node.input(0)
    return name


def _matrix_shape(graph: Graph, node: Node, name: str, source: str, stored: Packed) -> tuple[int, int]:
    """Return the rows and columns of a packed matrix, or of several stacked matrices."""
    if stored.sizes is not None:
        rows, columns = (whole_number(node, size, 0) for size in stored.sizes)
        return rows, columns
    tensor, bits = graph.initializers[source], whole_number(node, stored.bits, 4)
    known = getattr(graph.type_of(name), "shape", None) or tensor.shape
    rows = math.prod(size if isinstance(size, int) else 0 for size in known[: stored.row_axes]) if known else 0
    values = tensor.num_elements * 8 // bits if tensor.dtype.name == "UINT8" else tensor.num_elements
    return rows, values // max(rows, 1)


# --- activations -----------------------------------------------------------------------------------------------------


def workspace_bytes(graph: Graph, tokens: int, hidden_size: int) -> int:
    """Return the maximum bytes of live activations in a step of `tokens` tokens with one row of logits.

    As in the execution plan, a value is live from the node that computes it to the last node that reads it.
    """
    last_use = {name: index for index, node in enumerate(graph.nodes) for name in node.inputs}
    last_use |= {value.name: len(graph.nodes) for value in graph.outputs}
    single_rows: set[str] = set()
    alive: dict[str, int] = {}
    most = 0
    for index, node in enumerate(graph.nodes):
        if node.op_type == "LogitsRows" or single_rows.intersection(node.inputs):
            single_rows.update(node.outputs)
        for name in filter(None, node.outputs):
            alive[name] = _value_bytes(graph, name, 1 if name in single_rows else tokens, hidden_size)
        most = max(most, sum(alive.values()))
        alive = {name: size for name, size in alive.items() if last_use.get(name, -1) > index}
    return int(most * (1 + _SCRATCH_SHARE))


def _value_bytes(graph: Graph, name: str, tokens: int, hidden_size: int) -> int:
    """Return a value's bytes for one sequence. A dynamic first axis is the batch, and other dynamic axes are tokens."""
    shape = getattr(graph.type_of(name), "shape", None)
    if shape is None:
        return 4 * tokens * hidden_size
    sizes = [size if isinstance(size, int) else (tokens if axis else 1) for axis, size in enumerate(shape)]
    return 4 * math.prod(sizes)
