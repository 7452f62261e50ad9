"""From a model folder to a decoder: read, rewrite, flatten, compile, and lay out the cache."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from genai.kernels.cpu.jit import warm_up
from genai.kernels.cpu.team import Team
from genai.kvcache import budget
from genai.kvcache.groups import CacheGroup, CacheLayout
from genai.kvcache.pool import BlockPool
from genai.kvcache.storage import PagedStorage

from .config import Config
from .engine.decoder import Decoder
from .engine.dense import DenseDecoder, DenseInput
from .engine.paged import PagedDecoder
from .errors import CacheCapacityError, ConfigError, UnsupportedModelError
from .exported_decoder import flatten_exported
from .graph.flatten import AttentionLayer, FlatDecoder, flatten_decoder
from .graph.ir import DataType, Graph, Model, Value
from .graph.names import GraphNames
from .graph.reader import read_model
from .graph.rewrites.base import Level, run_rewrites
from .graph.rewrites.dead_code import RemoveDeadCode
from .graph.rewrites.dequantized_product import PackDequantizedProducts
from .graph.rewrites.identity import RemoveIdentities
from .graph.rewrites.matmul_bias import FuseMatMulBias
from .graph.rewrites.swiglu import FuseSwiGLU
from .graph.rows import NotFlattenable
from .graph.shapes import infer_shapes
from .runtime.plan import PlanOptions, build_plan

BLOCK_SIZE = 32
# MatMulNBits' accuracy_level for fp32 activations.
FP32_LEVEL = 1
DECODER_RULES = (
    RemoveIdentities(),
    PackDequantizedProducts(),
    FuseMatMulBias(),
    FuseSwiGLU(),
    RemoveDeadCode(),
)
# A pool larger than this many full contexts would only cost memory for its free list.
MAX_CONTEXTS_IN_POOL = 256


@dataclass(frozen=True)
class DecoderInfo:
    """What was found in a decoder's graph.

    Attributes:
        parameters: number of weights (a packed 4-bit byte counts as two).
        weight_bytes: bytes that the weights take as stored.
        num_layers: attention layers that keep a cache.
        kv_bytes_per_token: cache bytes per token over all layers.
        kv_dtype: "fp16" or "fp32".
        cache_tokens: tokens that the block pool can hold.
        flattened: whether it runs batched over the paged cache; `reason` says why not.
    """

    parameters: int
    weight_bytes: int
    num_layers: int
    kv_bytes_per_token: int
    kv_dtype: str
    cache_tokens: int
    flattened: bool
    reason: str = ""


def load_decoder(
    config: Config, *, threads: int | None, kv_dtype: str, accuracy: str, cache_bytes: int | None
) -> tuple[Decoder, DecoderInfo]:
    """Load the decoder of a model folder; see genai.Model for the arguments and errors."""
    model = read_model(config.folder / config.model.decoder.filename)
    names = config.model.decoder.names
    _check_interface(model.graph, names, config)
    infer_shapes(model)
    parameters, weight_bytes = count_weights(model.graph)
    kv_dtype = _kv_dtype(model.graph, kv_dtype, accuracy)
    warm_up()
    team = Team(threads)
    options = PlanOptions(kernel={"accuracy": accuracy, "team": team})
    try:
        flat = flatten_decoder(model, names)
    except NotFlattenable as reason:
        try:
            flat = flatten_exported(config)
        except NotFlattenable as second:
            why = f"{reason}; {second}"
            info = DecoderInfo(parameters, weight_bytes, 0, 0, "fp32", 0, False, why)
            return _dense(model, names, config, options, info)
        model = flat.model
    run_rewrites(model, DECODER_RULES, Level.ALL)
    _check_layers(flat, config)
    layout = cache_layout(flat.layers, kv_dtype)
    num_blocks = _num_blocks(layout, config, cache_bytes)
    decoder = PagedDecoder(
        plan=build_plan(model, options),
        input_ids=names.input_ids,
        position_ids=names.position_ids if any(v.name == names.position_ids for v in model.graph.inputs) else None,
        input_dtype=_input_dtype(model.graph, names.input_ids),
        vocab_size=config.model.vocab_size,
        pool=BlockPool(num_blocks),
        storage=PagedStorage(layout, num_blocks),
        team=team,
        rope_threshold=flat.rope_threshold,
    )
    info = DecoderInfo(
        parameters, weight_bytes, len(flat.layers), layout.bytes_per_token, kv_dtype, num_blocks * BLOCK_SIZE, True
    )
    return decoder, info


def _check_interface(graph: Graph, names: GraphNames, config: Config) -> None:
    inputs, outputs = {v.name for v in graph.inputs}, {v.name for v in graph.outputs}
    for kind, name, present in (("input", names.input_ids, inputs), ("output", names.logits, outputs)):
        if name not in present:
            raise ConfigError(
                f"{config.model.decoder.filename}: no {kind} named {name!r}",
                f"its {kind}s are {', '.join(sorted(present)) or 'none'}",
                f"name it in genai_config.json under model.decoder.{kind}s",
            )


# Inputs that are stored beside weights but are not weights: scales, zero points, and tables of cosines and sines.
_SIDE_INPUTS = {
    "DequantizeLinear": (1, 2),
    "MatMulNBits": (2, 3),
    "GatherBlockQuantized": (2, 3),
    "QMoE": (3, 6, 11, 12),
    "GroupQueryAttention": (7, 8),
    "RotaryEmbedding": (2, 3),
}


# Operator, input, and the attribute that says how many bits a weight has there.
_PACKED_INPUTS = (
    ("MatMulNBits", 1, "bits"),
    ("GatherBlockQuantized", 0, "bits"),
    ("QMoE", 2, "expert_weight_bits"),
    ("QMoE", 5, "expert_weight_bits"),
)


def count_weights(graph: Graph) -> tuple[int, int]:
    """Parameters and bytes of a graph's weights; scales, zero points and RoPE tables count as bytes only."""
    side = {node.input(i) for node in graph.nodes for i in _SIDE_INPUTS.get(node.op_type, ())}
    packed = {
        node.input(index): int(node.attribute(bits, 4))
        for node in graph.nodes
        for op_type, index, bits in _PACKED_INPUTS
        if node.op_type == op_type
    }
    parameters = 0
    for name, tensor in graph.initializers.items():
        if name in packed or (name not in side and tensor.dtype.name not in ("INT64", "INT32")):
            bits_per_value = packed.get(name, 8) if tensor.dtype is DataType.UINT8 else None
            parameters += tensor.num_elements if bits_per_value is None else tensor.num_elements * 8 // bits_per_value
    return parameters, sum(tensor.nbytes for tensor in graph.initializers.values())


