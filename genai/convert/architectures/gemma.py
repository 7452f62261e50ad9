"""Gemma 3n and 4: heads of two sizes, keys and values that layers share, and inputs per layer."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..hf_config import REQUIRED, HFConfig, rope_values
from ..spec import AltUpSpec, DecoderSpec, ExpertsSpec, PerLayerInputs
from . import common
from .common import Rule, architecture, decoder

# Some checkpoints store projections that are never used: of layers that attend to the keys of other layers.
_UNUSED = r"\.self_attn\.(k_proj|v_proj|k_norm)\."


def _full_layers(config: HFConfig) -> dict[str, Any]:
    """Return the sizes of the layers without a window, which config.json gives per layer or for all of them."""
    default = {"head_dim": config.integer("global_head_dim", default=512)}
    if config.flag("attention_k_eq_v") and config.get("num_global_key_value_heads") is not None:
        default["num_key_value_heads"] = config.integer("num_global_key_value_heads")
    given = config.get("per_layer_config")
    if given is None:
        found = default
    elif isinstance(given, dict) and all(isinstance(one, dict) for one in given.values()):
        windows = set(common.sliding_layers(config, pattern=6))
        full = [str(layer) for layer in range(config.num_layers) if layer not in windows]
        # An empty object means that the layers without a window have the sizes of the others.
        if given and (set(given) != set(full) or any(one != given[full[0]] for one in given.values())):
            raise config.wrong("per_layer_config", given, f"the same sizes for the layers {', '.join(full)}")
        found = given[full[0]] if given else {}
    else:
        raise config.wrong("per_layer_config", given, "an object with an object for each layer")
    sizes = config.with_values(found, part="per_layer_config")
    head_size = sizes.integer("head_dim", default=config.integer("head_dim", default=256))
    heads = sizes.integer("num_key_value_heads", default=config.integer("num_key_value_heads", default=4))
    return {"full_head_size": head_size, "full_key_value_heads": heads}


def _shared_layers(config: HFConfig, default: int) -> dict[str, Any]:
    """Return the number of layers that have keys and values, if it is not the number of all layers."""
    count = config.integer("num_kv_shared_layers", default=default, least=0)
    if count >= config.num_layers:
        raise config.wrong("num_kv_shared_layers", count, f"an integer from 0 to {config.num_layers - 1}")
    return {"num_cached_layers": config.num_layers - count} if count else {}


def _inputs(config: HFConfig, default: int) -> PerLayerInputs | None:
    size = config.integer("hidden_size_per_layer_input", default=default, least=0)
    rows = config.integer("vocab_size_per_layer_input", default=262144)
    return PerLayerInputs(size=size, vocab_size=rows) if size else None


def _gemma(
    config: HFConfig, *, window: int, inputs: int = 256, pattern: int | None = None, **fields: Any
) -> DecoderSpec:
    """Return a decoder with the values that Gemma 3n and Gemma 4 share; `window`, `inputs`, `pattern` are defaults."""
    local = rope_values(config, "sliding_attention").get("rope_theta")
    if config.optional_integer("sliding_window", window) is None and common.sliding_layers(config, pattern):
        raise config.wrong(
            "sliding_window", config.get("sliding_window"), "a number of tokens: some layers have windows"
        )
    return decoder(
        config, theta=1e6, rope_kind="full_attention", tied=True, head_size=256, post_norms=True, qk_norm=True,
        value_norm=True, attention_scale=1.0, embedding_scale=config.integer("hidden_size") ** 0.5,
        local_rope_theta=config.number("rope_local_base_freq", default=local or 10000.0),
        per_layer_inputs=_inputs(config, inputs), **common.attention_biases(config),
        **common.window_fields(config, pattern, window=window), **fields,
    )  # fmt: skip


def _first_row(spec: DecoderSpec, tensor: NDArray[Any]) -> NDArray[Any]:
    """Return the embedding of token 0 for each token that has no embedding per layer."""
    assert spec.per_layer_inputs is not None
    return np.repeat(tensor[:1], spec.vocab_size - spec.per_layer_inputs.vocab_size, axis=0)


def _widths(config: HFConfig, default: int = REQUIRED) -> tuple[int, tuple[int, ...] | None]:
    """Return the width of the feed-forward layers, and the width of each layer if config.json lists them."""
    given = config.get("intermediate_size")
    if not isinstance(given, list):
        return config.integer("intermediate_size", default=default), None
    sizes = config.layers("intermediate_size", config.num_layers) or []
    if not all(type(size) is int for size in sizes):
        raise config.wrong("intermediate_size", given, "an integer, or a list of integers")
    return sizes[0], tuple(sizes)


def _sparsities(config: HFConfig) -> tuple[float, ...] | None:
    given, name, count = config.get("activation_sparsity_pattern"), "activation_sparsity_pattern", config.num_layers
    if given is None:
        sparse = 10 if count > 10 else 0
        return (0.95,) * sparse + (0.0,) * (count - sparse)
    shares = config.layers(name, count) if isinstance(given, list) else [given] * count
    if not all(type(share) in (int, float) and 0 <= share < 1 for share in shares or []):
        raise config.wrong(name, given, "a number from 0 to less than 1, or a list of such numbers")
    return tuple(float(share) for share in shares or [])


@architecture(
    "Gemma 3n (text)",
    Rule(r"embed_tokens_per_layer_rest", "embed_tokens_per_layer", _first_row),
    unused=rf"{_UNUSED}|\.altup\.correct_output_scale$",
)
def gemma3n_text(config: HFConfig) -> DecoderSpec:
    """Gemma 3n: several residual streams, inputs per layer, and sparse activations in the first layers."""
    width, widths = _widths(config, 16384)
    shared = _shared_layers(config, 15)
    altup = AltUpSpec(
        streams=config.integer("altup_num_inputs", default=4),
        active=config.integer("altup_active_idx", default=0, least=0),
        scaled=config.flag("altup_correct_scale", default=True), laurel_rank=config.integer("laurel_rank", default=64),
    )  # fmt: skip
    config.get("altup_coef_clip")  # only training clips the coefficients
    return _gemma(
        config, window=512, pattern=5, altup=altup, intermediate_size=width, intermediate_sizes=widths,
        sparsities=_sparsities(config), hidden_activation=common.activation(
            config.text("hidden_activation", default="gelu_pytorch_tanh")
        ),
        logit_softcap=config.optional_number("final_logit_softcapping", 30.0), **shared,
    )  # fmt: skip


def _gemma4(config: HFConfig, **options: Any) -> DecoderSpec:
    shared, (width, widths) = _shared_layers(config, 0), _widths(config)
    first = shared.get("num_cached_layers", config.num_layers)
    if config.flag("use_double_wide_mlp") and widths is None:
        widths = tuple(width if layer < first else 2 * width for layer in range(config.num_layers))
    experts = None
    if config.flag("enable_moe_block"):
        experts = ExpertsSpec(
            count=config.integer("num_experts"), per_token=config.integer("top_k_experts"),
            intermediate_size=config.integer("moe_intermediate_size"), activation="geglu", beside_mlp=True,
            scaled=True,
        )  # fmt: skip
    rows = _inputs(config, options.get("inputs", 256))
    if rows is not None and rows.vocab_size < config.integer("vocab_size", default=262144):
        raise config.wrong("vocab_size_per_layer_input", rows.vocab_size, "at least vocab_size")
    return _gemma(
        config, family="gemma4_text", experts=experts, layer_scales=True,
        keys_as_values=config.flag("attention_k_eq_v"), logit_softcap=config.optional_number("final_logit_softcapping"),
        intermediate_size=width, intermediate_sizes=widths, **_full_layers(config), **shared, **options,
    )  # fmt: skip


@architecture(
    "Gemma 4 (text)",
    *common.EXPERTS_TOGETHER,
    Rule(r"\.mlp\.experts\.(gate_up_proj|down_proj)$", r".experts.\1"),
    Rule(r"\.mlp\.experts\.scale$", ".router.per_expert_scale"),
    Rule(r"\.mlp\.gate\.norm$", ".router.scale"),
    Rule(r"\.mlp\.gate\.weight$", ".router.proj.weight"),
    unused=_UNUSED,
)
def gemma4_text(config: HFConfig) -> DecoderSpec:
    """Gemma 4: larger heads in the layers without a window, a learned scale per layer, and in some sizes experts."""
    return _gemma4(config, window=512)


@architecture("Gemma 4 Unified (text)", unused=_UNUSED)
def gemma4_unified_text(config: HFConfig) -> DecoderSpec:
    """Gemma 4 12B: Gemma 4 without inputs per layer."""
    return _gemma4(config, window=1024, inputs=0)
