"""GroupQueryAttention of decoders over dense caches, and com.microsoft's rotary embeddings."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from genai.kernels.ir import Attention
from genai.kernels.reference.attention import attend, rotate, rotated, split_heads
from genai.kernels.reference.functions import Array

from ..onnx.node import MS
from ..onnx.types import Dim, TensorType, Type
from .registry import Kernel, KernelError, NodeSpec, operator, register
from .shape_rules import NodeTypes, divided, same_as_input, shape_rule, times
from .support import checked_indices

_GQA_ATTRIBUTES = (
    "num_heads kv_num_heads scale softcap local_window_size chunk do_rotary rotary_interleaved smooth_softmax "
    "qk_norm_epsilon"
).split()


@register("GroupQueryAttention", domain=MS)
def _dense_attention(spec: NodeSpec) -> Kernel:
    """Attention over dense past and present tensors, for graphs that run without a paged cache."""
    unsupported = [name for name in ("k_quant_type", "v_quant_type") if spec.attributes.get(name, "NONE") != "NONE"]
    if unsupported or spec.has(10) or any(spec.outputs[3:]):
        raise KernelError(
            "GroupQueryAttention: quantised caches, an attention bias and score outputs are not supported"
        )
    attributes = {name: spec.attributes[name] for name in _GQA_ATTRIBUTES if name in spec.attributes}
    return lambda context, inputs: group_query_attention(*inputs, **attributes)


def group_query_attention(
    *inputs: Any, num_heads: int, kv_num_heads: int, local_window_size: int = -1, do_rotary: bool = False,
    rotary_interleaved: bool = False, qk_norm_epsilon: float = 1e-6, **options: Any,
) -> tuple[Array, ...]:  # fmt: skip
    """Compute com.microsoft::GroupQueryAttention with a float cache; return the output, keys and values.

    Padding rows of the output hold arbitrary values.

    Args:
        inputs: the operator's inputs, without an attention bias or the scales of quantised caches.
        options: scale, softcap, smooth_softmax and chunk, as in `ops.Attention`.
    """
    inputs = (*inputs, *[None] * (16 - len(inputs)))
    query, key, value, past_key, past_value, lengths, total, cos, sin, position_ids, _, sinks, _, _, *norms = inputs
    size = query.shape[2] // (num_heads + 2 * kv_num_heads * (key is None))
    op = Attention("", "", "", "", 0, num_heads, kv_num_heads, size, size, window=local_window_size, **options)
    last, length, longest = lengths.reshape(-1).astype(np.int64), query.shape[1], int(np.max(total))
    for name, past in (("past_key", past_key), ("past_value", past_value)):
        if past is not None and (past.shape[1], past.shape[3]) != (kv_num_heads, size):
            raise ValueError(
                f"GroupQueryAttention: {name} has shape {list(past.shape)}, but the node has {kv_num_heads} key/value "
                f"heads of size {size}"
            )
    capacity = max(longest, 0 if past_key is None else past_key.shape[2])
    presents = [np.zeros((len(query), kv_num_heads, capacity, size), query.dtype) for _ in range(2)]
    output = np.empty((len(query), length, num_heads * size), query.dtype)
    for b, heads in enumerate(zip(*split_heads(op, query, key, value), strict=True)):
        positions = (0 if length == longest else last[b] + 1 - length) + np.arange(length)
        at = positions if position_ids is None else position_ids[b]
        rotation = (cos[at], sin[at], rotary_interleaved) if do_rotary and cos is not None else None
        normed = [rotated(heads[i], norms[i], qk_norm_epsilon, None).astype(query.dtype) for i in (0, 1)]
        q, k = (rotated(x, None, 0.0, rotation).astype(x.dtype) for x in normed)
        for present, past, new in zip(presents, (past_key, past_value), (k, heads[2]), strict=True):
            if past is not None:
                present[b, :, : past.shape[2]] = past[b]
            present[b, :, positions] = new
        keys = max(last[b], positions[-1]) + 1
        k, v = (present[b, :, :keys].swapaxes(0, 1) for present in presents)
        output[b] = attend(op, q, k, v, positions, sinks).reshape(length, -1)
    return output, *presents


@operator("RotaryEmbedding", domain=MS)
def rotary_embedding(
    x: Array, position_ids: Array, cos_cache: Array, sin_cache: Array, *, interleaved: bool = False, num_heads: int = 0,
    rotary_embedding_dim: int = 0, scale: float = 1.0, is_packed_batching: Literal[0] = 0,
) -> Array:  # fmt: skip
    """Rotate x [batch, sequence, hidden] or [batch, heads, sequence, head_size]."""
    checked_indices("RotaryEmbedding: position_ids", position_ids, len(cos_cache))
    width = 2 * cos_cache.shape[1]
    if rotary_embedding_dim not in (0, width):
        raise ValueError(
            f"RotaryEmbedding: rotary_embedding_dim is {rotary_embedding_dim}, but cos_cache has the rotary "
            f"dimension {width}"
        )
    heads = x.swapaxes(1, 2) if x.ndim == 4 else x.reshape(*x.shape[:2], num_heads or x.shape[2] // width, -1)
    if position_ids.size == 1:  # the position of the first token of every sequence
        position_ids = np.broadcast_to(position_ids.reshape(1, 1) + np.arange(heads.shape[1]), heads.shape[:2])
    rotated = rotate(heads, cos_cache[position_ids], sin_cache[position_ids], interleaved).astype(x.dtype)
    result = (rotated * scale).astype(x.dtype)
    return result.swapaxes(1, 2) if x.ndim == 4 else result.reshape(x.shape)


def present_types(
    types: NodeTypes, past: int, query: TensorType, batch: Dim, kv_heads: int, head_size: Dim
) -> list[Type | None]:
    """Present keys and values [batch, kv heads, length, head size], in the past's type if there is a past."""
    result: list[Type | None] = []
    for index in (past, past + 1):
        known, shape = types.tensor(index), types.shape(index, rank=4)
        dtype = query.dtype if known is None else known.dtype
        if shape is not None:
            result.append(TensorType(dtype, (shape[0], shape[1], None, shape[3])))
        else:
            result.append(TensorType(dtype, (batch, kv_heads or None, None, head_size)))
    return result


@shape_rule("GroupQueryAttention")
def group_query_attention_types(types: NodeTypes) -> list[Type | None]:
    """Y [batch, sequence, heads * head size]; present keys and values; optionally the scores.

    The cached length is unknown: with a shared buffer it equals the past's, without a shared buffer it is longer.
    """
    query, packed = types.source, not types.node.input(1)
    heads, kv_heads = types.attribute("num_heads", 0), types.attribute("kv_num_heads", 0)
    shape = types.shape(0, rank=3)
    if shape is None:
        return [TensorType(query.dtype), *present_types(types, 3, query, None, kv_heads, None)]
    batch, sequence, width = shape
    head_size = divided(width, heads + 2 * kv_heads if packed else heads)
    output = TensorType(query.dtype, (batch, sequence, times(head_size, heads) if packed else width))
    scores = TensorType(query.dtype, (batch, heads, sequence, None))
    return [output, *present_types(types, 3, query, batch, kv_heads, head_size), scores]


shape_rule("RotaryEmbedding")(same_as_input)
