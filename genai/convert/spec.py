"""A decoder's architecture as data: sizes, norms, rotary embedding, windows, caps and special tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Literal

from ..errors import InputError
from .rope_scaling import DynamicScaling, Llama3Scaling, LongRope, ProportionalRope, QueryScaling, RopeScaling


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec:
    """The mixture of experts that replaces a feed-forward layer.

    Attributes:
        count: number of experts per layer.
        per_token: number of experts that each token is routed to.
        intermediate_size: width of each expert.
        routing: "softmax" over all experts; "sparse_mixer" (Liu et al. 2023), which selects two experts and weights
            each by a softmax over the experts with similar scores; or "sigmoid", which weights each expert by the
            sigmoid of its score.
        normalized: True if the weights of the selected experts are normalised to sum to 1 (except sparse mixer).
        selection_bias: True if learned numbers are added to the sigmoids, or to the softmax, for the selection, but not
            for the weights.
        groups: number of groups of consecutive experts. If there are several, the experts of a token are selected from
            the `best_groups` groups with the highest sums of their `group_scores` highest scores.
        routed_scale: factor of the output of the selected experts.
        shared_intermediate_size: width of the shared expert that processes every token; 0 means none.
        shared_gate: True if the shared expert's output is multiplied by the sigmoid of a learned score.
        biased: True if the router and the experts have biases.
        activation: "swiglu"; "geglu", which is the tanh approximation of gelu(g) * u; or "relu2", the square of
            relu(u), for experts that consist of two matrices and have no gate.
        latent_size: width of the vectors that the selected experts read and write. One matrix projects the hidden
            vectors to this width, and another matrix projects the sum of the experts back. 0 means that the experts
            read the hidden vectors.
        beside_mlp: True if the layer also has an ordinary feed-forward layer (Gemma 4). Both read the residual stream
            with separate norms, and their normalised outputs are added. The router reads the stream after a norm with
            a separate weight.
        scaled: True if the output of each expert is multiplied by a learned number.
        scaled_inputs: True if the input of the selected expert is multiplied by the sigmoid of the expert's score
            (Llama 4). per_token is then 1.
        alpha, beta, limit: constants of the activation g * sigmoid(alpha * g) * (u + beta), where g is clamped to at
            most limit and u is clamped to -limit to limit.
    """

    count: int
    per_token: int
    intermediate_size: int
    routing: Literal["softmax", "sparse_mixer", "sigmoid"] = "softmax"
    normalized: bool = True
    selection_bias: bool = False
    groups: int = 1
    best_groups: int = 1
    group_scores: int = 1
    routed_scale: float = 1.0
    sparse_mixer_jitter: float = 0.01
    shared_intermediate_size: int = 0
    shared_gate: bool = False
    biased: bool = False
    activation: Literal["swiglu", "geglu", "relu2"] = "swiglu"
    latent_size: int = 0
    beside_mlp: bool = False
    scaled: bool = False
    scaled_inputs: bool = False
    alpha: float = 1.0
    beta: float = 0.0
    limit: float = math.inf

    @property
    def gated(self) -> bool:
        """True if each expert has a gate."""
        return self.activation != "relu2"

    def width(self, hidden_size: int) -> int:
        """Return the width of the vectors that the selected experts read."""
        return self.latent_size or hidden_size


@dataclass(frozen=True, kw_only=True)
class ShortConvSpec:
    """Gated short convolutions in place of the attention of some layers (LFM2).

    Attributes:
        layers: the layers that have a convolution.
        kernel: number of tokens that a result depends on.
        biased: True if the convolution and both projections have biases.
    """

    layers: tuple[int, ...]
    kernel: int
    biased: bool = False


@dataclass(frozen=True, kw_only=True)
class DeltaNetSpec:
    """Gated DeltaNet (Yang et al. 2024) in place of the attention of some layers (Qwen3-Next, Qwen 3.5).

    Attributes:
        layers: the layers that have linear attention.
        kernel: size of the convolution over queries, keys and values.
        key_heads, value_heads: numbers of heads.
        key_size, value_size: elements per head.
        gate_rank: rank of the projections of decays and gates, if each element of a key has a separate decay (Kimi
            Delta Attention: Kimi Team 2025). Queries, keys and values then have separate projections. 0 means that a
            projection gives one decay for each head.
        tiled: True if the value heads are in another order in the columns of out_proj: the first value head of each
            key head, then the second of each, and so on (ggml).
    """

    layers: tuple[int, ...]
    kernel: int
    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    gate_rank: int = 0
    tiled: bool = False

    @property
    def key_width(self) -> int:
        """The combined width of all key heads, which is also that of all query heads."""
        return self.key_heads * self.key_size

    @property
    def value_width(self) -> int:
        """The combined width of all value heads."""
        return self.value_heads * self.value_size


@dataclass(frozen=True, kw_only=True)
class MambaSpec:
    """Mamba-2 (Dao & Gu 2024) in place of the attention of some layers (Granite 4, Bamba), or beside it (Falcon H1).

    Attributes:
        layers: the layers that have a Mamba-2 part.
        kernel: size of the convolution.
        heads: number of heads, each with a separate decay.
        head_size: elements per head.
        state_size: number of state vectors per head.
        groups: number of groups of heads that share the projections to and from the state.
        biased: True if the projections have biases.
        conv_biased: True if the convolution has a bias.
        norm: norm of the result: of its product with the gate ("gated"), before this product ("before"), or "none".
        beside_attention: True if the layers also have attention, and the outputs of both are added.
        rank: rank of the projection of the time steps in Mamba-1 (Gu & Dao 2023), whose heads have one element, and a
            separate decay for each state; only this element passes through the convolution. 0 means Mamba-2.
        part_norms: True if the time steps and the projections to and from the state are normalised (Jamba).
    """

    layers: tuple[int, ...]
    kernel: int
    heads: int
    head_size: int
    state_size: int
    groups: int = 1
    biased: bool = False
    conv_biased: bool = True
    norm: Literal["gated", "before", "none"] = "gated"
    beside_attention: bool = False
    rank: int = 0
    part_norms: bool = False

    @property
    def width(self) -> int:
        """The combined width of all heads."""
        return self.heads * self.head_size

    @property
    def channels(self) -> int:
        """The number of channels of the convolution."""
        return self.width + (0 if self.rank else 2 * self.groups * self.state_size)


@dataclass(frozen=True, kw_only=True)
class LatentSpec:
    """Multi-head latent attention (DeepSeek-AI 2024): all heads share one latent row per token, which is cached.

    A row consists of a normalised vector, from which matrices compute the keys and values of each head, and of a
    rotated part that belongs to the keys of all heads. The matrices are absorbed: queries are multiplied by the
    matrices of the keys, and results by the matrices of the values. Attention then has one key/value head of
    rank + rope_size elements.

    Attributes:
        rank: elements of the vector.
        rope_size: elements of the rotated part.
        nope_size: elements of a query head that are not rotated.
        value_size: elements of a value head.
        query_rank: elements of the vector from which queries are computed; 0 means the hidden vector.
        biased: True if the projections of the hidden vector have biases.
        epsilon: epsilon of the norms of both vectors.
    """

    rank: int
    rope_size: int
    nope_size: int
    value_size: int
    query_rank: int = 0
    biased: bool = False
    epsilon: float = 1e-6

    @property
    def row_size(self) -> int:
        """The number of elements of a latent row."""
        return self.rank + self.rope_size


@dataclass(frozen=True, kw_only=True)
class PerLayerInputs:
    """A vector for each token and layer, which the layer adds to the residual stream (Gemma 3n, Gemma 4).

    The vector is the mean of an embedding of the token and a projection of the token's ordinary embedding, times
    sqrt(2). The layer multiplies it by a gate, projects it, and normalises the result.

    Attributes:
        size: elements of a vector.
        vocab_size: number of tokens that have embeddings; all other tokens have the embedding of token 0.
    """

    size: int
    vocab_size: int

    def table(self, vocab_size: int) -> dict[str, int]:
        """Return the names and row counts of the matrices that make up the embeddings of `vocab_size` tokens."""
        rest = vocab_size - self.vocab_size
        name = "model.embed_tokens_per_layer"
        return {name: self.vocab_size, **({f"{name}_rest": rest} if rest > 0 else {})}


@dataclass(frozen=True, kw_only=True)
class AltUpSpec:
    """Alternating updates (Baykal et al. 2023) and the learned augmented residual layer (Gemma 3n).

    The residual stream consists of several streams. Each layer predicts all streams from a learned combination of them,
    computes only one stream, and corrects the other streams by the difference between its result and the prediction.

    Attributes:
        streams: number of streams.
        active: index of the stream that the layers compute.
        scaled: True if the corrected active stream is scaled before it selects the layer's per-layer inputs.
        laurel_rank: rank of the matrix of the augmented residual layer.
    """

    streams: int
    active: int
    scaled: bool
    laurel_rank: int


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """One decoder: a stack of layers, each with attention over the past, or a recurrent part, and a feed-forward layer.

    Attributes:
        model_type: the name that onnxruntime-genai uses in genai_config.json, such as "llama" or "qwen2".
        head_size: elements per head; num_attention_heads * head_size need not equal hidden_size.
        context_length: maximum number of tokens in a sequence, prompt and reply together.
        rms_norm_eps: epsilon of every norm, for both kinds of norm.
        norm: "rms", or "layer", which also subtracts the mean.
        norm_weights: True if norms have learned weights.
        norm_biases: True if norms have learned biases.
        norm_weight_offset: constant added to every norm weight (1 in Gemma).
        pre_norms: True if the inputs of the attention and of the feed-forward layer are normalised.
        post_norms: True if the outputs of both are normalised before they are added to the residual stream. Gemma 2 has
            both pre_norms and post_norms, OLMo 2 only post_norms.
        parallel: True if the attention and the feed-forward layer read the same residual stream and their outputs are
            added together.
        shared_norm: True if both also read the same normalised vectors.
        rope_theta: base of the rotary wavelengths.
        local_rope_theta: base for layers with a sliding window; these layers then ignore rope_scaling. None means
            rope_theta.
        query_scaling: scaling of queries by their positions, in addition to rope_scaling; None means none.
        rope_layers: layers that rotate queries and keys; None means all.
        partial_rotary_factor: fraction of each head that is rotated.
        rope_interleaved: True if the rotated pairs are neighbours (2i, 2i + 1); False if they are (i, i + size / 2).
        position_embeddings: True if learned position embeddings are added to the token embeddings (GPT-2).
        qkv_bias, o_bias, mlp_bias, head_bias: True if these projections have biases.
        sinks: True if each head has an attention sink: a learned score in its softmax that belongs to a value of zero.
        qkv_clip: bound to which queries, keys and values are clamped; 0 means none.
        qk_norm: True if queries and keys are normalised.
        qk_norm_weights: True if these norms have learned weights. If False, only the layers that rotate have the norms.
        rotated_norms: True if queries and keys are normalised after the rotation instead of before it.
        qk_norm_scope: scope of the norm of queries and keys: each head with one shared weight vector ("head"), each
            head with separate weights ("heads"), or all heads together ("all").
        attention_gate: True if the attention's result is multiplied by the sigmoid of a projection.
        latent: latent attention; None means ordinary attention. head_size is then the size of a latent row, and
            num_key_value_heads is 1.
        full_head_size, full_key_value_heads: head_size and num_key_value_heads of the layers without a window; None
            means that all layers have the same sizes.
        value_norm: True if each value head is normalised, without learned weights.
        keys_as_values: True if values are the keys before their norm, in the layers without a window.
        num_cached_layers: number of layers that have keys and values. Each later layer attends to the keys and values
            of the last of these layers with the same window. None means all layers.
        recurrent: recurrent parts in place of the attention of some layers; None means none.
        feed_forward_layers: layers that consist of a feed-forward layer; every other layer then has no feed-forward
            layer (Nemotron-H). None means that every layer has both parts.
        gated_mlp: True for down(activation(gate(x)) * up(x)), False for down(activation(up(x))).
        intermediate_sizes: width of the feed-forward layer of each layer; None means intermediate_size.
        per_layer_inputs: vectors per token and layer; None means none.
        altup: alternating updates of several residual streams; None means one stream.
        sparsities: fraction of the inputs of each feed-forward layer's activation function that are set to 0, under the
            assumption that they are normally distributed; None means 0 for all layers.
        mtp: the head that predicts further tokens (multi-token prediction): a decoder with one layer that reads the
            normalised vectors from which this decoder computes its logits. None means none.
        reads_vectors: True for such a head: the layer reads a projection of the embedding of the token and of the
            vector of the previous token, which are normalised with separate weights.
        layer_scales: True if the residual stream is multiplied by a learned number after each layer.
        experts: the mixture of experts that replaces the feed-forward layer, except in dense_layers.
        matrix_scales: factors of matrices, by the parts of their names, which are applied when the matrices are read.
        embedding_scale, residual_scale, logit_scale: factors for the embeddings, for the output of each attention and
            feed-forward layer, and for the logits.
        attention_scale: factor for attention scores; None means 1 / sqrt(head_size).
        attention_softcap, logit_softcap: cap in cap * tanh(x / cap); 0 means none.
        sliding_window: number of tokens that a query attends to, including itself; None means all.
        sliding_layers: layers with the sliding window; None means every layer.
        chunk_size: number of tokens in a chunk; in the chunked layers, a query attends to the tokens of its chunk.
            None means that no layer has chunks.
        chunked_layers: layers with chunks (Llama 4).
        bos_token_id: id of the beginning-of-sequence token; None if the model has none.
        eos_token_ids: ids of the tokens that end a reply.
        pad_token_id: id of the padding token; None means the first of eos_token_ids.

    Raises:
        InputError: sizes contradict each other or are out of range.
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
    query_scaling: QueryScaling | None = None
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
    qk_norm_weights: bool = True
    rotated_norms: bool = False
    qk_norm_scope: Literal["head", "heads", "all"] = "head"
    qk_norm_biases: bool = False
    attention_gate: bool = False
    latent: LatentSpec | None = None
    full_head_size: int | None = None
    full_key_value_heads: int | None = None
    value_norm: bool = False
    keys_as_values: bool = False
    num_cached_layers: int | None = None
    recurrent: ShortConvSpec | DeltaNetSpec | MambaSpec | None = None
    feed_forward_layers: tuple[int, ...] | None = None
    gated_mlp: bool = True
    intermediate_sizes: tuple[int, ...] | None = None
    per_layer_inputs: PerLayerInputs | None = None
    altup: AltUpSpec | None = None
    sparsities: tuple[float, ...] | None = None
    layer_scales: bool = False
    mtp: DecoderSpec | None = None
    reads_vectors: bool = False
    experts: ExpertsSpec | None = None
    dense_layers: tuple[int, ...] = ()
    pre_norms: bool = True
    post_norms: bool = False
    parallel: bool = False
    shared_norm: bool = False
    norm_weight_offset: float = 0.0
    matrix_scales: tuple[tuple[str, float], ...] = ()
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    attention_scale: float | None = None
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] | None = None
    chunk_size: int | None = None
    chunked_layers: tuple[int, ...] = ()
    bos_token_id: int | None = 1
    eos_token_ids: tuple[int, ...] = (2,)
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        for check in _CHECKS:
            check(self)

    @property
    def query_size(self) -> int:
        """The combined width of all query heads."""
        return self.num_attention_heads * self.head_size

    @property
    def key_value_size(self) -> int:
        """The combined width of all key heads, which is also the combined width of all value heads."""
        return self.num_key_value_heads * self.head_size

    @property
    def rotary_size(self) -> int:
        """The number of elements of a head that are rotated, in the layers that do not rotate with local_rope_theta."""
        if self.latent is not None:
            return self.latent.rope_size
        return int((self.full_head_size or self.head_size) * self.partial_rotary_factor)

    @property
    def local_rotary_size(self) -> int:
        """The number of elements of a head that are rotated, in the layers that rotate with local_rope_theta."""
        if self.latent is not None:
            return self.latent.rope_size
        return int(self.head_size * self.partial_rotary_factor)

    @property
    def varies(self) -> bool:
        """True if the sizes of keys and values differ between layers."""
        return not {self.full_head_size, self.full_key_value_heads} <= {None}

    def at(self, layer: int) -> DecoderSpec:
        """Return the specification with head_size and num_key_value_heads of one layer."""
        if not self.varies or self.window(layer) is not None:
            return self
        return replace(
            self, head_size=self.full_head_size or self.head_size, full_head_size=None, full_key_value_heads=None,
            num_key_value_heads=self.full_key_value_heads or self.num_key_value_heads,
        )  # fmt: skip

    def cache_layer(self, layer: int) -> int:
        """Return the layer whose keys and values a layer attends to."""
        count = self.num_layers if self.num_cached_layers is None else self.num_cached_layers
        if layer < count:
            return layer
        return max((one for one in range(count) if self.window(one) == self.window(layer)), default=-1)

    @property
    def cached_layers(self) -> list[int]:
        """The layers that have keys and values."""
        return [
            layer for layer in range(self.num_layers)
            if self.cache_layer(layer) == layer and not self.is_recurrent(layer) and self.has_mixer(layer)
        ]  # fmt: skip

    def one_layer(self) -> DecoderSpec:
        """Return the specification of an MTP head with one attention layer like those of this decoder."""
        return replace(
            self, num_layers=1, recurrent=None, dense_layers=(), intermediate_sizes=None, mtp=None, reads_vectors=True
        )

    def mlp_size(self, layer: int) -> int:
        """Return the width of a layer's feed-forward layer."""
        return self.intermediate_size if self.intermediate_sizes is None else self.intermediate_sizes[layer]

    def reuses_keys(self, layer: int) -> bool:
        """Return True if a layer's values are its keys before their norm."""
        return self.keys_as_values and self.window(layer) is None

    def window(self, layer: int) -> int | None:
        """Return the layer's sliding window in tokens, or None."""
        local = self.sliding_layers is None or layer in self.sliding_layers
        return self.sliding_window if local else None

    def chunk(self, layer: int) -> int:
        """Return the number of tokens in a chunk of the layer; 0 means that the layer has no chunks."""
        size = self.chunk_size or 0
        return size if layer in self.chunked_layers and size < self.context_length else 0

    def has_norms(self, layer: int) -> bool:
        """Return True if the layer normalises queries and keys."""
        return self.qk_norm and (self.qk_norm_weights or self.rotated(layer))

    def scales_queries(self, layer: int) -> bool:
        """Return True if the layer multiplies queries that are not rotated by factors of their positions."""
        scaling = self.query_scaling
        return scaling is not None and not scaling.rotated and not self.rotated(layer) and not self.is_recurrent(layer)

    def rotated(self, layer: int) -> bool:
        """Return True if the layer rotates queries and keys."""
        if self.position_embeddings or self.is_recurrent(layer):
            return False
        return self.rope_layers is None or layer in self.rope_layers

    def is_recurrent(self, layer: int) -> bool:
        """Return True if the layer has a recurrent part in place of attention."""
        return self.has_recurrence(layer) and not getattr(self.recurrent, "beside_attention", False)

    def has_mixer(self, layer: int) -> bool:
        """Return True if the layer has attention or a recurrent part."""
        return self.feed_forward_layers is None or layer not in self.feed_forward_layers

    def has_recurrence(self, layer: int) -> bool:
        """Return True if the layer has a recurrent part."""
        return self.recurrent is not None and layer in self.recurrent.layers

    def local_rope(self, layer: int) -> bool:
        """Return True if the layer rotates with local_rope_theta."""
        return self.local_rope_theta is not None and self.window(layer) is not None

    def routed(self, layer: int) -> ExpertsSpec | None:
        """Return the layer's mixture of experts, or None."""
        return None if layer in self.dense_layers else self.experts


