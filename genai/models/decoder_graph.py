"""Analysis of a decoder's graph before compilation: the ways in which it can run, its weights and its cache.

`genai info` and the loader both use this module, so their results agree. Weights stay in the mapped file, and no kernel
is imported.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from genai.common.memory_limits import available_memory, format_bytes
from genai.kernels.cache_layout import MOST_PACKED_COLUMNS, PAGE_TOKENS, SCALE_COLUMNS
from genai.kernels.checks import FormatError
from genai.kernels.float_bits import FLOAT_BITS
from genai.kvcache.groups import CacheGroup, GroupKind
from genai.kvcache.storage import ITEM_BYTES, PACKED_BITS, CacheLayout, LayerShape, StateShape, grouped_layout

from ..errors import (
    CacheCapacityError,
    ConfigError,
    OptionError,
    UnsupportedModelError,
    VocabularyMismatchError,
    malformed,
)
from ..lora.inputs import take_out_empty_factors, with_defaults
from ..lowering.flatten import (
    AttentionLayer,
    CacheEntry,
    FlatDecoder,
    RecurrentLayer,
    attention_layers,
    flatten_decoder,
)
from ..lowering.rows import NotFlattenable
from ..lowering.rules import find_stored_weights
from ..onnx.decoder_names import GraphNames
from ..onnx.ir import DataType, Graph, Node, OnnxModel, Value
from ..ops.registry import INT8_LEVEL
from ..ops.weights import PRODUCTS, ROUNDING_PRODUCTS
from ..optimize.base import Level, run_rewrites
from ..optimize.chunks import read_chunks
from ..optimize.decoders import fuse_matmul_bias, fuse_rotation, fuse_swiglu, read_narrow_weights, widen_floats
from ..optimize.dequantized import PACK_DEQUANTIZED
from ..optimize.recurrent import has_states, prepare_states
from ..optimize.shapes import infer_shapes
from ..optimize.simplify import remove_dead_code, remove_identities
from .config import Config
from .decoder_file import read_decoder_file
from .draft_block import DRAFT
from .identity import LoadedFiles
from .kv_types import KV_TYPES

BLOCK_SIZE = PAGE_TOKENS
DECODER_RULES = (
    remove_identities,
    *PACK_DEQUANTIZED,
    read_narrow_weights,
    fuse_matmul_bias,
    fuse_swiglu,
    remove_dead_code,
)
# Operators that combine tokens, in addition to attention. Attention without an operator of its own has a Softmax.
_MIXING = ("Conv", "CumSum", "GRU", "LSTM", "Loop", "RNN", "Scan", "Softmax")
# Products whose activations the graph rounds to 8 bits.
_DYNAMIC_PRODUCTS = ("MatMulInteger", "DynamicQuantizeMatMul")
# Bytes of memory for a logit, including the sampler's working data.
_HIDDEN_STATES = "hidden_states"
_BYTES_PER_LOGIT = 64


@dataclass(frozen=True)
class DecoderInfo:
    """Facts about a decoder's graph.

    Attributes:
        parameters: number of weights (a byte with 4-bit weights counts as two).
        weight_bytes: bytes of the weights in their stored form.
        num_layers: number of layers with a cache in the block pool.
        kv_bytes_per_token: cache bytes per token over all layers.
        kv_dtype: one of KV_TYPES.
        flattened: True if the graph runs batched over the paged cache.
        reason: reason why the graph is not flattened; "" if it is flattened.
        inputs: the graph's inputs as exported, and their types.
        context_size: maximum number of tokens per sequence; set when the decoder is loaded.
        cache_tokens: number of tokens of one sequence that fit into the block pool; 0 without a pool.
        defaults: type and shape of the inputs that have a default, which adapters may replace.
        cache_groups: the layers of each kind of cached state, in the order of `CacheLayout.kinds`; empty if the graph
            is not flattened.
        adapter_inputs: the names of the inputs with factor A, and the names of the inputs with factor B, for target
            modules that an exporter has prepared for adapters.
    """

    parameters: int
    weight_bytes: int
    num_layers: int
    kv_bytes_per_token: int
    kv_dtype: str
    flattened: bool
    reason: str
    inputs: Mapping[str, np.dtype[Any]]
    context_size: int = 0
    cache_tokens: int = 0
    defaults: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]] = field(default_factory=dict)
    adapter_inputs: Mapping[str, str] = field(default_factory=dict)
    cache_groups: tuple[CacheGroup, ...] = ()


@dataclass(frozen=True)
class DecoderGraph:
    """A decoder's graph in the form in which it runs.

    Attributes:
        model: the flattened and fused graph, or the graph as exported if flattening is impossible.
        flat: the cache layers and the RoPE threshold; None if the graph is not flattened.
        layout: layout of the paged cache; None if the graph is not flattened.
        operators: number of nodes per operator as exported; keys are "domain::Op" (without the prefix for ai.onnx).
        kv_bytes_per_token: bytes per token over all layers, by cache type. A graph that is not flattened has only one
            type.
        info: facts about the graph.
    """

    model: OnnxModel
    flat: FlatDecoder | None
    layout: CacheLayout | None
    operators: Mapping[str, int]
    kv_bytes_per_token: Mapping[str, int]
    info: DecoderInfo


def read_decoder(
    config: Config,
    *,
    kv_dtype: str = "auto",
    accuracy: str = "auto",
    model: OnnxModel | None = None,
    files: LoadedFiles | None = None,
    stores_values: bool = False,
    token_rows: str = "",
) -> DecoderGraph:
    """Read, check, flatten and rewrite the decoder graph of a folder; see genai.Model for other arguments and errors.

    Args:
        config: the folder's configuration.
        model: the parsed file, if it has already been read; it is modified.
        files: see read_decoder_file.
        stores_values: True to store the values of latent attention, too, although its keys are the same numbers.
        token_rows: see flatten_decoder.
    """
    model = read_decoder_file(config, files) if model is None else model
    names = config.model.decoder.names
    defaults, adapter_inputs = with_defaults(model.graph), take_out_empty_factors(model.graph)
    if adapter_inputs:
        remove_dead_code.apply(model)
    if defaults:  # inputs that are never fed become constants
        model.graph.inputs = [value for value in model.graph.inputs if value.name not in defaults]
        model.graph.invalidate()
    _check_interface(model.graph, names, config)
    infer_shapes(model)
    _check_vocabulary(model.graph, names, config)
    operators = count_operators(model)
    parameters, weight_bytes = count_weights(model.graph)
    if kv_dtype == "auto":  # fp16 is precise enough if matmuls use int8 activations
        kv_dtype = "fp16" if count_activations(model.graph, accuracy)["int8"] else "fp32"
    inputs = {v.name: numpy_dtype(v) for v in model.graph.inputs if v.name not in model.graph.initializers}
    flat: FlatDecoder | None = None
    layout: CacheLayout | None = None
    reason = ""
    try:
        flat = _flattened(model, config, files, token_rows)
    except NotFlattenable as error:
        if has_states(model.graph):
            raise _unknown_states(config, error) from None
        widen_floats(model)
        reason = str(error)
        _check_own_tensors(kv_dtype, reason)
        kv_dtype, size = dense_cache(model.graph, names, config)
        sizes = {kv_dtype: size}
    else:
        model = flat.model
        run_rewrites(model, (*DECODER_RULES, fuse_rotation(names.position_ids)), Level.ALL)
        _check_layers(flat, config)
        limit = config.model.context_length
        if stores_values:
            flat = replace(flat, layers=tuple(map(_with_values, flat.layers)))
        layouts = {name: found for name in KV_TYPES if (found := cache_layout(flat.layers, name, limit)) is not None}
        if (layout := layouts.get(kv_dtype)) is None:
            raise _unpackable(kv_dtype, attention_layers(flat.layers))
        sizes = {name: layout.bytes_per_token for name, layout in layouts.items()}
    info = DecoderInfo(
        parameters=parameters,
        weight_bytes=weight_bytes,
        num_layers=flat.num_layers if flat else 0,
        kv_bytes_per_token=sizes[kv_dtype],
        kv_dtype=kv_dtype,
        flattened=flat is not None,
        reason=reason,
        inputs=inputs,
        defaults=defaults,
        adapter_inputs=adapter_inputs,
        cache_groups=tuple(layout.kinds) if layout else (),
    )
    return DecoderGraph(model, flat, layout, operators, sizes, info)


def _flattened(model: OnnxModel, config: Config, files: LoadedFiles | None, token_rows: str = "") -> FlatDecoder:
    """Flatten the graph unchanged (`model` is modified), or else with plain operators replaced by fused ones."""
    if read_chunks(config.model.decoder.names).apply(model):
        remove_dead_code.apply(model)
    if has_states(model.graph):
        prepare_states(model)
        infer_shapes(model)
        return flatten_decoder(model, config.model.decoder.names, token_rows)
    try:
        return flatten_decoder(model, config.model.decoder.names, token_rows)
    except NotFlattenable as reason:
        from .exported_decoder import flatten_exported  # evaluates attention masks, so it needs kernels

        try:
            return flatten_exported(config, files)
        except NotFlattenable as second:
            # Without an attention operator, the first reason is only that the mask is computed by plain operators.
            fused = any(node.op_type == "GroupQueryAttention" for node in model.graph.nodes)
            both = dict.fromkeys((*([str(reason)] if fused else []), str(second)))
            raise NotFlattenable("; ".join(both)) from None


def _unknown_states(config: Config, error: NotFlattenable) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{config.model.decoder.filename}: the graph has recurrent layers that cannot run in a batch",
        str(error),
        "export the model again with onnxruntime-genai's builder, or build its checkpoint with `genai build`",
    )


def _check_interface(graph: Graph, names: GraphNames, config: Config) -> None:
    inputs, outputs = {v.name for v in graph.inputs}, {v.name for v in graph.outputs}
    decoder = config.model.decoder
    who = "Draft" if decoder.block == DRAFT else "the"
    if names.logits not in outputs and _HIDDEN_STATES in outputs:
        raise ConfigError(
            f"{decoder.filename} computes hidden states, not logits",
            "it was exported without its output layer, so it cannot generate tokens",
            "export it with the output layer: in onnxruntime-genai's builder, leave out exclude_lm_head",
        )
    for kind, what, name, present in (
        ("input", "token ids", names.input_ids, inputs),
        ("output", "logits", names.logits, outputs),
    ):
        if name not in present:
            raise ConfigError(
                f"{decoder.filename}: {who} {what} {kind} {name!r} was not found",
                f"the graph's {kind}s are {', '.join(sorted(present)) or 'none'}",
                f"set its name in genai_config.json under {decoder.block}.{kind}s",
            )
    _check_cache(config, graph, inputs, outputs)


def _mixing_operator(graph: Graph) -> str | None:
    """Return the first operator that may combine the tokens of a sequence; None if there is none."""
    kinds = (node.op_type for node in graph.nodes)
    return next((kind for kind in kinds if kind in _MIXING or kind.endswith("Attention")), None)


def _check_cache(config: Config, graph: Graph, inputs: Collection[str], outputs: Collection[str]) -> None:
    """Raise an error unless the graph has a cache: past inputs, and an output that replaces each of them."""
    decoder = config.model.decoder
    pairs = [
        (name, present % int(match[1]))
        for past, present in decoder.names.caches.items()
        for name in sorted(inputs)
        if (match := re.fullmatch(re.escape(past).replace("%d", r"(\d{1,20})"), name))
    ]
    mixing = None if decoder.num_hidden_layers else _mixing_operator(graph)
    if not pairs and mixing is not None:
        raise ConfigError(
            f"{decoder.block}.num_hidden_layers is 0 in genai_config.json, but {decoder.filename} has a node {mixing}",
            "without layers, the logits depend on one token only, but this operator may combine tokens",
            "export the model with a cache, and set num_hidden_layers to its number of layers",
        )
    if not pairs and decoder.num_hidden_layers:
        raise UnsupportedModelError(
            f"{decoder.filename}: no input for the keys and values of earlier tokens, such as "
            f"{next(iter(decoder.names.pasts)) % 0!r}",
            f"a step computes only new tokens, which would not see the earlier ones; the graph's inputs are "
            f"{', '.join(sorted(inputs)) or 'none'}",
            f"export the model with a cache, or name the inputs in genai_config.json under {decoder.block}.inputs",
        )
    for past, present in pairs:
        if present not in outputs:
            where = f"genai_config.json under {decoder.block}.outputs"
            raise UnsupportedModelError(
                f"{decoder.filename}: no output named {present!r}",
                f"it replaces the input {past!r} after each step; the outputs are {', '.join(sorted(outputs))}",
                f"export the model with a cache, or name the outputs in {where}",
            )


def _check_vocabulary(graph: Graph, names: GraphNames, config: Config) -> None:
    """Raise an error if vocab_size differs from the graph's, or if the graph leaves it open and it is too large."""
    vocab_size = config.model.vocab_size
    shape = getattr(graph.type_of(names.logits), "shape", None)
    num_logits = shape[-1] if shape else None
    if isinstance(num_logits, int) and num_logits != vocab_size:
        if config.model.decoder.block == DRAFT:
            raise VocabularyMismatchError(
                f"{config.model.decoder.filename}: Target and draft logit dimensions don't match. Target vocab: "
                f"{vocab_size}, Draft vocab: {num_logits}",
                "a proposal is a token id, so both models must have the same vocabulary",
                "use a smaller model of the same family, with the same tokenizer, as the draft",
            )
        raise _disagree(f"the model returns {num_logits} logits", "model.vocab_size", vocab_size, num_logits)
    if vocab_size * _BYTES_PER_LOGIT > available_memory():
        raise CacheCapacityError(
            f"vocab_size is {vocab_size} in genai_config.json",
            f"sampling from this number of tokens needs {format_bytes(vocab_size * _BYTES_PER_LOGIT)}, but only "
            f"{format_bytes(available_memory())} is free",
            "set vocab_size to the number of logits per token",
        )


