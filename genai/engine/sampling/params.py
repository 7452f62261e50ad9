"""SamplingParams, the sampling options of a request, and their combination with a model's defaults."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack

from ...errors import NotSupportedYetError, OptionError, did_you_mean
from . import generation_config, grammar as grammars, option_rules as rules
from .search_options import SEARCH_OPTIONS, checked

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

T = TypeVar("T")
LogitsProcessor = Callable[["tuple[int, ...]", "NDArray[np.float32]"], "NDArray[np.float32] | None"]
"""A function processor(token_ids, logits), see SamplingParams.logits_processors."""


# The samples of a request share a prompt. A larger number is probably a mistake, and the results would use much memory.
_MOST_SAMPLES = 10_000
_ALTERNATIVES = rules.count(0, "0 or greater, below 2 ** 31 (alternatives per token), or None (none)", optional=True)


def _option(default: T, check: rules.Check) -> T:
    """Return a field with its default and the check of its values."""
    return field(default=default, metadata={"check": check})


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The sampling options of a request. By default, tokens are drawn from the model's unmodified distribution.

    Values are checked and converted to the types below; options that contradict each other raise an error (see
    docs/reference/sampling.md). Options apply in this order: logits_processors on the model's logits; logit_bias and
    sequence_bias; masks (grammars, no_repeat_ngram_size, minimum lengths, begin_suppress_tokens, banned strings); then
    `samplers`; then the random draw.

    >>> SamplingParams(temperature=0.7, top_p=0.9, seed=1).top_p
    0.9
    >>> SamplingParams(temperature=0, top_p=0.9)
    Traceback (most recent call last):
    genai.errors.OptionError: top_p = 0.9 contradicts temperature = 0
      why: greedy decoding always takes the most likely token
      fix: raise temperature, or remove top_p

    Attributes:
        temperature: divisor of the logits; 0 = greedy, the most likely token (the lowest id among equally likely ones).
        top_k: keep the k most likely tokens; 0 = all.
        top_p: keep the smallest set of most likely tokens whose total probability reaches top_p; 1 = all.
        min_p: keep tokens that are at least min_p times as likely as the most likely token; 0 = all.
        typical_p: keep tokens whose surprise is closest to the entropy, until their total probability reaches
            typical_p; 1 = all.
        top_n_sigma: keep tokens with a logit within this number of standard deviations of the largest logit; 0 = all.
        xtc_probability: probability that XTC is applied.
        xtc_threshold: of the tokens with at least this probability, XTC keeps only the least likely one.
        dry_multiplier: DRY strength; 0 = off. A token that would continue a repetition of m tokens loses dry_multiplier
            * dry_base ** (m - dry_allowed_length), if m is at least dry_allowed_length.
        dry_base, dry_allowed_length: see dry_multiplier.
        dry_last_n: number of tokens to search for repetitions; None = all.
        dry_sequence_breakers: strings that a repetition cannot extend across.
        mirostat: 2 = Mirostat 2.0, which keeps the surprise per token near mirostat_tau bits; 0 = off.
        mirostat_tau: target surprise in bits.
        mirostat_eta: learning rate of Mirostat.
        repetition_penalty: divides positive logits of tokens that occur in the prompt or output, and multiplies
            negative logits.
        presence_penalty: subtracted once from the logits of tokens that occur in the output.
        frequency_penalty: subtracted from the logits of tokens in the output, once per occurrence.
        penalty_last_n: number of most recent tokens that these three penalties consider; None = all.
        no_repeat_ngram_size: size of n-grams that must not occur twice in prompt and output; 0 = off.
        logit_bias: token id -> number added to the token's logit; -inf forbids the token. Stored as pairs sorted by id.
        sequence_bias: token ids -> number added to the logit of the last of these tokens if the prompt and output end
            with the others; -inf forbids the sequence. As in transformers; stored as pairs sorted by ids.
        begin_suppress_tokens: tokens that the output must not begin with.
        min_tokens: number of output tokens before stop tokens and EOS may be chosen.
        min_length: like min_tokens, but the number includes the prompt.
        max_tokens: maximum number of output tokens; None = limited only by the context.
        stop_token_ids: tokens that end the output, in addition to EOS.
        ignore_eos: True = EOS does not end the output.
        stop: strings that end the output; not included in the output.
        banned_strings: strings that must not occur in the output: generation backtracks and takes another token.
        seed: seed of the random numbers, 0 to 2 ** 64 - 1; None = a new seed each time. A token depends only on the
            seed, the sample's number and the token's position, not on the batch or on threads.
        n: number of samples per prompt.
        json_schema: a JSON schema that the reply must match: an object, the schema's JSON text, or a Pydantic model.
            Stored as text.
        regex: a regular expression that the whole reply must match.
        grammar: a grammar that the reply must match, in Lark or GBNF.
        choice: a list of strings; the reply must be one of them. At most one of json_schema, regex, grammar and choice
            may be set; see docs/how-to/structured-output.md.
        logprobs: number of most likely alternatives to report with the log-probabilities of output tokens; None =
            report nothing. Log-probabilities describe the model's distribution, before all other options.
        prompt_logprobs: like logprobs, for prompt tokens.
        logits_processors: functions called as f(token_ids, logits) with a tuple of the prompt and output so far, and a
            float32 array [V]. A function either changes the array in place and returns None, or returns an array of the
            same shape and dtype.
        samplers: the samplers in order, joined by semicolons or as a sequence. Stored as a tuple.
    """

    temperature: float = _option(1.0, rules.number(0, "0 (greedy) or greater"))
    top_k: int = _option(0, rules.count(0, "0 (all) or greater, below 2 ** 31"))
    top_p: float = _option(1.0, rules.number(0, "greater than 0, at most 1 (all)", high=1, excludes_low=True))
    min_p: float = _option(0.0, rules.number(0, "0 (all) to 1", high=1))
    typical_p: float = _option(1.0, rules.number(0, "greater than 0, at most 1 (all)", high=1, excludes_low=True))
    top_n_sigma: float = _option(0.0, rules.number(0, "0 (all) or greater"))
    xtc_probability: float = _option(0.0, rules.number(0, "0 (never) to 1", high=1))
    # at most one token can have a probability above 0.5
    xtc_threshold: float = _option(0.1, rules.number(0, "greater than 0, at most 0.5", high=0.5, excludes_low=True))
    dry_multiplier: float = _option(0.0, rules.number(0, "0 (off) or greater"))
    dry_base: float = _option(1.75, rules.number(1, "1 or greater"))
    dry_allowed_length: int = _option(2, rules.whole(1, "1 or greater"))
    dry_last_n: int | None = _option(None, rules.whole(1, "1 or greater, or None (the whole sequence)", optional=True))
    dry_sequence_breakers: Sequence[str] = _option(("\n", ":", '"', "*"), rules.texts)
    mirostat: int = _option(0, rules.Choice((0, 2), "0 (off) or 2 (Mirostat 2.0)"))
    mirostat_tau: float = _option(5.0, rules.number(0, "greater than 0, in bits", excludes_low=True))
    mirostat_eta: float = _option(0.1, rules.number(0, "greater than 0, at most 1", high=1, excludes_low=True))
    repetition_penalty: float = _option(
        1.0, rules.number(rules.SMALLEST_FACTOR, "greater than 0, at least 1e-28; 1 = none")
    )
    presence_penalty: float = _option(0.0, rules.number(-rules.LARGEST_PENALTY, "a number, at least -1e28; 0 = none"))
    frequency_penalty: float = _option(0.0, rules.number(-rules.LARGEST_PENALTY, "a number, at least -1e28; 0 = none"))
    penalty_last_n: int | None = _option(
        None, rules.whole(1, "1 or greater, or None (the whole sequence)", optional=True)
    )
    no_repeat_ngram_size: int = _option(0, rules.whole(0, "0 (off) or greater"))
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = _option((), rules.biases)
    sequence_bias: Mapping[tuple[int, ...], float] | Sequence[tuple[Sequence[int], float]] = _option(
        (), rules.sequence_biases
    )
    begin_suppress_tokens: Sequence[int] = _option((), rules.token_ids)
    min_tokens: int = _option(0, rules.count(0, "0 or greater, below 2 ** 31"))
    min_length: int = _option(0, rules.count(0, "0 or greater, below 2 ** 31"))
    max_tokens: int | None = _option(
        None, rules.whole(1, "1 or greater, or None (limited only by the context)", optional=True)
    )
    stop_token_ids: Sequence[int] = _option((), rules.token_ids)
    ignore_eos: bool = _option(False, rules.Choice((False, True), "True or False"))
    stop: str | Sequence[str] = _option((), rules.texts)
    banned_strings: str | Sequence[str] = _option((), rules.texts)
    seed: int | None = _option(
        None, rules.whole(0, "0 to 2 ** 64 - 1, or None (a new seed each time)", high=2**64 - 1, optional=True)
    )
    n: int = _option(1, rules.whole(1, f"1 to {_MOST_SAMPLES}", high=_MOST_SAMPLES))
    json_schema: str | Mapping[str, Any] | bool | type[Any] | None = _option(None, grammars.schema_text)  # noqa: RUF009
    regex: str | None = _option(None, grammars.expression)
    grammar: str | None = _option(None, grammars.source_text)
    choice: Sequence[str] = _option((), grammars.choices)
    logprobs: int | None = _option(None, _ALTERNATIVES)
    prompt_logprobs: int | None = _option(None, _ALTERNATIVES)
    logits_processors: Sequence[LogitsProcessor] = _option((), rules.processors)
    samplers: str | Sequence[str] = _option(rules.DEFAULT_ORDER, lambda name, value: rules.parse_order(value))

    def __post_init__(self) -> None:
        # Default values have already been checked and converted.
        options = {
            one.name: value
            if (value := getattr(self, one.name)) is one.default
            else one.metadata["check"](one.name, value)
            for one in fields(self)
        }
        rules.check_contradictions(options, NEUTRAL)
        for name, value in options.items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> SamplingParams:
        """Create params from names and values, for example from user input.

        Raises:
            OptionError: a value is invalid, or a name is unknown.

        >>> SamplingParams.from_options({"temprature": 0.7})
        Traceback (most recent call last):
        genai.errors.OptionError: unknown sampling option 'temprature' = 0.7
          why: the API has no option of this name
          fix: did you mean 'temperature'?
        """
        known = [field.name for field in fields(cls)]
        for name, value in options.items():
            if name not in known:
                otherwise = f"use one of the known options: {', '.join(sorted(known))}"
                hint = _ELSEWHERE.get(name) or did_you_mean(name, known, otherwise)
                raise OptionError(
                    f"unknown sampling option {name!r} = {value!r}", "the API has no option of this name", hint
                )
        return cls(**options)

    @classmethod
    def from_search_options(cls, options: Mapping[str, Any]) -> SamplingParams:
        """Create params from search options of onnxruntime-genai, with their meanings there (see `SEARCH_OPTIONS`).

        Decoding is greedy unless do_sample is set; the options for random sampling then have no effect, as in
        onnxruntime-genai. A top_k of 1 or a temperature of 0 is also greedy; a top_p of 0 or 1 keeps all tokens.
        Otherwise top-k applies to the logits, then the softmax at the temperature, then top-p. A negative random_seed
        selects a new seed.

        Args:
            options: do_sample, temperature, top_k, top_p, repetition_penalty, min_length, random_seed and
                no_repeat_ngram_size. Values equal to the defaults of `SEARCH_OPTIONS` may be left out. Other options
                are ignored.

        >>> SamplingParams.from_search_options({"do_sample": True, "top_k": 40}).samplers
        ('penalties', 'top_k', 'temperature', 'top_p')
        """
        return cls(**_from_search({"top_k": SEARCH_OPTIONS["top_k"].default, **options}), samplers=rules.SEARCH_ORDER)

    def replace(self, **changes: Unpack[SamplingOptions]) -> SamplingParams:
        """Return a copy with changed values. The combination of all options is checked.

        Raises:
            OptionError: an option is unknown or out of range, or contradicts another option.

        >>> SamplingParams(top_k=40).replace(temperature=0.7).top_k
        40
        """
        return self.from_options({**self.as_dict(), **changes})

    def as_dict(self) -> dict[str, Any]:
        """Return all options by name.

        >>> SamplingParams(stop="END").as_dict()["stop"]
        ('END',)
        """
        return {field.name: getattr(self, field.name) for field in fields(self)}


