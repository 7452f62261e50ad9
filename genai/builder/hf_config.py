"""config.json of a Hugging Face checkpoint, asked for typed values one key at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError


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

    @property
    def model_type(self) -> str:
        return str(self._typed(("model_type",), REQUIRED, (str,)))

    def get(self, *names: str) -> Any:
        """The value as it is, or None."""
        return next((self.values[name] for name in names if self.values.get(name) is not None), None)

    def integer(self, *names: str, default: int | _Required = REQUIRED) -> int:
        return int(self._typed(names, default, (int,)))

    def number(self, *names: str, default: float | _Required = REQUIRED) -> float:
        return float(self._typed(names, default, (int, float)))

    def flag(self, *names: str, default: bool | _Required = False) -> bool:
        return bool(self._typed(names, default, (bool,)))

    def text(self, *names: str, default: str | _Required = REQUIRED) -> str:
        return str(self._typed(names, default, (str,)))

    def optional_integer(self, *names: str) -> int | None:
        return None if self.get(*names) is None else self.integer(*names)

    def layers(self, name: str, count: int) -> list[Any] | None:
        """A list with one entry per layer, or None."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != count:
            raise _wrong(name, value, f"a list with one entry for each of the {count} layers")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One special token or several; generation_config.json comes first, because it is what decoding obeys."""
        value = self.generation.get(name)
        value = self.values.get(name) if value is None else value
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
