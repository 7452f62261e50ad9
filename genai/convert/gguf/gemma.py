"""llama.cpp's metadata and tensors of Gemma 3n and Gemma 4."""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from ...weight_files.gguf import GgufModel
from ..architectures.common import Rule
from ..spec import AltUpSpec, DecoderSpec
from . import experts
from .metadata import Metadata

Values = dict[str, Any]
# Layers that attend to the keys and values of other layers have projections that are never used.
UNUSED = r"\.attn_(k|v|k_norm)\."
# llama.cpp's constants for Gemma 3n.
_SPARSE_LAYERS, _SPARSITY, _STREAMS, _LAUREL_RANK = 10, 0.95, 4, 64


def gemma4(data: Metadata, model: GgufModel) -> Values:
    """Return the configuration of Gemma 4."""
    windows, widths = _windows(data), data.layers("feed_forward_length")
    size, full_size = data.integer("attention.key_length_swa"), data.integer("attention.key_length")
    for name in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if data.integer(name, size) != size:
            raise data.wrong(name, data.get(name), f"{size}, which is attention.key_length_swa")
    if not all(windows) and "rope_freqs.weight" not in model:
        raise InputError(
            f"{model.path}: tensor 'rope_freqs.weight' is missing",
            "it contains the frequencies for the layers without a window", "convert the model again",
        )  # fmt: skip
    heads = data.layers("attention.head_count_kv", data.integer("attention.head_count"))
    local, full = ({count for count, one in zip(heads, windows, strict=True) if one == window}
                   for window in (True, False))  # fmt: skip
    if max(len(local), len(full)) > 1:
        raise data.wrong(
            "attention.head_count_kv", heads, "a number for all layers with a window, and one for all other layers"
        )
    last = [layer for layer, window in enumerate(windows) if not window and f"blk.{layer}.attn_k.weight" in model]
    values: Values = {
        **_shared_values(data, model), "head_dim": size, "num_key_value_heads": heads[windows.index(True)] if local
        else heads[0],
        "intermediate_size": widths if len(set(widths)) > 1 else widths[0],
        "per_layer_config": {
            str(layer): {"head_dim": full_size, "num_key_value_heads": heads[layer]}
            for layer, window in enumerate(windows) if not window
        },
        "attention_k_eq_v": any(f"blk.{layer}.attn_v.weight" not in model for layer in last),
        "final_logit_softcapping": data.number("final_logit_softcapping", 0.0) or None,
    }  # fmt: skip
    if data.optional_integer("expert_count"):
        values |= {**experts.routed(data), "enable_moe_block": True}
    return values


def gemma3n(data: Metadata, model: GgufModel) -> Values:
    """Return the configuration of Gemma 3n. llama.cpp has constants for what the files do not contain."""
    _windows(data)
    active = data.get("altup.active_idx")
    streams = data.integer("altup.num_inputs", _STREAMS)
    if active is not None and (type(active) is not int or not 0 <= active < streams):
        raise data.wrong("altup.active_idx", active, f"an integer from 0 to {streams - 1}")
    return {
        **_shared_values(data, model), "altup_num_inputs": streams, "altup_active_idx": active or 0,
        "num_key_value_heads": data.integer("attention.head_count_kv", data.integer("attention.head_count")),
        "laurel_rank": _LAUREL_RANK, "intermediate_size": data.layers("feed_forward_length"),
        "activation_sparsity_pattern": _sparsities(data),
        "final_logit_softcapping": data.number("final_logit_softcapping", 30.0),
    }  # fmt: skip


def _shared_values(data: Metadata, model: GgufModel) -> Values:
    shared, count = data.optional_integer("attention.shared_kv_layers"), data.integer("block_count")
    if shared >= count:
        raise data.wrong("attention.shared_kv_layers", shared, f"a number below block_count = {count}")
    table = "per_layer_token_embd.weight"
    return {
        "hidden_activation": "gelu_pytorch_tanh", "rope_local_base_freq": data.number("rope.freq_base_swa", 10000.0),
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": data.optional_integer("embedding_length_per_layer_input"),
        **({"vocab_size_per_layer_input": model.info(table).shape[0]} if table in model else {}),
    }  # fmt: skip