NEUTRAL: Mapping[str, Any] = {one.name: one.default for one in fields(SamplingParams)}
"""The default values of all options."""


class SamplingOptions(TypedDict, total=False):
    """The fields of SamplingParams, as keyword arguments."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    top_n_sigma: float
    xtc_probability: float
    xtc_threshold: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_last_n: int | None
    dry_sequence_breakers: Sequence[str]
    mirostat: int
    mirostat_tau: float
    mirostat_eta: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    penalty_last_n: int | None
    no_repeat_ngram_size: int
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]]
    sequence_bias: Mapping[tuple[int, ...], float] | Sequence[tuple[Sequence[int], float]]
    begin_suppress_tokens: Sequence[int]
    min_tokens: int
    min_length: int
    max_tokens: int | None
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    stop: str | Sequence[str]
    banned_strings: str | Sequence[str]
    seed: int | None
    n: int
    json_schema: str | Mapping[str, Any] | bool | type[Any] | None
    regex: str | None
    grammar: str | None
    choice: Sequence[str]
    logprobs: int | None
    prompt_logprobs: int | None
    logits_processors: Sequence[LogitsProcessor]
    samplers: str | Sequence[str]


def checked_option(name: str, value: Any) -> Any:
    """Return the value of a single option of SamplingParams, converted to its type.

    Raises:
        OptionError: the value is invalid.
    """
    return next(one for one in fields(SamplingParams) if one.name == name).metadata["check"](name, value)


# Options that select among several tokens; they have no effect in greedy decoding.
DRAWING = tuple(
    "top_k top_p min_p typical_p top_n_sigma xtc_probability xtc_threshold mirostat mirostat_tau mirostat_eta".split()
)


# Options of other programs, and what to use here.
_SCHEMAS = "pass a JSON schema as json_schema; LLM.chat and LLM.generate also accept a Pydantic class as schema"
_ELSEWHERE = {
    "format": _SCHEMAS,
    "max_completion_tokens": "did you mean 'max_tokens'?",
    "max_new_tokens": "did you mean 'max_tokens'?",
    "num_predict": "did you mean 'max_tokens'?",
    "repeat_penalty": "did you mean 'repetition_penalty'?",
    "response_format": _SCHEMAS,
    "stop_sequences": "did you mean 'stop'?",
    "stop_words": "did you mean 'stop'?",
    "top_logprobs": "did you mean 'logprobs'?",
}


def model_defaults(search: Mapping[str, Any], vocab_size: int, eos_token_ids: tuple[int, ...] = ()) -> dict[str, Any]:
    """Return the sampling options that the "search" block of a genai_config.json and generation_config.json set.

    Args:
        search: the block, completed from generation_config.json.
        vocab_size: size of the vocabulary, which is the upper limit of top_k.
        eos_token_ids: the tokens that end a reply.

    Raises:
        OptionError: a value is out of range.
        NotSupportedYetError: this version does not support an option, such as beams, as a default.
    """
    further = {name: search[name] for name in ("min_p", "typical_p") if search.get(name) is not None}
    further |= generation_config.request_options(search, vocab_size, eos_token_ids)
    search = {name: checked(name, value) for name, value in search.items() if name in SEARCH_OPTIONS}
    for name in ("num_beams", "num_return_sequences"):
        if search.get(name, 1) != 1:
            raise NotSupportedYetError(
                f"{name} = {search[name]} is not supported as a model's default",
                "streams and conversations have a single output, so beams must be requested in each call",
                f"set the default to 1 in genai_config.json, and pass {name} to LLM.generate",
            )
    if search.get("top_k"):
        search["top_k"] = min(search["top_k"], vocab_size)
    found = {**_from_search(search), **further}
    if found.get("temperature") == 0 or found.get("mirostat"):
        dropped = DRAWING if found.get("temperature") == 0 else rules.TRUNCATION
        found = {name: value for name, value in found.items() if name not in dropped}
    if found.get("penalty_last_n") == 0:
        found = {name: value for name, value in found.items() if name not in rules.SAMPLERS["penalties"]}
    if "samplers" in found:
        found = _within(found, rules.parse_order(found["samplers"]))
    if "min_tokens" in found and "max_tokens" in found:
        found["min_tokens"] = min(found["min_tokens"], found["max_tokens"])  # as in transformers
    return _with_their_needs(found, {})


def _within(options: Mapping[str, Any], order: Sequence[str]) -> dict[str, Any]:
    """Return the options without those of samplers that are not in the order."""
    unused = {name for sampler, names in rules.SAMPLERS.items() if sampler not in order for name in names}
    return {name: value for name, value in options.items() if name not in unused or value == 0}


def _with_their_needs(kept: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options without those that have no effect together with the others and with requested options."""
    both = {**kept, **asked}
    given = {name for name, value in both.items() if value != NEUTRAL.get(name)}
    return {
        name: value
        for name, value in kept.items()
        if name not in rules.NEEDS or not given.isdisjoint(rules.NEEDS[name])
    }


