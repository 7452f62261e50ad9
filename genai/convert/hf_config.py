"""Typed access to the values of a Hugging Face checkpoint's config.json."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import ConfigError, UnsupportedModelError
from . import rope_scaling
from .spec import MAX_CONTEXT, MAX_LAYERS, MAX_NUMBER, MAX_SIZE

# Keys that only training uses, keys about the file itself, keys that are meaningful only together with another key, and
# keys of special tokens, which generation_config.json may override. Heads that predict further tokens are not read.
_HARMLESS = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _name_or_path _sliding_window_pattern architectures
    attention_dropout attn_pdrop auto_map bos_token_id chunk_size_feed_forward classifier_dropout
    classifier_dropout_prob dtype embd_pdrop embedding_dropout eos_token_id experts_implementation finetuning_task
    gradient_checkpointing hidden_dropout hidden_dropout_prob id2label initializer_range input_jitter_noise label2id
    language n_ctx no_rope_layer_interval num_mtp_layers num_nextn_predict_layers original_max_position_embeddings
    output_router_logits pad_token_id pretraining_tp reorder_and_upcast_attn resid_pdrop residual_dropout return_dict
    router_aux_loss_coef sep_token_id sliding_window_pattern summary_activation summary_first_dropout
    summary_proj_to_labels summary_type summary_use_proj task_specific_params tokenizer_class torch_dtype torchscript
    num_logits_to_keep transformers_version use_cache
    """.split()
)


# Marks a getter without a default: the key must be present.
REQUIRED: Any = object()


