"""A decoder's architecture as data: sizes, norms, rotary embedding, windows, caps and special tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

from ..errors import InputError
from .rope_scaling import DynamicScaling, Llama3Scaling, LongRope, RopeScaling


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec:
    """A mixture of experts in the place of the feed-forward layer.

    Attributes:
        count: experts per layer. per_token: how many of them each token is sent to.
        intermediate_size: width of each expert.
        routing: "softmax" over all experts; or "sparse_mixer" (Liu et al. 2023): two experts, each weighed against
            those whose scores come close to its own.
        normalized: the weights of the chosen experts are made to sum to 1 (softmax routing only).
        shared_intermediate_size: width of an expert that sees every token; 0 means none.
        shared_gate: that expert's output is multiplied with the sigmoid of a learned score.
        biased: the router and the experts have biases.
        alpha, beta, limit: an expert computes g * sigmoid(alpha * g) * (u + beta), g and u bounded by the limit (g from
            above only).
    """

    count: int
    per_token: int
    intermediate_size: int
    routing: Literal["softmax", "sparse_mixer"] = "softmax"
    normalized: bool = True
    sparse_mixer_jitter: float = 0.01
    shared_intermediate_size: int = 0
    shared_gate: bool = False
    biased: bool = False
    alpha: float = 1.0
    beta: float = 0.0
    limit: float = math.inf


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
        sinks: each head has a learned score that takes part in its softmax, with a value of zero.
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
    sinks: bool = False
    qkv_clip: float = 0.0
    qk_norm: bool = False
    qk_norm_scope: Literal["head", "heads", "all"] = "head"
    qk_norm_biases: bool = False
    gated_mlp: bool = True
    experts: ExpertsSpec | None = None
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
        for check in (_check_sizes, _check_attention, _check_rope, _check_experts, _check_tokens):
            check(self)

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

    def routed(self, layer: int) -> ExpertsSpec | None:
        """The layer's mixture of experts, or None."""
        return None if layer in self.dense_layers else self.experts


# Far beyond any decoder, and small enough to count through.
MAX_LAYERS, MAX_EXPERTS, MAX_CONTEXT, MAX_SIZE = 1 << 12, 1 << 17, 1 << 24, (1 << 31) - 1
# Bases of rotations go up to 1e11.
MAX_NUMBER = 1e30
# Of a table inside a graph: four of them stay below the 2 GB of a protobuf message.
MAX_GRAPH_FLOATS = 1 << 26

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")


def _check_sizes(spec: DecoderSpec) -> None:
    for field in fields(spec):
        value = getattr(spec, field.name)
        if field.type == "int" and value < 1:
            raise _error(f"{field.name} is {value}", "sizes and counts are at least 1")
        limit = {"num_layers": MAX_LAYERS, "context_length": MAX_CONTEXT}.get(field.name, MAX_SIZE)
        if field.type == "int" and value > limit:
            raise _error(f"{field.name} is {value}", f"more than {limit} is taken for a mistake")
    if spec.hidden_activation not in ACTIVATIONS:
        raise _error(f"hidden_activation is {spec.hidden_activation!r}", f"known are {', '.join(ACTIVATIONS)}")
    if spec.rms_norm_eps <= 0:
        raise _error(f"rms_norm_eps is {spec.rms_norm_eps}", "it keeps the norm from dividing by zero")


def _check_attention(spec: DecoderSpec) -> None:
    heads, kv_heads = spec.num_attention_heads, spec.num_key_value_heads
    if heads % kv_heads:
        raise _error(
            f"num_attention_heads is {heads} and num_key_value_heads is {kv_heads}",
            "each key/value head serves the same number of query heads",
        )
    if spec.sliding_window is not None and not 1 <= spec.sliding_window <= MAX_SIZE:
        why = f"a query sees at least itself, and at most {MAX_SIZE} tokens; None means no window"
        raise _error(f"sliding_window is {spec.sliding_window}", why)
    for name in ("sliding_layers", "rope_layers", "dense_layers"):
        outside = [layer for layer in getattr(spec, name) or () if not 0 <= layer < spec.num_layers]
        if outside:
            raise _error(f"{name} names layer {outside[0]}", f"the decoder has layers 0 to {spec.num_layers - 1}")
    if spec.attention_softcap < 0 or spec.logit_softcap < 0:
        raise _error(
            f"attention_softcap is {spec.attention_softcap} and logit_softcap is {spec.logit_softcap}",
            "a cap is positive, or 0 for none",
        )


