"""The samplers and the order in which they are applied; what each sampling option may be (its type, its range, and how
that is said), and which cannot all be obeyed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...errors import OptionError, did_you_mean, kind_of
from .grammar import OPTIONS as GRAMMARS, contradictions as grammar_contradictions

# The samplers in llama.cpp's order, and the options that switch each on; docs/sampling.md says what they do.
SAMPLERS = {
    "penalties": ("repetition_penalty", "presence_penalty", "frequency_penalty"),
    "dry": ("dry_multiplier",),
    "top_n_sigma": ("top_n_sigma",),
    "top_k": ("top_k",),
    "typical_p": ("typical_p",),
    "top_p": ("top_p",),
    "min_p": ("min_p",),
    "xtc": ("xtc_probability",),
    "temperature": ("temperature",),
}

DEFAULT_ORDER = tuple(SAMPLERS)
# Top-k on the raw logits, softmax at the temperature, top-p inside, as onnxruntime-genai does.
SEARCH_ORDER = ("penalties", "top_k", "temperature", "top_p")
# The short name of llama.cpp.
_OTHER_NAMES = {"typ_p": "typical_p"}


def parse_order(samplers: str | Sequence[str]) -> tuple[str, ...]:
    """The names of samplers in order.

    Args:
        samplers: names joined by semicolons, or a sequence of names.

    Raises:
        OptionError: not text, an unknown name, or a name that comes twice.
    """
    if isinstance(samplers, str):
        names = [name.strip() for name in samplers.split(";")] if samplers.strip() else []
    elif isinstance(samplers, Sequence) and all(isinstance(name, str) for name in samplers):
        names = list(samplers)
    else:
        raise OptionError(
            f"samplers = {_shown(samplers)} is {kind_of(samplers)}",
            "names joined by semicolons, or a sequence of names, are expected",
            f"the default is {';'.join(DEFAULT_ORDER)}",
        )
    names = [_OTHER_NAMES.get(name, name) for name in names]
    for name in names:
        if name not in DEFAULT_ORDER:
            hint = did_you_mean(name, DEFAULT_ORDER, f"the default is {';'.join(DEFAULT_ORDER)}")
            raise OptionError(f"samplers names {name!r}", f"known: {', '.join(DEFAULT_ORDER)}", hint)
        if names.count(name) > 1:
            raise OptionError(f"samplers names {name!r} twice", "each sampler is applied once", "leave one of them out")
    return tuple(names)


# Of a name and a value: gives the value in its own type, or raises an OptionError.
Check = Callable[[str, Any], Any]

_LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127
# No vocabulary and no sequence has more; machine code could not count further.
MOST_TOKENS = 2**31 - 1
# Penalties stay so small that no sum of them, and no logit that one of them multiplies, leaves the range of float32.
LARGEST_PENALTY, SMALLEST_FACTOR = 1e28, 1e-28


def _refuse(name: str, value: Any, allowed: str) -> OptionError:
    return OptionError(f"{name} = {_shown(value)}", f"allowed: {allowed}", "choose an allowed value, or leave it out")


def _shown(value: Any) -> str:
    """A value as it would be written; Python refuses to write integers of thousands of digits."""
    try:
        return repr(value)
    except ValueError:
        return "a value too long to be written"


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
    allowed: str
    high: float
    excludes_low: bool = False
    optional: bool = False

    def __call__(self, name: str, value: Any) -> Any:
        """The value in its own type; an OptionError if it is of another type, or out of range."""
        value = _scalar(value)
        if value is None and self.optional:
            return None
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or (self.kind is int and isinstance(value, float) and not value.is_integer()):
            raise OptionError(
                f"{name} = {_shown(value)} is {kind_of(value)}",
                f"{'a whole number' if self.kind is int else 'a number'} is expected",
                f"allowed: {self.allowed}",
            )
        if not self.low <= value <= self.high or (self.excludes_low and value == self.low):
            raise _refuse(name, value, self.allowed)
        return self.kind(value)


@dataclass(frozen=True)
class Choice:
    """One of a few values."""

    values: tuple[Any, ...]
    allowed: str

    def __call__(self, name: str, value: Any) -> Any:
        """The value; an OptionError for another value, or one of another type."""
        value = _scalar(value)
        for choice in self.values:
            if type(value) is type(choice) and value == choice:
                return value
        raise _refuse(name, value, self.allowed)


def texts(name: str, value: Any) -> tuple[str, ...]:
    """A tuple of texts from one text or a sequence of them; none is empty."""
    given = (value,) if isinstance(value, str) else value
    if not isinstance(given, Sequence) or not all(isinstance(text, str) and text for text in given):
        raise _refuse(name, value, "a text or several, none of them empty")
    return tuple(dict.fromkeys(given))


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """A tuple of token ids from a sequence."""
    given = value.tolist() if hasattr(value, "tolist") else value
    given = sorted(given) if isinstance(given, (set, frozenset)) else given
    valid = isinstance(given, Sequence) and not isinstance(given, (str, bytes))
    given = [_scalar(token) for token in given] if valid else []
    if not valid or not all(map(_is_token, given)):
        raise _refuse(name, value, "token ids: whole numbers, 0 or greater, below 2 ** 31")
    return tuple(dict.fromkeys(given))


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_TOKENS


def biases(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    """(token id, bias) pairs in order of ids, from a mapping or pairs; no bias is NaN or plus infinity."""
    allowed = "token id -> number; -inf forbids a token"
    try:
        pairs = [(_scalar(token), _scalar(bias)) for token, bias in dict(value).items()]
    except (TypeError, ValueError):
        raise _refuse(name, value, allowed) from None
    for token, bias in pairs:
        is_number = isinstance(bias, (int, float)) and not isinstance(bias, bool)
        bias_fits = is_number and (bias == -math.inf or abs(bias) <= _LARGEST_FLOAT32)
        if not _is_token(token) or not bias_fits:
            raise _refuse(name, {token: bias}, allowed)
    return tuple(sorted((token, float(bias)) for token, bias in pairs))


def processors(name: str, value: Any) -> tuple[Callable[..., Any], ...]:
    """A tuple of callables from one or a sequence."""
    given = (value,) if callable(value) else value
    if not isinstance(given, Sequence) or not all(callable(processor) for processor in given):
        raise _refuse(name, value, "functions of (token_ids, logits)")
    return tuple(given)


number, whole = partial(Number, float, high=sys.float_info.max), partial(Number, int, high=math.inf)
# How many tokens there are to be, or are to be looked at: beyond this, no model has what is asked for.
count = partial(Number, int, high=MOST_TOKENS)


# Options that remove tokens.
_TRUNCATION = ("top_k", "top_p", "min_p", "typical_p", "top_n_sigma", "xtc_probability")
# Options without an effect unless another one is on.
_NEEDS = {
    "xtc_threshold": ("xtc_probability",),
    "dry_base": ("dry_multiplier",),
    "dry_allowed_length": ("dry_multiplier",),
    "dry_last_n": ("dry_multiplier",),
    "dry_sequence_breakers": ("dry_multiplier",),
    "mirostat_tau": ("mirostat",),
    "mirostat_eta": ("mirostat",),
    "penalty_last_n": ("repetition_penalty", "presence_penalty", "frequency_penalty"),
}


# Two options, why they contradict each other, and what to do.
_Contradiction = tuple[str, str, str, str]


def check_contradictions(options: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise if options contradict each other.

    Args:
        options: all options, each valid alone. defaults: the neutral values.

    Raises:
        OptionError: naming both options.
    """
    for first, second, why, fix in _found(options, defaults):
        raise OptionError(f"{first} contradicts {second}", why, fix)


