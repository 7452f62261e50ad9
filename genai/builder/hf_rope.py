"""Rotary embedding of a Hugging Face configuration: rope_parameters, or rope_theta and rope_scaling before it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from ..errors import ConfigError, UnsupportedModelError
from .hf_config import HFConfig
from .rope_scaling import DynamicScaling, LinearScaling, Llama3Scaling, LongRope, RopeScaling, YarnScaling
from .spec_checks import MAX_CONTEXT, MAX_NUMBER


def rope_fields(
    config: HFConfig, *, theta: float = 10000.0, partial: float | None = None, kind: str | None = None
) -> dict[str, Any]:
    """Fields of DecoderSpec: rope_theta, rope_scaling, partial_rotary_factor, and the context length that they allow.

    Args:
        theta, partial: the architecture's defaults; no `partial` means that it rotates whole heads only.
        kind: of the layers asked for, such as "full_attention", where they differ.

    Raises:
        ConfigError: a scaling that is not known, or lacks a number.
        UnsupportedModelError: part of a head is to be rotated, which the architecture does not do.
    """
    values = rope_values(config, kind)
    share = config.number("partial_rotary_factor", "rotary_pct", default=partial or 1.0)
    share = _number(values, "partial_rotary_factor", share)
    if partial is None and share != 1:
        raise UnsupportedModelError(
            f"config.json: partial_rotary_factor is {share}",
            f"{config.model_type} rotates whole heads",
            "check that model_type and the weights belong together",
        )
    context = config.integer("max_position_embeddings", "n_positions", default=2048)
    scaling = _scaling(config, values, context)
    if isinstance(scaling, DynamicScaling):
        context = math.ceil(context * scaling.factor)
    elif isinstance(scaling, YarnScaling):  # some configurations give the length before, some after
        context = max(context, math.ceil(scaling.original_max_position_embeddings * scaling.factor))
    base = config.number("rope_theta", "rotary_emb_base", default=theta)
    return {
        "rope_theta": _number(values, "rope_theta", base),
        "rope_scaling": scaling,
        "partial_rotary_factor": share,
        "context_length": context,
    }


def rope_values(config: HFConfig, kind: str | None = None) -> Mapping[str, Any]:
    """rope_parameters or rope_scaling, of one kind of layers if it tells them apart."""
    values = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(values, dict):
        raise ConfigError(f"config.json: rope_parameters is {values!r}", "an object is expected", "correct the file")
    if kind is not None and any(isinstance(value, dict) for value in values.values()):
        values = values.get(kind) or {}
    if any(isinstance(value, dict) for value in values.values()):
        raise UnsupportedModelError(
            f"config.json has rope_parameters for {', '.join(map(repr, values))}",
            "here all layers rotate alike",
            "check that model_type and the weights belong together",
        )
    return values


def _scaling(config: HFConfig, values: Mapping[str, Any], context: int) -> RopeScaling | None:
    kind = values.get("rope_type", values.get("type", "default"))
    if kind == "default":
        return None
    if not isinstance(kind, str) or kind not in _READERS:
        raise ConfigError(
            f"config.json: rope scaling {kind!r} is not known",
            f"known are default, {', '.join(sorted(_READERS))}",
            "use another checkpoint; with a scaling ignored every long text would come out wrong",
        )
    return _READERS[kind](config, values, context)


def _linear(config: HFConfig, values: Mapping[str, Any], context: int) -> LinearScaling:
    return LinearScaling(factor=_number(values, "factor"))


def _dynamic(config: HFConfig, values: Mapping[str, Any], context: int) -> DynamicScaling:
    return DynamicScaling(factor=_number(values, "factor"), original_max_position_embeddings=context)


def _llama3(config: HFConfig, values: Mapping[str, Any], context: int) -> Llama3Scaling:
    return Llama3Scaling(
        factor=_number(values, "factor"),
        low_freq_factor=_number(values, "low_freq_factor"),
        high_freq_factor=_number(values, "high_freq_factor"),
        original_max_position_embeddings=_original_length(values, context),
    )


def _yarn(config: HFConfig, values: Mapping[str, Any], context: int) -> YarnScaling:
    original = _original_length(values, context)
    factor = _number(values, "factor", context / original)
    attention = _optional(values, "attention_factor")
    mscale, all_dim = _optional(values, "mscale"), _optional(values, "mscale_all_dim")
    if attention is None and mscale and all_dim:
        attention = _magnitude(factor, mscale) / _magnitude(factor, all_dim)
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=attention,
        beta_fast=_number(values, "beta_fast", 32.0),
        beta_slow=_number(values, "beta_slow", 1.0),
        truncate=values.get("truncate") is not False,
    )


def _magnitude(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _longrope(config: HFConfig, values: Mapping[str, Any], context: int) -> LongRope:
    original = config.integer("original_max_position_embeddings", default=_original_length(values, context), least=2)
    attention = _optional(values, "attention_factor")
    if attention is None and values.get("factor") is not None:
        factor = _number(values, "factor")
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    short = _optional(values, "short_mscale")
    return LongRope(
        short_factor=_numbers(values, "short_factor"),
        long_factor=_numbers(values, "long_factor"),
        original_max_position_embeddings=original,
        attention_factor=attention if short is None else short,
        long_attention_factor=_optional(values, "long_mscale"),
    )


_READERS: dict[str, Callable[[HFConfig, Mapping[str, Any], int], RopeScaling]] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,
}


def _original_length(values: Mapping[str, Any], context: int) -> int:
    """Tokens that the model was first trained on."""
    name = "original_max_position_embeddings"
    length = _number(values, name, context)
    if length < 2 or length > MAX_CONTEXT:
        raise _wrong(name, values.get(name), f"a number from 2 to {MAX_CONTEXT} is expected")
    return int(length)


def _number(values: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = values.get(name)
    value = default if value is None else value
    if not _is_positive(value):
        raise _wrong(name, value, "a positive number is expected")
    return float(value)


def _optional(values: Mapping[str, Any], name: str) -> float | None:
    """A number; 0 means the same as none."""
    return _number(values, name) if values.get(name) not in (None, 0) else None


def _numbers(values: Mapping[str, Any], name: str) -> tuple[float, ...]:
    value = values.get(name)
    if not isinstance(value, list) or not all(map(_is_positive, value)):
        raise _wrong(name, value, "a list of positive numbers is expected")
    return tuple(float(x) for x in value)


def _is_positive(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MAX_NUMBER


def _wrong(name: str, value: Any, why: str) -> ConfigError:
    return ConfigError(f"config.json: {name} of the rope scaling is {value!r}", why, "correct the file")