# Far above any real decoder, and small enough to loop over.
_MAX_KERNEL, _MAX_STREAMS = 256, 64
MAX_LAYERS, MAX_EXPERTS, MAX_CONTEXT, MAX_SIZE = 1 << 12, 1 << 17, 1 << 24, (1 << 31) - 1
# rope_theta goes up to 1e11 in published models.
MAX_NUMBER = 1e30
# Limit for one table inside a graph, so that four tables stay below the 2 GB limit of a protobuf message.
MAX_GRAPH_FLOATS = 1 << 26

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu")


def _check_sizes(spec: DecoderSpec) -> None:
    for field in fields(spec):
        value = getattr(spec, field.name)
        if field.type == "int" and value < 1:
            raise _error(f"{field.name} is {value}", "sizes and counts must be at least 1")
        limit = {"num_layers": MAX_LAYERS, "context_length": MAX_CONTEXT}.get(field.name, MAX_SIZE)
        if field.type == "int" and value > limit:
            raise _error(f"{field.name} is {value}", f"the maximum is {limit}")
    if spec.hidden_activation not in ACTIVATIONS:
        raise _error(
            f"hidden_activation is {spec.hidden_activation!r}", f"the supported functions are {', '.join(ACTIVATIONS)}"
        )
    if spec.rms_norm_eps <= 0:
        raise _error(f"rms_norm_eps is {spec.rms_norm_eps}", "the value must be positive to avoid a division by zero")