class HFConfig:
    """The values in config.json, and the special tokens in generation_config.json and in the tokenizer's files.

    A key may have several names; the getters accept them with the newest name first. Every getter raises ConfigError if
    a value without a default is missing or a value has the wrong type.

    Args:
        values: the JSON object.
        generation: the JSON object of generation_config.json.
        part: name of the part of config.json that `values` holds, for error messages; "" means the whole file.
        tokenizer_ends: returns the ids of the tokenizer's tokens that end a reply.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        generation: Mapping[str, Any] | None = None,
        part: str = "",
        tokenizer_ends: Callable[[], Sequence[int]] = tuple,
    ) -> None:
        self.values, self.generation = values, generation or {}
        self.tokenizer_ends = tokenizer_ends
        self._part = part and f" of {part}"
        self._keys_read: set[str] = set()

    @property
    def model_type(self) -> str:
        return str(self._typed(("model_type",), REQUIRED, (str,)))

    def with_values(self, values: Mapping[str, Any], part: str | None = None) -> HFConfig:
        """Return a configuration with other values, in the same part of config.json unless `part` is set."""
        changed = HFConfig(values, self.generation, "" if part is None else part, self.tokenizer_ends)
        changed._part = self._part if part is None else changed._part
        return changed

    def get(self, *names: str) -> Any:
        """Return the value without a check, or None."""
        self._keys_read.update(names)
        return next((self.values[name] for name in names if self.values.get(name) is not None), None)

    @property
    def unread(self) -> list[str]:
        """Keys that have a value, have not been read so far, and are not in the list of harmless keys."""
        return sorted(name for name, value in self.values.items() if value and name not in self._keys_read | _HARMLESS)

    @property
    def num_layers(self) -> int:
        return self.integer("num_hidden_layers", "n_layer", most=MAX_LAYERS)

    def integer(self, *names: str, default: int = REQUIRED, least: int = 1, most: int = MAX_SIZE) -> int:
        """Return a size or a count."""
        value = int(self._typed(names, default, (int,)))
        if not least <= value <= most:
            raise self.wrong(names[0], value, f"an integer from {least} to {most}")
        return value

    def number(self, *names: str, default: float = REQUIRED, positive: bool = False) -> float:
        value = self._typed(names, default, (int, float))
        if not abs(value) <= MAX_NUMBER or (positive and value <= 0):  # Python's JSON parser accepts NaN and Infinity
            raise self.wrong(names[0], value, "a positive number" if positive else "a finite number")
        return float(value)

    def flag(self, *names: str, default: bool = False) -> bool:
        return bool(self._typed(names, default, (bool,)))

    def text(self, *names: str, default: str = REQUIRED) -> str:
        return str(self._typed(names, default, (str,)))

    def optional_integer(self, name: str, default: int | None = None) -> int | None:
        """Return an integer: None if the value is null or 0, the default if the key is missing."""
        if self.get(name) in (None, 0):
            return None if name in self.values else default
        return self.integer(name)

    def optional_number(self, name: str, default: float = 0.0) -> float:
        """Return a number: 0 if the value is null, the default if the key is missing."""
        return self.number(name, default=0.0 if name in self.values else default)

    def layers(self, name: str, count: int) -> list[Any] | None:
        """Return a list with one entry per layer, or None."""
        value: list[Any] | None = self.get(name)
        if value is not None and (not isinstance(value, list) or len(value) != count):
            raise self.wrong(name, value, f"a list with one entry for each of the {count} layers")
        return value

    def numbers(self, name: str) -> list[int]:
        """Return a list of integers, empty if the key is missing."""
        value = self.get(name)
        value = [] if value is None else value
        if not isinstance(value, list) or not all(type(number) is int for number in value):
            raise self.wrong(name, value, "a list of integers")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Return one or more special tokens. generation_config.json takes precedence, because it governs decoding."""
        value = self.generation.get(name)
        value = self.get(name) if value is None else value
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int for token in ids):
            raise self.wrong(name, value, "a token id or a list of token ids")
        # Some checkpoints use -1 for "none".
        return tuple(dict.fromkeys(token for token in ids if token >= 0))

    def ends(self, vocab_size: int) -> tuple[int, ...]:
        """Return the ids that end a reply: those of the configuration, and those of the tokenizer.

        A fine-tune often changes the tokenizer's files only. An end of the tokenizer without an embedding never occurs.
        """
        known = (token for token in self.tokenizer_ends() if token < vocab_size)
        return tuple(dict.fromkeys([*self.token_ids("eos_token_id"), *known]))

    def _typed(self, names: tuple[str, ...], default: Any, types: tuple[type, ...]) -> Any:
        value = self.get(*names)
        if value is None:
            if default is REQUIRED:
                problem = f"config.json has no {names[0]}{self._part}"
                raise ConfigError(problem, "the architecture requires this key", "download the checkpoint again")
            return default
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise self.wrong(names[0], value, " or ".join(kind.__name__ for kind in types))
        return value

    def wrong(self, name: str, value: Any, expected: str) -> ConfigError:
        """Return the error for an unexpected value."""
        return ConfigError(
            f"config.json: {name}{self._part} is {value!r}", f"expected {expected}", "correct the value in config.json"
        )


def rope_fields(
    config: HFConfig, *, theta: float = 10000.0, partial: float | None = None, kind: str | None = None
) -> dict[str, Any]:
    """Return DecoderSpec's rope_theta, rope_scaling and partial_rotary_factor, and the context length that they allow.

    Args:
        theta: the architecture's default base.
        partial: the architecture's default fraction of a head to rotate; None if it rotates only whole heads.
        kind: kind of layers to read the values for, such as "full_attention", if the kinds differ.

    Raises:
        ConfigError: the scaling is unknown or lacks a number.
        UnsupportedModelError: the file sets a fraction of each head, but the architecture rotates only whole heads.
    """
    values = rope_values(config, kind)
    share = config.number("partial_rotary_factor", "rotary_pct", default=partial or 1.0)
    share = values.number("partial_rotary_factor", default=share, positive=True)
    context = config.integer("max_position_embeddings", "n_positions", default=2048)
    scaling = _scaling(config, values, context)
    if isinstance(scaling, rope_scaling.ProportionalRope):  # tables of whole heads
        share = 1.0
    if partial is None and share != 1:
        raise UnsupportedModelError(
            f"config.json: partial_rotary_factor is {share}",
            f"{config.model_type} models rotate only whole heads",
            "check that model_type in config.json matches the weights",
        )
    if isinstance(scaling, rope_scaling.DynamicScaling):
        context = math.ceil(context * scaling.factor)
    elif isinstance(scaling, rope_scaling.YarnScaling):  # some give the original length, some the scaled one
        context = max(context, math.ceil(scaling.original_max_position_embeddings * scaling.factor))
    base = config.number("rope_theta", "rotary_emb_base", default=theta)
    return {
        "rope_theta": values.number("rope_theta", default=base, positive=True),
        "rope_scaling": scaling,
        "partial_rotary_factor": share,
        "context_length": context,
    }


