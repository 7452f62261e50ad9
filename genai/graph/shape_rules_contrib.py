"""Shape rules for operators that ONNX does not define: those that exporters write for onnxruntime."""

from __future__ import annotations

from dataclasses import replace

from .shape_rules import NodeTypes, shape_rule
from .shape_rules_standard import statistics_type
from .types import DataType, Dim, TensorType, Type


@shape_rule("RotaryEmbedding", "Gelu", "FastGelu", "QuickGelu", "BiasGelu", "MoE", "QMoE")
def same_as_input(types: NodeTypes) -> list[Type | None]:
    """One output, of the first input's type."""
    return [types.tensor(0)]


@shape_rule("SimplifiedLayerNormalization", domain="")
@shape_rule("SimplifiedLayerNormalization")
def simplified_layer_normalization(types: NodeTypes) -> list[Type | None]:
    """The normalised input, in the scale's element type, and the inverse deviations."""
    source, scale = types.tensor(0), types.tensor(1)
    if source is None:
        return []
    normalised = replace(source, dtype=scale.dtype if scale else source.dtype)
    return [normalised, statistics_type(source, types.attribute("axis", -1))]


@shape_rule("SkipSimplifiedLayerNormalization", "SkipLayerNormalization")
def skip_layer_normalization(types: NodeTypes) -> list[Type | None]:
    """The normalised sum, mean, inverse deviation, and the sum itself."""
    source = types.tensor(0)
    if source is None:
        return []
    statistics = statistics_type(source, -1)
    return [source, statistics, statistics, source]


@shape_rule("Linear", domain="genai")
def linear(types: NodeTypes) -> list[Type | None]:
    """[..., K] times [K, N]: [..., N]."""
    source, weight = types.tensor(0), types.tensor(1)
    if source is None or weight is None or not source.shape or not weight.shape:
        return []
    return [TensorType(source.dtype, (*source.shape[:-1], weight.shape[-1]))]


@shape_rule("DenseAttention", domain="genai")
def dense_attention(types: NodeTypes) -> list[Type | None]:
    """[B, H, T, size], [B, H, size, S] and [B, H, S, width]: [B, H, T, width]."""
    query, values = types.tensor(0), types.tensor(2)
    if query is None or values is None or not query.shape or not values.shape:
        return []
    return [TensorType(query.dtype, (*query.shape[:-1], values.shape[-1]))]


@shape_rule("MatMulNBits")
def matmul_nbits(types: NodeTypes) -> list[Type | None]:
    """[..., K] times packed [N, K]: [..., N]."""
    source = types.tensor(0)
    if source is None:
        return []
    shape = None if not source.shape else (*source.shape[:-1], types.attribute("N", 0))
    return [TensorType(source.dtype, shape)]


@shape_rule("GatherBlockQuantized")
def gather_block_quantized(types: NodeTypes) -> list[Type | None]:
    """Gather along `gather_axis`, dequantised to the scales' type; uint8 data hold 8 / bits elements per byte."""
    data, indices, scales = types.tensor(0), types.tensor(1), types.tensor(2)
    if scales is None:
        return []
    if data is None or indices is None or not data.shape or indices.shape is None:
        return [TensorType(scales.dtype)]
    shape = list(data.shape)
    if data.dtype is DataType.UINT8:
        shape[-1] = _times(shape[-1], 8 // max(types.attribute("bits", 4), 1))
    axis = types.attribute("gather_axis", 0) % len(shape)
    return [TensorType(scales.dtype, (*shape[:axis], *indices.shape, *shape[axis + 1 :]))]


@shape_rule("GroupQueryAttention")
def group_query_attention(types: NodeTypes) -> list[Type | None]:
    """Y [batch, sequence, heads * head size]; present keys and values; optionally the scores.

    The cached length is left open: it is the past's own with a shared buffer, and longer than the past without.
    """
    query, packed = types.tensor(0), not types.node.input(1)
    if query is None:
        return []
    heads, kv_heads = types.attribute("num_heads", 0), types.attribute("kv_num_heads", 0)
    shape = types.shape(0, rank=3)
    if shape is None:
        return [TensorType(query.dtype), *_present(types, 3, query, None, kv_heads, None)]
    batch, sequence, width = shape
    head_size = _divided(width, heads + 2 * kv_heads if packed else heads)
    output = TensorType(query.dtype, (batch, sequence, _times(head_size, heads) if packed else width))
    scores = TensorType(query.dtype, (batch, heads, sequence, None))
    return [output, *_present(types, 3, query, batch, kv_heads, head_size), scores]


@shape_rule("MultiHeadAttention")
def multi_head_attention(types: NodeTypes) -> list[Type | None]:
    """Y [batch, sequence, value width]; inputs may be separate, packed QKV [B, S, N, 3, H] or KV [B, L, N, 2, H]."""
    query, heads = types.tensor(0), types.attribute("num_heads", 0)
    if query is None or not query.shape or len(query.shape) not in (3, 5):
        return [] if query is None else [TensorType(query.dtype)]
    batch, sequence = query.shape[:2]
    width: Dim = None
    if len(query.shape) == 5:
        width = _times(query.shape[4], heads)
    elif (value := types.shape(2)) is not None:
        width = value[2] if len(value) == 3 else _times(value[-1], heads)
    elif (packed := types.shape(1, rank=5)) is not None:
        width = _times(packed[4], heads)
    present = _present(types, 6, query, batch, heads, _divided(width, heads))
    return [TensorType(query.dtype, (batch, sequence, width)), *present]


def _present(
    types: NodeTypes, past: int, query: TensorType, batch: Dim, kv_heads: int, head_size: Dim
) -> list[Type | None]:
    """Present keys and values [batch, kv heads, length, head size], of the past's type where there is a past."""
    result: list[Type | None] = []
    for index in (past, past + 1):
        known, shape = types.tensor(index), types.shape(index, rank=4)
        dtype = query.dtype if known is None else known.dtype
        if shape is not None:
            result.append(TensorType(dtype, (shape[0], shape[1], None, shape[3])))
        else:
            result.append(TensorType(dtype, (batch, kv_heads or None, None, head_size)))
    return result


def _times(dim: Dim, factor: int) -> Dim:
    return dim * factor if isinstance(dim, int) else None


def _divided(dim: Dim, divisor: int) -> Dim:
    return dim // divisor if isinstance(dim, int) and divisor > 0 else None
