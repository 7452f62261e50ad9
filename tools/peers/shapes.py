"""Shapes of real models, as the config.json of their checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from genai.convert.architectures import find
from genai.convert.hf_config import HFConfig
from genai.convert.spec import DecoderSpec
from genai.convert.tensors import tensor_shapes

# INT4 in blocks of 32 with one float16 scale per block: the minimum that an engine must read.
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


_QWEN3_MOE = _COMMON | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "max_position_embeddings": 32768,
    "attention_bias": False,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "use_sliding_window": False,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "head_dim": 128,
}


@dataclass(frozen=True)
class Shape:
    """The sizes of a model.

    Attributes:
        name: name in folders and options.
        title: name in tables.
        config: contents of config.json.
    """

    name: str
    title: str
    config: Mapping[str, Any]

    @property
    def spec(self) -> DecoderSpec:
        """The specification of the decoder that our builder makes from the config."""
        return find(str(self.config["model_type"])).describe(HFConfig(self.config))

    @property
    def packed_bytes(self) -> int:
        """Bytes of all matrices in INT4 with blocks of 32 and float16 scales; a tied head counts once."""
        return int(self._weights(1.0) * _BYTES_PER_WEIGHT)

    @property
    def operations_per_token(self) -> int:
        """Multiplications and additions in the layers' matrix products for one prompt token, without the head."""
        return int(2 * self._weights(self._chosen(1), ".layers."))

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in float16, over all layers."""
        spec = self.spec
        return 2 * spec.num_layers * spec.num_key_value_heads * spec.head_size * _KV_BYTES

    def bytes_per_step(self, context: float, batch: int = 1) -> float:
        """Return the bytes that one decode step reads: each used weight once, and all keys and values."""
        return self._weights(self._chosen(batch)) * _BYTES_PER_WEIGHT + batch * context * self.kv_bytes_per_token

    def _weights(self, share_of_experts: float, place: str = "") -> float:
        """Count the weights in matrices whose names contain `place`; a share of the experts counts."""
        return sum(
            prod(shape) * (share_of_experts if ".experts." in name else 1)
            for name, shape in tensor_shapes(self.spec).items()
            if len(shape) >= 2 and place in name
        )

    def _chosen(self, batch: int) -> float:
        """Return the share of experts that a batch of random tokens selects."""
        experts, chosen = self.config.get("num_experts", 1), self.config.get("num_experts_per_tok", 1)
        return 1 - (1 - float(chosen) / experts) ** batch


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
        Shape(
            "llama-3.1-8b",
            "Llama-3.1-8B",
            _LLAMA
            | {
                "vocab_size": 128256,
                "hidden_size": 4096,
                "intermediate_size": 14336,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "tie_word_embeddings": False,
            },
        ),
        Shape(
            "moe-32x1024",
            "6 layers of 32 experts of 1024, 4 chosen",
            _QWEN3_MOE
            | {
                "vocab_size": 32000,
                "num_hidden_layers": 6,
                "num_key_value_heads": 4,
                "intermediate_size": 1024,
                "moe_intermediate_size": 1024,
                "num_experts": 32,
                "num_experts_per_tok": 4,
            },
        ),
        Shape(
            "moe-64x1024",
            "6 layers with OLMoE-1B-7B's sizes: 64 experts of 1024, 8 chosen",
            _QWEN3_MOE
            | {
                "vocab_size": 50304,
                "num_hidden_layers": 6,
                "num_key_value_heads": 16,
                "intermediate_size": 1024,
                "moe_intermediate_size": 1024,
                "num_experts": 64,
                "num_experts_per_tok": 8,
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
# The shapes that are measured by default.
DEFAULT_SHAPES = ("qwen2.5-0.5b", "llama-3.2-1b")