def _windows(data: Metadata) -> list[bool]:
    """Return True for each layer with a window. Raise ConfigError unless the file lists the layers."""
    name, count = "attention.sliding_window_pattern", data.integer("block_count")
    value = data.get(name)
    if not isinstance(value, np.ndarray) or len(value) != count:
        shown = value.tolist() if isinstance(value, np.ndarray) else value
        raise data.wrong(name, shown, f"a list with true or false for each of the {count} layers")
    return [bool(flag) for flag in value.tolist()]


def _sparsities(data: Metadata) -> list[float]:
    """Return the fraction of each layer's activations that are set to 0; files contain the normal distribution's."""
    name, count = "activation_sparsity_scale", data.integer("block_count")
    value = data.get(name)
    if value is None:
        return [_SPARSITY if layer < _SPARSE_LAYERS else 0.0 for layer in range(count)]
    if not isinstance(value, np.ndarray) or value.dtype.kind != "f" or len(value) != count or np.isnan(value).any():
        shown = value.tolist() if isinstance(value, np.ndarray) else value
        raise data.wrong(name, shown, f"a list with a number for each of the {count} layers")
    shares = [NormalDist().cdf(max(float(scale), -40.0)) for scale in value]
    if max(shares) >= 1:
        raise data.wrong(name, value.tolist(), "numbers that leave some activations")
    return shares


def as_in_file(spec: DecoderSpec, model: GgufModel) -> DecoderSpec:
    """Return the decoder of Gemma 4 without the learned factors that a file lacks, which are then 1."""
    mixture = spec.experts
    if mixture is not None:
        mixture = replace(mixture, scaled="blk.0.ffn_down_exps.scale" in model)
    return replace(spec, experts=mixture, layer_scales="blk.0.layer_output_scale.weight" in model)


def laurel(spec: DecoderSpec, model: GgufModel) -> DecoderSpec:
    """Return the decoder of Gemma 3n with the rank of the augmented residuals in a file."""
    assert isinstance(spec.altup, AltUpSpec)
    name = "blk.0.laurel_l.weight"
    return replace(spec, altup=replace(spec.altup, laurel_rank=model.info(name).shape[0])) if name in model else spec


def _stream(spec: DecoderSpec, tensor: NDArray[Any], stream: int) -> NDArray[Any]:
    matrix: NDArray[Any] = tensor[stream]
    return matrix


def _half(part: int) -> Any:
    """Return a view of one expert's gate (0) or up (1) rows, which are one tensor."""
    return lambda spec, tensor, expert: np.split(tensor[expert], 2)[part]


_INPUTS = (
    Rule(r"^model\.embed_tokens_per_layer\.", "per_layer_token_embd."),
    Rule(r"^model\.per_layer_model_projection\.", "per_layer_model_proj."),
    Rule(r"^model\.per_layer_projection_norm\.", "per_layer_proj_norm."),
    Rule(r"per_layer_input_gate", "inp_gate"),
    Rule(r"post_per_layer_input_norm", "post_norm"),
    Rule(r"per_layer_projection", "proj"),
)
GEMMA3N = (
    *_INPUTS,
    Rule(r"^model\.altup_projections\.(\d+)\.", "altup_proj.", _stream),
    Rule(r"^model\.altup_unembed_projections\.(\d+)\.", "altup_unembd_proj.", _stream),
    Rule(r"altup\.correct_output_scale", "altup_correct_scale.weight"),
    Rule(r"altup\.router_norm", "altup_router_norm"),
    Rule(r"altup\.modality_router", "altup_router"),
    Rule(r"altup\.prediction_coefs", "altup_predict_coef"),
    Rule(r"altup\.correction_coefs", "altup_correct_coef"),
    Rule(r"laurel\.linear_left", "laurel_l"),
    Rule(r"laurel\.linear_right", "laurel_r"),
    Rule(r"laurel\.post_laurel_norm", "laurel_post_norm"),
)
GEMMA4 = (
    *_INPUTS,
    Rule(r"layer_scalar", "layer_output_scale.weight"),
    Rule(r"pre_feedforward_layernorm_2", "pre_ffw_norm_2"),
    Rule(r"post_feedforward_layernorm_([12])", r"post_ffw_norm_\1"),
    Rule(r"mlp\.experts\.scale", "ffn_down_exps.scale"),
    Rule(r"mlp\.gate\.norm", "ffn_gate_inp.scale"),
)
EXPERTS_JOINED = (
    Rule(r"mlp\.experts\.(\d+)\.gate_proj", "ffn_gate_up_exps", _half(0)),
    Rule(r"mlp\.experts\.(\d+)\.up_proj", "ffn_gate_up_exps", _half(1)),
)