def _check_rope(spec: DecoderSpec) -> None:
    if not 0 < spec.partial_rotary_factor <= 1 or spec.rotary_size < 2 or spec.rotary_size % 2:
        raise _error(
            f"partial_rotary_factor is {spec.partial_rotary_factor} with head_size {spec.head_size}: "
            f"{spec.rotary_size} elements are rotated",
            "rotation works on pairs, and on at most the whole head",
        )
    if not spec.rope_theta > 1 or not (spec.local_rope_theta is None or spec.local_rope_theta > 1):
        raise _error(f"rope_theta is {spec.rope_theta}, local {spec.local_rope_theta}", "a base is larger than 1")
    for name in ("factor", "original_max_position_embeddings", "attention_factor"):
        value = getattr(spec.rope_scaling, name, None)
        if value is not None and not 0 < value < float("inf"):
            raise _error(f"{name} of the RoPE scaling is {value}", "it is a positive number")
    scaling = spec.rope_scaling
    if isinstance(scaling, Llama3Scaling) and not scaling.low_freq_factor < scaling.high_freq_factor:
        raise _error(
            f"low_freq_factor is {scaling.low_freq_factor}, high_freq_factor {scaling.high_freq_factor}",
            "between them lies the blend of kept and stretched frequencies",
        )
    if isinstance(scaling, DynamicScaling) and spec.rotary_size < 4:
        raise _error(f"{spec.rotary_size} elements of a head are rotated", "dynamic scaling needs two pairs or more")
    if isinstance(scaling, LongRope):
        _check_long_rope(spec, scaling)


def _check_long_rope(spec: DecoderSpec, scaling: LongRope) -> None:
    pairs = spec.rotary_size // 2
    for name in ("short_factor", "long_factor"):
        count = len(getattr(scaling, name))
        if count != pairs:
            raise _error(f"{name} has {count} entries", f"there are {pairs} rotated pairs in a head")
    if not 1 < scaling.original_max_position_embeddings <= spec.context_length:
        raise _error(
            f"original_max_position_embeddings is {scaling.original_max_position_embeddings}",
            f"it lies between 2 and the {spec.context_length} positions there are",
        )
    if spec.context_length * pairs > MAX_GRAPH_FLOATS:
        raise _error(
            f"LongRoPE with {spec.context_length} positions of {pairs} pairs",
            f"its tables lie in the graph, which holds {MAX_GRAPH_FLOATS} numbers in each",
        )


def _check_experts(spec: DecoderSpec) -> None:
    experts = spec.experts
    if experts is None:
        return
    total = spec.num_layers * experts.count
    if total > MAX_EXPERTS:
        raise _error(f"there are {total} experts in all layers", f"more than {MAX_EXPERTS} is taken for a mistake")
    if not 1 <= experts.per_token <= experts.count or experts.intermediate_size < 1:
        raise _error(
            f"{experts.per_token} of {experts.count} experts of width {experts.intermediate_size} are used per token",
            "each token is sent to at least one of the experts there are",
        )
    if experts.routing == "sparse_mixer" and experts.per_token != 2:
        raise _error(f"sparse mixer routing with {experts.per_token} experts per token", "it chooses two")


def _check_tokens(spec: DecoderSpec) -> None:
    if not spec.eos_token_ids:
        raise _error("eos_token_ids is empty", "a reply would never end")
    named = [("bos_token_id", spec.bos_token_id), *(("eos_token_ids", token) for token in spec.eos_token_ids)]
    for name, token in [*named, ("pad_token_id", spec.pad_token_id)]:
        if token is not None and not 0 <= token < spec.vocab_size:
            raise _error(f"{name} holds {token}", f"token ids are 0 to {spec.vocab_size - 1}")


def _error(problem: str, why: str) -> InputError:
    return InputError(f"the decoder's specification is wrong: {problem}", why, "correct the model's configuration")
