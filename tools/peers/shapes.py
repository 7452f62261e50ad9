"""Shapes of real models, as the config.json of their checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from genai.builder.architectures import find
from genai.builder.hf_config import HFConfig
from genai.builder.spec import DecoderSpec
from genai.builder.tensors import tensor_shapes

# INT4 in blocks of 32 with a float16 scale each: what an engine must read of a matrix, at least.
_BYTES_PER_WEIGHT = 4 / 8 + 2 / 32
_KV_BYTES = 2

_COMMON = {
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_QWEN2 = _COMMON | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
}
_LLAMA = _COMMON | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "max_position_embeddings": 131072,
    "attention_bias": False,
    "mlp_bias": False,
}


@dataclass(frozen=True)
class Shape:
    """A model's sizes.

    Attributes:
        name: as in folders and options.
        title: for people.
        config: config.json.
    """

    name: str
    title: str
    config: Mapping[str, Any]

    @property
    def spec(self) -> DecoderSpec:
        """The decoder that our own builder makes of it."""
        return find(str(self.config["model_type"])).describe(HFConfig(self.config))

    @property
    def packed_bytes(self) -> int:
        """Bytes of all matrices in INT4, blocks of 32, float16 scales; a tied head counts once."""
        weights = sum(prod(shape) for shape in tensor_shapes(self.spec).values() if len(shape) >= 2)
        return int(weights * _BYTES_PER_WEIGHT)

    @property
    def operations_per_token(self) -> int:
        """Multiplications and additions of the layers' matrices for one token of a prompt (its head runs once)."""
        layers = {name: shape for name, shape in tensor_shapes(self.spec).items() if ".layers." in name}
        return 2 * sum(prod(shape) for shape in layers.values() if len(shape) >= 2)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in float16, over all layers."""
        spec = self.spec
        return 2 * spec.num_layers * spec.num_key_value_heads * spec.head_size * _KV_BYTES

    def bytes_per_step(self, context: float, batch: int = 1) -> float:
        """What one decode step of `batch` sequences reads: each weight once, and all keys and values."""
        return self.packed_bytes + batch * context * self.kv_bytes_per_token


def _qwen2(name: str, title: str, **sizes: int) -> Shape:
    return Shape(name, title, _QWEN2 | sizes)


SHAPES = {
    shape.name: shape
    for shape in (
        _qwen2(
            "qwen2.5-0.5b",
            "Qwen2.5-0.5B",
            vocab_size=151936,
            hidden_size=896,
            intermediate_size=4864,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
        ),
        Shape(
            "llama-3.2-1b",
            "Llama-3.2-1B",
            _LLAMA
            | {
                "vocab_size": 128256,
                "hidden_size": 2048,
                "intermediate_size": 8192,
                "num_hidden_layers": 16,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "head_dim": 64,
            },
        ),
        _qwen2(
            "tiny",
            "a tiny shape for tests",
            vocab_size=2048,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
        ),
    )
}
# What is measured unless something else is asked for.
DEFAULT_SHAPES = ("qwen2.5-0.5b", "llama-3.2-1b")
