"""How much memory a decoder takes, and the longest context that fits: arithmetic, nothing is allocated here."""

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

# Kernels keep some arrays beside the graph's own values (quantised activations, rotated heads). In measured prefills
# the values alone were 90 to 98 % of the peak.
_SCRATCH_SHARE = 1 / 4
_SCALES_JUDGED = 4096
# Of free memory, what stays free.
_MARGIN = 1 / 20


@dataclass(frozen=True)
class MemoryPlan:
    """What one loaded decoder takes.

    Attributes:
        weights: bytes of the weights in the form in which kernels read them: those that stay in memory.
        workspace: most bytes of activations in one step.
        cache_bytes_per_token: bytes of keys and values per token of context, over all layers.
        context_limit: longest context the model was made for, in tokens.
        block_size: the cache grows by so many tokens at a time.
        mapped: bytes of tables that are read from the mapped file, of which few rows are touched; the system takes
            their pages back when it needs them.
        packing: bytes that loading takes meanwhile: weights inside the model's own file, the largest matrix as it is
            stored, and where it is packed from half precision, as fp32; activations take that place later.
        where: of whose memory errors speak.
        layout: how a paged cache is laid out; None where the cache is no paged one, and grows with every token.
        step_tokens: the most tokens of a step, in which windows do not slide.
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
        """Bytes of activations, or of packing before there are any."""
        return max(self.workspace, self.packing)

    @property
    def fixed(self) -> int:
        """Bytes that do not depend on the context."""
        return self.weights + self.temporary

    def cache(self, context: int) -> int:
        """Cache bytes of one sequence of `context` tokens."""
        if self.layout is None:
            return -(-context // self.block_size) * self.block_size * self.cache_bytes_per_token
        return self.layout.sequence_bytes(context, self.step_tokens)

    def cache_by_kind(self, context: int) -> list[tuple[CacheGroup, int]]:
        """The layers of each kind, and what the cache of one sequence takes for them; none without a paged cache."""
        layout = self.layout
        if layout is None:
            return []
        return [(kind, layout.kind_bytes(kind, context, self.step_tokens)) for kind in layout.kinds]

    def describe_cache(self, context: int) -> str:
        """What the layers of each kind need of it, where there is more than one kind; else nothing."""
        parts = [f"{kind}: {format_bytes(size)}" for kind, size in self.cache_by_kind(context)]
        return f" ({', '.join(parts)})" if len(parts) > 1 else ""

    def needed(self, context: int) -> int:
        """Bytes for everything, with one sequence of `context` tokens."""
        return self.fixed + self.cache(context)

    def context_within(self, cache_bytes: int) -> int:
        """The longest context whose cache fits into so many bytes, at most the model's limit; 0 = not even a block."""
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
    """The context that one sequence may have, in tokens, and the bytes that the cache of all sequences may take."""

    context_size: int
    cache_bytes: int


def plan_memory(
    decoder: DecoderGraph, config: Config, *, device: str = "", tokens: int = HostMemory.step_sizes.fast
) -> MemoryPlan:
    """What a decoder will take when it is loaded.

    Args:
        device: in whose own memory, where weights lie as they are stored, tables as well; "" = the host's.
        tokens: of a step in which a prompt is read.
    """
    limit = config.model.context_length
    graph = decoder.model.graph
    # A graph that is not flattened makes its present tensors anew in each step, so the past is there twice.
    copies = 1 if decoder.flat else 2
    tables = mapped_tables(graph) if decoder.flat and not device else frozenset()
    loaded = [tensor for name, tensor in graph.initializers.items() if name not in tables]
    widened = 2 if decoder.flat else 0
    meanwhile = (tensor.nbytes * (1 + widened * _is_half(tensor)) for tensor in loaded)
    packing = sum(tensor.nbytes for tensor in loaded if not tensor.is_external) + max(meanwhile, default=0)
    return MemoryPlan(
        weights=sum(tensor.nbytes for tensor in loaded) if device else loaded_weight_bytes(graph, tables),
        mapped=sum(graph.initializers[name].nbytes for name in tables),
        packing=0 if device else packing,  # the host packs
        workspace=workspace_bytes(graph, min(tokens, limit), config.model.decoder.hidden_size),
        cache_bytes_per_token=copies * decoder.info.kv_bytes_per_token,
        context_limit=limit,
        where=f" on the device {device}" if device else "",
        layout=decoder.layout,
        step_tokens=tokens,
    )


def usable(free_bytes: int) -> int:
    """What a model may take of free memory: some is left, since the others on the machine do not stand still."""
    return free_bytes - int(max(free_bytes, 0) * _MARGIN)