def _disagree(actual: str, key: str, said: int, value: int) -> ConfigError:
    name = key.rsplit(".", 1)[1]
    return ConfigError(
        f"{actual}, but genai_config.json has {name} {said}", "the two values must be equal", f"set {key} to {value}"
    )


def numpy_dtype(value: Value) -> np.dtype[Any]:
    """Return the NumPy type of a graph input."""
    dtype = getattr(value.type, "dtype", None)
    if dtype is None:
        raise UnsupportedModelError(
            f"graph input {value.name!r} is not a tensor",
            "inputs of decoders must be tensors",
            "export the model again",
        )
    result: np.dtype[Any] = np.dtype(dtype.numpy_dtype)
    return result


def count_operators(model: OnnxModel) -> dict[str, int]:
    """Return the number of nodes per operator, including subgraphs, in descending order."""
    nodes = [node for graph in model.graphs() for node in graph.nodes]
    counts = Counter("::".join(filter(None, node.key)) for node in nodes)
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def count_weights(graph: Graph) -> tuple[int, int]:
    """Return the number of parameters and the bytes of a graph's weights.

    Scales, zero points and RoPE tables count only as bytes.
    """
    stored = [(node, find_stored_weights(node.op_type)) for node in graph.nodes]
    side = {node.input(index) for node, inputs in stored for index in inputs.beside}
    # Scales that are stored as float16 and cast for the operator are included.
    side |= {node.input(0) for node in graph.nodes if node.op_type == "Cast" and node.output(0) in side}
    packed = {
        node.input(index): whole_number(node, weight.bits, 4)
        for node, inputs in stored
        for index, weight in inputs.packed.items()
    }
    parameters = 0
    for name, tensor in graph.initializers.items():
        if name in packed or (name not in side and tensor.dtype.name not in ("INT64", "INT32")):
            bits_per_value = packed.get(name, 8) if tensor.dtype is DataType.UINT8 else None
            parameters += tensor.num_elements if bits_per_value is None else tensor.num_elements * 8 // bits_per_value
    return parameters, sum(tensor.nbytes for tensor in graph.initializers.values())


