"""llama.cpp's metadata and tensors of decoders with recurrent parts.

They are LFM2, Qwen3-Next, Qwen 3.5, Granite 4, Falcon H1, Jamba, Mamba, Mamba 2, Nemotron-H and Kimi Linear.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError, UnsupportedModelError
from ...weight_files.gguf import GgufModel
from ..architectures.common import Rule, TensorView, flat
from ..architectures.hybrid import half_of_heads, part_of_groups
from ..architectures.mamba import rows_of
from ..spec import DecoderSpec, DeltaNetSpec
from . import experts
from .metadata import Metadata

Values = dict[str, Any]


def without_drafts(data: Metadata) -> int:
    """Return the number of layers, without those at the end that only predict further tokens."""
    count, drafts = data.integer("block_count"), data.optional_integer("nextn_predict_layers")
    if drafts >= count:
        raise data.wrong("nextn_predict_layers", drafts, f"a number below block_count = {count}")
    return count - drafts


def layers_without_attention(data: Metadata) -> list[bool]:
    """Return which layers have no key/value heads."""
    heads = data.get("attention.head_count_kv")
    count = without_drafts(data)
    if not isinstance(heads, np.ndarray):
        return [False] * count
    return [number == 0 for number in heads.tolist()[:count]]


def _heads(data: Metadata) -> tuple[int, int]:
    """Return the number of heads of a state, and the number of their values."""
    heads, inner = data.integer("ssm.time_step_rank"), data.integer("ssm.inner_size")
    if inner % heads:
        raise data.wrong("ssm.inner_size", inner, f"a multiple of ssm.time_step_rank = {heads}")
    return heads, inner // heads


def _expansion(data: Metadata) -> int:
    """Return the width of Mamba in multiples of the hidden vector."""
    inner, hidden = data.integer("ssm.inner_size"), data.integer("embedding_length")
    if inner % hidden:
        raise data.wrong("ssm.inner_size", inner, f"a multiple of embedding_length = {hidden}")
    return inner // hidden


# --- LFM2 ------------------------------------------------------------------------------------------------------------


def lfm2(data: Metadata, model: GgufModel) -> Values:
    """Return the configuration of LFM2."""
    kinds = ["conv" if conv else "full_attention" for conv in layers_without_attention(data)]
    return {
        "layer_types": kinds, "conv_L_cache": data.integer("shortconv.l_cache"), "block_auto_adjust_ff_dim": False
    }  # fmt: skip


def lfm2_moe(data: Metadata, model: GgufModel) -> Values:
    """Return the configuration of LFM2 with experts."""
    return {**lfm2(data, model), **experts.sigmoids(data, model), "norm_topk_prob": True}


def _convolution(spec: DecoderSpec, tensor: NDArray[Any]) -> NDArray[Any]:
    return tensor.reshape(-1, 1, tensor.shape[-1])


SELECTION = (Rule(r"mlp\.gate\.selection_bias", "exp_probs_b.bias"),)
LFM2 = (
    Rule(r"conv\.conv\.", "shortconv.conv.", _convolution),
    Rule(r"conv\.(in|out)_proj", r"shortconv.\1_proj"),
    *SELECTION,
    Rule(r"^output_norm\.", "token_embd_norm."),
)


# --- Qwen3-Next and Qwen 3.5 -----------------------------------------------------------------------------------------


def delta_net(data: Metadata, model: GgufModel) -> Values:
    """Return the configuration of Gated DeltaNet, and of experts if there are any."""
    count, every = without_drafts(data), data.integer("full_attention_interval", 4)
    flags = data.get("attention.recurrent_layers")
    linear = [(layer + 1) % every != 0 for layer in range(count)]
    if isinstance(flags, np.ndarray):
        linear = [bool(flag) for flag in flags.tolist()[:count]]
    heads, size = _heads(data)
    check_sections(data)
    values: Values = {
        "layer_types": ["linear_attention" if one else "full_attention" for one in linear],
        "linear_conv_kernel_dim": data.integer("ssm.conv_kernel"),
        "linear_num_key_heads": data.integer("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": data.integer("ssm.state_size"),
        "linear_value_head_dim": size,
    }
    if data.optional_integer("expert_count"):
        values |= {
            **experts.routed(data),
            "shared_expert_intermediate_size": data.integer("expert_shared_feed_forward_length"),
            "norm_topk_prob": True,
        }
    return values


def check_sections(data: Metadata, *, interleaved: bool = True) -> None:
    """Check that all rotated pairs turn with a token's position in texts; pairs in no section do not turn."""
    sections = data.get("rope.dimension_sections")
    pairs = data.optional_integer("rope.dimension_count") // 2
    if sections is None:
        return
    is_list = isinstance(sections, np.ndarray) and sections.dtype.kind in "iu" and len(sections) >= 3
    if not is_list or (
        any(pair >= 3 * sections[pair % 3] for pair in range(pairs)) if interleaved else sum(sections[:3]) < pairs
    ):
        shown = sections.tolist() if isinstance(sections, np.ndarray) else sections
        raise data.wrong("rope.dimension_sections", shown, f"three sections that include {pairs} pairs")


