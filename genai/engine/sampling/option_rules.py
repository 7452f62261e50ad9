"""Rules for sampling options: samplers and their order, the type and range of each option, and contradictions."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...errors import OptionError, did_you_mean, kind_of
from .grammar import OPTIONS as GRAMMARS, contradictions as grammar_contradictions

# The samplers in llama.cpp's order, each with the options that enable it; described in docs/reference/sampling.md.
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
# onnxruntime-genai's order: top-k on the raw logits, softmax at the temperature, then top-p.
SEARCH_ORDER = ("penalties", "top_k", "temperature", "top_p")
# The short name that llama.cpp uses.
_OTHER_NAMES = {"typ_p": "typical_p"}


def parse_order(samplers: str | Sequence[str]) -> tuple[str, ...]:
    """Return the names of samplers in order.

    Args:
        samplers: names joined by semicolons, or a sequence of names.

    Raises:
        OptionError: a name is unknown or occurs twice, or the value has a wrong type.
    """
    if isinstance(samplers, str):
        names = [name.strip() for name in samplers.split(";")] if samplers.strip() else []
    elif isinstance(samplers, Sequence) and all(isinstance(name, str) for name in samplers):
        names = list(samplers)
    else:
        raise OptionError(
            f"samplers = {_shown(samplers)} is {kind_of(samplers)}",
            "expected: names joined by semicolons, or a sequence of names",
            f"pass names, as in the default {';'.join(DEFAULT_ORDER)}",
        )
    names = [_OTHER_NAMES.get(name, name) for name in names]
    for name in names:
        if name not in DEFAULT_ORDER:
            hint = did_you_mean(name, DEFAULT_ORDER, f"the default is {';'.join(DEFAULT_ORDER)}")
            raise OptionError(
                f"samplers contains the unknown name {name!r}",
                f"the known samplers are {', '.join(DEFAULT_ORDER)}",
                hint,
            )
        if names.count(name) > 1:
            raise OptionError(
                f"samplers contains {name!r} twice",
                "each sampler can be applied only once",
                "remove one of the two names",
            )
    return tuple(names)


# A function that receives a name and a value. It returns the value converted to its type, or raises OptionError.
Check = Callable[[str, Any], Any]

_LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127
# No vocabulary or sequence is larger, and kernels use 32-bit counters.
MOST_TOKENS = 2**31 - 1
# These limits ensure that sums of penalties, and logits multiplied by them, stay in the range of float32.
LARGEST_PENALTY, SMALLEST_FACTOR = 1e28, 1e-28


def _refuse(name: str, value: Any, allowed: str) -> OptionError:
    return OptionError(f"{name} = {_shown(value)}", f"allowed: {allowed}", "use an allowed value, or remove the option")


def _shown(value: Any) -> str:
    """Return the repr of a value; Python refuses to format integers with thousands of digits."""
    try:
        return repr(value)
    except ValueError:
        return "a value that is too long to show"


def _scalar(value: Any) -> Any:
    """Convert NumPy scalars to Python numbers."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value


@dataclass(frozen=True)
class Number:
    """A check for a number within limits.

    Attributes:
        kind: int, or float (which also accepts whole numbers).
        low, high: limits, inclusive unless excluded.
        allowed: the limits in words.
        excludes_low: True if `low` itself is not allowed.
        optional: True if None is allowed.
    """

    kind: type
    low: float
    allowed: str
    high: float
    excludes_low: bool = False
    optional: bool = False

    def __call__(self, name: str, value: Any) -> Any:
        """Return the converted value; raise OptionError if it has a wrong type or is out of range."""
        value = _scalar(value)
        if value is None and self.optional:
            return None
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or (self.kind is int and isinstance(value, float) and not value.is_integer()):
            raise OptionError(
                f"{name} = {_shown(value)} is {kind_of(value)}",
                f"expected: {'a whole number' if self.kind is int else 'a number'}",
                f"use an allowed value: {self.allowed}",
            )
        if not self.low <= value <= self.high or (self.excludes_low and value == self.low):
            raise _refuse(name, value, self.allowed)
        return self.kind(value)


