"""Qwen 2 and 2.5: biases on queries, keys and values; some have a window in their upper layers."""

from __future__ import annotations

from typing import Any

from ..architecture import Architecture
from ..hf_config import HFConfig
from ..spec import DecoderSpec
from .common import decoder, window_fields


def describe(config: HFConfig) -> DecoderSpec:
    return decoder(config, family="qwen2", qkv_bias=True, **windows(config))


def windows(config: HFConfig) -> dict[str, Any]:
    """The window of the layers from max_window_layers on, if use_sliding_window says so."""
    fields, first = window_fields(config, window=4096), config.integer("max_window_layers", default=28, least=0)
    if not config.flag("use_sliding_window"):
        return {}
    if fields and config.get("layer_types") is None:
        layers = tuple(range(first, config.num_layers))
        return {**fields, "sliding_layers": layers} if layers else {}
    return fields


ARCHITECTURE = Architecture("qwen2", "Qwen 2, 2.5", describe)
