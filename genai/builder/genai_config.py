"""genai_config.json as onnxruntime-genai's builder writes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .export import takes_positions
from .options import ExportOptions
from .spec import DecoderSpec

# What generation_config.json may say of how to decode, and the types that it may have there.
_SEARCH_TYPES: dict[str, tuple[type, ...]] = {
    "do_sample": (bool,),
    "temperature": (int, float),
    "top_k": (int,),
    "top_p": (int, float),
    "repetition_penalty": (int, float),
    "no_repeat_ngram_size": (int,),
}


def search_defaults(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Search options out of generation_config.json; what is no number of the right type is left out."""
    given = {name: generation.get(name) for name in _SEARCH_TYPES}
    return {
        name: value
        for name, value in given.items()
        if isinstance(value, _SEARCH_TYPES[name]) and isinstance(value, bool) == (name == "do_sample")
    }


def genai_config(spec: DecoderSpec, options: ExportOptions, search: Mapping[str, Any]) -> dict[str, Any]:
    """The contents of genai_config.json; `search` goes before the defaults, which are greedy."""
    eos = list(spec.eos_token_ids)
    bos = {} if spec.bos_token_id is None else {"bos_token_id": spec.bos_token_id}
    return {
        "model": {
            **bos,
            "context_length": spec.context_length,
            "decoder": _decoder(spec, options),
            "eos_token_id": eos[0] if len(eos) == 1 else eos,
            "pad_token_id": eos[0] if spec.pad_token_id is None else spec.pad_token_id,
            "type": spec.model_type,
            "vocab_size": spec.vocab_size,
        },
        "search": {
            "diversity_penalty": 0.0,
            "do_sample": False,
            "early_stopping": True,
            "length_penalty": 1.0,
            "max_length": spec.context_length,
            "min_length": 0,
            "no_repeat_ngram_size": 0,
            "num_beams": 1,
            "num_return_sequences": 1,
            "past_present_share_buffer": True,
            "repetition_penalty": 1.0,
            "temperature": 1.0,
            "top_k": 50,
            "top_p": 1.0,
            **search,
        },
    }


def _decoder(spec: DecoderSpec, options: ExportOptions) -> dict[str, Any]:
    inputs = {"input_ids": "input_ids", "attention_mask": "attention_mask"}
    if takes_positions(spec, options):
        inputs["position_ids"] = "position_ids"
    inputs |= {"past_key_names": "past_key_values.%d.key", "past_value_names": "past_key_values.%d.value"}
    decoder: dict[str, Any] = {
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
        "filename": "model.onnx",
        "head_size": spec.head_size,
        "hidden_size": spec.hidden_size,
        "inputs": inputs,
        "outputs": {
            "logits": "logits",
            "present_key_names": "present.%d.key",
            "present_value_names": "present.%d.value",
        },
        "num_attention_heads": spec.num_attention_heads,
        "num_hidden_layers": spec.num_layers,
        "num_key_value_heads": spec.num_key_value_heads,
    }
    windowed = [layer for layer in range(spec.num_layers) if spec.window(layer) is not None]
    if windowed and options.windowed_kv_cache:
        decoder["sliding_window"] = {
            "window_size": spec.sliding_window,
            "slide_key_value_cache": False,
            "slide_inputs": False,
            "layers": windowed,
            "cache_slack": 0,
        }
    return decoder
