"""A decoder's architecture as data: sizes, norms, rotary embedding, windows, caps and special tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .rope_scaling import RopeScaling
from .spec_checks import check_spec


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts in the place of the feed-forward layer.

    Attributes:
        count: experts per layer. per_token: how many of them each token is sent to.
        intermediate_size: width of each expert.
        routing: "softmax" over all experts; or "sparse_mixer" (Liu et al. 2023): two experts, each weighed against
            those whose scores come close to its own.
        normalized: the weights of the chosen experts are made to sum to 1 (softmax routing only).
        shared_intermediate_size: width of an expert that sees every token; 0 means none.
        shared_gate: that expert's output is multiplied with the sigmoid of a learned score.
    """

    count: int
    per_token: int
    intermediate_size: int
    routing: Literal["softmax", "sparse_mixer"] = "softmax"
    normalized: bool = True
    sparse_mixer_jitter: float = 0.01
    shared_intermediate_size: int = 0
    shared_gate: bool = False


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """One decoder: a stack of layers, each attention over the past and a feed-forward layer.

    Attributes:
        model_type: as onnxruntime-genai names it in genai_config.json, such as "llama" or "qwen2".
        head_size: elements per head; num_attention_heads * head_size need not equal hidden_size.
        context_length: tokens that a sequence may have, prompt and reply together.
        rms_norm_eps: epsilon of every norm, whatever its kind.
        norm: "rms", or "layer" with the mean taken off; norm_weights, norm_biases: what is learned.
        norm_weight_offset: added to every norm weight (1 in Gemma).
        pre_norms: attention and feed-forward layer read normed vectors; post_norms: their outputs are normed before
            they are added. Gemma 2 does both, OLMo 2 the second only.
        parallel: feed-forward layer and attention read the same stream, and are added together; shared_norm: the same
            normed vectors, too.
        rope_theta: base of the wavelengths; local_rope_theta: that of layers with a window, which then have no
            rope_scaling; None means the same as the others.
        rope_layers: layers that rotate queries and keys; None means all.
        partial_rotary_factor: share of each head that is rotated.
        rope_interleaved: pairs are neighbours (2i, 2i + 1) instead of halves (i, i + size / 2).
        position_embeddings: learned vectors per position are added to the embeddings (GPT-2).
        qkv_bias, o_bias, mlp_bias, head_bias: which projections have biases.
        qkv_clip: bound of queries, keys and values; 0 means none.
        qk_norm: norm over queries and keys before the rotation: with one weight vector for each head ("head"), with
            weights of its own for each head ("heads"), or over all heads together ("all"), by qk_norm_scope.
        gated_mlp: down(activation(gate(x)) * up(x)); else down(activation(up(x))).
        experts: in the place of the feed-forward layer, but for dense_layers.
        embedding_scale, residual_scale, logit_scale: multiply embeddings, what each part adds, and logits.
        attention_scale: multiplies attention scores; None means 1 / sqrt(head_size).
        attention_softcap, logit_softcap: cap * tanh(x / cap); 0 means none.
        sliding_window: tokens that a query sees, itself included; None means all.
        sliding_layers: layers that have the window; None means every layer.
        bos_token_id: None where the model has none.
        eos_token_ids: any of them ends a reply. pad_token_id: None means the first of these.

    Raises:
        InputError: sizes that contradict each other or lie out of range.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_size: int
    context_length: int
    rms_norm_eps: float = 1e-5
    norm: Literal["rms", "layer"] = "rms"
    norm_weights: bool = True
    norm_biases: bool = False
    hidden_activation: str = "silu"
    tie_word_embeddings: bool = False
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    local_rope_theta: float | None = None
    rope_layers: tuple[int, ...] | None = None
    partial_rotary_factor: float = 1.0
    rope_interleaved: bool = False
    position_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    qkv_clip: float = 0.0
    qk_norm: bool = False
    qk_norm_scope: Literal["head", "heads", "all"] = "head"
    qk_norm_biases: bool = False
    gated_mlp: bool = True
    experts: Experts | None = None
    dense_layers: tuple[int, ...] = ()
    pre_norms: bool = True
    post_norms: bool = False
    parallel: bool = False
    shared_norm: bool = False
    norm_weight_offset: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    attention_scale: float | None = None
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] | None = None
    bos_token_id: int | None = 1
    eos_token_ids: tuple[int, ...] = (2,)
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        check_spec(self)

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.head_size

    @property
    def key_value_size(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.num_key_value_heads * self.head_size

    @property
    def rotary_size(self) -> int:
        """Elements of a head that are rotated."""
        return int(self.head_size * self.partial_rotary_factor)

    def window(self, layer: int) -> int | None:
        """The layer's sliding window in tokens, or None."""
        local = self.sliding_layers is None or layer in self.sliding_layers
        return self.sliding_window if local else None

    def rotated(self, layer: int) -> bool:
        """Whether the layer rotates queries and keys."""
        return not self.position_embeddings and (self.rope_layers is None or layer in self.rope_layers)

    def local_rope(self, layer: int) -> bool:
        """Whether the layer rotates with the base of layers that have a window."""
        return self.local_rope_theta is not None and self.window(layer) is not None

    def routed(self, layer: int) -> Experts | None:
        """The layer's mixture of experts, or None."""
        return None if layer in self.dense_layers else self.experts