def _check_attention(spec: DecoderSpec) -> None:
    heads, kv_heads = spec.num_attention_heads, spec.num_key_value_heads
    if heads % kv_heads:
        raise _error(
            f"num_attention_heads is {heads} and num_key_value_heads is {kv_heads}",
            "the number of query heads must be a multiple of the number of key/value heads",
        )
    if spec.sliding_window is not None and not 1 <= spec.sliding_window <= MAX_SIZE:
        why = f"a window must have 1 to {MAX_SIZE} tokens, including the query (None disables the window)"
        raise _error(f"sliding_window is {spec.sliding_window}", why)
    size = spec.chunk_size
    if (size is None and spec.chunked_layers) or (size is not None and not 1 <= size <= MAX_SIZE):
        why = f"a chunk must have 1 to {MAX_SIZE} tokens (None is allowed only if no layer has chunks)"
        raise _error(f"chunk_size is {size}", why)
    if both := [layer for layer in spec.chunked_layers if spec.window(layer) is not None]:
        raise _error(f"layer {both[0]} has both a window and chunks", "a layer can have one of them")
    for name in ("sliding_layers", "chunked_layers", "rope_layers", "dense_layers"):
        outside = [layer for layer in getattr(spec, name) or () if not 0 <= layer < spec.num_layers]
        if outside:
            raise _error(f"{name} contains layer {outside[0]}", f"the decoder has layers 0 to {spec.num_layers - 1}")
    if spec.attention_softcap < 0 or spec.logit_softcap < 0:
        raise _error(
            f"attention_softcap is {spec.attention_softcap} and logit_softcap is {spec.logit_softcap}",
            "each cap must be positive, or 0 to disable it",
        )