def count_activations(graph: Graph, accuracy: str) -> dict[str, int]:
    """Count the matmuls with quantised weights by the type of their activations: rounded to int8, or fp32."""
    counts = {"int8": 0, "fp32": 0}
    for node in graph.nodes:
        if node.op_type in _DYNAMIC_PRODUCTS:
            counts["fp32" if accuracy == "fp32" else "int8"] += 1
        if node.op_type in ROUNDING_PRODUCTS:
            allowed = accuracy == "int8" or whole_number(node, "accuracy_level", 0, least=0) == INT8_LEVEL
            counts["int8" if allowed and accuracy != "fp32" else "fp32"] += 1
    return counts


def whole_number(node: Node, name: str, default: int, *, least: int = 1) -> int:
    """Return an integer attribute from which sizes are computed. Raise GraphError if the value is less than `least`."""
    value = node.attribute(name, default)
    if not isinstance(value, int) or value < least:
        problem = f"{node.op_type} {node.name!r}: {name} is {value!r:.40}"
        raise malformed(problem, f"a whole number of at least {least} is expected")
    return value


def _check_layers(flat: FlatDecoder, config: Config) -> None:
    expected, actual = config.model.decoder.num_hidden_layers, flat.num_layers
    if actual != expected:
        kinds = "attention" if len(attention_layers(flat.layers)) == len(flat.layers) else "attention and recurrent"
        key = f"{config.model.decoder.block}.num_hidden_layers"
        raise _disagree(f"the graph has {actual} {kinds} layers", key, expected, actual)
    for layer in attention_layers(flat.layers):
        if min(layer.kv_heads, layer.head_size, layer.v_head_size) < 1:
            raise malformed(
                f"attention layer {layer.layer} has {layer.kv_heads} key/value heads of size {layer.head_size}, values "
                f"of size {layer.v_head_size}",
                f"its matmul ({' or '.join(PRODUCTS)}) has too few output features, or the attributes are wrong",
            )


