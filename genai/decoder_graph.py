"""What a decoder's graph says, before anything is compiled: how it runs, its weights and its cache.

`genai info` and the loader both begin here, so they agree. Weights stay in the mapped file, and no kernel is imported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from genai.kernels.formats import PAGE_TOKENS
from genai.kvcache.groups import ITEM_BYTES, CacheGroup, CacheLayout

from .config import Config
from .errors import ConfigError, GraphError
from .graph.flatten import AttentionLayer, FlatDecoder, flatten_decoder
from .graph.ir import DataType, Graph, Model, Node
from .graph.names import GraphNames
from .graph.reader import read_model
from .graph.rewrites.base import Level, run_rewrites
from .graph.rewrites.dead_code import RemoveDeadCode
from .graph.rewrites.dequantized_product import PackDequantizedProducts
from .graph.rewrites.identity import RemoveIdentities
from .graph.rewrites.matmul_bias import FuseMatMulBias
from .graph.rewrites.rotation import FuseRotation
from .graph.rewrites.swiglu import FuseSwiGLU
from .graph.rows import NotFlattenable
from .graph.shapes import infer_shapes

BLOCK_SIZE = PAGE_TOKENS
# MatMulNBits' accuracy_level for fp32 activations.
FP32_LEVEL = 1
DECODER_RULES = (
    RemoveIdentities(),
    PackDequantizedProducts(),
    FuseMatMulBias(),
    FuseSwiGLU(),
    RemoveDeadCode(),
)
_ARRAY_DTYPES = {"fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True)
class DecoderGraph:
    """A decoder's graph, read and brought into the form in which it runs.

    Attributes:
        model: flattened and fused, or as exported where that is impossible.
        flat: its cache layers and RoPE threshold; None if it is not flattened, and `reason` says why.
        operators: how often each operator occurs as exported, as "domain::Op" ("" = ai.onnx left out).
        parameters: number of weights (a packed 4-bit byte counts as two).
        weight_bytes: bytes that the weights take as stored.
        kv_dtype: "fp16" or "fp32".
        layout: how the paged cache is laid out; None if it is not flattened.
        kv_bytes_per_token: by cache type, bytes per token over all layers. A graph that is not flattened has one type.
    """

    model: Model
    flat: FlatDecoder | None
    reason: str
    operators: Mapping[str, int]
    parameters: int
    weight_bytes: int
    kv_dtype: str
    layout: CacheLayout | None
    kv_bytes_per_token: Mapping[str, int]

    @property
    def bytes_per_token(self) -> int:
        """Cache bytes per token in the type chosen."""
        return self.kv_bytes_per_token[self.kv_dtype]


def read_decoder(config: Config, *, kv_dtype: str = "auto", accuracy: str = "auto") -> DecoderGraph:
    """Read, check, flatten and rewrite the decoder graph of a folder; see genai.Model for arguments and errors."""
    model = read_model(config.folder / config.model.decoder.filename)
    names = config.model.decoder.names
    _check_interface(model.graph, names, config)
    infer_shapes(model)
    operators = count_operators(model)
    parameters, weight_bytes = count_weights(model.graph)
    kv_dtype = _kv_dtype(model.graph, kv_dtype, accuracy)
    try:
        flat = _flattened(model, config)
        model = flat.model
    except NotFlattenable as reason:
        kv_dtype, per_token = dense_cache(model.graph, names, config)
        return DecoderGraph(
            model, None, str(reason), operators, parameters, weight_bytes, kv_dtype, None, {kv_dtype: per_token}
        )
    run_rewrites(model, (*DECODER_RULES, FuseRotation(names.position_ids)), Level.ALL)
    _check_layers(flat, config)
    layouts = {name: cache_layout(flat.layers, name) for name in _ARRAY_DTYPES}
    return DecoderGraph(
        model,
        flat,
        "",
        operators,
        parameters,
        weight_bytes,
        kv_dtype,
        layouts[kv_dtype],
        {name: layout.bytes_per_token for name, layout in layouts.items()},
    )


def _flattened(model: Model, config: Config) -> FlatDecoder:
    """The graph as it is, or with its plain attention recognised, flattened; `model` is changed in the first case."""
    try:
        return flatten_decoder(model, config.model.decoder.names)
    except NotFlattenable as reason:
        from .exported_decoder import flatten_exported  # it tries masks out, so it needs kernels

        try:
            return flatten_exported(config)
        except NotFlattenable as second:
            raise NotFlattenable(f"{reason}; {second}") from None


def _check_interface(graph: Graph, names: GraphNames, config: Config) -> None:
    inputs, outputs = {v.name for v in graph.inputs}, {v.name for v in graph.outputs}
    for kind, name, present in (("input", names.input_ids, inputs), ("output", names.logits, outputs)):
        if name not in present:
            raise ConfigError(
                f"{config.model.decoder.filename}: no {kind} named {name!r}",
                f"its {kind}s are {', '.join(sorted(present)) or 'none'}",
                f"name it in genai_config.json under model.decoder.{kind}s",
            )


def count_operators(model: Model) -> dict[str, int]:
    """How often each operator occurs, subgraphs included, most frequent first."""
    nodes = [node for graph in model.graphs() for node in graph.nodes]
    counts = Counter("::".join(filter(None, node.key)) for node in nodes)
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


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
        node.input(index): whole_number(node, bits, 4)
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
    levels = {whole_number(n, "accuracy_level", 0, least=0) for n in graph.nodes if n.op_type == "MatMulNBits"}
    return "fp16" if levels - {FP32_LEVEL} and accuracy != "fp32" else "fp32"


def whole_number(node: Node, name: str, default: int, *, least: int = 1) -> int:
    """An attribute that sizes are computed from.

    Raises:
        GraphError: it is something else than a whole number, or too small.
    """
    value = node.attribute(name, default)
    if not isinstance(value, int) or value < least:
        raise GraphError(
            f"{node.op_type} {node.name!r}: {name} is {value!r:.40}",
            f"a whole number of at least {least} is expected",
            "export the model again",
        )
    return value


def _check_layers(flat: FlatDecoder, config: Config) -> None:
    wanted = config.model.decoder.num_hidden_layers
    if len(flat.layers) != wanted:
        raise ConfigError(
            f"the graph has {len(flat.layers)} attention layers, genai_config.json says num_hidden_layers {wanted}",
            "both must agree",
            f"set model.decoder.num_hidden_layers to {len(flat.layers)}",
        )
    for layer in flat.layers:
        if min(layer.kv_heads, layer.head_size, layer.v_head_size) < 1:
            raise GraphError(
                f"attention layer {layer.layer} has {layer.kv_heads} key/value heads of size {layer.head_size}, values "
                f"of size {layer.v_head_size}",
                "the MatMul or MatMulNBits before it gives too few features, or its own attributes are wrong",
                "export the model again",
            )


def cache_layout(layers: Sequence[AttentionLayer], kv_dtype: str) -> CacheLayout:
    """One group per shape of layer; all of them share the sequences' block tables."""
    shapes: dict[tuple[int, int, int, int | None], list[int]] = {}
    for layer in layers:
        shapes.setdefault((layer.kv_heads, layer.head_size, layer.v_head_size, layer.window), []).append(layer.layer)
    groups = tuple(
        CacheGroup(
            index=index,
            layers=tuple(members),
            kv_heads=kv_heads,
            head_size=head_size,
            v_head_size=v_head_size,
            dtype=_ARRAY_DTYPES[kv_dtype],
            window=window,
        )
        for index, ((kv_heads, head_size, v_head_size, window), members) in enumerate(shapes.items())
    )
    return CacheLayout(groups, BLOCK_SIZE)


def dense_cache(graph: Graph, names: GraphNames, config: Config) -> tuple[str, int]:
    """Type and bytes per token of the past tensors of a graph that is run as it is."""
    templates = (names.past_key.split("%d"), names.past_value.split("%d"))
    past = [v for v in graph.inputs if any(v.name.startswith(a) and v.name.endswith(b) for a, b in templates)]
    types = {getattr(value.type, "dtype", None) for value in past}
    kv_dtype = "fp16" if types == {DataType.FLOAT16} else "fp32"
    per_head = config.model.decoder.head_size * ITEM_BYTES[_ARRAY_DTYPES[kv_dtype]]
    return kv_dtype, len(past) * config.model.decoder.num_key_value_heads * per_head
