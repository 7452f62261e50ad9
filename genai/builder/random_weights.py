"""Random weights for a decoder: each tensor depends on the seed and its own name alone, on every machine."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from .spec import DecoderSpec

Shape = tuple[int, ...]


class RandomWeights(Mapping[str, NDArray[np.float32]]):
    """Weights by Hugging Face name, drawn anew at every look-up, so that a large model takes no memory.

    Matrices keep the size of what they are applied to, so logits spread by about 1; norm weights lie around 1 (less the
    architecture's offset), biases around 0.
    """

    def __init__(self, spec: DecoderSpec, seed: int = 0) -> None:
        self._shapes = tensor_shapes(spec)
        self._norm_mean = np.float32(1 - spec.norm_weight_offset)
        self._seed = seed

    def __getitem__(self, name: str) -> NDArray[np.float32]:
        shape = self._shapes[name]
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        values = np.random.Generator(np.random.PCG64(int.from_bytes(digest))).standard_normal(shape, np.float32)
        if len(shape) == 2:
            return values * np.float32(shape[1] ** -0.5)
        values *= np.float32(0.2)
        return values if name.endswith(".bias") else values + self._norm_mean

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def tensor_shapes(spec: DecoderSpec) -> dict[str, Shape]:
    """Every tensor that a decoder reads, by Hugging Face name, in the order of the layers."""
    table = (spec.vocab_size, spec.hidden_size)
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": table}
    for layer in range(spec.num_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer_shapes(spec).items()}
    shapes["model.norm.weight"] = (spec.hidden_size,)
    if not spec.tie_word_embeddings:
        shapes["lm_head.weight"] = table
    return shapes


def _layer_shapes(spec: DecoderSpec) -> dict[str, Shape]:
    hidden, wide, queries, keys = spec.hidden_size, spec.intermediate_size, spec.query_size, spec.key_value_size
    matrices: dict[str, tuple[int, int, bool]] = {
        "self_attn.q_proj": (queries, hidden, spec.qkv_bias),
        "self_attn.k_proj": (keys, hidden, spec.qkv_bias),
        "self_attn.v_proj": (keys, hidden, spec.qkv_bias),
        "self_attn.o_proj": (hidden, queries, spec.o_bias),
        "mlp.gate_proj": (wide, hidden, spec.mlp_bias),
        "mlp.up_proj": (wide, hidden, spec.mlp_bias),
        "mlp.down_proj": (hidden, wide, spec.mlp_bias),
    }
    norms = ["input_layernorm", "post_attention_layernorm"]
    if spec.post_norms:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    shapes: dict[str, Shape] = {f"{name}.weight": (hidden,) for name in norms}
    for name, (rows, columns, bias) in matrices.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    if spec.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (spec.head_size,), "self_attn.k_norm.weight": (spec.head_size,)}
    return shapes
