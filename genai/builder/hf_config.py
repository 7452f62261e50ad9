"""config.json of a Hugging Face checkpoint, asked for typed values one key at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from .spec_checks import MAX_LAYERS, MAX_NUMBER, MAX_SIZE

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


class _Required:
    pass


REQUIRED = _Required()


class HFConfig:
    """The values of config.json, and of generation_config.json where it names special tokens.

    A key may have several names, newest first. Every getter raises ConfigError if a value is missing that has no
    default, or is of another type.
    """

    def __init__(self, values: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> None:
        self.values, self.generation = values, generation or {}
        self._asked: set[str] = set()

    @property
    def model_type(self) -> str:
        return str(self._typed(("model_type",), REQUIRED, (str,)))

    def get(self, *names: str) -> Any:
        """The value as it is, or None."""
        self._asked.update(names)
        return next((self.values[name] for name in names if self.values.get(name) is not None), None)

    @property
    def unread(self) -> list[str]:
        """Keys that say something, that nobody asked for so far, and that are not known to change nothing."""
        return sorted(name for name, value in self.values.items() if value and name not in self._asked | _HARMLESS)

    @property
    def num_layers(self) -> int:
        return self.integer("num_hidden_layers", "n_layer", most=MAX_LAYERS)

    def integer(self, *names: str, default: int | _Required = REQUIRED, least: int = 1, most: int = MAX_SIZE) -> int:
        """A size or a count."""
        value = int(self._typed(names, default, (int,)))
        if not least <= value <= most:
            raise _wrong(names[0], value, f"a whole number from {least} to {most}")
        return value

    def number(self, *names: str, default: float | _Required = REQUIRED, positive: bool = False) -> float:
        value = self._typed(names, default, (int, float))
        if not abs(value) <= MAX_NUMBER or (positive and value <= 0):  # Python's JSON knows NaN and Infinity
            raise _wrong(names[0], value, "a positive number" if positive else "a finite number")
        return float(value)

    def flag(self, *names: str, default: bool | _Required = False) -> bool:
        return bool(self._typed(names, default, (bool,)))

    def text(self, *names: str, default: str | _Required = REQUIRED) -> str:
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
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != count:
            raise _wrong(name, value, f"a list with one entry for each of the {count} layers")
        return value

    def numbers(self, name: str) -> list[int]:
        """A list of integers, empty where the file has none."""
        value = self.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(type(number) is int for number in value):
            raise _wrong(name, value, "a list of integers")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One special token or several; generation_config.json comes first, because it is what decoding obeys."""
        value = self.generation.get(name)
        value = self.get(name) if value is None else value
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int for token in ids):
            raise _wrong(name, value, "a token id or a list of them")
        # -1 is how some checkpoints say "none".
        return tuple(dict.fromkeys(token for token in ids if token >= 0))

    def _typed(self, names: tuple[str, ...], default: Any, types: tuple[type, ...]) -> Any:
        value = self.get(*names)
        if value is None:
            if default is REQUIRED:
                raise ConfigError(
                    f"config.json has no {names[0]}", "the architecture needs it", "download the checkpoint again"
                )
            return default
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise _wrong(names[0], value, " or ".join(kind.__name__ for kind in types))
        return value


def _wrong(name: str, value: Any, wanted: str) -> ConfigError:
    return ConfigError(f"config.json: {name} is {value!r}", f"expected {wanted}", "correct the file")
