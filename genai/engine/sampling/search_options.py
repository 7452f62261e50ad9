"""Search options: names, types, ranges and defaults, as onnxruntime-genai has them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

from ...errors import NotSupportedYetError, OptionError, did_you_mean
from . import option_rules as rules


@dataclass(frozen=True)
class Option:
    """One search option: its default, what its values are checked with, and what any but the default would need."""

    default: Any
    check: rules.Check
    needs: str = ""


_BOOL = rules.Choice((False, True), "True or False")
_NUMBER = rules.number(-sys.float_info.max, "a number")
_SEED = rules.whole(
    -sys.float_info.max, "a whole number that a float holds; negative = a new one each time", high=sys.float_info.max
)
_COUNT = rules.count(1, "1 or greater, below 2 ** 31")
SEARCH_OPTIONS: Mapping[str, Option] = {
    "do_sample": Option(False, _BOOL),
    "temperature": Option(1.0, rules.number(0, "0 or greater")),
    "top_k": Option(50, rules.count(0, "0 (all) or greater, below 2 ** 31")),
    "top_p": Option(0.0, rules.number(0, "0 to 1", high=1)),
    "repetition_penalty": Option(1.0, rules.number(rules.SMALLEST_FACTOR, "greater than 0, 1e-28 at least")),
    "min_length": Option(0, rules.count(0, "0 or greater, below 2 ** 31")),
    "max_length": Option(0, _COUNT),
    "batch_size": Option(1, _COUNT),
    "random_seed": Option(-1, _SEED),
    "chunk_size": Option(0, rules.count(0, "0 (automatic) or greater, below 2 ** 31")),
    "no_repeat_ngram_size": Option(0, rules.count(0, "0 or greater, below 2 ** 31")),
    "num_beams": Option(1, _COUNT, "beam search"),
    "num_return_sequences": Option(1, _COUNT, "several sequences per prompt"),
    # These steer beam search, or how onnxruntime allocates; with one beam they cannot change tokens.
    "length_penalty": Option(1.0, _NUMBER),
    "early_stopping": Option(True, _BOOL),
    "diversity_penalty": Option(0.0, _NUMBER),
    "past_present_share_buffer": Option(False, _BOOL),
}


class SearchOptions(TypedDict, total=False):
    """Search options as keywords of calls."""

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
    """The value of a search option in its own type.

    Raises:
        OptionError: unknown name, wrong type, out of range.
        NotSupportedYetError: a value that asks for something this version does not do.
    """
    option = SEARCH_OPTIONS.get(name)
    if option is None:
        hint = did_you_mean(name, SEARCH_OPTIONS, f"known options: {', '.join(sorted(SEARCH_OPTIONS))}")
        raise OptionError(f"unknown search option {name!r} = {value!r}", "it is not part of the API", hint)
    found = option.check(name, value)
    if option.needs and found != option.default:
        raise NotSupportedYetError(
            f"{name} = {value!r} is not supported yet", f"it needs {option.needs}", f"use {name} = {option.default}"
        )
    return found