def _check_layers(spec: DecoderSpec) -> None:
    sizes = spec.intermediate_sizes
    if sizes is not None and (len(sizes) != spec.num_layers or not all(1 <= size <= MAX_SIZE for size in sizes)):
        raise _error(
            f"intermediate_sizes is {sizes!r:.80}", f"each of the {spec.num_layers} layers needs a positive width"
        )
    for name in ("full_head_size", "full_key_value_heads"):
        value = getattr(spec, name)
        if value is not None and not 1 <= value <= MAX_SIZE:
            raise _error(f"{name} is {value}", f"the value must be from 1 to {MAX_SIZE}")
    if spec.full_key_value_heads is not None and spec.num_attention_heads % spec.full_key_value_heads:
        raise _error(
            f"num_attention_heads is {spec.num_attention_heads} and full_key_value_heads is "
            f"{spec.full_key_value_heads}",
            "the number of query heads must be a multiple of the number of key/value heads",
        )
    if spec.full_head_size is not None and spec.local_rope_theta is None:
        raise _error(
            f"full_head_size is {spec.full_head_size}, but local_rope_theta is None",
            "heads of two sizes need two rotations",
        )
    inputs = spec.per_layer_inputs
    if inputs is not None and not (1 <= inputs.size <= MAX_SIZE and 1 <= inputs.vocab_size <= MAX_SIZE):
        raise _error(
            f"per-layer inputs have {inputs.size} elements and {inputs.vocab_size} tokens",
            f"both numbers must be from 1 to {MAX_SIZE}",
        )


