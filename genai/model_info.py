"""A model in figures, for people and for scripts."""

from __future__ import annotations

from typing import Any

from .model import Model


def describe(model: Model) -> dict[str, Any]:
    """Facts about a loaded model: names to plain values (str, int, float, bool or None)."""
    config, info = model.config.model, model.info
    decoder = config.decoder
    return {
        "folder": str(model.folder),
        "type": config.type,
        "parameters": info.parameters,
        "weight_bytes": info.weight_bytes,
        "bits_per_weight": round(8 * info.weight_bytes / info.parameters, 2) if info.parameters else None,
        "layers": decoder.num_hidden_layers,
        "hidden_size": decoder.hidden_size,
        "attention_heads": decoder.num_attention_heads,
        "key_value_heads": decoder.num_key_value_heads,
        "head_size": decoder.head_size,
        "vocab_size": config.vocab_size,
        "context_length": config.context_length,
        "kv_dtype": info.kv_dtype,
        "kv_bytes_per_token": info.kv_bytes_per_token or None,
        "kv_bytes_full_context": info.kv_bytes_per_token * config.context_length or None,
        "cache_tokens": info.cache_tokens or None,
        "batched": info.flattened,
        "not_batched_because": info.reason or None,
        "config_keys_without_effect": ", ".join(model.config.ignored_keys) or None,
    }
