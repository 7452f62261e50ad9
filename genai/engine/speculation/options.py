"""Options of speculative decoding in a Generator: the "speculative" block of a genai_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from ...errors import OptionError, did_you_mean
from ..sampling import option_rules as rules
from ..sampling.search_options import Option

MOST_WIDTH = 16
"""The maximum number of draft tokens per round, and the maximum size of an n-gram."""
_BOOL = rules.Choice((False, True), "True or False")
_SIZES = rules.whole(0, f"0 (no lookup), or 2 to {MOST_WIDTH}", high=MOST_WIDTH)


def _ngram_size(name: str, value: Any) -> int:
    """Return a valid size of n-grams. An n-gram of one token has no tokens that could match."""
    size: int = _SIZES(name, value)
    if size == 1:
        raise OptionError(f"{name} = 1", f"allowed: {_SIZES.allowed}", "use an allowed value, or remove the option")
    return size


SPECULATIVE_OPTIONS: Mapping[str, Option] = {
    "max_draft_tokens": Option(4, rules.whole(1, f"1 to {MOST_WIDTH}", high=MOST_WIDTH)),
    "ngram_size": Option(0, _ngram_size),
    "ngram_chained_lookup": Option(False, _BOOL),
    "min_adaptive_k": Option(0, rules.whole(0, f"0 (fixed width), or 1 to {MOST_WIDTH}", high=MOST_WIDTH)),
    "cooldown": Option(False, _BOOL),
}


class SpeculativeOptions(TypedDict, total=False):
    """Speculative options, as keyword arguments."""

    max_draft_tokens: int
    ngram_size: int
    ngram_chained_lookup: bool
    min_adaptive_k: int
    cooldown: bool


def checked(name: str, value: Any) -> Any:
    """Return the value of a speculative option, converted to its type.

    Raises:
        OptionError: the name is unknown, or the value has a wrong type or is out of range.
    """
    option = SPECULATIVE_OPTIONS.get(name)
    if option is None:
        known = f"use one of the known options: {', '.join(sorted(SPECULATIVE_OPTIONS))}"
        hint = did_you_mean(name, SPECULATIVE_OPTIONS, known)
        why = "the API has no option of this name"
        raise OptionError(f"unknown speculative option {name!r} = {value!r:.80}", why, hint)
    return option.check(name, value)
