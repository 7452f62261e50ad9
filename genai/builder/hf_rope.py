"""Rotary embedding of a Hugging Face configuration: rope_parameters, or rope_theta and rope_scaling before it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import ConfigError
from .hf_config import HFConfig
from .rope_scaling import DynamicScaling, LinearScaling, Llama3Scaling, LongRope, RopeScaling, YarnScaling


def rope_fields(
    config: HFConfig, *, theta: float = 10000.0, partial: float = 1.0, kind: str | None = None
) -> dict[str, Any]:
    """Fields of DecoderSpec: rope_theta, rope_scaling, partial_rotary_factor, and the context length that they allow.

    Args:
        theta, partial: the architecture's defaults.
        kind: of the layers asked for, such as "full_attention", where they differ.

    Raises:
        ConfigError: a scaling that is not known, or lacks a number.
    """
    values = rope_values(config, kind)
    partial = config.number("partial_rotary_factor", "rotary_pct", default=partial)
    partial = _number(values, "partial_rotary_factor", partial)
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
        "partial_rotary_factor": partial,
        "context_length": context,
    }


def rope_values(config: HFConfig, kind: str | None = None) -> Mapping[str, Any]:
    """rope_parameters or rope_scaling, of one kind of layers if it tells them apart."""
    values = config.get("rope_parameters", "rope_scaling") or {}
    if not isinstance(values, dict):
        raise ConfigError(f"config.json: rope_parameters is {values!r}", "an object is expected", "correct the file")
    if kind is not None and any(isinstance(value, dict) for value in values.values()):
        values = values.get(kind) or {}
    return values


def _scaling(config: HFConfig, values: Mapping[str, Any], context: int) -> RopeScaling | None:
    kind = values.get("rope_type", values.get("type", "default"))
    if kind == "default":
        return None
    if kind == "mrope" or kind not in _READERS:
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
        original_max_position_embeddings=int(_number(values, "original_max_position_embeddings")),
    )


def _yarn(config: HFConfig, values: Mapping[str, Any], context: int) -> YarnScaling:
    original = int(_number(values, "original_max_position_embeddings", context))
    factor = _number(values, "factor", context / original)
    attention = values.get("attention_factor")
    mscale, all_dim = values.get("mscale"), values.get("mscale_all_dim")
    if attention is None and mscale and all_dim:
        attention = _magnitude(factor, mscale) / _magnitude(factor, all_dim)
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=attention,
        beta_fast=_number(values, "beta_fast", 32.0),
        beta_slow=_number(values, "beta_slow", 1.0),
        truncate=values.get("truncate", True),
    )


def _magnitude(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _longrope(config: HFConfig, values: Mapping[str, Any], context: int) -> LongRope:
    original = config.integer("original_max_position_embeddings", default=0)
    original = int(_number(values, "original_max_position_embeddings", original or context))
    attention = values.get("attention_factor")
    if attention is None and values.get("factor") is not None:
        factor = _number(values, "factor")
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return LongRope(
        short_factor=_numbers(values, "short_factor"),
        long_factor=_numbers(values, "long_factor"),
        original_max_position_embeddings=original,
        attention_factor=values.get("short_mscale", attention),
        long_attention_factor=values.get("long_mscale"),
    )


_READERS: dict[str, Callable[[HFConfig, Mapping[str, Any], int], RopeScaling]] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,
}


def _number(values: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = values.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"config.json: {name} of the rope scaling is {value!r}", "a number is expected", "correct it")
    return float(value)


def _numbers(values: Mapping[str, Any], name: str) -> tuple[float, ...]:
    value = values.get(name)
    if not isinstance(value, list) or any(isinstance(x, bool) or not isinstance(x, int | float) for x in value):
        raise ConfigError(f"config.json: {name} of the rope scaling is {value!r}", "a list of numbers is expected", "")
    return tuple(float(x) for x in value)
