"""config.json of a Hugging Face checkpoint, asked for typed values one key at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import ConfigError, UnsupportedModelError
from . import rope_scaling
from .spec import MAX_CONTEXT, MAX_LAYERS, MAX_NUMBER, MAX_SIZE

# What only training reads, what is about the file itself, what means nothing without another key, and special tokens,
# which generation_config.json may name instead.
_HARMLESS = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _name_or_path _sliding_window_pattern architectures
    attention_dropout attn_pdrop auto_map bos_token_id chunk_size_feed_forward classifier_dropout
    classifier_dropout_prob dtype embd_pdrop embedding_dropout eos_token_id experts_implementation finetuning_task
    gradient_checkpointing hidden_dropout hidden_dropout_prob id2label initializer_range input_jitter_noise label2id
    language n_ctx no_rope_layer_interval original_max_position_embeddings output_router_logits pad_token_id
    pretraining_tp reorder_and_upcast_attn resid_pdrop residual_dropout return_dict router_aux_loss_coef sep_token_id
    sliding_window_pattern summary_activation summary_first_dropout summary_proj_to_labels summary_type
    summary_use_proj task_specific_params tokenizer_class torch_dtype torchscript transformers_version use_cache
    """.split()
)


# No default: the key must be there.
REQUIRED: Any = object()


