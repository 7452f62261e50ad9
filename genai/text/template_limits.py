"""What a chat template may do: how often it may loop, how long it may run, and how large its values may grow."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateRuntimeError

MAX_SIZE = 4 * 2**20
"""Most characters or items of one value."""
MAX_WIDTH = 1000
"""Widest padding or indentation, and most bits of a number."""


@dataclass(frozen=True)
class RenderLimits:
    """How much one rendering may do: loop rounds and calls, characters written, seconds."""

    steps: int = 1_000_000
    characters: int = MAX_SIZE
    seconds: float = 10.0


class LimitExceeded(TemplateRuntimeError):
    """The template ran or grew beyond its limits."""


class Budget:
    """What is left of the limits during one rendering."""

    def __init__(self, limits: RenderLimits) -> None:
        self._limits = limits
        self._steps = 0
        self._characters = 0
        self._deadline = time.monotonic() + limits.seconds

    def step(self, count: int = 1) -> None:
        """Charge loop rounds or calls."""
        self._steps += count
        if self._steps > self._limits.steps:
            raise LimitExceeded(f"it took more than {self._limits.steps} loop rounds and calls")
        if time.monotonic() > self._deadline:
            raise LimitExceeded(f"it took longer than {self._limits.seconds:g} seconds")

    def write(self, count: int) -> None:
        """Charge characters."""
        self._characters += count
        if self._characters > self._limits.characters:
            raise LimitExceeded(f"it wrote more than {self._limits.characters} characters")


def check_size(size: int) -> None:
    """Refuse a value of that many characters or items."""
    if size > MAX_SIZE:
        raise LimitExceeded(f"it built a value of more than {MAX_SIZE} characters or items")


def bounded(value: Any) -> Any:
    """The value itself, unless it is too large."""
    if isinstance(value, (str, list, tuple, dict)):
        check_size(len(value))
    elif isinstance(value, int) and value.bit_length() > MAX_WIDTH:
        raise LimitExceeded(f"it computed a number of {value.bit_length()} bits")
    return value


def check_operator(operator: str, left: Any, right: Any) -> None:
    """Refuse an operation whose result would be far larger than its operands."""
    if operator == "*":
        for items, count in ((left, right), (right, left)):
            if isinstance(items, (str, list, tuple)) and isinstance(count, int):
                check_size(len(items) * count)
    elif operator == "**" and isinstance(right, int) and abs(right) > MAX_WIDTH:
        raise LimitExceeded(f"it raised a number to the power of {right}")
    elif operator == "%" and isinstance(left, str):
        _check_format(left)


_PADDING = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "indent", "tojson"})


def check_call(name: str, receiver: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a string method or filter whose result would be far larger than what it is given."""
    values = (*args, *kwargs.values())
    for value in values:
        if isinstance(value, int) and abs(value) > (MAX_WIDTH if name in _PADDING else MAX_SIZE):
            raise LimitExceeded(f"it called {name} with the number {value}")
    if name in ("format", "format_map"):
        _check_format(str(receiver))
    elif name == "replace" and len(values) >= 2:
        check_size(str(receiver).count(str(values[0])) * len(str(values[1])))
    elif name == "translate":
        raise LimitExceeded("it called translate, whose result has no bound")


def check_join(items: Any, separator: Any) -> None:
    """Refuse to join items to a text that is too long."""
    if isinstance(items, (list, tuple)):
        check_size(sum(len(item) for item in items if isinstance(item, str)) + len(items) * len(str(separator)))


# A width or precision of four digits, or one taken from the values.
_WIDE_FORMAT = re.compile(r"%(\(\w*\))?[-+ #0]*(\d{4}|\*|\d*\.(\d{4}|\*))|\{[^{}]*:[^{}]*(\d{4}|\{)")


def _check_format(pattern: str) -> None:
    if wide := _WIDE_FORMAT.search(pattern):
        raise LimitExceeded(f"it used the format {wide.group()!r}, which can be very wide")
