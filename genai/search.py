"""Search options: names, types, ranges and defaults, as onnxruntime-genai has them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import NotSupportedYetError, OptionError, did_you_mean


@dataclass(frozen=True)
class Option:
    """One search option: its type, default, allowed values in words and as a test, and what other values would need."""

    kind: type
    default: Any
    allowed: str
    valid: Callable[[Any], bool]
    supported: Callable[[Any], bool] = lambda value: True
    needs: str = ""


def _at_least(low: float) -> Callable[[Any], bool]:
    return lambda value: bool(value >= low)


_BOOL = ("True or False", lambda value: True)
SEARCH_OPTIONS: Mapping[str, Option] = {
    "do_sample": Option(bool, False, *_BOOL),
    "temperature": Option(float, 1.0, "0 or greater", _at_least(0)),
    "top_k": Option(int, 50, "0 (all) or greater", _at_least(0)),
    "top_p": Option(float, 0.0, "0 to 1", lambda value: 0 <= value <= 1),
    "repetition_penalty": Option(float, 1.0, "greater than 0", lambda value: value > 0),
    "min_length": Option(int, 0, "0 or greater", _at_least(0)),
    "max_length": Option(int, 0, "1 or greater", _at_least(1)),
    "batch_size": Option(int, 1, "1 or greater", _at_least(1)),
    "random_seed": Option(int, -1, "a whole number; negative = a new one each time", lambda value: True),
    "chunk_size": Option(int, 0, "0 (automatic) or greater", _at_least(0)),
    "no_repeat_ngram_size": Option(int, 0, "0 or greater", _at_least(0)),
    "num_beams": Option(int, 1, "1 or greater", _at_least(1), lambda value: value == 1, "beam search"),
    "num_return_sequences": Option(
        int, 1, "1 or greater", _at_least(1), lambda value: value == 1, "several sequences per prompt"
    ),
    # These steer beam search, or how onnxruntime allocates; with one beam they cannot change tokens.
    "length_penalty": Option(float, 1.0, "a number", lambda value: True),
    "early_stopping": Option(bool, True, *_BOOL),
    "diversity_penalty": Option(float, 0.0, "a number", lambda value: True),
    "past_present_share_buffer": Option(bool, False, *_BOOL),
}


def checked(name: str, value: Any) -> Any:
    """The value of a search option in its own type.

    Raises:
        OptionError: unknown name, wrong type, out of range.
        NotSupportedYetError: a value that asks for something this version does not do.
    """
    option = SEARCH_OPTIONS.get(name)
    if option is None:
        hint = did_you_mean(name, SEARCH_OPTIONS, f"known options: {', '.join(sorted(SEARCH_OPTIONS))}")
        raise OptionError(f"unknown search option {name!r} = {value!r}", "it is not part of the API", hint)
    number = _converted(name, value, option)
    if not option.valid(number):
        raise OptionError(f"{name} = {value!r}", f"allowed: {option.allowed}", f"the default is {option.default}")
    if not option.supported(number):
        raise NotSupportedYetError(
            f"{name} = {value!r} is not supported yet", f"it needs {option.needs}", f"use {name} = {option.default}"
        )
    return number


def _converted(name: str, value: Any, option: Option) -> Any:
    value = value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value
    if option.kind is bool:
        if isinstance(value, bool):
            return value
    elif not isinstance(value, bool) and isinstance(value, (int, float)):
        if not math.isfinite(value):
            raise OptionError(f"{name} = {value!r}", "it must be finite", f"allowed: {option.allowed}")
        if option.kind is float:
            return float(value)
        if float(value).is_integer():
            return int(value)
        raise OptionError(f"{name} = {value!r}", "it must be a whole number", f"allowed: {option.allowed}")
    raise OptionError(
        f"{name} = {value!r} is a {type(value).__name__}",
        f"{option.kind.__name__} is expected",
        f"allowed: {option.allowed}",
    )