def _check_mamba(part: MambaSpec) -> None:
    for name in ("heads", "head_size", "state_size", "groups"):
        value = getattr(part, name)
        if not 1 <= value <= MAX_SIZE:
            raise _error(f"{name} of Mamba-2 is {value}", f"the value must be from 1 to {MAX_SIZE}")
    if not 0 <= part.rank <= MAX_SIZE:
        raise _error(f"rank of the time steps is {part.rank}", f"the value must be from 0 to {MAX_SIZE}")
    if part.heads % part.groups:
        raise _error(
            f"Mamba-2 has {part.heads} heads in {part.groups} groups", "each group must have the same number of heads"
        )
    if part.width * part.state_size > MAX_SIZE:
        raise _error(
            f"Mamba-2 has {part.heads} heads of {part.state_size} x {part.head_size}",
            f"a state can have at most {MAX_SIZE} numbers",
        )


def _check_altup(spec: DecoderSpec) -> None:
    shares, altup = spec.sparsities, spec.altup
    if shares is not None and (len(shares) != spec.num_layers or not all(0 <= share < 1 for share in shares)):
        raise _error(
            f"sparsities is {shares!r:.80}",
            f"each of the {spec.num_layers} layers needs a fraction from 0 to less than 1",
        )
    if altup is None:
        return
    if not 2 <= altup.streams <= _MAX_STREAMS or not 0 <= altup.active < altup.streams:
        raise _error(
            f"{altup.streams} residual streams, of which number {altup.active} is active",
            f"there must be 2 to {_MAX_STREAMS} streams, and one of them must be active",
        )
    if not 1 <= altup.laurel_rank <= MAX_SIZE:
        raise _error(f"laurel_rank is {altup.laurel_rank}", f"the value must be from 1 to {MAX_SIZE}")
    if spec.per_layer_inputs is None or not spec.post_norms or spec.recurrent is not None or spec.experts is not None:
        raise _error(
            "alternating updates in a decoder with other parts than those of Gemma 3n",
            "the layers must have per-layer inputs and norms after each part, and neither experts nor recurrent parts",
        )