def _found(options: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[_Contradiction]:
    given = {name for name, value in options.items() if value != defaults[name]}
    truncating = [name for name in _TRUNCATION if name in given]
    if options["temperature"] == 0:
        yield from _greedy(options, truncating)
    if options["mirostat"]:
        for name in truncating:
            why = "Mirostat itself decides how many tokens are kept"
            yield _said(name, options), _said("mirostat", options), why, f"leave {name} or mirostat out"
    for name, needed in _NEEDS.items():
        if name in given and given.isdisjoint(needed):
            others = " and ".join(_said(other, options) for other in needed)
            fix = f"set {' or '.join(needed)}, or leave {name} out"
            yield _said(name, options), others, f"{name} has no effect then", fix
    for sampler, switches in SAMPLERS.items():
        # Greedy needs no sampler of that name: the temperature is never divided by.
        off = [name for name in switches if name in given and (name != "temperature" or options[name] != 0)]
        for name in off if sampler not in options["samplers"] else ():
            order, why = f"samplers = {';'.join(options['samplers'])!r}", f"{sampler!r} is not among the samplers"
            yield _said(name, options), order, why, f"add {sampler!r}, or leave {name} out"
    yield from _ends(options)
    if not given.isdisjoint(GRAMMARS):
        yield from grammar_contradictions(options, defaults)


def _said(name: str, options: Mapping[str, Any]) -> str:
    return f"{name} = {options[name]!r}"


def _greedy(options: Mapping[str, Any], truncating: Sequence[str]) -> Iterator[_Contradiction]:
    why = "the most likely token is taken: nothing is drawn"
    for name in (*truncating, "mirostat"):
        if options[name] and not (name == "top_k" and options[name] == 1):
            yield _said(name, options), "temperature = 0", why, f"raise temperature, or leave {name} out"
    if options["n"] > 1:
        same = "all samples would be the same"
        yield _said("n", options), "temperature = 0", same, "raise temperature, or use n = 1"


def _ends(options: Mapping[str, Any]) -> Iterator[_Contradiction]:
    least, most = options["min_tokens"], options["max_tokens"]
    if most is not None and least > most:
        fix = "lower min_tokens or raise max_tokens"
        yield f"min_tokens = {least}", f"max_tokens = {most}", "no output satisfies both", fix
    for stop in options["stop"]:
        for banned in options["banned_strings"]:
            if banned in stop:
                why = "a stop string that holds a banned string never comes"
                yield f"stop = {stop!r}", f"banned_strings = {banned!r}", why, "leave one of them out"
            elif stop in banned and least == 0:
                why = "the output ends before the banned string can come"
                yield f"banned_strings = {banned!r}", f"stop = {stop!r}", why, "leave one of them out"
    for token, bias in options["logit_bias"]:
        if bias == -math.inf and token in options["stop_token_ids"]:
            why = "a forbidden token never comes"
            yield f"stop_token_ids = {token}", f"logit_bias = {{{token}: -inf}}", why, "leave one of them out"