def tiled(spec: DecoderSpec, model: GgufModel) -> DecoderSpec:
    """Return the decoder whose value heads are in the order of ggml in the columns of out_proj."""
    assert isinstance(spec.recurrent, DeltaNetSpec)
    return replace(spec, recurrent=replace(spec.recurrent, tiled=True))


def _net(spec: DecoderSpec) -> DeltaNetSpec:
    assert isinstance(spec.recurrent, DeltaNetSpec)
    return spec.recurrent


def _grouped(spec: DecoderSpec, tensor: NDArray[Any]) -> NDArray[Any]:
    """Return the rows of value heads with the heads of a key head side by side; ggml has them in turns."""
    net = _net(spec)
    rest = tensor.shape[1:]
    turns = tensor.reshape(net.value_heads // net.key_heads, net.key_heads, -1, *rest)
    return turns.swapaxes(0, 1).reshape(-1, *rest)


def _grouped_values(spec: DecoderSpec, tensor: NDArray[Any]) -> NDArray[Any]:
    """Do the same to the rows that follow those of queries and keys."""
    before = 2 * _net(spec).key_width
    return np.concatenate([tensor[:before], _grouped(spec, tensor[before:])])


def _decay(spec: DecoderSpec, tensor: NDArray[Any]) -> NDArray[Any]:
    if not (tensor < 0).all():
        raise InputError(
            "a tensor ssm_a contains numbers that are not negative", "they are the rates of decay, -exp(A_log)",
            "download the file again",
        )  # fmt: skip
    return np.log(-tensor.astype(np.float64)).astype(np.float32)


def _then(first: TensorView, second: TensorView) -> TensorView:
    return lambda spec, tensor: second(spec, first(spec, tensor))


_DELTA_NET = (
    Rule(r"post_attention_layernorm", "post_attention_norm"),
    Rule(r"self_attn\.q_proj", "attn_q", half_of_heads(0)),
    Rule(r"self_attn\.gate_proj", "attn_q", half_of_heads(1)),
    Rule(r"linear_attn\.norm", "ssm_norm"),
    Rule(r"linear_attn\.out_proj", "ssm_out"),
)
QWEN3_NEXT = (
    *_DELTA_NET,
    Rule(r"linear_attn\.in_proj_qkv", "attn_qkv"),
    Rule(r"linear_attn\.in_proj_z", "attn_gate"),
    Rule(r"linear_attn\.in_proj_b", "ssm_ba", part_of_groups("b")),
    Rule(r"linear_attn\.in_proj_a", "ssm_ba", part_of_groups("a")),
    Rule(r"linear_attn\.conv1d", "ssm_conv1d", _convolution),
    Rule(r"linear_attn\.dt_bias", "ssm_dt.bias"),
    Rule(r"linear_attn\.A_log", "ssm_a", _decay),
)
QWEN3_5 = (
    *_DELTA_NET,
    Rule(r"linear_attn\.in_proj_qkv", "attn_qkv", _grouped_values),
    Rule(r"linear_attn\.in_proj_z", "attn_gate", _grouped),
    Rule(r"linear_attn\.in_proj_b", "ssm_beta", _grouped),
    Rule(r"linear_attn\.in_proj_a", "ssm_alpha", _grouped),
    Rule(r"linear_attn\.conv1d", "ssm_conv1d", _then(_grouped_values, _convolution)),
    Rule(r"linear_attn\.dt_bias", "ssm_dt.bias", _grouped),
    Rule(r"linear_attn\.A_log", "ssm_a", _then(_grouped, _decay)),
)


# --- Kimi Linear -----------------------------------------------------------------------------------------------------


def kimi_linear(data: Metadata, model: GgufModel) -> Values:
    """Return the configuration of Kimi Delta Attention, and of the experts, which are always normalised."""
    linear = layers_without_attention(data)
    return {
        "layer_types": ["linear_attention" if one else "full_attention" for one in linear],
        "linear_num_heads": data.integer("attention.head_count"), "linear_head_dim": data.integer("kda.head_dim"),
        "linear_conv_kernel_dim": data.integer("ssm.conv_kernel"), **experts.sigmoids(data, model),
        "norm_topk_prob": True,
    }  # fmt: skip


KIMI_LINEAR = (
    Rule(r"linear_attn\.([qkv])_proj", r"attn_\1"),
    *(Rule(rf"linear_attn\.{part}_conv1d", f"ssm_conv1d_{part}", _convolution) for part in "qkv"),
    Rule(r"linear_attn\.([fg])_([ab])_proj", r"ssm_\1_\2"),
    Rule(r"linear_attn\.b_proj", "ssm_beta"),
    Rule(r"linear_attn\.A_log", "ssm_a", _then(flat, _decay)),
    Rule(r"linear_attn\.dt_bias", "ssm_dt.bias"),
    Rule(r"linear_attn\.o_norm", "ssm_norm"),
    Rule(r"linear_attn\.o_proj", "attn_output"),
)


# --- Mamba-2 ---------------------------------------------------------------------------------------------------------


def falcon_h1(data: Metadata, model: GgufModel) -> Values:
    """Return the configuration of Falcon H1. The tensors in the file already include the factors of the matrices."""
    return {
        **_mamba(data, model), "mamba_d_ssm": data.integer("ssm.inner_size"), "mamba_norm_before_gate": False,
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in model,
    }  # fmt: skip


def mamba2(data: Metadata, model: GgufModel) -> Values:
    """Return the configuration of Mamba-2 without attention."""
    mamba = _mamba(data, model)
    return {
        "num_heads": mamba["mamba_n_heads"], "head_dim": mamba["mamba_d_head"], "n_groups": mamba["mamba_n_groups"],
        "state_size": mamba["mamba_d_state"], "conv_kernel": mamba["mamba_d_conv"], "expand": _expansion(data),
        "use_conv_bias": mamba["mamba_conv_bias"],
    }  # fmt: skip


def mamba(data: Metadata, model: GgufModel) -> Values:
    """Return the configuration of Mamba-1 without attention."""
    if data.flag("ssm.dt_b_c_rms", False):
        raise UnsupportedModelError(
            f"{model.path}: {data.architecture}.ssm.dt_b_c_rms is true",
            "the norms of Falcon Mamba, which have no weights, are not supported", "use another model",
        )  # fmt: skip
    return {
        "expand": _expansion(data), "state_size": data.integer("ssm.state_size"),
        "conv_kernel": data.integer("ssm.conv_kernel"), "time_step_rank": data.integer("ssm.time_step_rank"),
        "use_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in model), "num_key_value_heads": 1,
    }  # fmt: skip


def jamba(data: Metadata, model: GgufModel) -> Values:
    """Return the configuration of Jamba. Its layers have experts if the file has their routers."""
    mamba = layers_without_attention(data)
    routed = [f"blk.{layer}.ffn_gate_inp.weight" in model for layer in range(len(mamba))]
    values: Values = {
        "layer_types": ["linear_attention" if one else "full_attention" for one in mamba],
        "mamba_expand": _expansion(data), "mamba_d_state": data.integer("ssm.state_size"),
        "mamba_d_conv": data.integer("ssm.conv_kernel"), "mamba_dt_rank": data.integer("ssm.time_step_rank"),
        "mamba_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in model), "num_experts": 1,
    }  # fmt: skip
    if any(routed):
        values |= {
            "num_experts": data.integer("expert_count"), "num_experts_per_tok": data.integer("expert_used_count"),
            "mlp_layer_types": ["sparse" if one else "dense" for one in routed],
        }  # fmt: skip
    return values


def nemotron_h(data: Metadata, model: GgufModel) -> Values:
    """Return the configuration of Nemotron-H, whose layers are Mamba-2, attention or a feed-forward layer."""
    names = [f"blk.{layer}.%s.weight" for layer in range(without_drafts(data))]
    parts = {"attn_q": "full_attention", "ffn_up": "mlp", "ffn_up_exps": "moe"}
    kinds = [next((parts[part] for part in parts if name % part in model), "linear_attention") for name in names]
    mamba = _mamba(data, model)
    return {
        "layers_block_type": kinds, "mamba_num_heads": mamba["mamba_n_heads"], "mamba_head_dim": mamba["mamba_d_head"],
        "n_groups": mamba["mamba_n_groups"], "ssm_state_size": mamba["mamba_d_state"],
        "conv_kernel": mamba["mamba_d_conv"], "use_conv_bias": mamba["mamba_conv_bias"],
        **(_nemotron_experts(data) if "moe" in kinds else {}),
    }  # fmt: skip


def _nemotron_experts(data: Metadata) -> Values:
    latent = data.optional_integer("moe_latent_size")
    return {
        **experts.routed(data), **({"moe_latent_size": latent} if latent else {}),
        "moe_shared_expert_intermediate_size": data.integer("expert_shared_feed_forward_length"),
    }  # fmt: skip


def _mamba(data: Metadata, model: GgufModel) -> Values:
    heads, size = _heads(data)
    return {
        "mamba_n_heads": heads, "mamba_d_head": size, "mamba_d_conv": data.integer("ssm.conv_kernel"),
        "mamba_d_state": data.integer("ssm.state_size"), "mamba_n_groups": data.integer("ssm.group_count"),
        "mamba_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in model),
    }  # fmt: skip


def granite_hybrid(data: Metadata, model: GgufModel) -> Values:
    """Return the configuration of Granite 4, without its multipliers."""
    kinds = ["mamba" if mamba else "attention" for mamba in layers_without_attention(data)]
    count, width = data.optional_integer("expert_count"), data.integer("feed_forward_length")
    values: Values = {
        **_mamba(data, model), "layer_types": kinds, "position_embedding_type": "rope", "num_local_experts": count,
        "mamba_expand": data.integer("ssm.inner_size") // data.integer("embedding_length"),
        "shared_intermediate_size": width,
    }  # fmt: skip
    if count:
        values |= {
            "num_experts_per_tok": data.integer("expert_used_count"), "intermediate_size": width,
            "shared_intermediate_size": data.integer("expert_shared_feed_forward_length"),
        }  # fmt: skip
    return values


MAMBA = (
    *(Rule(rf"mamba\.in_proj_{part}\.", "ssm_in.", rows_of(part)) for part in ("gate", "conv", "dt")),
    Rule(r"mamba\.conv1d\.weight", "ssm_conv1d.weight", _convolution),
    Rule(r"mamba\.conv1d\.bias", "ssm_conv1d.bias"),
    Rule(r"mamba\.dt_bias", "ssm_dt.bias"),
    Rule(r"mamba\.A_log", "ssm_a", _then(flat, _decay)),
    Rule(r"mamba\.D$", "ssm_d", flat),
    Rule(r"mamba\.norm", "ssm_norm", flat),
    Rule(r"mamba\.out_proj", "ssm_out"),
)
MAMBA_1 = (
    Rule(r"mamba\.in_proj_conv\.", "ssm_in.", lambda spec, x: x[: len(x) // 2]),
    Rule(r"mamba\.in_proj_gate\.", "ssm_in.", lambda spec, x: x[len(x) // 2 :]),
    Rule(r"mamba\.conv1d\.weight", "ssm_conv1d.weight", _convolution),
    Rule(r"mamba\.conv1d\.bias", "ssm_conv1d.bias"),
    Rule(r"mamba\.x_proj", "ssm_x"),
    Rule(r"mamba\.dt_proj", "ssm_dt"),
    Rule(r"mamba\.(dt|b|c)_layernorm", r"ssm_\1_norm"),
    Rule(r"mamba\.A_log", "ssm_a", _decay),
    Rule(r"mamba\.D$", "ssm_d"),
    Rule(r"mamba\.out_proj", "ssm_out"),
)
NEMOTRON = (
    *MAMBA,
    *SELECTION,
    Rule(r"mlp\.latent_in_proj", "ffn_latent_down"),
    Rule(r"mlp\.latent_out_proj", "ffn_latent_up"),
)
FALCON_H1 = (*MAMBA, Rule(r"post_attention_layernorm\.weight", "ffn_norm"))  # this name has no ".weight"