def _check_parts(spec: DecoderSpec) -> None:
    layers = spec.feed_forward_layers
    if layers is None:
        return
    recurrent = () if spec.recurrent is None else spec.recurrent.layers
    if wrong := [layer for layer in layers if not 0 <= layer < spec.num_layers or layer in recurrent]:
        raise _error(
            f"layer {wrong[0]} consists of a feed-forward layer",
            f"the decoder has layers 0 to {spec.num_layers - 1}, and these layers have no recurrent parts",
        )
    if len(set(layers)) == spec.num_layers:
        raise _error("every layer consists of a feed-forward layer", "no layer has attention or a recurrent part")


def _check_sharing(spec: DecoderSpec) -> None:
    count = spec.num_cached_layers
    if count is None:
        return
    if not 1 <= count <= spec.num_layers:
        raise _error(f"num_cached_layers is {count}", f"the value must be from 1 to {spec.num_layers}")
    if spec.recurrent is not None and count < spec.num_layers:
        raise _error("layers of a decoder with recurrent parts share keys and values", "states cannot be shared")
    if lonely := [layer for layer in range(count, spec.num_layers) if spec.cache_layer(layer) < 0]:
        kind = "a" if spec.window(lonely[0]) else "no"
        raise _error(
            f"layer {lonely[0]} has {kind} window and attends to the keys and values of an earlier layer",
            f"none of the first {count} layers has {kind} window",
        )


