"""Decoders with recurrent parts in place of the attention of some layers: LFM2, Qwen3-Next, Qwen 3.5."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..hf_config import HFConfig
from ..spec import DecoderSpec, DeltaNetSpec, ShortConvSpec
from . import common
from .common import Rule, architecture, decoder


def _layers(config: HFConfig, kind: str, default: list[str]) -> tuple[int, ...]:
    """Return the layers of a kind, according to layer_types; all other layers must have full attention."""
    return common.layers_of(kind, kinds=config.layers("layer_types", config.num_layers) or default)


# --- LFM2 ------------------------------------------------------------------------------------------------------------


def _feed_forward_size(config: HFConfig) -> int:
    """Return the width of the feed-forward layer, which config.json gives before it is adapted."""
    size = config.integer("block_ff_dim", "intermediate_size", default=12288)
    multiplier = config.number("block_ffn_dim_multiplier", default=1.0)
    multiple = config.integer("block_multiple_of", default=256)
    if not config.flag("block_auto_adjust_ff_dim", default=True):
        return size
    size = int(2 * size / 3)
    return -(-int(multiplier * size) // multiple) * multiple


_LFM2 = (
    Rule(r"input_layernorm", "operator_norm"),
    Rule(r"post_attention_layernorm", "ffn_norm"),
    Rule(r"self_attn\.o_proj", "self_attn.out_proj"),
    Rule(r"self_attn\.(q|k)_norm", r"self_attn.\1_layernorm"),
    Rule(r"mlp\.(experts\.\d+\.)?gate_proj", r"feed_forward.\g<1>w1"),
    Rule(r"mlp\.(experts\.\d+\.)?up_proj", r"feed_forward.\g<1>w3"),
    Rule(r"mlp\.(experts\.\d+\.)?down_proj", r"feed_forward.\g<1>w2"),
    Rule(r"^model\.norm\.", "model.embedding_norm."),
)


def _lfm2(config: HFConfig, **fields: Any) -> DecoderSpec:
    count = config.num_layers
    attention = config.numbers("full_attn_idxs") or list(range(count))
    default = ["full_attention" if layer in attention else "conv" for layer in range(count)]
    convolutions = ShortConvSpec(
        layers=_layers(config, "conv", default), kernel=config.integer("conv_L_cache", default=3),
        biased=config.flag("conv_bias"),
    )  # fmt: skip
    return decoder(
        config, theta=1e6, epsilon=1e-5, tied=True, qk_norm=True, recurrent=convolutions,
        **common.biases(False, False), **fields,
    )  # fmt: skip


@architecture("LFM2", *_LFM2)
def lfm2(config: HFConfig) -> DecoderSpec:
    """LFM2 (Liquid AI): gated short convolutions, and attention with norms of queries and keys in some layers."""
    return _lfm2(config, family="lfm2", intermediate_size=_feed_forward_size(config))


@architecture(
    "LFM2 MoE",
    *_LFM2,
    Rule(r"mlp\.gate\.selection_bias", "feed_forward.expert_bias"),
    Rule(r"mlp\.gate\.weight", "feed_forward.gate.weight"),
)
def lfm2_moe(config: HFConfig) -> DecoderSpec:
    """LFM2 with experts that are weighted by sigmoids, except in the first layers."""
    experts = common.sigmoid_experts(
        config, dense=config.integer("num_dense_layers", default=2, least=0),
        normalized=config.flag("norm_topk_prob", default=True),
        selection_bias=config.flag("use_expert_bias", default=True),
    )  # fmt: skip
    return _lfm2(config, family="lfm2_moe", **experts)


# --- Qwen3-Next and Qwen 3.5 -----------------------------------------------------------------------------------------


def half_of_heads(half: int) -> common.TensorView:
    """Return a view of queries (0) or gates (1), which are side by side in each head."""

    def view(spec: DecoderSpec, tensor: NDArray[Any]) -> NDArray[Any]:
        heads = tensor.reshape(spec.num_attention_heads, 2, spec.head_size, *tensor.shape[1:])
        return heads[:, half].reshape(-1, *tensor.shape[1:])

    return view


_GATED_QUERIES = (
    Rule(r"self_attn\.q_proj", "self_attn.q_proj", half_of_heads(0)),
    Rule(r"self_attn\.gate_proj", "self_attn.q_proj", half_of_heads(1)),
)


# The head that predicts further tokens: one layer of attention. A build without it ignores its tensors.
_MTP: dict[str, Any] = {"unused": r"^mtp\.", "mtp": common.MtpHead()}


def _delta_net(config: HFConfig) -> DeltaNetSpec:
    every = config.integer("full_attention_interval", default=4)
    default = ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(config.num_layers)]
    return DeltaNetSpec(
        layers=_layers(config, "linear_attention", default),
        kernel=config.integer("linear_conv_kernel_dim", default=4),
        key_heads=config.integer("linear_num_key_heads", default=16),
        value_heads=config.integer("linear_num_value_heads", default=32),
        key_size=config.integer("linear_key_head_dim", default=128),
        value_size=config.integer("linear_value_head_dim", default=128),
    )


def _qwen(config: HFConfig, **fields: Any) -> DecoderSpec:
    return decoder(
        config, partial=0.25, epsilon=1e-6, head_size=256, qk_norm=True, norm_weight_offset=1.0, attention_gate=True,
        recurrent=_delta_net(config), **common.attention_biases(config), **fields,
    )  # fmt: skip


@architecture("Qwen 3.5", *_GATED_QUERIES, **_MTP)
def qwen3_5_text(config: HFConfig) -> DecoderSpec:
    """Qwen 3.5 (Alibaba), dense: three layers of Gated DeltaNet, then one of gated attention."""
    return _qwen(config, family="qwen3_5_text")


def _shared_experts(config: HFConfig, **fields: Any) -> dict[str, Any]:
    width = config.integer("shared_expert_intermediate_size")
    return common.expert_fields(config, shared_intermediate_size=width, shared_gate=True, **fields)


@architecture("Qwen 3.5 MoE", *_GATED_QUERIES, **_MTP, may_join_experts=True)
def qwen3_5_moe_text(config: HFConfig) -> DecoderSpec:
    """Qwen 3.5 with a mixture of experts and a gated shared expert in every layer."""
    experts = _shared_experts(config, normalized=True)
    width = config.integer("moe_intermediate_size")
    return _qwen(config, family="qwen3_5_moe_text", intermediate_size=width, **experts)


def part_of_groups(*parts: str) -> common.TensorView:
    """Return a view of some parts of the rows of each group: a key head with its value heads."""

    def view(spec: DecoderSpec, tensor: NDArray[Any]) -> NDArray[Any]:
        net = spec.recurrent
        assert isinstance(net, DeltaNetSpec)
        share = net.value_heads // net.key_heads
        values = share * net.value_size
        kinds = {"q": net.key_size, "k": net.key_size, "v": values, "z": values}
        if parts[0] in ("b", "a"):
            kinds = {"b": share, "a": share}
        groups = tensor.reshape(net.key_heads, sum(kinds.values()), *tensor.shape[1:])
        ends = dict(zip(kinds, np.cumsum(list(kinds.values())).tolist(), strict=True))
        found = [groups[:, ends[part] - kinds[part] : ends[part]] for part in parts]
        return np.concatenate([part.reshape(-1, *tensor.shape[1:]) for part in found])

    return view


@architecture(
    "Qwen3-Next",
    *_GATED_QUERIES,
    Rule(r"linear_attn\.in_proj_qkv\.", "linear_attn.in_proj_qkvz.", part_of_groups("q", "k", "v")),
    Rule(r"linear_attn\.in_proj_z\.", "linear_attn.in_proj_qkvz.", part_of_groups("z")),
    Rule(r"linear_attn\.in_proj_b\.", "linear_attn.in_proj_ba.", part_of_groups("b")),
    Rule(r"linear_attn\.in_proj_a\.", "linear_attn.in_proj_ba.", part_of_groups("a")),
    **_MTP,
    may_join_experts=True,
)
def qwen3_next(config: HFConfig) -> DecoderSpec:
    """Qwen3-Next: the predecessor of Qwen 3.5 MoE, with the projections of a key head stored together."""
    return _qwen(config, **_shared_experts(config))
