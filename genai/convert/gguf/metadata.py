"""Typed access to the metadata of a GGUF file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...errors import ConfigError, UnsupportedModelError
from ..spec import MAX_NUMBER


class Metadata:
    """The values of an architecture's keys. Getters prefix the name with "{arch}.".

    Every getter raises ConfigError if a value without a default is missing or a value has the wrong type.
    """

    def __init__(self, values: Mapping[str, Any], architecture: str, source: object) -> None:
        self.values, self.architecture, self._source = values, architecture, source
        self._keys_read: set[str] = set()

    def get(self, name: str) -> Any:
        """Return the value without a check, or None."""
        key = f"{self.architecture}.{name}"
        self._keys_read.add(key)
        return self.values.get(key)

    @property
    def unread(self) -> list[str]:
        """The architecture's keys that have not been read so far."""
        own = f"{self.architecture}."
        return sorted(key for key in self.values if key.startswith(own) and key not in self._keys_read)

    def integer(self, name: str, default: int | None = None, *, some: bool = False) -> int:
        """Return a positive integer. In a list with one value per layer, all values must be equal.

        Args:
            some: True if some layers may have 0, which is ignored.
        """
        value = self._same(name, self.get(name), some=some)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise self.wrong(name, value, "a positive integer")
        return value

    def optional_integer(self, name: str, *, some: bool = False) -> int:
        """Return a non-negative integer, 0 if the key is missing; see `integer`."""
        value = self._same(name, self.get(name), some=some)
        if value is None:
            return 0
        if type(value) is not int or value < 0:
            raise self.wrong(name, value, "a non-negative integer")
        return value

    def layers(self, name: str, default: int | None = None) -> list[int]:
        """Return a positive integer for each layer: of a list, or the same for all layers."""
        value, count = self.get(name), self.integer("block_count")
        if not isinstance(value, np.ndarray):
            return [self.integer(name, default)] * count
        if value.dtype.kind not in "iu" or len(value) != count or not (value > 0).all():
            raise self.wrong(name, value.tolist(), f"a positive integer for each of the {count} layers")
        return [int(number) for number in value]

    def number(self, name: str, default: float | None = None) -> float:
        """Return a finite number."""
        value = self.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_NUMBER:
            raise self.wrong(name, value, "a finite number")
        if not math.isfinite(value):
            raise self.wrong(name, value, "a finite number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return default if value is None else value

    def text(self, name: str, default: str) -> str:
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, value, "a string")
        return default if value is None else value

    def _same(self, name: str, value: Any, *, some: bool) -> Any:
        """Return the common value of a list with one value per layer, which newer files may have."""
        if not isinstance(value, np.ndarray):
            return value
        if some and not value.any():
            raise self.wrong(name, value.tolist(), "a number above 0 for at least one layer")
        value = value[value != 0] if some else value
        if value.size == 0 or not (value == value.flat[0]).all():
            raise UnsupportedModelError(
                f"{self._source}: {self.architecture}.{name} differs from layer to layer: {value.tolist()!r:.80}",
                "all layers must have the same sizes",
                "use another model",
            )
        return value.flat[0].item()

    def wrong(self, name: str, value: Any, expected: str) -> ConfigError:
        """Return the error for a value."""
        key = f"{self.architecture}.{name}"
        problem = f"{self._source} has no {key}" if value is None else f"{self._source}: {key} is {value!r:.80}"
        return ConfigError(
            problem, f"expected {expected}", "convert the model again with a current convert_hf_to_gguf.py"
        )
