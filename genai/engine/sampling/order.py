"""The samplers, by the names that llama.cpp gives them, and the order in which they are applied."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import OptionError


@dataclass(frozen=True)
class Sampler:
    """One sampler.

    Attributes:
        name: in `samplers`.
        options: that switch it on.
        purpose: what it does. source: who published it.
    """

    name: str
    options: tuple[str, ...]
    purpose: str
    source: str


SAMPLERS = (
    Sampler(
        "penalties",
        ("repetition_penalty", "presence_penalty", "frequency_penalty"),
        "makes tokens that occurred less likely",
        "Keskar et al. 2019, CTRL (repetition); OpenAI API reference (presence, frequency)",
    ),
    Sampler(
        "dry",
        ("dry_multiplier",),
        "penalises continuing a repetition, more for longer ones",
        "p-e-w 2024, text-generation-webui #5677",
    ),
    Sampler(
        "top_n_sigma",
        ("top_n_sigma",),
        "keeps logits within n standard deviations of the largest",
        "Tang et al. 2024, Top-nσ: Not All Logits Are You Need",
    ),
    Sampler(
        "top_k", ("top_k",), "keeps the k most likely tokens", "Fan et al. 2018, Hierarchical Neural Story Generation"
    ),
    Sampler(
        "typical_p",
        ("typical_p",),
        "keeps tokens whose surprise is near the entropy, up to a probability",
        "Meister et al. 2022, Locally Typical Sampling",
    ),
    Sampler(
        "top_p",
        ("top_p",),
        "keeps the most likely tokens up to a probability (the nucleus)",
        "Holtzman et al. 2019, The Curious Case of Neural Text Degeneration",
    ),
    Sampler(
        "min_p",
        ("min_p",),
        "keeps tokens at least p times as likely as the likeliest",
        "Nguyen et al. 2024, Turning Up the Heat: Min-p Sampling",
    ),
    Sampler(
        "xtc",
        ("xtc_probability",),
        "now and then removes all likely tokens but the least likely of them",
        "p-e-w 2024, text-generation-webui #6335",
    ),
    Sampler("temperature", ("temperature",), "flattens or sharpens the distribution", "Ackley et al. 1985"),
)

DEFAULT_ORDER = tuple(sampler.name for sampler in SAMPLERS)
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
            f"samplers = {samplers!r} is a {type(samplers).__name__}",
            "names joined by semicolons, or a sequence of names, are expected",
            f"the default is {';'.join(DEFAULT_ORDER)}",
        )
    names = [_OTHER_NAMES.get(name, name) for name in names]
    for name in names:
        if name not in DEFAULT_ORDER:
            close = difflib.get_close_matches(name, DEFAULT_ORDER, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"the default is {';'.join(DEFAULT_ORDER)}"
            raise OptionError(f"samplers names {name!r}", f"known: {', '.join(DEFAULT_ORDER)}", hint)
        if names.count(name) > 1:
            raise OptionError(f"samplers names {name!r} twice", "each sampler is applied once", "leave one of them out")
    return tuple(names)


def sampler_table() -> str:
    """The samplers as a table in Markdown, for the documentation."""
    rows = ["| sampler | options | what it does | source |", "|---|---|---|---|"]
    for sampler in (*SAMPLERS, *_APART):
        options = ", ".join(f"`{option}`" for option in sampler.options)
        rows.append(f"| `{sampler.name}` | {options} | {sampler.purpose} | {sampler.source} |")
    return "\n".join(rows)


# Not in `samplers`: it draws the token itself, or masks tokens before all others.
_APART = (
    Sampler(
        "mirostat",
        ("mirostat", "mirostat_tau", "mirostat_eta"),
        "keeps tokens up to a surprise that is steered towards tau bits; comes last",
        "Basu et al. 2020, Mirostat (version 2.0)",
    ),
    Sampler(
        "no-repeat n-gram",
        ("no_repeat_ngram_size",),
        "masks tokens that would complete an n-gram that occurred; comes first",
        "Paulus et al. 2017, A Deep Reinforced Model for Abstractive Summarization",
    ),
)