@dataclass(frozen=True)
class Choice:
    """A check that a value is one of a few allowed values."""

    values: tuple[Any, ...]
    allowed: str

    def __call__(self, name: str, value: Any) -> Any:
        """Return the value; raise OptionError for any other value or type."""
        value = _scalar(value)
        for choice in self.values:
            if type(value) is type(choice) and value == choice:
                return value
        raise _refuse(name, value, self.allowed)


def texts(name: str, value: Any) -> tuple[str, ...]:
    """Convert a string or a sequence of non-empty strings to a tuple."""
    given = (value,) if isinstance(value, str) else value
    if not isinstance(given, Sequence) or not all(isinstance(text, str) and text for text in given):
        raise _refuse(name, value, "a string or several strings, none of them empty")
    return tuple(dict.fromkeys(given))


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """Convert a sequence of token ids to a tuple."""
    given = value.tolist() if hasattr(value, "tolist") else value
    given = sorted(given) if isinstance(given, (set, frozenset)) else given
    valid = isinstance(given, Sequence) and not isinstance(given, (str, bytes))
    given = [_scalar(token) for token in given] if valid else []
    if not valid or not all(map(_is_token, given)):
        raise _refuse(name, value, "token ids: whole numbers from 0 to 2 ** 31 - 1")
    return tuple(dict.fromkeys(given))


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_TOKENS