def _with_values(layer: CacheEntry) -> CacheEntry:
    return replace(layer, is_latent=False) if isinstance(layer, AttentionLayer) else layer


def cache_layout(layers: Sequence[CacheEntry], kv_dtype: str, context_length: int) -> CacheLayout | None:
    """Return the layers' cache layout and the way they share block tables; None if the type does not fit the heads.

    Args:
        layers: the cache entries of the layers.
        kv_dtype: one of KV_TYPES.
        context_length: the model's context length; a window of at least this length is full attention.
    """
    dtype = KV_TYPES[kv_dtype]
    shapes: list[LayerShape | StateShape] = []
    kinds: list[tuple[GroupKind, int]] = []
    for layer in layers:
        if isinstance(layer, RecurrentLayer):
            shapes.append(StateShape(layer.size))
            kinds.append((GroupKind.STATE, 0))
            continue
        window, is_chunked = layer.chunk or layer.window or 0, layer.chunk is not None
        window = window if window < context_length else 0
        bounded = GroupKind.CHUNKED if is_chunked else GroupKind.WINDOW
        v_head_size = 0 if layer.is_latent else layer.v_head_size
        shapes.append(LayerShape(layer.kv_heads, layer.head_size, v_head_size, dtype))
        kinds.append((bounded if window else GroupKind.FULL, window))
    try:
        return grouped_layout(shapes, kinds, BLOCK_SIZE)
    except FormatError:
        return None


