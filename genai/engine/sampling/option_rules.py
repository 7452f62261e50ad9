"""What each sampling option may be: its type, its range, and how that is said."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import OptionError
from .order import parse_order

Check = Callable[[str, Any], Any]

_LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127
# Samples of one request share a prompt; a number beyond this is a mistake, and would take the memory of its results.
_MOST_SAMPLES = 10_000


def _refuse(name: str, value: Any, allowed: str) -> OptionError:
    return OptionError(f"{name} = {value!r}", f"allowed: {allowed}", "choose a value that is allowed, or leave it out")


def _scalar(value: Any) -> Any:
    """NumPy's numbers as Python's."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value


@dataclass(frozen=True)
class Number:
    """A number within limits.

    Attributes:
        kind: int or float (which takes whole numbers too).
        low, high: limits, inclusive unless excluded.
        allowed: the limits in words.
    """

    kind: type
    low: float
    high: float
    allowed: str
    excludes_low: bool = False
    optional: bool = False

    def __call__(self, name: str, value: Any) -> Any:
        """The value in its own type.

        Raises:
            OptionError: of another type, or out of range.
        """
        value = _scalar(value)
        if value is None and self.optional:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise OptionError(
                f"{name} = {value!r} is a {type(value).__name__}",
                f"{'a whole number' if self.kind is int else 'a number'} is expected",
                f"allowed: {self.allowed}",
            )
        if isinstance(value, float) and (not math.isfinite(value) or (self.kind is int and value != int(value))):
            raise _refuse(name, value, self.allowed)
        if not self.low <= value <= self.high or (self.excludes_low and value == self.low):
            raise _refuse(name, value, self.allowed)
        return self.kind(value)


@dataclass(frozen=True)
class Choice:
    """One of a few values."""

    values: tuple[Any, ...]
    allowed: str

    def __call__(self, name: str, value: Any) -> Any:
        """The value.

        Raises:
            OptionError: another value, or one of another type.
        """
        value = _scalar(value)
        for choice in self.values:
            if type(value) is type(choice) and value == choice:
                return value
        raise _refuse(name, value, self.allowed)


def texts(name: str, value: Any) -> tuple[str, ...]:
    """A tuple of texts from one text or a sequence of them; none is empty.

    Raises:
        OptionError: anything else.
    """
    given = (value,) if isinstance(value, str) else value
    if not isinstance(given, Sequence) or not all(isinstance(text, str) and text for text in given):
        raise _refuse(name, value, "a text or several, none of them empty")
    return tuple(dict.fromkeys(given))


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """A tuple of token ids from a sequence.

    Raises:
        OptionError: anything else.
    """
    given = value.tolist() if hasattr(value, "tolist") else value
    given = sorted(given) if isinstance(given, (set, frozenset)) else given
    valid = isinstance(given, Sequence) and not isinstance(given, (str, bytes))
    given = [_scalar(token) for token in given] if valid else []
    if not valid or any(isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in given):
        raise _refuse(name, value, "token ids: whole numbers, 0 or greater")
    return tuple(dict.fromkeys(given))


def biases(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    """(token id, bias) pairs in order of ids, from a mapping or pairs.

    Raises:
        OptionError: anything else; NaN, or plus infinity.
    """
    allowed = "token id -> number; -inf forbids a token"
    try:
        pairs = [(_scalar(token), _scalar(bias)) for token, bias in dict(value).items()]
    except (TypeError, ValueError):
        raise _refuse(name, value, allowed) from None
    for token, bias in pairs:
        id_fits = isinstance(token, int) and not isinstance(token, bool) and token >= 0
        is_number = isinstance(bias, (int, float)) and not isinstance(bias, bool)
        bias_fits = is_number and (bias == -math.inf or abs(bias) <= _LARGEST_FLOAT32)
        if not id_fits or not bias_fits:
            raise _refuse(name, {token: bias}, allowed)
    return tuple(sorted((token, float(bias)) for token, bias in pairs))


def processors(name: str, value: Any) -> tuple[Callable[..., Any], ...]:
    """A tuple of callables from one or a sequence.

    Raises:
        OptionError: anything else.
    """
    given = (value,) if callable(value) else value
    if not isinstance(given, Sequence) or not all(callable(processor) for processor in given):
        raise _refuse(name, value, "functions of (token_ids, logits)")
    return tuple(given)


def _number(low: float, high: float, allowed: str, **more: bool) -> Number:
    return Number(float, low, high, allowed, **more)


def _whole(low: int, allowed: str, high: float = math.inf, optional: bool = False) -> Number:
    return Number(int, low, high, allowed, optional=optional)


_INFINITY = sys.float_info.max
RULES: Mapping[str, Check] = {
    "temperature": _number(0, _INFINITY, "0 (greedy) or greater"),
    "top_k": _whole(0, "0 (all) or greater"),
    "top_p": _number(0, 1, "greater than 0, at most 1 (all)", excludes_low=True),
    "min_p": _number(0, 1, "0 (all) to 1"),
    "typical_p": _number(0, 1, "greater than 0, at most 1 (all)", excludes_low=True),
    "top_n_sigma": _number(0, _INFINITY, "0 (all) or greater"),
    "xtc_probability": _number(0, 1, "0 (never) to 1"),
    # More than one token cannot have more than half of the probability.
    "xtc_threshold": _number(0, 0.5, "greater than 0, at most 0.5", excludes_low=True),
    "dry_multiplier": _number(0, _INFINITY, "0 (off) or greater"),
    "dry_base": _number(1, _INFINITY, "1 or greater"),
    "dry_allowed_length": _whole(1, "1 or greater"),
    "dry_last_n": _whole(1, "1 or greater, or None (the whole sequence)", optional=True),
    "dry_sequence_breakers": texts,
    "mirostat": Choice((0, 2), "0 (off) or 2 (Mirostat 2.0)"),
    "mirostat_tau": _number(0, _INFINITY, "greater than 0, in bits", excludes_low=True),
    "mirostat_eta": _number(0, 1, "greater than 0, at most 1", excludes_low=True),
    "repetition_penalty": _number(0, _INFINITY, "greater than 0; 1 = none", excludes_low=True),
    "presence_penalty": _number(-_INFINITY, _INFINITY, "a number; 0 = none"),
    "frequency_penalty": _number(-_INFINITY, _INFINITY, "a number; 0 = none"),
    "penalty_last_n": _whole(1, "1 or greater, or None (the whole sequence)", optional=True),
    "no_repeat_ngram_size": _whole(0, "0 (off) or greater"),
    "logit_bias": biases,
    "min_tokens": _whole(0, "0 or greater"),
    "min_length": _whole(0, "0 or greater"),
    "max_tokens": _whole(1, "1 or greater, or None (no limit of its own)", optional=True),
    "stop_token_ids": token_ids,
    "ignore_eos": Choice((False, True), "True or False"),
    "stop": texts,
    "banned_strings": texts,
    "seed": _whole(0, "0 to 2 ** 64 - 1, or None (a new one each time)", 2**64 - 1, optional=True),
    "n": _whole(1, f"1 to {_MOST_SAMPLES}", _MOST_SAMPLES),
    "logprobs": _whole(0, "0 or greater (alternatives per token), or None (none)", optional=True),
    "prompt_logprobs": _whole(0, "0 or greater (alternatives per token), or None (none)", optional=True),
    "logits_processors": processors,
    "samplers": lambda name, value: parse_order(value),
}
