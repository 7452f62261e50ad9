"""Cutting one projection out of a tensor that holds several: views of the memory map where NumPy can make them."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from ..architecture import Rule
from ..spec import DecoderSpec


def transposed(spec: DecoderSpec, tensor: NDArray[Any]) -> NDArray[Any]:
    """A matrix stored as [inputs, outputs]; a bias stays as it is."""
    return tensor.T


def queries(spec: DecoderSpec, tensor: NDArray[Any]) -> NDArray[Any]:
    """Rows of a tensor that holds queries, keys and values below each other."""
    return tensor[: spec.query_size]


def keys(spec: DecoderSpec, tensor: NDArray[Any]) -> NDArray[Any]:
    return tensor[spec.query_size : spec.query_size + spec.key_value_size]


def values(spec: DecoderSpec, tensor: NDArray[Any]) -> NDArray[Any]:
    return tensor[spec.query_size + spec.key_value_size :]


def first_half(spec: DecoderSpec, tensor: NDArray[Any]) -> NDArray[Any]:
    """The gate of a tensor that holds gate and up projection below each other."""
    return tensor[: len(tensor) // 2]


def second_half(spec: DecoderSpec, tensor: NDArray[Any]) -> NDArray[Any]:
    return tensor[len(tensor) // 2 :]


def group_queries(spec: DecoderSpec, tensor: NDArray[Any]) -> NDArray[Any]:
    """Of a tensor with, per key/value head, its query heads, then its key, then its value."""
    return _by_group(spec, tensor)[:, :-2].reshape(-1, *tensor.shape[1:])


def group_keys(spec: DecoderSpec, tensor: NDArray[Any]) -> NDArray[Any]:
    return _by_group(spec, tensor)[:, -2].reshape(-1, *tensor.shape[1:])


def group_values(spec: DecoderSpec, tensor: NDArray[Any]) -> NDArray[Any]:
    return _by_group(spec, tensor)[:, -1].reshape(-1, *tensor.shape[1:])


def _by_group(spec: DecoderSpec, tensor: NDArray[Any]) -> NDArray[Any]:
    share = spec.num_attention_heads // spec.num_key_value_heads + 2
    return tensor.reshape(spec.num_key_value_heads, share, spec.head_size, *tensor.shape[1:])


def flat(spec: DecoderSpec, tensor: NDArray[Any]) -> NDArray[Any]:
    """Weights of several heads as one vector."""
    return tensor.reshape(-1)


# Queries, keys and values below each other, as Phi-3 stores them.
PACKED_QKV = tuple(
    Rule(rf"self_attn\.{part}_proj", "self_attn.qkv_proj", view)
    for part, view in (("q", queries), ("k", keys), ("v", values))
)
PACKED_GATE_UP = tuple(
    Rule(rf"mlp\.{part}_proj", "mlp.gate_up_proj", view) for part, view in (("gate", first_half), ("up", second_half))
)
# Mixtral's names of a mixture of experts.
MIXTRAL_EXPERTS = (
    Rule(r"mlp\.experts\.(\d+)\.gate_proj", r"block_sparse_moe.experts.\1.w1"),
    Rule(r"mlp\.experts\.(\d+)\.up_proj", r"block_sparse_moe.experts.\1.w3"),
    Rule(r"mlp\.experts\.(\d+)\.down_proj", r"block_sparse_moe.experts.\1.w2"),
    Rule(r"mlp\.gate\.", "block_sparse_moe.gate."),
)