def _unpackable(kv_dtype: str, layers: Sequence[AttentionLayer]) -> OptionError:
    sizes = sorted({size for layer in layers for size in (layer.head_size, layer.v_head_size)})
    allowed = f"at most {MOST_PACKED_COLUMNS}"
    if kv_dtype == "int4":
        allowed = f"powers of two from {SCALE_COLUMNS} to {MOST_PACKED_COLUMNS}, because of the Hadamard transform"
    return OptionError(
        f"kv_dtype = {kv_dtype!r}: the model's heads have size {' and '.join(map(str, sizes))}",
        f"head sizes of this cache type must be {allowed}",
        "use int8 or fp16" if kv_dtype == "int4" else "use fp16",
    )


def _check_own_tensors(kv_dtype: str, reason: str) -> None:
    """Raise OptionError for a packed or narrow cache type: a graph that is not flattened has its own cache tensors."""
    if KV_TYPES[kv_dtype] in (*PACKED_BITS, *FLOAT_BITS):
        raise OptionError(
            f"kv_dtype = {kv_dtype!r} cannot be used with a graph that runs sequence by sequence",
            f"the type of the graph's own cache tensors cannot be changed: {reason}",
            "leave kv_dtype out",
        )


def dense_cache(graph: Graph, names: GraphNames, config: Config) -> tuple[str, int]:
    """Return the type and the bytes per token of the past tensors of a graph that is not flattened."""
    templates = [template.split("%d") for template in names.pasts]
    past = [v for v in graph.inputs if any(v.name.startswith(a) and v.name.endswith(b) for a, b in templates)]
    types = {getattr(value.type, "dtype", None) for value in past}
    kv_dtype = "fp16" if types == {DataType.FLOAT16} else "fp32"
    per_head = config.model.decoder.head_size * ITEM_BYTES[KV_TYPES[kv_dtype]]
    return kv_dtype, len(past) * (2 if names.past else 1) * config.model.decoder.num_key_value_heads * per_head