def _from_search(search: Mapping[str, Any]) -> dict[str, Any]:
    """Convert search options. The result is greedy without do_sample, or if only one token can remain."""
    found = {
        name: search[name] for name in ("repetition_penalty", "no_repeat_ngram_size", "min_length") if search.get(name)
    }
    if search.get("random_seed", -1) >= 0:
        found["seed"] = search["random_seed"] % 2**64
    if not search.get("do_sample", False) or search.get("temperature") == 0 or search.get("top_k") == 1:
        return {"temperature": 0.0, **found}
    return {name: search[name] for name in ("temperature", "top_k", "top_p") if search.get(name)} | found


def with_defaults(defaults: Mapping[str, Any], asked: Mapping[str, Any]) -> SamplingParams:
    """Combine a request's options with the model's defaults; where they contradict each other, the request wins.

    A requested temperature of 0 drops the model's options for random sampling. If the model is greedy by default,
    requesting such an option (other than its neutral value) or several samples selects random sampling at a temperature
    of 1. Mirostat replaces the model's truncation options, and the other way around. The biases of both are combined,
    unless the request's are empty.

    Raises:
        OptionError: a requested option is unknown or out of range, or contradicts another requested option.
    """
    checks = {one.name: one.metadata["check"] for one in fields(SamplingParams)}
    asked = {name: checks[name](name, value) if name in checks else value for name, value in asked.items()}
    kept = dict(defaults)
    if asked.get("temperature") == 0 or asked.get("mirostat"):
        kept = {name: value for name, value in kept.items() if name not in DRAWING}
    if "samplers" in asked:
        kept = _within(kept, rules.parse_order(asked["samplers"]))
    given = {name for name, value in asked.items() if value != NEUTRAL.get(name)}
    if not given.isdisjoint(rules.TRUNCATION):
        kept.pop("mirostat", None)
    if "samplers" in kept and len(_within(chosen := {name: asked[name] for name in given}, kept["samplers"])) < len(
        chosen
    ):
        del kept["samplers"]
    _make_room(kept, asked)
    kept = _with_their_needs(kept, asked)
    for name in ("logit_bias", "sequence_bias"):
        if asked.get(name):
            asked[name] = {**dict(kept.get(name, ())), **dict(asked[name])}
    if kept.get("temperature") == 0 and "temperature" not in asked and asks_to_draw(asked):
        del kept["temperature"]
    return SamplingParams.from_options({**kept, **asked})