class HFConfig:
    """The values of config.json, and of generation_config.json where it names special tokens.

    A key may have several names, newest first. Every getter raises ConfigError if a value is missing that has no
    default, or is of another type.

    Args:
        part: of config.json, if these are not all of its values.
    """

    def __init__(self, values: Mapping[str, Any], generation: Mapping[str, Any] | None = None, part: str = "") -> None:
        self.values, self.generation = values, generation or {}
        self._part = part and f" of {part}"
        self._keys_read: set[str] = set()

    @property
    def model_type(self) -> str:
        return str(self._typed(("model_type",), REQUIRED, (str,)))

    def get(self, *names: str) -> Any:
        """The value as it is, or None."""
        self._keys_read.update(names)
        return next((self.values[name] for name in names if self.values.get(name) is not None), None)

    @property
    def unread(self) -> list[str]:
        """Keys that say something, that nobody asked for so far, and that are not known to change nothing."""
        return sorted(name for name, value in self.values.items() if value and name not in self._keys_read | _HARMLESS)

    @property
    def num_layers(self) -> int:
        return self.integer("num_hidden_layers", "n_layer", most=MAX_LAYERS)

    def integer(self, *names: str, default: int = REQUIRED, least: int = 1, most: int = MAX_SIZE) -> int:
        """A size or a count."""
        value = int(self._typed(names, default, (int,)))
        if not least <= value <= most:
            raise self.wrong(names[0], value, f"a whole number from {least} to {most}")
        return value

    def number(self, *names: str, default: float = REQUIRED, positive: bool = False) -> float:
        value = self._typed(names, default, (int, float))
        if not abs(value) <= MAX_NUMBER or (positive and value <= 0):  # Python's JSON knows NaN and Infinity
            raise self.wrong(names[0], value, "a positive number" if positive else "a finite number")
        return float(value)

    def flag(self, *names: str, default: bool = False) -> bool:
        return bool(self._typed(names, default, (bool,)))

    def text(self, *names: str, default: str = REQUIRED) -> str:
        return str(self._typed(names, default, (str,)))

    def optional_integer(self, name: str, default: int | None = None) -> int | None:
        """None where the file says null or 0; the default where it says nothing."""
        if self.get(name) in (None, 0):
            return None if name in self.values else default
        return self.integer(name)

    def optional_number(self, name: str, default: float = 0.0) -> float:
        """0 where the file says null; the default where it says nothing."""
        return self.number(name, default=0.0 if name in self.values else default)

    def layers(self, name: str, count: int) -> list[Any] | None:
        """A list with one entry per layer, or None."""
        value: list[Any] | None = self.get(name)
        if value is not None and (not isinstance(value, list) or len(value) != count):
            raise self.wrong(name, value, f"a list with one entry for each of the {count} layers")
        return value

    def numbers(self, name: str) -> list[int]:
        """A list of integers, empty where the file has none."""
        value = self.get(name)
        value = [] if value is None else value
        if not isinstance(value, list) or not all(type(number) is int for number in value):
            raise self.wrong(name, value, "a list of integers")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One special token or several; generation_config.json comes first, because it is what decoding obeys."""
        value = self.generation.get(name)
        value = self.get(name) if value is None else value
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int for token in ids):
            raise self.wrong(name, value, "a token id or a list of them")
        # -1 is how some checkpoints say "none".
        return tuple(dict.fromkeys(token for token in ids if token >= 0))

    def _typed(self, names: tuple[str, ...], default: Any, types: tuple[type, ...]) -> Any:
        value = self.get(*names)
        if value is None:
            if default is REQUIRED:
                problem = f"config.json has no {names[0]}{self._part}"
                raise ConfigError(problem, "the architecture needs it", "download the checkpoint again")
            return default
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise self.wrong(names[0], value, " or ".join(kind.__name__ for kind in types))
        return value

    def wrong(self, name: str, value: Any, expected: str) -> ConfigError:
        """The error for a value that is none of those wanted."""
        return ConfigError(f"config.json: {name}{self._part} is {value!r}", f"expected {expected}", "correct the file")


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
    share = values.number("partial_rotary_factor", default=share, positive=True)
    if partial is None and share != 1:
        raise UnsupportedModelError(
            f"config.json: partial_rotary_factor is {share}",
            f"{config.model_type} rotates whole heads",
            "check that model_type and the weights belong together",
        )
    context = config.integer("max_position_embeddings", "n_positions", default=2048)
    scaling = _scaling(config, values, context)
    if isinstance(scaling, rope_scaling.DynamicScaling):
        context = math.ceil(context * scaling.factor)
    elif isinstance(scaling, rope_scaling.YarnScaling):  # some configurations give the length before, some after
        context = max(context, math.ceil(scaling.original_max_position_embeddings * scaling.factor))
    base = config.number("rope_theta", "rotary_emb_base", default=theta)
    return {
        "rope_theta": values.number("rope_theta", default=base, positive=True),
        "rope_scaling": scaling,
        "partial_rotary_factor": share,
        "context_length": context,
    }


def rope_values(config: HFConfig, kind: str | None = None) -> HFConfig:
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
    return HFConfig(values, part="the rope scaling")


def _scaling(config: HFConfig, values: HFConfig, context: int) -> rope_scaling.RopeScaling | None:
    kind = values.get("rope_type", "type")
    if kind in (None, "default"):
        return None
    if not isinstance(kind, str) or kind not in _READERS:
        raise ConfigError(
            f"config.json: rope scaling {kind!r} is not known",
            f"known are default, {', '.join(sorted(_READERS))}",
            "use another checkpoint; with a scaling ignored every long text would come out wrong",
        )
    return _READERS[kind](config, values, context)


def _llama3(config: HFConfig, values: HFConfig, context: int) -> rope_scaling.Llama3Scaling:
    factors = {name: values.number(name, positive=True) for name in ("factor", "low_freq_factor", "high_freq_factor")}
    return rope_scaling.Llama3Scaling(original_max_position_embeddings=_original_length(values, context), **factors)


def _yarn(config: HFConfig, values: HFConfig, context: int) -> rope_scaling.YarnScaling:
    original = _original_length(values, context)
    factor = values.number("factor", default=context / original, positive=True)
    attention = _optional(values, "attention_factor")
    mscale, all_dim = _optional(values, "mscale"), _optional(values, "mscale_all_dim")
    if attention is None and mscale and all_dim:
        attention = rope_scaling.yarn_magnitude(factor, mscale) / rope_scaling.yarn_magnitude(factor, all_dim)
    return rope_scaling.YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=attention,
        beta_fast=values.number("beta_fast", default=32.0, positive=True),
        beta_slow=values.number("beta_slow", default=1.0, positive=True),
        truncate=values.get("truncate") is not False,
    )


def _longrope(config: HFConfig, values: HFConfig, context: int) -> rope_scaling.LongRope:
    original = config.integer("original_max_position_embeddings", default=_original_length(values, context), least=2)
    attention = _optional(values, "attention_factor")
    if attention is None and values.get("factor") is not None:
        attention = rope_scaling.long_rope_magnitude(values.number("factor", positive=True), original)
    short = _optional(values, "short_mscale")
    return rope_scaling.LongRope(
        short_factor=_numbers(values, "short_factor"),
        long_factor=_numbers(values, "long_factor"),
        original_max_position_embeddings=original,
        attention_factor=attention if short is None else short,
        long_attention_factor=_optional(values, "long_mscale"),
    )


_READERS: dict[str, Callable[[HFConfig, HFConfig, int], rope_scaling.RopeScaling]] = {
    "linear": lambda config, values, context: rope_scaling.LinearScaling(factor=values.number("factor", positive=True)),
    "dynamic": lambda config, values, context: rope_scaling.DynamicScaling(
        factor=values.number("factor", positive=True), original_max_position_embeddings=context
    ),
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,
}


def _original_length(values: HFConfig, context: int) -> int:
    """Tokens that the model was first trained on."""
    name = "original_max_position_embeddings"
    length = values.number(name, default=context, positive=True)
    if length < 2 or length > MAX_CONTEXT:
        raise values.wrong(name, values.get(name), f"a number from 2 to {MAX_CONTEXT}")
    return int(length)


def _optional(values: HFConfig, name: str) -> float | None:
    """A number; 0 means the same as none."""
    return values.number(name, positive=True) if values.get(name) not in (None, 0) else None


def _numbers(values: HFConfig, name: str) -> tuple[float, ...]:
    value = values.get(name)
    if not isinstance(value, list) or not all(type(x) in (int, float) and 0 < x <= MAX_NUMBER for x in value):
        raise values.wrong(name, value, "a list of positive numbers")
    return tuple(float(x) for x in value)
