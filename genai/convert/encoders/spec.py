"""The description of an encoder: sizes, the order of its parts, and the names of its tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class LayerNames:
    """Names of a layer's tensors, without ".weight" and ".bias"; "" = absent.

    Attributes:
        query, key, value: projections; or `joined`: one matrix with the rows of all three.
        output: projection of the attention's result.
        attention_norm: norm of the attention's input (pre-norm), or of the sum after it (post-norm).
        query_norm, key_norm: RMS norms per head before the rotation.
        attention_end: norm of the attention's result before it is added.
        up, down: feed-forward projections; `gate`: projection that multiplies `up` after the activation; or
            `gate_up`, `up_gate`: one matrix with the rows of both, in this order.
        feed_norm, feed_end: as `attention_norm` and `attention_end`.
    """

    output: str
    down: str
    attention_norm: str = ""
    feed_norm: str = ""
    query: str = ""
    key: str = ""
    value: str = ""
    joined: str = ""
    up: str = ""
    gate: str = ""
    gate_up: str = ""
    up_gate: str = ""
    query_norm: str = ""
    key_norm: str = ""
    attention_end: str = ""
    feed_end: str = ""


@dataclass(frozen=True)
class RelativeBias:
    """A bias per head and distance (Raffel et al. 2020): distances share buckets, which grow with the distance.

    Attributes:
        table: name of the tensor [buckets, heads].
        max_distance: distance from which all distances share the last bucket of a direction.
    """

    table: str
    buckets: int
    max_distance: int


@dataclass(frozen=True)
class Disentangled:
    """Attention to relative positions with projections of their own vectors (DeBERTa: He et al. 2021).

    Attributes:
        table: name of the tensor [2 * span, hidden_size] of relative positions.
        norm: name of the norm of that tensor; "" = none.
        span: number of buckets of distances in one direction.
        max_distance: distance from which all distances share a bucket; 0 = every distance has its own.
        to_positions: True to add the products of queries with keys of positions.
        from_positions: True to add the products of keys with queries of positions.
        own_projections: True if positions have projections of their own (pos_key_proj, pos_query_proj) in each layer.
    """

    table: str
    norm: str
    span: int
    max_distance: int
    to_positions: bool
    from_positions: bool
    own_projections: bool


@dataclass(frozen=True)
class TokenScore:
    """A score computed from the logits of a text's last token, as in rerankers that generate "yes" or "no".

    Attributes:
        true_id: id of the token whose logit is the score.
        false_id: id of the token whose logit is subtracted; None = nothing is subtracted.
    """

    true_id: int
    false_id: int | None = None


@dataclass(frozen=True)
class Head:
    """A classification head: dense layers with activations, the last of which computes logits.

    Attributes:
        layers: names and activations ("" = none) of dense layers, in order; `norm` is applied before the last layer.
        norm: name of a layer norm; "" = none.
        pooling: the rows that the head reads: "cls" (the first token), "last" (the last token) or "mean".
        score: if given, the last layer is a language model head, of which only this score is computed.
    """

    layers: tuple[tuple[str, str], ...]
    norm: str = ""
    pooling: str = "cls"
    score: TokenScore | None = None


@dataclass(frozen=True)
class EncoderSpec:
    """An encoder.

    Attributes:
        prefixes: prefixes of tensor names that checkpoints with a head add.
        embedding_width: width of the embedding tables, if it differs from hidden_size.
        words, positions, types: names of the embedding tables; "" = absent.
        has_types: True if the graph has the input token_type_ids; otherwise, all tokens have type 0.
        padding_id: id that is not counted in positions, which begin after it; None = positions begin at 0.
        embedding_norm, embedding_projection, embedding_scale: what is applied to the sum of the embeddings.
        norm: "layer" or "rms"; `norm_offset` is added to the weights of RMS norms.
        pre_norm: True for norms before attention and feed-forward, False for norms after the additions.
        thetas: base of the rotary position embedding per layer; empty = no rotation.
        rotation_factor: number that the frequencies of the rotation are divided by.
        windows: per layer, the number of tokens that a row sees on one side, its own included; None = all.
        scale: factor on attention scores; None = 1 / sqrt(head_size).
    """

    model_type: str
    hidden_size: int
    num_layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocab_size: int
    max_tokens: int
    activation: str
    words: str
    names: Callable[[int], LayerNames]
    prefixes: tuple[str, ...] = ()
    embedding_width: int = 0
    positions: str = ""
    num_positions: int = 0
    types: str = ""
    num_types: int = 0
    has_types: bool = False
    padding_id: int | None = None
    embedding_norm: str = ""
    embedding_projection: str = ""
    embedding_scale: float = 1.0
    norm: str = "layer"
    epsilon: float = 1e-12
    norm_offset: float = 0.0
    pre_norm: bool = False
    final_norm: str = ""
    thetas: tuple[float, ...] = ()
    rotation_factor: float = 1.0
    windows: tuple[int | None, ...] = ()
    causal: bool = False
    relative: RelativeBias | None = None
    disentangled: Disentangled | None = None
    scale: float | None = None
    head: Head | None = None
    num_labels: int = 0

    def window(self, layer: int) -> int | None:
        """Return the window of a layer."""
        return self.windows[layer] if self.windows else None