def asks_to_draw(asked: Mapping[str, Any]) -> bool:
    """Return True if an option selects random sampling for a model that is greedy by default."""
    return any(asked[name] != NEUTRAL[name] for name in asked.keys() & {*DRAWING, "n"})


def _make_room(kept: dict[str, Any], asked: Mapping[str, Any]) -> None:
    """Remove the model's defaults that contradict a request's limits, stop tokens and banned strings, in place."""
    if (asked.get("max_tokens") or _ANY) < kept.get("min_tokens", 0):
        del kept["min_tokens"]
    if asked.get("min_tokens", 0) > (kept.get("max_tokens") or _ANY):
        del kept["max_tokens"]
    if ends := set(asked.get("stop_token_ids", ())):
        biases = {token: bias for token, bias in dict(kept.pop("logit_bias", ())).items() if token not in ends}
        kept |= {"logit_bias": biases} if biases else {}
    if (banned := asked.get("banned_strings")) and "stop" in kept:
        texts = rules.texts("stop", kept["stop"])
        kept["stop"] = [text for text in texts if not any(one in text or text in one for one in banned)]


_ANY = float("inf")


def has_grammar(params: SamplingParams | None, options: Mapping[str, Any]) -> bool:
    """Return True if a request with these options, and with `params` for all other options, may use a grammar."""
    if any(options.get(name) is not None for name in grammars.OPTIONS):
        return True
    return isinstance(params, SamplingParams) and grammar_of(params) is not None


def grammar_of(params: SamplingParams) -> grammars.Grammar | None:
    """Return the grammar that a request uses; None if it uses no grammar."""
    for option in grammars.OPTIONS:
        value = getattr(params, option)
        if value is not None and value != ():
            return grammars.Grammar(option, json.dumps(value, ensure_ascii=False) if option == "choice" else value)
    return None