def default_context(plan: MemoryPlan, free_bytes: int) -> int:
    """The context that fits in half of the memory that weights and workspace leave free, at most the model's limit.

    Raises:
        CacheCapacityError: not even one block fits.
    """
    room = usable(free_bytes) - plan.fixed
    context = plan.context_within(room // 2)
    if context < 1:
        raise CacheCapacityError(
            f"the model needs {format_bytes(plan.needed(1))}, {format_bytes(free_bytes)} are free{plan.where}",
            f"weights {format_bytes(plan.weights)}, workspace {format_bytes(plan.temporary)}, and the smallest cache "
            f"{format_bytes(plan.cache(1))}{plan.describe_cache(1)}, which may take half of the rest",
            "free memory, raise the limit, or use a smaller or more strongly quantised model "
            "(cache_bytes=… loads it without this check)",
        )
    return context


def check_limit(plan: MemoryPlan, context_size: int) -> None:
    """Check a context against what the model was made for."""
    if not 1 <= context_size <= plan.context_limit:
        raise OptionError(
            f"context size = {context_size}",
            f"the model's context_length is {plan.context_limit}",
            f"use 1 to {plan.context_limit}, or leave it out",
        )


def check_context(plan: MemoryPlan, context_size: int, free_bytes: int) -> None:
    """Check a context that was asked for against the model's limit and the memory that is free."""
    check_limit(plan, context_size)
    if plan.needed(context_size) > usable(free_bytes):
        most = plan.context_within(usable(free_bytes) - plan.fixed)
        raise CacheCapacityError(
            f"a context of {context_size} tokens needs {format_bytes(plan.needed(context_size))}, "
            f"{format_bytes(free_bytes)} are free{plan.where}, and a twentieth of that is to stay free",
            f"weights {format_bytes(plan.weights)}, cache {format_bytes(plan.cache(context_size))}"
            f"{plan.describe_cache(context_size)}, "
            f"workspace {format_bytes(plan.temporary)}",
            f"use a context size of at most {most}, or free memory"
            if most
            else "use a smaller or more strongly quantised model, or free memory",
        )


def budget_cache(
    plan: MemoryPlan, *, free_bytes: int, context_size: int | None = None, cache_bytes: int | None = None
) -> CacheBudget:
    """Decide on context and cache.

    Args:
        free_bytes: memory free before the weights are packed.
        context_size: tokens asked for; None = `default_context`.
        cache_bytes: bytes asked for; None = half of what weights and workspace leave free, or what the context asked
            for needs, if that is more. Where it is given, it is taken as it is.

    Raises:
        OptionError, CacheCapacityError: see `check_context`, and where the context does not fit in cache_bytes.
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
            f"the KV cache may take {cache_bytes} bytes, a context of {context_size or 1} tokens needs "
            f"{plan.cache(context_size or 1)}{plan.describe_cache(context_size or 1)}",
            f"{fits} tokens fit" if fits else f"not even one block of {plan.block_size} tokens fits",
            "raise cache_bytes, or ask for a smaller context_size",
        )
    return CacheBudget(context_size or fits, cache_bytes)


# --- weights -------------------------------------------------------------------------------------------------------


def mapped_tables(graph: Graph) -> frozenset[str]:
    """Tables of floats that nothing but Gather reads, row by row: they stay in the file."""
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
    """Bytes of a graph's weights once loaded: block-quantised ones packed in tiles, others as they are in the file.

    Weights that several nodes read are counted once, `mapped` ones not at all, half-precision ones as the fp32 that
    they become.
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
                continue  # counted as stored, as what has one scale per row
            inside |= {source, scales, points}
            if bits not in (2, 4, 8) or block_size not in BLOCK_SIZES:
                continue  # loading refuses it
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
    """Bytes of a BlockMatrix (genai.kernels.weight_layout)."""
    return num_tiles(rows) * num_records(columns, layout) * layout.nbytes


def _is_wide(graph: Graph, *names: str) -> bool:
    """Whether scales and zero points take 32 bits: judged by some of each, since reading all would take long."""
    tensors = [graph.initializers[name] for name in names if name in graph.initializers]
    floats = [tensor for tensor in tensors if tensor.dtype.name == "FLOAT"]
    sample = [tensor.array().reshape(-1)[:_SCALES_JUDGED] for tensor in floats]
    with np.errstate(over="ignore"):
        return any(bool(np.any(part.astype(np.float16).astype(np.float32) != part)) for part in sample)


def _initializer(graph: Graph, name: str) -> str | None:
    """The initializer behind a name, through reshapes, as a tied embedding reads the head's weight."""
    while name not in graph.initializers:
        node = graph.producer(name)
        if node is None or node.op_type not in ("Reshape", "Identity", "Unsqueeze", "Squeeze"):
            return None
        name = node.input(0)
    return name


def _matrix_shape(graph: Graph, node: Node, name: str, source: str, stored: Packed) -> tuple[int, int]:
    """Rows and columns of a packed matrix, or of several one after the other."""
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
    """Most bytes of activations alive at once in a step of `tokens` tokens that wants one row of logits.

    Values live from the node that makes them to the last that reads them, as in the plan.
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
    """A value's bytes for one sequence: a free first axis is the batch, every other free axis the tokens."""
    shape = getattr(graph.type_of(name), "shape", None)
    if shape is None:
        return 4 * tokens * hidden_size
    sizes = [size if isinstance(size, int) else (tokens if axis else 1) for axis, size in enumerate(shape)]
    return 4 * math.prod(sizes)