def rope_values(config: HFConfig, kind: str | None = None) -> HFConfig:
    """Return rope_parameters or rope_scaling, or the part for one kind of layers if the kinds differ."""
    values = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(values, dict):
        raise ConfigError(
            f"config.json: rope_parameters is {values!r}", "the value must be a JSON object", "correct config.json"
        )
    if kind is not None and any(isinstance(value, dict) for value in values.values()):
        values = values.get(kind) or {}
    if any(isinstance(value, dict) for value in values.values()):
        raise UnsupportedModelError(
            f"config.json has separate rope_parameters for {', '.join(map(repr, values))}",
            "all layers of this architecture use the same rotation",
            "check that model_type in config.json matches the weights",
        )
    return HFConfig(values, part="the RoPE scaling")


def _scaling(config: HFConfig, values: HFConfig, context: int) -> rope_scaling.RopeScaling | None:
    kind = values.get("rope_type", "type")
    if kind in (None, "default"):
        return None
    if not isinstance(kind, str) or kind not in _READERS:
        raise ConfigError(
            f"config.json: the RoPE scaling type {kind!r} is not supported",
            f"the supported types are default, {', '.join(sorted(_READERS))}",
            "use a checkpoint with a supported type",
        )
    return _READERS[kind](config, values, context)


def _llama3(config: HFConfig, values: HFConfig, context: int) -> rope_scaling.Llama3Scaling:
    factors = {name: values.number(name, positive=True) for name in ("factor", "low_freq_factor", "high_freq_factor")}
    return rope_scaling.Llama3Scaling(
        original_max_position_embeddings=_original_length(config, values, context), **factors
    )


def _yarn(config: HFConfig, values: HFConfig, context: int) -> rope_scaling.YarnScaling:
    original = _original_length(config, values, context)
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
    original = _original_length(config, values, context)
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
    "proportional": lambda config, values, context: rope_scaling.ProportionalRope(
        share=values.number("partial_rotary_factor", default=1.0, positive=True),
        factor=values.number("factor", default=1.0, positive=True),
    ),
    "su": _longrope,
}


def _original_length(config: HFConfig, values: HFConfig, context: int) -> int:
    """Return the context length that the model was originally trained with.

    As in transformers, the number next to max_position_embeddings precedes the number in the scaling.
    """
    name = "original_max_position_embeddings"
    if config.get(name) is not None:
        return config.integer(name, least=2, most=MAX_CONTEXT)
    length = values.number(name, default=context, positive=True)
    if length < 2 or length > MAX_CONTEXT:
        raise values.wrong(name, values.get(name), f"a number from 2 to {MAX_CONTEXT}")
    return int(length)


def _optional(values: HFConfig, name: str) -> float | None:
    """Return a number, or None; 0 also means None."""
    return values.number(name, positive=True) if values.get(name) not in (None, 0) else None


def _numbers(values: HFConfig, name: str) -> tuple[float, ...]:
    value = values.get(name)
    if not isinstance(value, list) or not all(type(x) in (int, float) and 0 < x <= MAX_NUMBER for x in value):
        raise values.wrong(name, value, "a list of positive numbers")
    return tuple(float(x) for x in value)