def _kv_dtype(graph: Graph, wanted: str, accuracy: str) -> str:
    """fp16 where products take int8 activations anyway; fp32 where the graph or the caller asks for fp32."""
    if wanted != "auto":
        return wanted
    levels = {int(node.attribute("accuracy_level", 0)) for node in graph.nodes if node.op_type == "MatMulNBits"}
    return "fp16" if levels - {FP32_LEVEL} and accuracy != "fp32" else "fp32"


def _check_layers(flat: FlatDecoder, config: Config) -> None:
    wanted = config.model.decoder.num_hidden_layers
    if len(flat.layers) != wanted:
        raise ConfigError(
            f"the graph has {len(flat.layers)} attention layers, genai_config.json says num_hidden_layers {wanted}",
            "both must agree",
            f"set model.decoder.num_hidden_layers to {len(flat.layers)}",
        )


def cache_layout(layers: Sequence[AttentionLayer], kv_dtype: str) -> CacheLayout:
    """One group per shape of layer; all of them share the sequences' block tables."""
    shapes: dict[tuple[int, int, int, int | None], list[int]] = {}
    for layer in layers:
        shapes.setdefault((layer.kv_heads, layer.head_size, layer.v_head_size, layer.window), []).append(layer.layer)
    dtype = {"fp16": "float16", "fp32": "float32"}[kv_dtype]
    groups = tuple(
        CacheGroup(
            index=index,
            layers=tuple(members),
            kv_heads=kv_heads,
            head_size=head_size,
            v_head_size=v_head_size,
            dtype=dtype,
            window=window,
        )
        for index, ((kv_heads, head_size, v_head_size, window), members) in enumerate(shapes.items())
    )
    return CacheLayout(groups, BLOCK_SIZE)


def _num_blocks(layout: CacheLayout, config: Config, cache_bytes: int | None) -> int:
    bytes_allowed = cache_bytes if cache_bytes is not None else budget.available_memory() // 2
    fits = budget.blocks_that_fit(layout, bytes_allowed)
    if fits < 1:
        raise CacheCapacityError(
            f"the KV cache may take {bytes_allowed} bytes, one block needs {layout.bytes_per_token * BLOCK_SIZE}",
            "not even one block fits",
            "raise cache_bytes, or free memory",
        )
    blocks_per_context = -(-config.model.context_length // BLOCK_SIZE)
    return min(fits, blocks_per_context * MAX_CONTEXTS_IN_POOL)


def _dense(
    model: Model, names: GraphNames, config: Config, options: PlanOptions, info: DecoderInfo
) -> tuple[Decoder, DecoderInfo]:
    print(f"genai: running sequence by sequence, without batching: {info.reason}", file=sys.stderr)
    inputs = {
        value.name: DenseInput(_numpy_dtype(value), _static_shape(value))
        for value in model.graph.inputs
        if value.name not in model.graph.initializers
    }
    decoder = config.model.decoder
    past_shape = decoder.num_key_value_heads, decoder.head_size
    return DenseDecoder(build_plan(model, options), inputs, names, config.model.vocab_size, past_shape), info


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
