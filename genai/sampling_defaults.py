"""A model's own sampling defaults, and what a caller's options make of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from .engine.sampling.option_rules import RULES
from .engine.sampling.order import SAMPLERS, parse_order
from .sampling_params import SamplingParams
from .search import SEARCH_OPTIONS, checked

# What chooses among several tokens; meaningless when the most likely one is taken.
DRAWING = (
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "top_n_sigma",
    "xtc_probability",
    "xtc_threshold",
    "mirostat",
    "mirostat_tau",
    "mirostat_eta",
)


def model_defaults(search: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """Sampling options from the "search" block of a genai_config.json: only those that it sets.

    Args:
        search: the block; where it is silent, what generation_config.json says.

    Raises:
        OptionError: a value out of range.
        NotSupportedYetError: it asks for something that this version does not do, such as beams.
    """
    further = {name: search[name] for name in ("min_p", "typical_p") if search.get(name) is not None}
    search = {name: checked(name, value) for name, value in search.items() if name in SEARCH_OPTIONS}
    others = {
        name: search[name] for name in ("repetition_penalty", "no_repeat_ngram_size", "min_length") if search.get(name)
    }
    if search.get("random_seed", -1) >= 0:
        others["seed"] = search["random_seed"] % 2**64
    if not search.get("do_sample", False) or search.get("temperature") == 0 or search.get("top_k") == 1:
        return {"temperature": 0.0, **others}
    drawing = {name: search[name] for name in ("temperature", "top_k", "top_p") if search.get(name)}
    if "top_k" in drawing:
        drawing["top_k"] = min(drawing["top_k"], vocab_size)
    return {**drawing, **further, **others}


def with_defaults(defaults: Mapping[str, Any], asked: Mapping[str, Any]) -> SamplingParams:
    """The options asked for; the rest are the model's defaults, as far as they go together.

    Asking for a temperature of 0 leaves the model's drawing options out. Asking a model that is greedy by default for a
    drawing option (other than its neutral value), or for several samples, asks for drawing, at a temperature of 1.
    Mirostat replaces the model's truncation.

    Raises:
        OptionError: unknown, out of range, or contradictory among those asked for.
    """
    asked = {name: RULES[name](name, value) if name in RULES else value for name, value in asked.items()}
    kept = dict(defaults)
    if asked.get("temperature") == 0 or asked.get("mirostat"):
        kept = {name: value for name, value in kept.items() if name not in DRAWING}
    if "samplers" in asked:
        order = parse_order(asked["samplers"])
        unused = {name for sampler in SAMPLERS if sampler.name not in order for name in sampler.options}
        kept = {name: value for name, value in kept.items() if name not in unused or value == 0}
    neutral = {field.name: field.default for field in fields(SamplingParams)}
    draws = any(name in asked and asked[name] != neutral[name] for name in (*DRAWING, "n"))
    if kept.get("temperature") == 0 and "temperature" not in asked and draws:
        del kept["temperature"]
    return SamplingParams.from_options({**kept, **asked})
