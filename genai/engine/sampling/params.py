"""SamplingParams: how a request's tokens are chosen, and what a model's own defaults make of that."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack

from ...errors import NotSupportedYetError, OptionError, did_you_mean
from . import grammar as grammars, option_rules as rules
from .search_options import SEARCH_OPTIONS, checked

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

T = TypeVar("T")
LogitsProcessor = Callable[["tuple[int, ...]", "NDArray[np.float32]"], "NDArray[np.float32] | None"]
"""Called as processor(token_ids, logits), see SamplingParams.logits_processors."""


# Samples of one request share a prompt; a number beyond this is a mistake, and would take the memory of its results.
_MOST_SAMPLES = 10_000
_ALTERNATIVES = rules.count(0, "0 or greater, below 2 ** 31 (alternatives per token), or None (none)", optional=True)


def _option(default: T, check: rules.Check) -> T:
    """A field with its default, and what its values are checked with."""
    return field(default=default, metadata={"check": check})


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are chosen. By default they are drawn from the model's own distribution.

    Values are checked and brought into the types below; options that contradict each other raise (see
    docs/sampling.md). Applied in this order: logits_processors on the model's logits; logit_bias; what masks tokens
    (grammars, no_repeat_ngram_size, minimum lengths, banned strings); then `samplers`; then the draw.

    >>> SamplingParams(temperature=0.7, top_p=0.9, seed=1).top_p
    0.9
    >>> SamplingParams(temperature=0, top_p=0.9)
    Traceback (most recent call last):
    genai.errors.OptionError: top_p = 0.9 contradicts temperature = 0
      why: the most likely token is taken: nothing is drawn
      fix: raise temperature, or leave top_p out

    Attributes:
        temperature: divides the logits; 0 = greedy, the most likely token (the lowest id among equals).
        top_k: keep the k most likely tokens; 0 = all.
        top_p: keep the fewest most likely tokens whose probability reaches top_p; 1 = all.
        min_p: keep tokens at least min_p times as likely as the most likely one; 0 = all.
        typical_p: keep tokens whose surprise is closest to the entropy, until their probability reaches typical_p.
        top_n_sigma: keep tokens whose logit is within that many standard deviations of the largest; 0 = all.
        xtc_probability: how often XTC is applied. xtc_threshold: of the tokens with at least this probability it keeps
            only the least likely.
        dry_multiplier: switches DRY on: a token that would continue a repetition of m tokens loses dry_multiplier *
            dry_base ** (m - dry_allowed_length), if m is at least dry_allowed_length. dry_last_n: how many tokens back
            it looks; None = all. dry_sequence_breakers: texts that repetitions do not reach across.
        mirostat: 2 = Mirostat 2.0, which keeps the surprise per token near mirostat_tau bits; mirostat_eta is its
            learning rate. 0 = off.
        repetition_penalty: divides positive logits of tokens that occur in prompt or output, multiplies negative ones.
        presence_penalty, frequency_penalty: subtracted from logits of tokens in the output, once, and once per
            occurrence. penalty_last_n: the three look that many tokens back; None = all.
        no_repeat_ngram_size: no n-gram of this size occurs twice in prompt and output; 0 = any may.
        logit_bias: token id -> number added to its logit; -inf forbids it. Kept as pairs in order of ids.
        min_tokens: output tokens before stop tokens and EOS may be chosen. min_length: the same, prompt included.
        max_tokens: most output tokens; None = as many as the context holds.
        stop_token_ids: tokens that end the output, besides EOS. ignore_eos: EOS does not end it.
        stop: texts that end the output; they are not part of it.
        banned_strings: texts that do not occur in the output: generation goes back and takes another token.
        seed: of the random numbers: 0 to 2 ** 64 - 1; None = a new one each time. A token depends on the seed, the
            sample's number and its position only, not on the batch or on threads.
        n: samples per prompt.
        json_schema: a JSON schema that the reply is an instance of: an object, its JSON text, or a Pydantic model. Kept
            as text. regex: an expression that the reply matches as a whole. grammar: one in Lark or GBNF. choice: texts
            of which the reply is one. At most one of the four; see docs/structured_output.md.
        logprobs: report log-probabilities of output tokens, with that many most likely alternatives; None = do not.
            They are those of the model's distribution, before all that is described here. prompt_logprobs: the same
            for prompt tokens.
        logits_processors: functions called as f(token_ids, logits): a tuple of prompt and output so far, and a float32
            array [V] that it may change in place (then it returns None) or replace by one of the same shape and dtype.
        samplers: the samplers in order, joined by semicolons or as a sequence. Kept as a tuple.
    """

    temperature: float = _option(1.0, rules.number(0, "0 (greedy) or greater"))
    top_k: int = _option(0, rules.count(0, "0 (all) or greater, below 2 ** 31"))
    top_p: float = _option(1.0, rules.number(0, "greater than 0, at most 1 (all)", high=1, excludes_low=True))
    min_p: float = _option(0.0, rules.number(0, "0 (all) to 1", high=1))
    typical_p: float = _option(1.0, rules.number(0, "greater than 0, at most 1 (all)", high=1, excludes_low=True))
    top_n_sigma: float = _option(0.0, rules.number(0, "0 (all) or greater"))
    xtc_probability: float = _option(0.0, rules.number(0, "0 (never) to 1", high=1))
    # More than one token cannot have more than half of the probability.
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
        1.0, rules.number(rules.SMALLEST_FACTOR, "greater than 0, 1e-28 at least; 1 = none")
    )
    presence_penalty: float = _option(0.0, rules.number(-rules.LARGEST_PENALTY, "a number, -1e28 at least; 0 = none"))
    frequency_penalty: float = _option(0.0, rules.number(-rules.LARGEST_PENALTY, "a number, -1e28 at least; 0 = none"))
    penalty_last_n: int | None = _option(
        None, rules.whole(1, "1 or greater, or None (the whole sequence)", optional=True)
    )
    no_repeat_ngram_size: int = _option(0, rules.whole(0, "0 (off) or greater"))
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = _option((), rules.biases)
    min_tokens: int = _option(0, rules.count(0, "0 or greater, below 2 ** 31"))
    min_length: int = _option(0, rules.count(0, "0 or greater, below 2 ** 31"))
    max_tokens: int | None = _option(None, rules.whole(1, "1 or greater, or None (no limit of its own)", optional=True))
    stop_token_ids: Sequence[int] = _option((), rules.token_ids)
    ignore_eos: bool = _option(False, rules.Choice((False, True), "True or False"))
    stop: str | Sequence[str] = _option((), rules.texts)
    banned_strings: str | Sequence[str] = _option((), rules.texts)
    seed: int | None = _option(
        None, rules.whole(0, "0 to 2 ** 64 - 1, or None (a new one each time)", high=2**64 - 1, optional=True)
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
        # Defaults are what their checks make of them.
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
        """From names and values, which may come from a user.

        Raises:
            OptionError: also for unknown names.

        >>> SamplingParams.from_options({"temprature": 0.7})
        Traceback (most recent call last):
        genai.errors.OptionError: unknown sampling option 'temprature' = 0.7
          why: it is not part of the API
          fix: did you mean 'temperature'?
        """
        known = [field.name for field in fields(cls)]
        for name, value in options.items():
            if name not in known:
                hint = did_you_mean(name, known, f"known options: {', '.join(sorted(known))}")
                raise OptionError(f"unknown sampling option {name!r} = {value!r}", "it is not part of the API", hint)
        return cls(**options)

    @classmethod
    def from_search_options(cls, options: Mapping[str, Any]) -> SamplingParams:
        """From the search options of onnxruntime-genai (`search_options.SEARCH_OPTIONS`), with its meanings and order.

        Greedy unless do_sample is set; then the rest that concerns drawing has no meaning, as there. A top_k of 1 or a
        temperature of 0 is greedy too; a top_p of 0 or 1 keeps all. Otherwise top-k on the logits, softmax at the
        temperature, top-p inside. A negative random_seed asks for a new one.

        Args:
            options: do_sample, temperature, top_k, top_p, repetition_penalty, min_length, random_seed and
                no_repeat_ngram_size, where they differ from the defaults of `SEARCH_OPTIONS`; others are for others.

        >>> SamplingParams.from_search_options({"do_sample": True, "top_k": 40}).samplers
        ('penalties', 'top_k', 'temperature', 'top_p')
        """
        return cls(**_from_search({"top_k": SEARCH_OPTIONS["top_k"].default, **options}), samplers=rules.SEARCH_ORDER)

    def replace(self, **changes: Unpack[SamplingOptions]) -> SamplingParams:
        """The same with other values, checked as a whole.

        Raises:
            OptionError: unknown, out of range or contradictory.

        >>> SamplingParams(top_k=40).replace(temperature=0.7).top_k
        40
        """
        return self.from_options({**self.as_dict(), **changes})

    def as_dict(self) -> dict[str, Any]:
        """Names and values.

        >>> SamplingParams(stop="END").as_dict()["stop"]
        ('END',)
        """
        return {field.name: getattr(self, field.name) for field in fields(self)}


NEUTRAL: Mapping[str, Any] = {one.name: one.default for one in fields(SamplingParams)}
"""The options of a request that asks for nothing."""


class SamplingOptions(TypedDict, total=False):
    """The fields of SamplingParams as keywords of calls."""

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


# What chooses among several tokens; meaningless when the most likely one is taken.
DRAWING = tuple(
    "top_k top_p min_p typical_p top_n_sigma xtc_probability xtc_threshold mirostat mirostat_tau mirostat_eta".split()
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
    for name in ("num_beams", "num_return_sequences"):
        if search.get(name, 1) != 1:
            raise NotSupportedYetError(
                f"{name} = {search[name]} as a model's default",
                "streams and conversations have one output, so that beams are asked for per call",
                f"set it to 1 in genai_config.json, and give {name} to LLM.generate",
            )
    if search.get("top_k"):
        search["top_k"] = min(search["top_k"], vocab_size)
    found = _from_search(search)
    return found if found.get("temperature") == 0 else {**found, **further}


def _from_search(search: Mapping[str, Any]) -> dict[str, Any]:
    """What search options ask for: greedy without do_sample, and where one token is left."""
    found = {
        name: search[name] for name in ("repetition_penalty", "no_repeat_ngram_size", "min_length") if search.get(name)
    }
    if search.get("random_seed", -1) >= 0:
        found["seed"] = search["random_seed"] % 2**64
    if not search.get("do_sample", False) or search.get("temperature") == 0 or search.get("top_k") == 1:
        return {"temperature": 0.0, **found}
    return {name: search[name] for name in ("temperature", "top_k", "top_p") if search.get(name)} | found


def with_defaults(defaults: Mapping[str, Any], asked: Mapping[str, Any]) -> SamplingParams:
    """The options asked for; the rest are the model's defaults, as far as they go together.

    Asking for a temperature of 0 leaves the model's drawing options out. Asking a model that is greedy by default for a
    drawing option (other than its neutral value), or for several samples, asks for drawing, at a temperature of 1.
    Mirostat replaces the model's truncation.

    Raises:
        OptionError: unknown, out of range, or contradictory among those asked for.
    """
    checks = {one.name: one.metadata["check"] for one in fields(SamplingParams)}
    asked = {name: checks[name](name, value) if name in checks else value for name, value in asked.items()}
    kept = dict(defaults)
    if asked.get("temperature") == 0 or asked.get("mirostat"):
        kept = {name: value for name, value in kept.items() if name not in DRAWING}
    if "samplers" in asked:
        order = rules.parse_order(asked["samplers"])
        unused = {name for sampler, options in rules.SAMPLERS.items() if sampler not in order for name in options}
        kept = {name: value for name, value in kept.items() if name not in unused or value == 0}
    draws = any(asked[name] != NEUTRAL[name] for name in asked.keys() & {*DRAWING, "n"})
    if kept.get("temperature") == 0 and "temperature" not in asked and draws:
        del kept["temperature"]
    return SamplingParams.from_options({**kept, **asked})


def has_grammar(params: SamplingParams | None, options: Mapping[str, Any]) -> bool:
    """Whether a request with these options, the others from `params`, may ask for a grammar."""
    if any(options.get(name) is not None for name in grammars.OPTIONS):
        return True
    return isinstance(params, SamplingParams) and grammar_of(params) is not None


def grammar_of(params: SamplingParams) -> grammars.Grammar | None:
    """The grammar that a request asks for, if any."""
    for option in grammars.OPTIONS:
        value = getattr(params, option)
        if value is not None and value != ():
            return grammars.Grammar(option, json.dumps(value, ensure_ascii=False) if option == "choice" else value)
    return None
