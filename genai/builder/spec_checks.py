"""What a DecoderSpec must satisfy."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from ..errors import InputError
from .rope_scaling import DynamicScaling, Llama3Scaling, LongRope

if TYPE_CHECKING:
    from .spec import DecoderSpec

# Far beyond any decoder, and small enough to count through.
MAX_LAYERS, MAX_EXPERTS, MAX_CONTEXT, MAX_SIZE = 1 << 12, 1 << 17, 1 << 24, 1 << 31
# Bases of rotations go up to 1e11.
MAX_NUMBER = 1e30
# Of a table inside a graph: four of them stay below the 2 GB of a protobuf message.
MAX_GRAPH_FLOATS = 1 << 26

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")


def check_spec(spec: DecoderSpec) -> None:
    """Raise InputError where sizes or options contradict each other."""
    _check_sizes(spec)
    _check_attention(spec)
    _check_rope(spec)
    _check_experts(spec)
    _check_tokens(spec)


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
    if spec.sliding_window is not None and spec.sliding_window < 1:
        raise _error(f"sliding_window is {spec.sliding_window}", "a query sees at least itself; None means no window")
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


def _error(what: str, why: str) -> InputError:
    return InputError(f"the decoder's specification is wrong: {what}", why, "correct the model's configuration")