def _check_recurrent(spec: DecoderSpec) -> None:
    recurrent = spec.recurrent
    if recurrent is None:
        return
    if outside := [layer for layer in recurrent.layers if not 0 <= layer < spec.num_layers]:
        raise _error(f"layer {outside[0]} is recurrent", f"the decoder has layers 0 to {spec.num_layers - 1}")
    if not 2 <= recurrent.kernel <= _MAX_KERNEL:
        raise _error(f"the convolutions have kernels of {recurrent.kernel}", f"expected 2 to {_MAX_KERNEL}")
    if isinstance(recurrent, MambaSpec):
        _check_mamba(recurrent)
    if isinstance(recurrent, DeltaNetSpec):
        for name in ("key_heads", "value_heads", "key_size", "value_size"):
            value = getattr(recurrent, name)
            if not 1 <= value <= MAX_SIZE:
                raise _error(f"{name} of linear attention is {value}", f"the value must be from 1 to {MAX_SIZE}")
        if recurrent.value_heads % recurrent.key_heads:
            raise _error(
                f"linear attention has {recurrent.value_heads} value heads and {recurrent.key_heads} key heads",
                "the number of value heads must be a multiple of the number of key heads",
            )
        if not 0 <= recurrent.gate_rank <= MAX_SIZE:
            raise _error(f"gate_rank is {recurrent.gate_rank}", f"the value must be from 0 to {MAX_SIZE}")
        if recurrent.value_width * recurrent.key_size > MAX_SIZE:
            raise _error(
                f"linear attention has {recurrent.value_heads} heads of {recurrent.key_size} x {recurrent.value_size}",
                f"a state can have at most {MAX_SIZE} numbers",
            )


def _check_latent(spec: DecoderSpec) -> None:
    latent = spec.latent
    if latent is None:
        return
    for name in ("rank", "rope_size", "nope_size", "value_size"):
        value = getattr(latent, name)
        if not 1 <= value <= MAX_SIZE:
            raise _error(f"{name} of latent attention is {value}", f"the value must be from 1 to {MAX_SIZE}")
    if latent.rope_size % 2:
        raise _error(f"rope_size of latent attention is {latent.rope_size}", "pairs of elements are rotated")
    if not 0 <= latent.query_rank <= MAX_SIZE:
        raise _error(
            f"query_rank of latent attention is {latent.query_rank}", f"the value must be from 0 to {MAX_SIZE}"
        )
    if spec.head_size != latent.row_size or spec.num_key_value_heads != 1:
        raise _error(
            f"head_size is {spec.head_size} and num_key_value_heads is {spec.num_key_value_heads}",
            f"latent attention has one key/value head of {latent.rank} + {latent.rope_size} elements",
        )


def _check_rope(spec: DecoderSpec) -> None:
    heads = (spec.head_size, spec.full_head_size or spec.head_size)
    for head_size in heads if spec.latent is None and spec.rope_layers != () else ():
        rotated = int(head_size * spec.partial_rotary_factor)
        if not 0 < spec.partial_rotary_factor <= 1 or rotated < 2 or rotated % 2:
            raise _error(
                f"partial_rotary_factor is {spec.partial_rotary_factor} and head_size is {head_size}, so "
                f"{rotated} elements are rotated",
                "the number of rotated elements must be even, at least 2, and at most head_size",
            )
    if not spec.rope_theta > 1 or not (spec.local_rope_theta is None or spec.local_rope_theta > 1):
        raise _error(
            f"rope_theta is {spec.rope_theta} and local_rope_theta is {spec.local_rope_theta}",
            "both values must be greater than 1",
        )
    for name in ("factor", "original_max_position_embeddings", "attention_factor"):
        value = getattr(spec.rope_scaling, name, None)
        if value is not None and not 0 < value < float("inf"):
            raise _error(f"{name} of the RoPE scaling is {value}", "the value must be positive and finite")
    scaling = spec.rope_scaling
    if isinstance(scaling, Llama3Scaling) and not scaling.low_freq_factor < scaling.high_freq_factor:
        raise _error(
            f"low_freq_factor is {scaling.low_freq_factor} and high_freq_factor is {scaling.high_freq_factor}",
            "low_freq_factor must be less than high_freq_factor",
        )
    if isinstance(scaling, ProportionalRope) and not 0 < scaling.share <= 1:
        raise _error(f"{scaling.share} of the frequencies rotate", "the fraction must be from 0 to 1")
    if isinstance(scaling, DynamicScaling) and spec.rotary_size < 4:
        raise _error(
            f"{spec.rotary_size} elements of a head are rotated", "dynamic scaling needs at least 4 rotated elements"
        )
    if isinstance(scaling, LongRope):
        _check_long_rope(spec, scaling)
    if spec.query_scaling is not None:
        _check_query_scaling(spec, spec.query_scaling)