def biases(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    """Convert a mapping or pairs to (token id, bias) pairs sorted by id. A bias must not be NaN or plus infinity."""
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


def sequence_biases(name: str, value: Any) -> tuple[tuple[tuple[int, ...], float], ...]:
    """Convert a mapping or pairs to (token ids, bias) pairs sorted by ids; see `biases`."""
    allowed = "token ids -> number; -inf forbids the sequence of these tokens"
    try:
        pairs = [(token_sequence(ids), bias) for ids, bias in (value.items() if hasattr(value, "items") else value)]
    except (TypeError, ValueError):
        raise _refuse(name, value, allowed) from None
    checked = []
    for ids, bias in dict(pairs).items():
        try:
            ((_, number),) = biases(name, {0: bias})
        except OptionError:
            raise _refuse(name, {ids: bias}, allowed) from None
        checked.append((ids, number))
    return tuple(sorted(checked))


def token_sequence(value: Any) -> tuple[int, ...]:
    """Convert a non-empty sequence of token ids, which may repeat, to a tuple; raise ValueError for anything else."""
    ids = tuple(_scalar(token) for token in value)
    if isinstance(value, (str, bytes)) or not ids or not all(map(_is_token, ids)):
        raise ValueError(f"{value!r:.80} is not a sequence of token ids")
    return ids


def processors(name: str, value: Any) -> tuple[Callable[..., Any], ...]:
    """Convert a callable or a sequence of callables to a tuple."""
    given = (value,) if callable(value) else value
    if not isinstance(given, Sequence) or not all(callable(processor) for processor in given):
        raise _refuse(name, value, "functions of (token_ids, logits)")
    return tuple(given)


number, whole = partial(Number, float, high=sys.float_info.max), partial(Number, int, high=math.inf)
# The check of a number of tokens; it is limited because no model supports more.
count = partial(Number, int, high=MOST_TOKENS)


# Options that remove candidate tokens.
TRUNCATION = ("top_k", "top_p", "min_p", "typical_p", "top_n_sigma", "xtc_probability")
# Options that have no effect unless another option is set.
NEEDS = {
    "xtc_threshold": ("xtc_probability",),
    "dry_base": ("dry_multiplier",),
    "dry_allowed_length": ("dry_multiplier",),
    "dry_last_n": ("dry_multiplier",),
    "dry_sequence_breakers": ("dry_multiplier",),
    "mirostat_tau": ("mirostat",),
    "mirostat_eta": ("mirostat",),
    "penalty_last_n": ("repetition_penalty", "presence_penalty", "frequency_penalty"),
}


# Two options, why they contradict each other, and how to fix it.
_Contradiction = tuple[str, str, str, str]


def check_contradictions(options: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise an error if options contradict each other.

    Args:
        options: all options, each valid on its own.
        defaults: the neutral values.

    Raises:
        OptionError: two options contradict each other; the error names both.
    """
    for first, second, why, fix in _found(options, defaults):
        raise OptionError(f"{first} contradicts {second}", why, fix)


def _found(options: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[_Contradiction]:
    given = {name for name, value in options.items() if value != defaults[name]}
    truncating = [name for name in TRUNCATION if name in given]
    if options["temperature"] == 0:
        yield from _greedy(options, truncating)
    if options["mirostat"]:
        for name in truncating:
            why = "Mirostat determines the number of candidate tokens itself"
            yield _said(name, options), _said("mirostat", options), why, f"remove {name} or mirostat"
    for name, needed in NEEDS.items():
        if name in given and given.isdisjoint(needed):
            others = " and ".join(_said(other, options) for other in needed)
            fix = f"set {' or '.join(needed)}, or remove {name}"
            yield _said(name, options), others, f"{name} has no effect with this setting", fix
    for sampler, switches in SAMPLERS.items():
        # Greedy decoding does not divide by the temperature, so the temperature sampler may be absent.
        off = [name for name in switches if name in given and (name != "temperature" or options[name] != 0)]
        for name in off if sampler not in options["samplers"] else ():
            order, why = f"samplers = {';'.join(options['samplers'])!r}", f"{sampler!r} is not in samplers"
            yield _said(name, options), order, why, f"add {sampler!r}, or remove {name}"
    yield from _ends(options)
    if not given.isdisjoint(GRAMMARS):
        yield from grammar_contradictions(options, defaults)


def _said(name: str, options: Mapping[str, Any]) -> str:
    return f"{name} = {options[name]!r}"


def _greedy(options: Mapping[str, Any], truncating: Sequence[str]) -> Iterator[_Contradiction]:
    why = "greedy decoding always takes the most likely token"
    for name in (*truncating, "mirostat"):
        if options[name] and not (name == "top_k" and options[name] == 1):
            yield _said(name, options), "temperature = 0", why, f"raise temperature, or remove {name}"
    if options["n"] > 1:
        same = "all samples would be identical"
        yield _said("n", options), "temperature = 0", same, "raise temperature, or use n = 1"


def _ends(options: Mapping[str, Any]) -> Iterator[_Contradiction]:
    least, most = options["min_tokens"], options["max_tokens"]
    if most is not None and least > most:
        fix = "lower min_tokens or raise max_tokens"
        yield f"min_tokens = {least}", f"max_tokens = {most}", "no output satisfies both", fix
    for stop in options["stop"]:
        for banned in options["banned_strings"]:
            if banned in stop:
                why = "a stop string that contains a banned string can never occur"
                yield f"stop = {stop!r}", f"banned_strings = {banned!r}", why, "remove one of the two options"
            elif stop in banned and least == 0:
                why = "the output ends before the banned string can occur"
                yield f"banned_strings = {banned!r}", f"stop = {stop!r}", why, "remove one of the two options"
    biases = [("logit_bias", (token,), token, bias) for token, bias in options["logit_bias"]]
    biases += [("sequence_bias", ids, ids, bias) for ids, bias in options["sequence_bias"]]
    for name, ids, key, bias in biases:
        if bias == -math.inf and len(ids) == 1 and ids[0] in options["stop_token_ids"]:
            why = "a forbidden token is never generated"
            yield f"stop_token_ids = {ids[0]}", f"{name} = {{{key}: -inf}}", why, "remove one of the two options"
