"""What most configurations share: sizes, tokens, rotation, windows per layer."""

from __future__ import annotations

from typing import Any

from ...errors import ConfigError, UnsupportedModelError
from ..hf_config import HFConfig
from ..hf_rope import rope_fields
from ..spec import DecoderSpec

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


# What would change the mathematics, and is known to no architecture here.
_REFUSED = {
    "quantization_config": "weights that others have quantised cannot be quantised again; give the float checkpoint",
    "use_bidirectional_attention": "a decoder sees the past only",
    "add_cross_attention": "there is no encoder here",
    "is_encoder_decoder": "there is no encoder here",
}


def decoder(
    config: HFConfig,
    *,
    theta: float = 10000.0,
    partial: float | None = None,
    epsilon: float = 1e-6,
    tied: bool = False,
    head_size: int | None = None,
    rope_kind: str | None = None,
    family: str = "decoder",
    **fields: Any,
) -> DecoderSpec:
    """A decoder with the values that nearly every config.json has, and `fields` beside or instead of them.

    Args:
        theta, partial, epsilon, tied, head_size: the architecture's defaults, where its config.json may leave them out.
            No `partial` means that the architecture always rotates whole heads.
        rope_kind: the layers whose rotation is asked for, where they differ.
        family: what genai_config.json calls the model: a type that onnxruntime-genai knows, or "decoder".
    """
    _refuse(config)
    heads = config.integer("num_attention_heads", "n_head")
    hidden = config.integer("hidden_size", "n_embd")
    vocab = config.integer("vocab_size")
    stop = config.token_ids("eos_token_id")
    if not stop and "eos_token_ids" not in fields:
        raise ConfigError("config.json has no eos_token_id", "a reply would never end", "name the token in config.json")
    values: dict[str, Any] = {
        "model_type": family,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": config.integer("intermediate_size", default=4 * hidden),
        "num_layers": config.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": config.integer("num_key_value_heads", default=heads),
        "head_size": config.integer("head_dim", default=head_size or hidden // heads),
        "rms_norm_eps": config.number(
            "rms_norm_eps",
            "layer_norm_eps",
            "layer_norm_epsilon",
            "norm_epsilon",
            "norm_eps",
            default=epsilon,
            positive=True,
        ),
        "tie_word_embeddings": config.flag("tie_word_embeddings", default=tied),
        **rope_fields(config, theta=theta, partial=partial, kind=rope_kind),
        "bos_token_id": _token_within(config, "bos_token_id", vocab),
        "eos_token_ids": stop,
        "pad_token_id": _token_within(config, "pad_token_id", vocab),
    }
    if "hidden_activation" not in fields:
        values["hidden_activation"] = activation(config.text("hidden_act", "hidden_activation", default="silu"))
    return DecoderSpec(**(values | fields))


def _refuse(config: HFConfig) -> None:
    wrong = {name: why for name, why in _REFUSED.items() if config.get(name)}
    if config.flag("is_causal", default=True) is False:
        wrong["is_causal"] = "a decoder sees the past only"
    for name, why in wrong.items():
        raise UnsupportedModelError(f"config.json has {name}: {config.get(name)}", why, "use another checkpoint")


def _token_within(config: HFConfig, name: str, vocab: int) -> int | None:
    """Some checkpoints name a token for padding or beginnings that they do not have: as good as none."""
    return next((token for token in config.token_ids(name) if token < vocab), None)


def activation(name: str) -> str:
    """Our name of an activation function."""
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"activation {name!r} is not known", f"known are {', '.join(_ACTIVATIONS)}", "use another checkpoint"
        )
    return _ACTIVATIONS[name]


def biases(attention: bool, mlp: bool) -> dict[str, Any]:
    """Biases of all attention projections, and of the feed-forward layer's."""
    return {"qkv_bias": attention, "o_bias": attention, "mlp_bias": mlp}


def layer_norms(*, biased: bool = True, **fields: Any) -> dict[str, Any]:
    """Layer norms in the place of RMS norms."""
    return {"norm": "layer", "norm_biases": biased, **fields}


def sliding_layers(config: HFConfig, pattern: int | None = None) -> tuple[int, ...]:
    """Layers with a window: by layer_types, or all but every pattern-th."""
    count = config.num_layers
    kinds = config.layers("layer_types", count)
    if kinds is None:
        every = config.integer("sliding_window_pattern", default=pattern or 1)
        return tuple(layer for layer in range(count) if every < 2 or (layer + 1) % every)
    known = {"sliding_attention", "full_attention"}
    if other := sorted({str(kind) for kind in kinds} - known):
        raise UnsupportedModelError(
            f"layer_types has {other[0]!r}", f"known are {', '.join(sorted(known))}", "use another checkpoint"
        )
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")


def window_fields(config: HFConfig, pattern: int | None = None, *, window: int | None = None) -> dict[str, Any]:
    """sliding_window and sliding_layers; nothing where no layer has a window. `window` is the default."""
    window, layers = config.optional_integer("sliding_window", window), sliding_layers(config, pattern)
    if window is None or not layers:
        return {}
    every = len(layers) == config.num_layers
    return {"sliding_window": window, "sliding_layers": None if every else layers}
