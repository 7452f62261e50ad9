"""SmolLM 3: Llama without rotation in every fourth layer."""

from __future__ import annotations

from ..architecture import Architecture
from ..hf_config import HFConfig
from ..spec import DecoderSpec
from .common import biases, decoder, window_fields


def describe(config: HFConfig) -> DecoderSpec:
    count = config.num_layers
    rotated = config.layers("no_rope_layers", count)
    if rotated is None:
        every = config.integer("no_rope_layer_interval", default=4)
        rotated = [(layer + 1) % every for layer in range(count)]
    still = tuple(layer for layer, flag in enumerate(rotated) if not flag)
    windows = window_fields(config)
    if not config.flag("use_sliding_window"):
        windows = {}
    elif windows and config.get("layer_types") is None:
        windows["sliding_layers"] = still
    return decoder(
        config,
        family="smollm3",
        theta=2e6,
        tied=True,
        rope_layers=tuple(layer for layer, flag in enumerate(rotated) if flag),
        **biases(config.flag("attention_bias"), config.flag("mlp_bias")),
        **windows,
    )


ARCHITECTURE = Architecture("smollm3", "SmolLM 3", describe)
