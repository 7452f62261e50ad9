"""SamplingParams: how a request's tokens are chosen."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from .engine.sampling.contradictions import check_contradictions
from .engine.sampling.option_rules import RULES
from .engine.sampling.order import DEFAULT_ORDER, SEARCH_ORDER
from .errors import OptionError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LogitsProcessor = Callable[["tuple[int, ...]", "NDArray[np.float32]"], "NDArray[np.float32] | None"]
"""Called as processor(token_ids, logits), see SamplingParams.logits_processors."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are chosen. By default they are drawn from the model's own distribution.

    Values are checked and brought into the types below; options that contradict each other raise (see
    docs/sampling.md). Applied in this order: logits_processors on the model's logits; logit_bias; what masks tokens
    (no_repeat_ngram_size, minimum lengths, banned strings); then `samplers`; then the draw.

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
        logprobs: report log-probabilities of output tokens, with that many most likely alternatives; None = do not.
            They are those of the model's distribution, before all that is described here. prompt_logprobs: the same
            for prompt tokens.
        logits_processors: functions called as f(token_ids, logits): a tuple of prompt and output so far, and a float32
            array [V] that it may change in place (then it returns None) or replace by one of the same shape and dtype.
        samplers: the samplers in order, joined by semicolons or as a sequence. Kept as a tuple.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_last_n: int | None = None
    dry_sequence_breakers: Sequence[str] = ("\n", ":", '"', "*")
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_last_n: int | None = None
    no_repeat_ngram_size: int = 0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    min_tokens: int = 0
    min_length: int = 0
    max_tokens: int | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    stop: str | Sequence[str] = ()
    banned_strings: str | Sequence[str] = ()
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logits_processors: Sequence[LogitsProcessor] = ()
    samplers: str | Sequence[str] = DEFAULT_ORDER

    def __post_init__(self) -> None:
        options = {field.name: RULES[field.name](field.name, getattr(self, field.name)) for field in fields(self)}
        check_contradictions(options, {field.name: field.default for field in fields(self)})
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
                close = difflib.get_close_matches(name, known, 1)
                hint = f"did you mean {close[0]!r}?" if close else f"known options: {', '.join(sorted(known))}"
                raise OptionError(f"unknown sampling option {name!r} = {value!r}", "it is not part of the API", hint)
        return cls(**options)

    @classmethod
    def from_search_options(cls, options: Mapping[str, Any]) -> SamplingParams:
        """From the search options of onnxruntime-genai (`genai.search.SEARCH_OPTIONS`), with its meanings and order.

        Greedy unless do_sample is set; then the rest that concerns drawing has no meaning, as there. A top_k of 1 or a
        temperature of 0 is greedy too; a top_p of 0 or 1 keeps all. Otherwise top-k on the logits, softmax at the
        temperature, top-p inside. A negative random_seed asks for a new one.

        Args:
            options: do_sample, temperature, top_k, top_p, repetition_penalty, min_length, random_seed and
                no_repeat_ngram_size, where they differ from the defaults of `SEARCH_OPTIONS`; others are for others.

        >>> SamplingParams.from_search_options({"do_sample": True, "top_k": 40}).samplers
        ('penalties', 'top_k', 'temperature', 'top_p')
        """
        seed = options.get("random_seed", -1)
        kept: dict[str, Any] = {
            name: options[name]
            for name in ("repetition_penalty", "min_length", "no_repeat_ngram_size")
            if name in options
        }
        temperature, top_k = options.get("temperature", 1.0), options.get("top_k", 50)
        if not options.get("do_sample", False) or top_k == 1 or temperature == 0:
            kept["temperature"] = 0.0
        else:
            kept |= {"temperature": temperature, "top_k": top_k, "top_p": options.get("top_p", 0.0) or 1.0}
        return cls(**kept, seed=seed % 2**64 if seed >= 0 else None, samplers=SEARCH_ORDER)

    def replace(self, **changes: Any) -> SamplingParams:
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