def _check_long_rope(spec: DecoderSpec, scaling: LongRope) -> None:
    pairs = spec.rotary_size // 2
    for name in ("short_factor", "long_factor"):
        count = len(getattr(scaling, name))
        if count != pairs:
            raise _error(
                f"{name} has {count} entries", f"the list must have one entry for each of the {pairs} rotated pairs"
            )
    if not 1 < scaling.original_max_position_embeddings <= spec.context_length:
        raise _error(
            f"original_max_position_embeddings is {scaling.original_max_position_embeddings}",
            f"the value must be from 2 to context_length, which is {spec.context_length}",
        )
    if spec.context_length * pairs > MAX_GRAPH_FLOATS:
        raise _error(
            f"LongRoPE tables have {spec.context_length} positions of {pairs} pairs",
            f"a table in the graph can have at most {MAX_GRAPH_FLOATS} numbers",
        )


def _check_query_scaling(spec: DecoderSpec, scaling: QueryScaling) -> None:
    if not scaling.beta >= 0 or scaling.length < 1:
        raise _error(
            f"query_scaling has the beta {scaling.beta} and the length {scaling.length}",
            "the beta must not be negative, and the length must be at least 1",
        )
    if not scaling.rotated:
        return
    # The factor is part of the tables that rotate queries.
    plain = spec.rope_layers is None and not spec.position_embeddings and spec.partial_rotary_factor == 1
    if not plain or spec.local_rope_theta is not None or isinstance(spec.rope_scaling, LongRope):
        raise _error(
            "query_scaling is set for a decoder that does not rotate whole heads in all layers in the same way",
            "queries are scaled by the tables that rotate them",
        )


def _check_experts(spec: DecoderSpec) -> None:
    experts = spec.experts
    if experts is None:
        return
    total = spec.num_layers * experts.count
    if total > MAX_EXPERTS:
        raise _error(f"all layers together have {total} experts", f"a model can have at most {MAX_EXPERTS} experts")
    if not 1 <= experts.per_token <= experts.count or experts.intermediate_size < 1:
        raise _error(
            f"{experts.per_token} of {experts.count} experts of width {experts.intermediate_size} are used per token",
            "per_token must be from 1 to the number of experts, and the width must be at least 1",
        )
    if experts.count % experts.groups or not 1 <= experts.best_groups <= experts.groups:
        raise _error(
            f"{experts.count} experts are in {experts.groups} groups, of which {experts.best_groups} are selected",
            "the number of experts must be a multiple of the number of groups, and 1 to all groups can be selected",
        )
    if experts.scaled_inputs and experts.per_token != 1:
        raise _error(
            f"{experts.per_token} experts per token scale their inputs", "only the input of one expert can be scaled"
        )
    in_group = experts.count // experts.groups
    if experts.groups > 1 and (in_group * experts.best_groups < experts.per_token or in_group < experts.group_scores):
        raise _error(
            f"{experts.per_token} experts per token are selected from {experts.best_groups} groups of {in_group}",
            f"the groups must have enough experts, and each group at least {experts.group_scores}",
        )
    if experts.routing == "sparse_mixer" and experts.per_token != 2:
        raise _error(
            f"sparse mixer routing has {experts.per_token} experts per token", "this routing always selects two experts"
        )


def _check_tokens(spec: DecoderSpec) -> None:
    if not spec.eos_token_ids:
        raise _error("eos_token_ids is empty", "a reply ends only with an end-of-sequence token")
    named = [("bos_token_id", spec.bos_token_id), *(("eos_token_ids", token) for token in spec.eos_token_ids)]
    for name, token in [*named, ("pad_token_id", spec.pad_token_id)]:
        if token is not None and not 0 <= token < spec.vocab_size:
            raise _error(f"{name} contains {token}", f"token ids are integers from 0 to {spec.vocab_size - 1}")


def _error(problem: str, why: str) -> InputError:
    return InputError(f"invalid decoder specification: {problem}", why, "correct the model's configuration")


_CHECKS = (
    _check_sizes, _check_attention, _check_layers, _check_parts, _check_altup, _check_sharing, _check_recurrent,
    _check_latent, _check_rope, _check_experts, _check_tokens,
)  # fmt: skip
