"""Checkpoints that hold a text decoder and a reader of pictures: the configuration and tensor names of the decoder.

The decoder is converted as if it were stored alone. A prompt without pictures has the same logits: pictures only
replace embeddings of tokens, and without pictures all three parts of a position of multimodal RoPE are equal, so that
the rotation is the ordinary rotation, regardless of the sections.
"""

from __future__ import annotations

import re
from typing import Any

from ..errors import ConfigError, InputError
from ..weight_files.tensor_files import TensorFile
from .hf_config import HFConfig

# The model_type of the text decoder if text_config does not set it, by the model_type of the checkpoint.
_DECODERS = {
    "aya_vision": "cohere2",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "idefics3": "llama",
    "internvl": "qwen2",
    "lfm2_vl": "lfm2",
    "llama4": "llama4_text",
    "llava": "llama",
    "llava_next": "llama",
    "llava_onevision": "qwen2",
    "mistral3": "mistral",
    "qwen2_5_vl": "qwen2",
    "qwen2_vl": "qwen2",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "smolvlm": "llama",
}
NESTED_TYPES = tuple(_DECODERS)
# Decoders whose only difference from another decoder is multimodal RoPE.
_SAME_FOR_TEXT = {"qwen2_5_vl_text": "qwen2", "qwen2_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
# text_config omits the values that equal the defaults of its class in transformers.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131072,
    },
    "gemma3n_text": {
        "vocab_size": 262400, "hidden_size": 2048, "num_hidden_layers": 35, "num_attention_heads": 8,
        "num_key_value_heads": 2, "max_position_embeddings": 32768,
    },
    "gemma4_text": {
        "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
        "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131072,
    },
    "lfm2": {
        "vocab_size": 65536, "hidden_size": 2560, "intermediate_size": 12288, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 128000,
    },
    "llama": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "max_position_embeddings": 2048,
    },
    "llama4_text": {
        "vocab_size": 202048, "hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40,
        "num_key_value_heads": 8, "max_position_embeddings": 131072,
    },
    "mistral": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    },
}  # fmt: skip
_DEFAULTS["gemma4_unified_text"] = {**_DEFAULTS["gemma4_text"], "max_position_embeddings": 262144}
_PART = "text_config"
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Keys of the reader of pictures in configurations without text_config, and of tokens that stand for pictures.
_OF_PICTURES = re.compile(r"(image|video|vision)_")
_TEXT_NAMES = (
    (re.compile(r"^(model\.)?language_model\.lm_head\."), "lm_head."),
    (re.compile(r"^(model\.)?language_model\.(model\.)?"), "model."),
    (re.compile(r"^model\.text_model\."), "model."),
)
_PICTURE_NAMES = re.compile(
    r"^(model\.)?(audio_tower|connector|embed_audio|embed_vision|image_newline|multi_modal_projector|vision_embedder|vision_model|vision_tower|visual)\b"
)


def text_part(config: HFConfig) -> HFConfig:
    """Return the configuration of the text decoder: the configuration itself if it holds nothing else.

    Raises:
        ConfigError: text_config is not a JSON object.
    """
    outer = config.values
    kind = outer.get("model_type")
    if not isinstance(kind, str) or kind not in _DECODERS:
        return config
    inner = outer.get(_PART)
    if inner is None:  # as transformers 4 wrote Qwen 2-VL
        inner = {key: value for key, value in outer.items() if not _OF_PICTURES.match(key) and key != "model_type"}
    if not isinstance(inner, dict):
        raise ConfigError(
            f"config.json: {_PART} is {inner!r:.80}",
            f"{kind} checkpoints describe their text decoder in this JSON object",
            "download the checkpoint again",
        )
    values = {key: value for key, value in inner.items() if value is not None or key == "sliding_window"}
    named = values.get("model_type", _DECODERS[kind])
    values["model_type"] = _SAME_FOR_TEXT.get(named, named) if isinstance(named, str) else named
    values |= {key: outer[key] for key in _TOKENS if outer.get(key) is not None}
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := values.get(key), dict):
            values[key] = {name: "default" if value == "mrope" else value for name, value in rope.items()}
    if kind == "aya_vision":  # as in transformers, whose class for pictures and text does not scale logits
        values["logit_scale"] = 1.0
    defaults = _DEFAULTS.get(values["model_type"], {}) if isinstance(values["model_type"], str) else {}
    return config.with_values(defaults | values, part=_PART if _PART in outer else "")


def nested_type(config: HFConfig) -> str | None:
    """Return the checkpoint's model_type if it holds more than a text decoder."""
    kind = config.values.get("model_type")
    return kind if isinstance(kind, str) and kind in _DECODERS else None


class TextTensors:
    """The text decoder's tensors in a file, by the names that they have in a checkpoint of the decoder alone.

    Raises:
        InputError: two tensors have the same name.
    """

    def __init__(self, file: TensorFile) -> None:
        self._file, self.path = file, file.path
        self._stored: dict[str, str] = {}
        self.tensors: dict[str, Any] = {}
        for stored in file.tensors:
            if _PICTURE_NAMES.match(stored):
                continue
            name = _text_name(stored)
            if name in self._stored:
                raise InputError(
                    f"{file.path.name} has the tensors {self._stored[name]!r} and {stored!r}",
                    f"both are {name!r} of the text decoder",
                    "download the checkpoint again",
                )
            self._stored[name], self.tensors[name] = stored, file.tensors[stored]

    def read(self, name: str) -> Any:
        """Return a tensor without a copy."""
        return self._file.read(self._stored[name])


def _text_name(stored: str) -> str:
    for pattern, replacement in _TEXT_NAMES:
        if pattern.match(stored):
            return pattern.sub(replacement, stored)
    return stored
