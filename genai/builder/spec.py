"""A decoder's architecture as data: sizes, norms, rotary embedding, windows, caps and special tokens."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..errors import InputError

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's rotary scaling: long wavelengths are stretched by `factor`, short ones kept, others blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class LongRope:
    """LongRoPE: a divisor per frequency, one list up to `original_max_position_embeddings` tokens and one beyond.

    attention_factor multiplies cosines and sines; None means sqrt(1 + ln(context / original) / ln(original)).
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float | None = None


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """One architecture of the Llama family.

    Attributes:
        model_type: as onnxruntime-genai names it in genai_config.json, such as "llama" or "qwen2".
        head_size: elements per head; num_attention_heads * head_size need not equal hidden_size.
        context_length: tokens that a sequence may have, prompt and reply together.
        partial_rotary_factor: share of each head that is rotated.
        rope_interleaved: pairs are neighbours (2i, 2i + 1) instead of halves (i, i + size / 2).
        qkv_bias, o_bias, mlp_bias: which projections have biases.
        qk_norm: RMS norm over each query and key head, before the rotation (Qwen3).
        post_norms: attention and MLP outputs are normed before they are added (Gemma 2).
        norm_weight_offset: added to every norm weight (1 in Gemma).
        embedding_scale: multiplies embeddings.
        attention_scale: multiplies attention scores; None means 1 / sqrt(head_size).
        attention_softcap, logit_softcap: cap * tanh(x / cap); 0 means none.
        sliding_window: tokens that a query sees, itself included; None means all.
        sliding_layers: layers that have the window; None means every layer.
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
    hidden_activation: str = "silu"
    tie_word_embeddings: bool = False
    rope_theta: float = 10000.0
    rope_scaling: Llama3Scaling | LongRope | None = None
    partial_rotary_factor: float = 1.0
    rope_interleaved: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    norm_weight_offset: float = 0.0
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] | None = None
    bos_token_id: int = 1
    eos_token_ids: tuple[int, ...] = (2,)
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        _check_sizes(self)
        _check_attention(self)
        _check_rope(self)
        _check_tokens(self)

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


def _check_sizes(spec: DecoderSpec) -> None:
    for field in fields(spec):
        value = getattr(spec, field.name)
        if field.type == "int" and field.name != "bos_token_id" and value < 1:
            raise _error(f"{field.name} is {value}", "sizes and counts are at least 1")
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
    if spec.sliding_window is not None and spec.sliding_window < 1:
        raise _error(f"sliding_window is {spec.sliding_window}", "a query sees at least itself; None means no window")
    outside = [layer for layer in spec.sliding_layers or () if not 0 <= layer < spec.num_layers]
    if outside:
        raise _error(f"sliding_layers names layer {outside[0]}", f"the decoder has layers 0 to {spec.num_layers - 1}")
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
    if isinstance(spec.rope_scaling, LongRope):
        pairs = spec.rotary_size // 2
        for name in ("short_factor", "long_factor"):
            count = len(getattr(spec.rope_scaling, name))
            if count != pairs:
                raise _error(f"{name} has {count} entries", f"there are {pairs} rotated pairs in a head")


def _check_tokens(spec: DecoderSpec) -> None:
    if not spec.eos_token_ids:
        raise _error("eos_token_ids is empty", "a reply would never end")
    named = [("bos_token_id", spec.bos_token_id), *(("eos_token_ids", token) for token in spec.eos_token_ids)]
    if spec.pad_token_id is not None:
        named.append(("pad_token_id", spec.pad_token_id))
    for name, token in named:
        if not 0 <= token < spec.vocab_size:
            raise _error(f"{name} holds {token}", f"token ids are 0 to {spec.vocab_size - 1}")


def _error(what: str, why: str) -> InputError:
    return InputError(f"the decoder's specification is wrong: {what}", why, "correct the model's configuration")
