"""Sampling options that cannot all be obeyed. Each rule names the options, and says what to change."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...errors import OptionError
from .order import SAMPLERS

# Options that remove tokens, and the value that means "off".
_TRUNCATION = {
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "top_n_sigma": 0.0,
    "xtc_probability": 0.0,
}
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


def check_contradictions(options: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise if options contradict each other.

    Args:
        options: all options, each valid alone. defaults: the neutral values.

    Raises:
        OptionError: naming both options.
    """
    for first, second, why, fix in _found(options, defaults):
        raise OptionError(f"{first} contradicts {second}", why, fix)


def _found(options: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    def given(name: str) -> bool:
        return bool(options[name] != defaults[name])

    def said(name: str) -> str:
        return f"{name} = {options[name]!r}"

    truncating = [name for name, off in _TRUNCATION.items() if options[name] != off]
    if options["temperature"] == 0:
        yield from _greedy(options, truncating)
    if options["mirostat"]:
        for name in truncating:
            why = "Mirostat itself decides how many tokens are kept"
            yield said(name), said("mirostat"), why, f"leave {name} or mirostat out"
    for name, needed in _NEEDS.items():
        if given(name) and not any(given(other) for other in needed):
            others = " and ".join(said(other) for other in needed)
            yield said(name), others, f"{name} has no effect then", f"set {' or '.join(needed)}, or leave {name} out"
    yield from _order(options, defaults)
    yield from _ends(options)


def _greedy(options: Mapping[str, Any], truncating: Sequence[str]) -> Iterator[tuple[str, str, str, str]]:
    why = "the most likely token is taken: nothing is drawn"
    for name in truncating:
        if not (name == "top_k" and options[name] == 1):
            yield f"{name} = {options[name]!r}", "temperature = 0", why, f"raise temperature, or leave {name} out"
    if options["mirostat"]:
        yield f"mirostat = {options['mirostat']}", "temperature = 0", why, "raise temperature, or leave mirostat out"
    if options["n"] > 1:
        same = "all samples would be the same"
        yield f"n = {options['n']}", "temperature = 0", same, "raise temperature, or use n = 1"


def _order(options: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    for sampler in SAMPLERS:
        if sampler.name in options["samplers"]:
            continue
        for name in sampler.options:
            # Greedy needs no sampler of that name: the temperature is never divided by.
            if options[name] != defaults[name] and not (name == "temperature" and options[name] == 0):
                yield (
                    f"{name} = {options[name]!r}",
                    f"samplers = {';'.join(options['samplers'])!r}",
                    f"{sampler.name!r} is not among the samplers",
                    f"add {sampler.name!r}, or leave {name} out",
                )


def _ends(options: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
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
