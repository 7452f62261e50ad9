"""Search options, which form the "search" block of a genai_config.json: names, types, ranges and defaults."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

from ...errors import OptionError, did_you_mean
from ..beams import MOST_BEAMS
from . import option_rules as rules


@dataclass(frozen=True)
class Option:
    """A search option: its default and the check of its values."""

    default: Any
    check: rules.Check


_BOOL = rules.Choice((False, True), "True or False")
_NUMBER = rules.number(-sys.float_info.max, "a number")
_SEED = rules.whole(
    -sys.float_info.max,
    "a whole number in the range of a float; negative = a new seed each time",
    high=sys.float_info.max,
)
_COUNT = rules.count(1, "1 or greater, below 2 ** 31")
SEARCH_OPTIONS: Mapping[str, Option] = {
    "do_sample": Option(False, _BOOL),
    "temperature": Option(1.0, rules.number(0, "0 or greater")),
    "top_k": Option(50, rules.count(0, "0 (all) or greater, below 2 ** 31")),
    "top_p": Option(0.0, rules.number(0, "0 to 1", high=1)),
    "repetition_penalty": Option(1.0, rules.number(rules.SMALLEST_FACTOR, "greater than 0, at least 1e-28")),
    "min_length": Option(0, rules.count(0, "0 or greater, below 2 ** 31")),
    "max_length": Option(0, _COUNT),
    "batch_size": Option(1, _COUNT),
    "random_seed": Option(-1, _SEED),
    "chunk_size": Option(0, rules.count(0, "0 (automatic) or greater, below 2 ** 31")),
    "no_repeat_ngram_size": Option(0, rules.count(0, "0 or greater, below 2 ** 31")),
    "num_beams": Option(1, rules.whole(1, f"1 to {MOST_BEAMS}", high=MOST_BEAMS)),
    "num_return_sequences": Option(1, _COUNT),
    # These have no effect with a single beam.
    "length_penalty": Option(1.0, rules.number(-50, "a number, -50 to 50", high=50)),
    "early_stopping": Option(True, _BOOL),
    # onnxruntime-genai accepts this option but ignores it.
    "diversity_penalty": Option(0.0, _NUMBER),
    # Controls onnxruntime's memory allocation.
    "past_present_share_buffer": Option(False, _BOOL),
}


class SearchOptions(TypedDict, total=False):
    """Search options, as keyword arguments."""

    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float
    min_length: int
    max_length: int
    batch_size: int
    random_seed: int
    chunk_size: int
    no_repeat_ngram_size: int
    num_beams: int
    num_return_sequences: int
    length_penalty: float
    early_stopping: bool
    diversity_penalty: float
    past_present_share_buffer: bool


def checked(name: str, value: Any) -> Any:
    """Return the value of a search option, converted to its type.

    Raises:
        OptionError: the name is unknown, or the value has a wrong type or is out of range.
    """
    option = SEARCH_OPTIONS.get(name)
    if option is None:
        hint = did_you_mean(name, SEARCH_OPTIONS, f"use one of the known options: {', '.join(sorted(SEARCH_OPTIONS))}")
        raise OptionError(f"unknown search option {name!r} = {value!r}", "the API has no option of this name", hint)
    return option.check(name, value)
